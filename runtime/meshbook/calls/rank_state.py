"""What a rank answers when it is asked what it does, and what is known of one that does not answer."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from meshbook.errors import WorkerLost
from meshbook.system.devices import GpuUse

State: TypeAlias = Literal["idle", "busy", "waiting", "pdb", "stopped", "silent", "dead", "starting"]
"""What a person is told that a rank is; which of them there are depends on how closely it is looked at."""


class SilenceCause(enum.Enum):
    """Why a rank does not answer, as a sentence about it goes on."""

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
    """How it ended, or what its host is."""

    @property
    def state(self) -> State:
        """``stopped`` where a person, or a program, has stopped the process; else ``silent``."""
        return "stopped" if self.why in (SilenceCause.STOPPED, SilenceCause.TRACED) else "silent"

    def __str__(self) -> str:
        if self.detail:
            return f"ended: {self.detail}" if self.why is SilenceCause.ENDED else f"its host is {self.detail}"
        return self.why.value


def find_silence(state: str | None, lost: WorkerLost | None = None, suspicion: str = "") -> Unresponsive:
    """What keeps the control thread of a rank from answering.

    state: see `meshbook.wire.messages.ProcessState`; None: not known. suspicion: as
    `meshbook.controller.host_state.HostState` has it.
    """
    if lost is not None:
        return Unresponsive(SilenceCause.ENDED, lost.cause)
    if state is None:
        return Unresponsive(SilenceCause.HOST_SILENT, suspicion)
    return Unresponsive(_BY_STATE.get(state, SilenceCause.HOLDS_GIL))


class Reaction(NamedTuple):
    """How a rank takes an interrupt that was sent to it."""

    place: str
    """What it does, and why it goes on with it."""
    has_stopped: bool
    """It runs nothing, or has left the user's code and is about to answer."""


Reactions: TypeAlias = Mapping[int, Reaction | Unresponsive]


def no_reactions(ranks: Iterable[int], why: SilenceCause) -> dict[int, Reaction | Unresponsive]:
    """Of ranks that cannot be asked."""
    return dict.fromkeys(ranks, Unresponsive(why))


def place_of(answer: Reaction | Unresponsive) -> str:
    """What a rank does, or why it does not answer, in words."""
    return answer.place if isinstance(answer, Reaction) else str(answer)


class StatusAnswer(NamedTuple):
    """What a rank tells of itself to a person who looks at the mesh."""

    busy: str
    """What its call is called; empty when it runs none."""
    busy_s: float
    where: str
    paused: str
    """Where it stopped in a debugger; empty when it did not."""
    in_collective: bool
    rss_bytes: int
    moved_bytes: int
    gpu: GpuUse | None
    kept_bytes: int

    @property
    def state(self) -> State:
        """Return ``pdb``, ``busy`` or ``idle``."""
        return "pdb" if self.paused else "busy" if self.busy else "idle"


class Completions(NamedTuple):
    """What may stand in place of ``code[start:end]``, as far as it can be sent."""

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
    """In which it was raised."""
    freed: bool
    """Whether the rank raised it since it was freed or interrupted, not by itself."""
    has_frames: bool
