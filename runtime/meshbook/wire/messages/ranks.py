"""The output of ranks, the prompts at which they stop, and the questions that they or their agents answer.

Questions are answered even while the main threads of ranks are busy.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from meshbook.source.location import ThreadStack
from meshbook.wire.messages.calls import Header, Target

PLACE, SHOWN_HERE = b"=", b"*"  # the text in a mark before the number of a place, and of a place with rich output
JOINS = "\x1f"
"""The character that a rank puts before a newline within a text of one write: its lines belong together."""
OWN_RANK = -1  # the rank in a worker's messages on its output: its agent fills in the rank, and the mesh


def without_joins(text: str) -> str:
    """Return the text as it was printed."""
    return text.replace(JOINS, "") if JOINS in text else text


class StreamText(Header, frozen=True, tag="text"):
    """Text of stdout or stderr, with `JOINS`; may end in the middle of a line.

    From a worker: text of an output that is not the running one, which cannot go through the pipes.
    """

    rank: int
    stream: str
    text: str
    output: int
    place: int = 0  # texts of stdout and of stderr with one number were written in an unknown order


class SharedText(Header, frozen=True):
    """A text as in `StreamText` that each of these ranks has printed: it travels once."""

    ranks: tuple[int, ...]
    stream: str
    text: str
    output: int
    place: int


class StreamTexts(Header, frozen=True, tag="texts"):
    """Texts that ranks of one host have printed since the message before, in the order of each rank."""

    texts: tuple[SharedText, ...]


class OutputDropped(Header, frozen=True, tag="cut"):
    """Characters of the rank's output that are in its log only, up to now: it wrote faster than can be shown."""

    rank: int
    size_bytes: int
    log_path: str
    output: int
    lacks: str = ""  # why its log is incomplete; then this comes for output that is shown too


class Bundle(msgspec.Struct):
    """Rich output, by kinds of content; a frame of its own, made by a rank."""

    data: dict[str, object]
    metadata: dict[str, object]
    transient: dict[str, object]


class DisplayData(Header, frozen=True, tag="display"):
    """Rich output; ``is_result`` for the value of a cell's last expression."""

    rank: int
    output: int
    update: bool
    is_result: bool
    # number of the mark that the worker writes into its pipes behind this; 0 for none, where its text is late
    place: int = 0
    data: dict[str, object] = {}  # this and the following fields travel as a `Bundle`, which agents do not read
    metadata: dict[str, object] = {}
    transient: dict[str, object] = {}


class Scalars(msgspec.Struct, array_like=True):
    """The points of one name that a rank has logged since the message before; float64 in the order of its machine."""

    name: str
    count: int  # of points that were logged, some of which may have been left out
    steps: bytes
    times: bytes  # in seconds since the epoch
    values: bytes


class Logged(Header, frozen=True, tag="logged"):
    """Scalars that one output of a rank has logged; they travel as a list of `Scalars`, which agents do not read."""

    mesh: int
    rank: int
    output: int


ASKS_LINE, ASKS_SECRET = "input()", "getpass()"
END_OF_INPUT = "\x04"  # the answer of a person who gives none, as of Ctrl-D


class AtPrompt(NamedTuple):
    """A rank waits for a line at its prompt ``number``; without a place it has gone on, and waits at none."""

    number: int  # counts the prompts of the process
    place: str  # ``cell 7, line 5``
    why: str  # for a post-mortem the exception; else empty
    prompt: str  # ``(Pdb) ``, or another text with which pdb asks
    text: str  # text that pdb has written since the prompt before
    asks: str = ""  # `ASKS_LINE` or `ASKS_SECRET` for a question of a program's own; empty: it is pdb's prompt


class Prompted(Header, frozen=True, tag="prompted"):
    """A rank has stopped at a prompt, or gone on from one; in the order of its prints."""

    mesh: int
    rank: int
    output: int
    at: AtPrompt


class AskRank(Header, frozen=True, tag="rank?"):
    """A question for a rank's control thread, which answers while the rank is busy (`meshbook.worker.queries`)."""

    endpoint: str
    args: bytes = b"\x90"  # a list in msgpack: plain data, since no pickle is loaded on a control thread


class ProcessState(NamedTuple):
    """The state of a rank's process, as in /proc/<pid>/stat (proc(5)): ``R``, ``S``, ``D``, ``T``, ``t``. ``R`` also
    where another thread than the main one runs, or waits for a processor."""

    state: str
    ran_s: float  # processor time of all its threads so far


class AskProcesses(Header, frozen=True, tag="ps?"):
    """The `ProcessState` of each rank; known also when no thread of a rank can answer."""

    # answered among the replies, behind those of ranks that had sent theirs when their states were read
    in_order: bool = False


class AskPrinted(Header, frozen=True, tag="printed?"):
    """A question that is answered, with nothing, behind all text that the ranks have printed by then."""


class AskStacks(Header, frozen=True, tag="stacks?"):
    """The stacks of workers, read from outside within ``wait_s``, as `RankDump`. native: with the frames of native
    code, which halts the processes for a moment and needs py-spy."""

    native: bool
    wait_s: float


class RankDump(NamedTuple):
    """The stacks of a rank, read by its agent."""

    rank: int
    threads: tuple[ThreadStack, ...]
    read_by: str  # ``signal``, ``py-spy``; empty where they could not be read
    problem: str = ""  # why not, and a way to help it


class ReadLogs(Header, frozen=True, tag="logs?"):
    """The last ``lines`` lines of each log, as text."""

    lines: int
    containing: str = ""  # only lines with this text


FROM_THE_END = -1  # an offset: the end of a log when it is read


class ReadOn(Header, frozen=True, tag="readon?"):
    """The text in ranks' logs beyond (rank, offset in bytes), as `LogPiece`; nothing of logs without news."""

    offsets: tuple[tuple[int, int], ...]
    lines: int  # lines before the end that come too, of a log that is read `FROM_THE_END`
    limit_bytes: int  # the most of one log; where more was written the newest is sent


class LogPiece(NamedTuple):
    """The text of one rank's log beyond an offset."""

    rank: int
    data: bytes
    end: int  # the offset to read on from
    skipped_bytes: int  # bytes between the offset that was asked for and ``data``


class Retire(Header, frozen=True, tag="retire?"):
    """A request to end some workers, idle ones by themselves, busy ones by force after ``grace_s``; answered when they
    are gone.

    From now on no message reaches them, and their ranks may be given to others. So it travels among the calls.
    """

    ranks: tuple[int, ...]  # their numbers in messages
    grace_s: float


AskAgent: TypeAlias = AskProcesses | AskPrinted | AskStacks | ReadLogs | ReadOn | Retire


class Query(Header, frozen=True, tag="query"):
    """A question to the ranks of ``target``, or to their agents; urgent. `Replies` answer with plain data.
    A rank answers for itself, an agent in one message for all ranks that it has something to say of."""

    id: int
    mesh: int
    target: Target
    asked: AskRank | AskAgent
