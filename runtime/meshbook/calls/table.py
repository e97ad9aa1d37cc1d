"""The open calls and questions of a controller, and the listeners to the prints of calls. I/O thread only."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.output import ConsoleOutput, OutputEvent, OutputListener, OutputTarget
from meshbook.errors import MeshError, WorkerLost
from meshbook.lifecycle import CallEvent
from meshbook.wire import messages as wire
from meshbook.wire.replies import split_replies

FAILURE_GRACE_S = 0.02
"""The time that the first failure of a call waits for more like it, where no agent can be asked."""
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
    """The watcher of the calls of a mesh, which says when they complete, by `CallTable.complete`."""

    def on_told(self, call: OpenCall, rank: int, encoded: bytes) -> None:
        """Take in the report of the rank's process groups that came with an answer, before `on_answered`."""

    def on_answered(self, call: OpenCall) -> None:
        """Note that ranks have answered, or were lost."""

    def forget(self, call: OpenCall) -> None:
        """Note that the call was given up."""


class CallTable:
    """Routes answers and output by id."""

    def __init__(self, watchers: Mapping[int, CallWatcher]) -> None:
        """watchers: by mesh; calls of other meshes complete by their answers alone, as those of a rank do."""
        self._watchers = watchers
        self.default_listener: OutputListener = ConsoleOutput()
        """The listener to output that belongs to no cell."""
        self._calls: dict[int, OpenCall] = {}
        self.find: Callable[[int], OpenCall | None] = self._calls.get
        self.ids, self.open_now = self._calls.keys(), self._calls.values()
        """Live views of the ids of the open calls and of the calls, oldest first."""
        self._tell_at: dict[int, float] = {}
        """The times at which calls without a watcher fail."""
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
        """Have the call complete as soon as its policy and its mesh allow, since ranks have answered or were lost."""
        if (watcher := self._watchers.get(call.mesh)) is not None:
            watcher.on_answered(call)
        elif not call.waiting:
            self.complete(call)
        elif call.fail_fast and call.failed and not call.is_told:
            tell_at = time.monotonic() + (0.0 if call.hurried else FAILURE_GRACE_S)
            self._tell_at[call.id] = min(tell_at, self._tell_at.get(call.id, math.inf))

    def complete(self, call: OpenCall, groups: str = "") -> None:
        """Hand out the outcome of a call that all ranks have answered, and forget it. groups: as `OpenCall.settle`."""
        if self._calls.pop(call.id, None) is not None:
            self._tell_at.pop(call.id, None)
            call.settle(groups)
            call.close(CallEvent.SETTLED)

    def next_deadline(self) -> float:
        """Return the time on the monotonic clock at which to call `expire`; infinity if never."""
        due = min(self._tell_at.values(), default=math.inf)
        for question in self._questions.values():
            due = min(due, question.until if question.is_open else 0.0)
        return due

    def expire(self) -> None:
        """End the questions whose time is over, and fail the calls whose first failure has waited long enough."""
        now = time.monotonic()
        for question in [each for each in self._questions.values() if each.until <= now or not each.is_open]:
            self.end(question)
        for id in [id for id, tell_at in self._tell_at.items() if tell_at <= now]:
            del self._tell_at[id]
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
        """Forget a call that is given up, or whose end a former controller has seen."""
        self._calls.pop(call.id, None)
        self._tell_at.pop(call.id, None)
        if (watcher := self._watchers.get(call.mesh)) is not None:
            watcher.forget(call)

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
