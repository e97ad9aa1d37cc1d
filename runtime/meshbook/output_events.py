"""What a running cell tells its listener, in the order in which it happened on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from meshbook.errors import Failure
from meshbook.stops import Stop


class StreamText(NamedTuple):
    """Text of stdout or stderr; may end in the middle of a line."""

    rank: int
    stream: str
    text: str
    cell_id: int
    place: int = 0
    """Between stdout and stderr of one place nobody knows the order."""


class OutputCut(NamedTuple):
    """So many characters of the rank's output, up to now, are in its log only: it wrote faster than can be shown."""

    rank: int
    size_bytes: int
    log_path: str
    cell_id: int


class DisplayData(NamedTuple):
    """Rich output; ``is_result`` for the value of a cell's last expression."""

    rank: int
    data: Mapping[str, object]
    metadata: Mapping[str, object]
    transient: Mapping[str, object]
    update: bool
    is_result: bool
    cell_id: int


class RankDone(NamedTuple):
    """The rank has ended the cell; ``failure`` tells why when it was not ``ok``: None for one that was freed."""

    rank: int
    ok: bool
    duration_s: float
    failure: Failure | None
    cell_id: int


class RankStopped(NamedTuple):
    """The rank waits at a prompt of pdb; ``stop.seen`` once a person knows."""

    rank: int
    stop: Stop
    cell_id: int


class Notice(NamedTuple):
    """Something that the controller has to say while the cell runs."""

    text: str
    cell_id: int


OutputEvent: TypeAlias = StreamText | OutputCut | DisplayData | RankDone | RankStopped | Notice
OutputListener: TypeAlias = Callable[[OutputEvent], None]
"""Called on the thread that serves the sockets: it must not block."""


class OutputTarget(NamedTuple):
    """Where the output of calls goes that have no listener of their own."""

    id: int
    listener: OutputListener
