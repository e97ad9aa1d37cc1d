"""What every message has in common: its header, the version of the protocol, and whom it is for."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from meshbook.shape.members import Piece

PROTOCOL_VERSION = 7
"""Peers compare it in their first message and refuse each other, naming both numbers."""


class Header(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="t"):
    """What all messages are: arrays in msgpack, of which the tag is the first element."""


Target: TypeAlias = tuple[Piece, ...]


def target_has(target: Target, rank: int) -> bool:
    """Whether base rank ``rank`` is a member of ``target``; O(axes)."""
    return any(part.has(rank) for part in target)
