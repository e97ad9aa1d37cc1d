"""The states of ranks: their answers when they are asked, causes of silence, and stops at a prompt.

Ranks report each prompt unasked (`meshbook.wire.messages.ranks.Prompted`); prompts that a former controller was told of
are asked for (`meshbook.mesh.states.stopped`). While any rank is stopped, the deadlines of the mesh stand still:
`StoppedRanks.clock`, and on the ranks `meshbook.groups.group_state.GroupState.clock`.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from meshbook.errors import WorkerLost
from meshbook.system.devices import GpuUse
from meshbook.wire.messages import AtPrompt

State: TypeAlias = Literal["idle", "busy", "waiting", "pdb", "stopped", "silent", "dead", "starting"]
"""The state of a rank as people see it; a closer look tells more of them apart."""


class SilenceCause(enum.Enum):
    """The cause of a rank's silence, as the end of a sentence about the rank."""

    ENDED = "ended"
    MESH_STOPPED = "its mesh was stopped"
    HOST_SILENT = "its host does not answer"
    STOPPED = "stopped by SIGSTOP"
    TRACED = "stopped by a debugger"
    UNINTERRUPTIBLE = "in uninterruptible I/O (state D): a disk or a network file system does not answer"
    HOLDS_GIL = "native code holds the GIL"


_BY_STATE = {
    "T": SilenceCause.STOPPED,
    "t": SilenceCause.TRACED,
    "D": SilenceCause.UNINTERRUPTIBLE,
    "Z": SilenceCause.ENDED,
    "": SilenceCause.ENDED,
}


class Unresponsive(NamedTuple):
    """A rank whose control thread does not answer."""

    why: SilenceCause
    detail: str = ""
    """The way in which the rank ended, or the state of its host."""

    @property
    def state(self) -> State:
        """``stopped`` where a person, or a program, has stopped the process; else ``silent``."""
        return "stopped" if self.why in (SilenceCause.STOPPED, SilenceCause.TRACED) else "silent"

    def __str__(self) -> str:
        if self.detail:
            return f"ended: {self.detail}" if self.why is SilenceCause.ENDED else f"its host is {self.detail}"
        return self.why.value


def find_silence(state: str | None, lost: WorkerLost | None = None, suspicion: str = "") -> Unresponsive:
    """Return the cause that keeps the control thread of a rank from answering.

    state: see `meshbook.wire.messages.ranks.ProcessState`; None: not known. suspicion: as
    `meshbook.controller.host_state.HostState` has it.
    """
    if lost is not None:
        return Unresponsive(SilenceCause.ENDED, lost.cause)
    if state is None:
        return Unresponsive(SilenceCause.HOST_SILENT, suspicion)
    return Unresponsive(_BY_STATE.get(state, SilenceCause.HOLDS_GIL))


class Reaction(NamedTuple):
    """The reaction of a rank to an interrupt."""

    place: str
    """The rank's place, and why it goes on there."""
    has_stopped: bool
    """It runs nothing, or has left the user's code and is about to answer."""


Reactions: TypeAlias = Mapping[int, Reaction | Unresponsive]


def place_of(answer: Reaction | Unresponsive) -> str:
    """Return the place of a rank, or the cause of its silence, in words."""
    return answer.place if isinstance(answer, Reaction) else str(answer)


class StatusAnswer(NamedTuple):
    """The answer of a rank to a person who looks at the mesh."""

    busy: str
    """The name of its call; empty when it runs none."""
    busy_s: float
    where: str
    paused: str
    """The place at which it stopped in a debugger; empty when it did not."""
    in_collective: bool
    rss_bytes: int
    moved_bytes: int
    gpu: GpuUse | None
    kept_bytes: int

    @property
    def state(self) -> State:
        """Return ``pdb``, ``busy`` or ``idle``."""
        return "pdb" if self.paused else "busy" if self.busy else "idle"


class Peeked(NamedTuple):
    """The answer of a rank to a peek (`meshbook.worker.peek`): a value, a failure, or the reason why there is none."""

    place: str
    """``cell 7, line 4``, ``idle``: the main thread's place at the time."""
    head: bytes = b""
    """The head of the value's pickle; its buffers are the next field."""
    buffers: Sequence[bytes] = ()
    failure: Sequence[bytes] = ()
    """The frames of `meshbook.wire.replies.decode_failure`."""
    missed: str = ""
    """The reason why there is neither: ``in time.sleep (train.py:41), 12 s``."""


class Completions(NamedTuple):
    """The completions of ``code[start:end]``, as far as they can be sent."""

    start: int
    end: int
    items: list[tuple[str, str, str]]
    """Text, kind and signature of each, as ``_jupyter_types_experimental`` has them."""


class LastError(NamedTuple):
    """The exception of a rank that a post-mortem would be of."""

    ename: str
    evalue: str
    ago_s: float
    call: int
    """The call in which it was raised."""
    freed: bool
    """Whether the rank raised it since it was freed or interrupted, not by itself."""
    has_frames: bool


LEFT_MAX_CHARS = 200_000
"""The limit of unread text that a rank has written at prompts; the oldest is dropped first."""


class Stop:
    """A rank at a prompt, from a line of code until it goes on."""

    def __init__(self, rank: int, at: AtPrompt, output: int) -> None:
        self.rank, self.at, self.output = rank, at, output
        self.seen = False
        """Whether the stop was shown to a person."""

    @property
    def words(self) -> str:
        """``stopped at cell 7, line 5``"""
        if self.at.asks:
            return f"asks by {self.at.asks} at {self.at.place}: {self.at.prompt.strip()}".rstrip(": ")
        return f"post-mortem of {self.at.why}, at {self.at.place}" if self.at.why else f"stopped at {self.at.place}"


class StoppedRanks:
    """Written under the turn; read, and waited for, by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.stops: dict[int, Stop] = {}
        """The present stops by rank."""
        self._numbers: dict[int, int] = {}
        self._texts: dict[int, str] = {}
        self._held_since: float | None = None
        self._held_s = 0.0
        self.stepping: set[int] = set()
        """Ranks that a person moves from line to line: their next stop is no news."""
        self.left: set[int] = set()
        """Ranks whose prompts were left by a person (``detach``): they wait until it is opened again."""

    def take(self, rank: int, at: AtPrompt, output: int) -> Stop | None:
        """Take in the news of a rank's prompt. Returns: the stop, if it is a new one."""
        with self._changed:
            if at.number <= self._numbers.get(rank, 0):
                return None
            self._numbers[rank] = at.number
            is_news = at.place and rank not in self.stops and rank not in self.stepping
            before = "" if is_news else self._texts.get(rank, "")  # nobody has read it, and nobody will
            self._texts[rank] = (before + at.text)[-LEFT_MAX_CHARS:]
            new = None
            if not at.place:
                self.stops.pop(rank, None)
                self.left.discard(rank)
            elif (stop := self.stops.get(rank)) is not None:
                stop.at = at
            else:
                new = self.stops[rank] = Stop(rank, at, output)
                new.seen = rank in self.stepping
            self._changed_now()
            return new

    def lose(self, rank: int) -> None:
        """Forget a rank that has ended, or is another process from now on."""
        with self._changed:
            self.stops.pop(rank, None)
            self._numbers.pop(rank, None)
            self._texts.pop(rank, None)
            self.left.discard(rank)
            self.stepping.discard(rank)
            self._changed_now()

    def clear(self) -> None:
        """Forget all stops."""
        for rank in list(self._numbers):
            self.lose(rank)

    def _changed_now(self) -> None:
        now = time.monotonic()
        if self.stops and self._held_since is None:
            self._held_since = now
        elif not self.stops and self._held_since is not None:
            self._held_s += now - self._held_since
            self._held_since = None
        self._changed.notify_all()

    def __bool__(self) -> bool:
        """Whether any rank is stopped."""
        return bool(self.stops)

    def of(self, ranks: Collection[int]) -> dict[int, Stop]:
        """Return the stops of ``ranks``."""
        if not self.stops:
            return {}
        wanted = frozenset(ranks)
        return {rank: stop for rank, stop in sorted(self.stops.items()) if rank in wanted}

    def number(self, rank: int) -> int:
        """Return the number of the rank's last prompt."""
        return self._numbers.get(rank, 0)

    def take_text(self, rank: int) -> str:
        """Return the text that the rank has written at its prompts since the last call."""
        with self._changed:
            return self._texts.pop(rank, "")

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition()``, looked at whenever something changes. Raises: KeyboardInterrupt."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def wake(self) -> None:
        """Have waiting threads look again."""
        with self._changed:
            self._changed.notify_all()

    def clock(self) -> float:
        """Return seconds for deadlines: monotonic, and still while a rank is stopped."""
        now = time.monotonic() if self._held_since is None else self._held_since
        return now - self._held_s
