"""Every message survives its codec, and old bytes are still understood."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.shape.members import Piece, Region
from meshbook.wire import messages as wire
from meshbook.wire.kv_store import StoreOp, StoreResult

DECODERS: dict[str, Any] = {
    "ToHost": wire.decode_to_host,
    "FromHost": wire.decode_from_host,
    "ToWorker": wire.decode_to_worker,
    "FromWorker": wire.decode_from_worker,
    "PastAgent": wire.decode_past_agent,
}


def _example(kind: Any) -> Any:
    """A value of a field's type that is not its default."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Piece,):
        return Piece(3, (2, 2), (4, 1))
    if kind is wire.SegmentRef:
        return wire.SegmentRef(12, 5, 7, 4096, ((0, 10), (4096, 20)))
    if kind is StoreOp:
        return StoreOp("set", ("key",), (b"value",))
    if kind is StoreResult:
        return StoreResult((b"value",), 3)
    if fields := getattr(kind, "_fields", getattr(kind, "__struct_fields__", ())):
        hints = typing.get_type_hints(kind)
        return kind(*(_example(hints[name]) for name in fields))
    if origin is tuple:
        return (_example(args[0]),) if args[-1] is Ellipsis else tuple(map(_example, args))
    if origin is dict:
        return {_example(args[0]): _example(args[1])}
    if origin is not None:  # a union with None
        return _example(args[0])
    return {int: 41, str: "text", object: "any", float: 0.5, bool: True, bytes: b"\x00\xff"}[kind]


@pytest.mark.parametrize(
    ("side", "message"),
    [(side, kind) for side in DECODERS for kind in typing.get_args(getattr(wire, side))],
)
def test_every_message_round_trips(side: str, message: Any) -> None:
    hints = typing.get_type_hints(message)
    original = message(*(_example(hints[field]) for field in message.__struct_fields__))
    assert DECODERS[side](wire.encode(original)) == original


def test_bytes_of_protocol_1_are_still_understood() -> None:
    call = wire.decode_to_host(bytes.fromhex("98a463616c6c0703a6696e766f6b65919300910491010cc0c0"))
    assert call == wire.Call(7, 3, "invoke", (Piece(0, (4,), (1,)),), 12)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 35))
def test_a_target_has_exactly_the_ranks_of_its_members(hosts: int, gpus: int, rank: int) -> None:
    members = Region.of(dict(zip(("hosts", "gpus"), (hosts, gpus), strict=True))).slice(gpus=slice(0, None, 2))
    assert wire.target_has(members.encoded, rank) == (rank in set(members.ranks()))


def test_a_target_of_ten_thousand_ranks_takes_a_few_bytes() -> None:
    members = Region.of(dict(zip(("hosts", "gpus"), (1250, 8), strict=True)))
    assert len(wire.encode(wire.Call(1, 1, "push", members.encoded))) <= 40
