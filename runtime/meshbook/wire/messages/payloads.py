"""Payloads on their way: in shared memory of one host, in pieces between hosts, or within their message."""

from __future__ import annotations

from typing import NamedTuple

from meshbook.wire.messages.base import Header

CHUNK_BYTES = 1 << 20
"""Payloads that cross hosts travel in pieces of this size on the bulk lane."""

INLINE_MAX_BYTES = 1 << 14
"""Pickle heads up to this size travel inside their header."""


class SegmentRef(NamedTuple):
    """Where a payload lies in shared memory: a memfd of a living process on this host."""

    pid: int
    fd: int
    segment: int
    """Never reused by its owner."""
    size_bytes: int
    spans: tuple[tuple[int, int], ...]
    """(offset, length) of each buffer, in order."""


class Bulk(Header, frozen=True, tag="bulk"):
    """A piece of a payload that crosses hosts; the message that names ``payload`` waits until it is whole."""

    payload: int
    size_bytes: int
    offset: int
    last: bool


class SegmentFree(Header, frozen=True, tag="free"):
    """Nobody on the sender's side still looks at the segment ``segment`` of process ``pid``."""

    pid: int
    segment: int
