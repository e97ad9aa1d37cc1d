"""The open calls and questions of a controller, and the listeners to the prints of calls. I/O thread only.

The first failure of a call waits for more like it (`FailingCall`), so that one error tells of them all. An error takes
a few milliseconds from a rank to here, and eight ranks share the cores of a machine: they fail one after the other
though they failed together. So the agents are asked which ranks run, and for how long they have. A rank that runs and
has not answered may be about to fail as well, until it has had the time for that; when all others sleep, wait in
collectives or compute something, nobody will.

    failure ──> which ranks run? ──some may fail──> `LOOK_S`, ask again
                      └──none──> the error: earlier messages came before the answer
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.output import ConsoleOutput, OutputEvent, OutputListener, OutputTarget
from meshbook.errors import MeshError, WorkerLost
from meshbook.lifecycle import CallEvent
from meshbook.wire import messages as wire
from meshbook.wire.replies import split_replies

FAILURE_GRACE_S = 0.02
"""The time that an error waits if no agent can be asked."""

LONGEST_GRACE_S = 0.5
"""The most that it waits, on a machine on which ranks that run get no processor."""

FAILS_WITHIN_S = 0.02
"""Processor time in which a rank fails as the others did: with a long traceback, of which nothing is in memory yet."""

LOOK_S = 0.001
"""The pause between questions."""

ASK_S = 0.02
"""The time that agents have to answer."""

OnStates = Callable[[Mapping[int, wire.ProcessState]], object]


class FailingCall:
    """A call that has failed on some ranks, and completes when no more failures can be expected."""

    def __init__(self, call: OpenCall, source: CallWatcher | None) -> None:
        """source: the agents to ask for the states of ranks; None where there are none to ask."""
        self._call = call
        self._source = None if call.lost else source  # ranks that die together leave no sign of that
        now = time.monotonic()
        grace_s = FAILURE_GRACE_S if self._source is None else LONGEST_GRACE_S
        self._tell_at, self._look_at = now + grace_s, now
        self._asking = False
        self._ran_s: dict[int, float] = {}
        """Seconds that each rank had run at the first answer about it."""

    @property
    def due(self) -> float:
        """The time at which to call `is_ripe`."""
        if self._call.hurried:
            return 0.0
        return self._tell_at if self._asking or self._source is None else min(self._look_at, self._tell_at)

    def is_ripe(self, now: float) -> bool:
        """Whether to tell of the failures now; else asks again, if it is time to."""
        if self._tell_at <= now or self._call.hurried:
            return True
        if self._source is not None and not self._asking and self._look_at <= now:
            self._asking = True
            self._source.ask_states(self._call.waiting, ASK_S, self._on_states)
        return False

    def _on_states(self, states: Mapping[int, wire.ProcessState]) -> None:
        self._asking, now = False, time.monotonic()
        self._look_at = now + LOOK_S
        if not any(self._may_fail(rank, states.get(rank)) for rank in self._call.waiting):
            self._tell_at = min(self._tell_at, now)

    def _may_fail(self, rank: int, told: wire.ProcessState | None) -> bool:
        if told is None:
            return True  # its agent has no time to tell: others will not have either
        began_s = self._ran_s.setdefault(rank, told.ran_s)
        return told.state in ("R", "D") and told.ran_s - began_s < FAILS_WITHIN_S


KEPT_LISTENERS = 1024
"""The number of outputs without an open call whose late text still finds its listener."""
LOOKED_AT_ONCE = 256
"""The number of further listeners before unused ones are dropped, which takes a walk over all calls."""


NOTHING = wire.encode(None)

TAnswer = TypeVar("TAnswer")


class OpenQuestion(Generic[TAnswer]):
    """A question to ranks or agents, until all have answered or are lost, or the time is over."""

    def __init__(
        self,
        id: int,
        mesh: int,
        kind: type[TAnswer],
        timeout_s: float,
        on_done: Callable[[OpenQuestion[TAnswer]], object] = lambda question: None,
    ) -> None:
        """kind: the type of answers; others count as none. on_done: called once, unless the question is forgotten."""
        self.id, self.mesh, self.on_done = id, mesh, on_done
        self.until = time.monotonic() + timeout_s
        self.ranks: set[int] = set()
        self.hosts: set[str] = set()
        """The hosts whose agents have to answer still, as the ranks of `ranks` have."""
        self.answers: dict[int, TAnswer | None] = {}
        """The answers by rank."""
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def answer(self, host: str, message: wire.Replies, frames: Sequence[bytes]) -> None:
        """Handle a message from a host."""
        self.hosts.discard(host)
        for reply, mine in split_replies(message, frames):
            self.ranks.discard(reply.rank)
            data = mine[0] if mine else reply.inline
            if reply.status == wire.OK:
                with contextlib.suppress(*wire.MALFORMED):  # the rank's own doing: it has not answered
                    self.answers[reply.rank] = None if data == NOTHING else self._decode(data)

    @property
    def told(self) -> dict[int, TAnswer]:
        """The answers that are not None."""
        return {rank: answer for rank, answer in self.answers.copy().items() if answer is not None}

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self.ranks or self.hosts)


class CallWatcher(Protocol):
    """The watcher of the calls of a mesh, which can ask its agents."""

    def ask_states(self, ranks: Collection[int], timeout_s: float, on_done: OnStates) -> None:
        """Call ``on_done`` with the known states of their processes.

        Answers that ranks sent before their states were read have come by then.
        """

    def watch(self, call: OpenCall) -> bool:
        """Note that a rank has answered, or was lost; True if a call that has ended everywhere waits for `complete`."""

    def on_told(self, call: OpenCall, rank: int, encoded: bytes) -> None:
        """Take in the report of the rank's process groups that came with an answer, before `watch`."""


class CallTable:
    """Routes answers and output by id."""

    def __init__(self, watchers: Mapping[int, CallWatcher]) -> None:
        """watchers: by mesh; the calls of other meshes are over when all ranks have answered."""
        self._watchers = watchers
        self.default_listener: OutputListener = ConsoleOutput()
        """The listener to output that belongs to no cell."""
        self._calls: dict[int, OpenCall] = {}
        self.find: Callable[[int], OpenCall | None] = self._calls.get
        self.ids, self.open_now = self._calls.keys(), self._calls.values()
        """Live views of the ids of the open calls and of the calls, oldest first."""
        self._failing: dict[int, FailingCall] = {}
        self._questions: dict[int, OpenQuestion[Any]] = {}
        self._listeners: OrderedDict[int, OutputListener] = OrderedDict()
        """The listeners by output; the one whose last call was opened longest ago comes first."""
        self._look_at = KEPT_LISTENERS + LOOKED_AT_ONCE

    def open(self, call: OpenCall, output: OutputTarget | None) -> None:
        """Expect answers to ``call``."""
        self._calls[call.id] = call
        if output is not None:
            self._listeners[output.id] = output.listener
            self._listeners.move_to_end(output.id)
            if len(self._listeners) >= self._look_at:
                self._drop_listeners()

    def _drop_listeners(self) -> None:
        """Forget the oldest listeners, except for those to which an open call may still print."""
        open_outputs = {call.output for call in self._calls.values()}
        unused = [output for output in self._listeners if output not in open_outputs]
        for output in unused[: max(0, len(unused) - KEPT_LISTENERS)]:
            del self._listeners[output]
        self._look_at = len(self._listeners) + LOOKED_AT_ONCE

    def all(self) -> list[OpenCall]:
        """Return the open calls, oldest first. Any thread."""
        return list(self._calls.values())

    def busy_on(self, mesh: int) -> set[int]:
        """The ranks of ``mesh`` that have a call to answer."""
        return {rank for call in self.all() if call.mesh == mesh for rank in call.waiting}

    # ---- questions --------------------------------------------------------------------------------------------------

    def ask(self, question: OpenQuestion[TAnswer]) -> None:
        """Expect answers to a question."""
        self._questions[question.id] = question

    def forget(self, question: OpenQuestion[TAnswer]) -> None:
        """Drop the question and its later answers."""
        self._questions.pop(question.id, None)

    def end(self, question: OpenQuestion[TAnswer]) -> None:
        """Go on with the answers that have come."""
        if self._questions.pop(question.id, None) is not None:
            question.on_done(question)

    def answer_question(self, host: str, message: wire.Replies, frames: Sequence[bytes]) -> None:
        """Take in answers of ranks of ``host``, or of its agent."""
        if (question := self._questions.get(message.id)) is not None:
            question.answer(host, message, frames)
            if not question.is_open:
                self.end(question)

    def lose_host(self, host: str) -> None:
        """Await no agent's answer from there; ranks are lost one by one."""
        for question in self._questions.values():
            question.hosts.discard(host)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def answer(
        self, call: OpenCall, message: wire.Replies, frames: Sequence[bytes], buffers: Sequence[Sequence[object]]
    ) -> None:
        """Hand out combined replies to an open call. ``buffers``: the large buffers of each."""
        replies = message.replies
        parts = [(replies[0], frames)] if len(replies) == 1 else split_replies(message, frames)
        for (reply, mine), large in zip(parts, buffers, strict=True):
            if reply.rank not in call.waiting:
                continue  # it was not asked, or has answered, or was taken for dead meanwhile
            call.answer(reply, mine, large)
            if reply.groups and (watcher := self._watchers.get(call.mesh)) is not None:
                watcher.on_told(call, reply.rank, reply.groups)
        self.settle_if_done(call)

    def settle_if_done(self, call: OpenCall) -> None:
        """Complete the call's future as soon as its policy allows; forget the call when all have answered."""
        watcher = self._watchers.get(call.mesh)
        later = watcher is not None and watcher.watch(call)
        if not call.waiting:
            if not later:
                self.complete(call)
        elif call.fail_fast and (call.failures or call.lost) and call.id not in self._failing and not call.is_told:
            self._failing[call.id] = FailingCall(call, watcher)

    def complete(self, call: OpenCall, groups: str = "") -> None:
        """Hand out the outcome of a call that all ranks have answered, and forget it. groups: as `OpenCall.settle`."""
        if self._calls.pop(call.id, None) is not None:
            self._failing.pop(call.id, None)
            call.settle(groups)
            call.close(CallEvent.SETTLED)

    def running(self, mesh: int) -> list[OpenCall]:
        """The calls to main threads that some rank of the mesh has not answered."""
        return [call for call in self._calls.values() if call.mesh == mesh and call.waiting and not call.mailbox]

    def next_deadline(self) -> float:
        """Return the time on the monotonic clock at which to call `expire`; infinity if never."""
        due = math.inf
        for failing in self._failing.values():
            due = min(due, failing.due)
        for question in self._questions.values():
            due = min(due, question.until if question.is_open else 0.0)
        return due

    def expire(self) -> None:
        """Fail the calls whose first failure has waited long enough for more like it; end questions."""
        now = time.monotonic()
        for question in [each for each in self._questions.values() if each.until <= now or not each.is_open]:
            self.end(question)
        for id in [id for id, failing in self._failing.items() if failing.is_ripe(now)]:
            del self._failing[id]
            self._calls[id].settle()

    def lose(self, mesh: int, error: WorkerLost, *, alone: bool = False) -> None:
        """Tell the calls that wait for a worker of ``mesh`` that it ended."""
        for call in [call for call in self._calls.values() if call.mesh == mesh]:
            call.lose(error, alone=alone)
            self.settle_if_done(call)
        for question in self._questions.values():
            if question.mesh == mesh:
                question.ranks.discard(error.rank)

    def adopt(self, call: OpenCall, listener: OutputListener | None) -> None:
        """Expect answers to a call of a former controller, and output of it."""
        self._calls[call.id] = call
        if listener is not None:
            self._listeners.setdefault(call.output, listener)

    def listener_of(self, output: int) -> OutputListener | None:
        """Return the listener of an output."""
        return self._listeners.get(output)

    def disown(self, call: OpenCall) -> None:
        """Forget a call of a former controller that had seen its end."""
        self._calls.pop(call.id, None)
        self._failing.pop(call.id, None)

    def give_up(self, mesh: int, error: MeshError) -> None:
        """Fail the calls of a mesh that is being stopped, or goes on without this controller."""
        for call in [call for call in self._calls.values() if call.mesh == mesh]:
            self.disown(call)
            call.give_up(error)

    def tell(self, output: int, event: OutputEvent) -> None:
        """Hand an output event to its listener."""
        try:
            self._listeners.get(output, self.default_listener)(event)
        except Exception:
            traceback.print_exc()  # a listener's fault must not stop the mesh
