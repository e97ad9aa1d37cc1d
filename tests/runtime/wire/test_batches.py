"""Small messages that travel as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshbook.wire.frames import MAX_BATCH_BYTES, Batch, unbatch

headers = st.binary(min_size=1, max_size=30).filter(lambda header: header[:1] != b"\xc1")
messages = st.lists(st.tuples(headers, st.lists(st.binary(max_size=5), max_size=2)))


@given(messages, st.integers(1, 7))
def test_every_message_arrives_once_in_order_with_its_payload(
    sent: list[tuple[bytes, list[bytes]]], every: int
) -> None:
    received: list[tuple[bytes, list[bytes]]] = []

    def send(header: bytes, payload: object) -> None:
        received.extend((each, list(payload)) for each in unbatch(header))  # type: ignore[call-overload]

    batch = Batch(send)
    for index, (header, payload) in enumerate(sent):
        batch.add(header, payload)
        if index % every == 0:
            batch.flush()
    batch.flush()
    assert received == sent


def test_a_batch_is_bounded() -> None:
    sizes: list[int] = []
    batch = Batch(lambda header, payload: sizes.append(len(header)))
    for _ in range(100):
        batch.add(b"x" * 1000)
    batch.flush()
    assert len(sizes) > 2
    assert max(sizes) < MAX_BATCH_BYTES + 5000
