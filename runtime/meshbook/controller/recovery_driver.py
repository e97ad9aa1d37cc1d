"""The recovery of a mesh on its real ranks: messages and the clock become events of `meshbook.controller.recovery`.

    dispatcher, call table, users' threads ──method──> RecoveryDriver ──event, time──> Recovery
    hosts, call table              <──what to do──     `_carry_out`   <──`todo`──

An instruction may cause an event at once, as a call that completes does: its instructions are carried out behind those
that are there. Under the turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeAlias

from typing_extensions import assert_never

from meshbook.calls.call import OpenCall
from meshbook.calls.output import Notice
from meshbook.calls.table import CallTable, OpenQuestion
from meshbook.concurrency.background import attempt
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.queries import ask_rank, put
from meshbook.controller.recovery import Complete, Instruction, OwnCall, Recovery, ShowNotice, TellFailure
from meshbook.controller.watched_calls import FailingCall, Poll, Unsent
from meshbook.errors import MeshStoppedError, WorkerLost
from meshbook.groups.agreements import decode_told
from meshbook.groups.progress import Collectives
from meshbook.lifecycle import MeshPhase
from meshbook.shape.members import Members
from meshbook.values.pickling import dumps
from meshbook.wire import messages as wire

ASK_STATES_S = 0.02  # the time that agents have to answer

OnStates: TypeAlias = Callable[[dict[int, wire.ProcessState], float], object]


class RecoveryDriver:
    """The recovery of one mesh, as the dispatcher and the table of calls use it."""

    def __init__(self, mesh: MeshState, calls: CallTable, next_id: Callable[[], int]) -> None:
        self._mesh, self._calls, self._next_id = mesh, calls, next_id
        self.machine = Recovery(mesh, next_id)
        self.due = math.inf  # when `expire` is due
        self._question: OpenQuestion[Collectives] | None = None
        self._is_at_it = False  # whether instructions are being carried out

    def send(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None = None
    ) -> None:
        """Have ``transmit`` send a new call, or a message without an answer, now or when it meets no failed one."""
        machine = self.machine
        if machine.on_call(mailbox, members, transmit, call, time.monotonic()):
            transmit()
            self.due = min(self.due, machine.ask_at)
        else:
            self.due = machine.plan()

    def on_answered(self, call: OpenCall) -> None:
        """Take in that ranks have answered a call, or were lost."""
        if not self.machine.on_answered(call, time.monotonic()):
            self._carry_out()
        elif not call.waiting:
            self._calls.complete(call)  # the path of nearly all calls

    def on_told(self, call: OpenCall, rank: int, encoded: bytes) -> None:
        """Take in the report on a rank's groups that came with an answer, before `on_answered`."""
        self.machine.on_told(call, rank, decode_told(encoded), time.monotonic())

    def cancel(self, call: OpenCall) -> bool:
        """Cancel a call. Return True if it still queued here, and has ended now."""
        is_dropped = self.machine.on_cancel(call, time.monotonic())
        self._carry_out()
        if is_dropped:
            call.drop()
            self.on_answered(call)
        return is_dropped

    def adopt(self) -> None:
        """Watch the calls of a former controller."""
        calls = [call for call in self._calls.open_now if call.mesh == self._mesh.id]
        self._feed(partial(self.machine.adopt, calls))

    def forget(self, call: OpenCall) -> None:
        """Forget a call that was given up."""
        self.machine.forget(call)

    def on_lost(self) -> None:
        """Take in that a rank has ended, which `MeshState.lost` has."""
        self._feed(self.machine.on_lost)

    def abort(self, reason: str, ranks: Collection[int] | None = None) -> None:
        """Abort the groups of all ranks, as `Recovery.abort`."""
        self._feed(partial(self.machine.abort, reason, ranks))

    def form(self, call: OpenCall) -> None:
        """Form the groups, in place where there are some; the caller waits for ``call``."""
        if self._mesh.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            call.give_up(MeshStoppedError(self._mesh.name))
        elif self._mesh.lost:
            call.give_up(WorkerLost.of(self._mesh.lost.values()))
        else:
            self._feed(partial(self.machine.form, call))

    def expire(self, now: float) -> None:
        """Take the steps that are due."""
        if self._question is not None and self.machine.is_late(now):
            self._calls.end(self._question)
        self._feed(self.machine.on_time)

    def stop(self) -> None:
        """Stop, since the mesh is being stopped, or left."""
        if self._question is not None:
            self._calls.forget(self._question)
        self._feed(self.machine.stop)

    def _feed(self, event: Callable[[float], object]) -> None:
        event(time.monotonic())
        self._carry_out()

    def _carry_out(self) -> None:
        todo = self.machine.todo
        if self._is_at_it:
            return
        self._is_at_it = True
        try:
            while todo:
                attempt(partial(self._do, todo.popleft()), "the care for process groups")
        finally:
            self._is_at_it = False
            self.due = self.machine.plan()

    def _do(self, instruction: Instruction) -> None:
        mesh, machine = self._mesh, self.machine
        match instruction:
            case wire.AbortGroups() | wire.Cancel():
                mesh.tell(instruction)
            case wire.DropKeys():
                mesh.store_host.send_urgent(instruction)
            case Poll():
                question = self._question = OpenQuestion(
                    instruction.id, mesh.id, Collectives, instruction.answer_s,
                    lambda done: self._feed(partial(machine.on_poll, instruction, done.told)),
                )  # fmt: skip
                everyone = mesh.by_host(range(mesh.extent.nelements))
                put(self._calls, question, mesh, everyone, ask_rank("collectives", instruction.recent))
            case FailingCall():
                self.ask_states(instruction.call.waiting, ASK_STATES_S, instruction.on_states)
            case OwnCall(call, endpoint, args):
                call.when_settled(lambda error: self._feed(partial(machine.on_formed, call, error)))
                self._calls.open(call, None)
                inline = dumps((args, {}), what=call.what).head
                message = wire.Call(call.id, mesh.id, endpoint, call.members.encoded, inline=inline, label=call.what)
                for host in mesh.hosts:
                    host.send(message)
            case Unsent():
                instruction.transmit()
            case ShowNotice(call, text):
                self._calls.tell(call.output, Notice(text))
            case TellFailure(call):
                call.settle()
            case Complete(call, groups):
                self._calls.complete(call, groups)
            case _:
                assert_never(instruction)

    def ask_states(self, ranks: Collection[int], timeout_s: float, on_states: OnStates) -> None:
        """Have ``on_states`` take the states of the ranks' processes that are known in time, and the time.

        They are asked for behind the calls, so that ranks which have not got theirs yet run then. Answers that ranks
        sent before their states were read have come by then.
        """
        question = OpenQuestion(
            self._next_id(), self._mesh.id, wire.ProcessState, timeout_s,
            lambda done: self._feed(partial(on_states, done.told)),
        )  # fmt: skip
        by_host = self._mesh.by_host(ranks)
        put(self._calls, question, self._mesh, by_host, wire.AskProcesses(in_order=True), in_order=True)
