"""The workers of one mesh on one host, as its agent sees them.

Calls fan out to the workers, answers are combined on the way back (`meshbook.agent.calls`), payloads in shared memory
are counted until the last worker has let go of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from typing_extensions import assert_never

from meshbook.agent.calls import AgentCalls
from meshbook.agent.journal import CallJournal
from meshbook.agent.mail import AgentMail, MailAnswer
from meshbook.agent.output import ShownDisplay
from meshbook.agent.output_pump import OutputPump
from meshbook.agent.rank_log import read_on
from meshbook.agent.resources import HostResources
from meshbook.agent.stack_dumps import OutsideStacks
from meshbook.agent.store import StoreHome, StoreRelay
from meshbook.agent.worker import AgentWorker
from meshbook.agent.worker_pool import WorkerPool
from meshbook.errors import MeshError
from meshbook.lifecycle import WorkerEvent
from meshbook.system.exits import CRASH_REPORT_LINES, last_words, log_tail
from meshbook.system.processes import is_ending, process_state, processor_time, some_thread_runs
from meshbook.wire import messages as wire
from meshbook.wire.direct import remove_listener
from meshbook.wire.frames import Buffer, pack
from meshbook.wire.replies import agents_answer, failed_replies

LOG_TAIL_LINES = 5


def _state_of(pid: int) -> wire.ProcessState:
    state = process_state(pid)
    return wire.ProcessState("R" if state == "S" and some_thread_runs(pid) else state, processor_time(pid))


class AgentMesh:
    """The workers of a mesh on this host."""

    def __init__(
        self, spawn: wire.Spawn, host: HostResources, mail: AgentMail, on_stopped: Callable[[int], None]
    ) -> None:
        """spawn: the order for the first workers of the mesh.

        on_stopped: called when the mesh was told to end and has no process left.
        """
        self.id = spawn.mesh
        self.is_up = False  # whether it can be attached, so that it waits for another controller (`wire.MeshUp`)
        self.environment = spawn.environment
        self.memory = CallJournal(spawn.mesh, spawn.name)
        self._host, self.mail, self._loop, self._uplink = host, mail, host.loop, host.uplink
        self.oom = host.oom
        self.worker_pool = WorkerPool(self, host, Path(host.ticket.log_dir) / f"{spawn.name}-{spawn.mesh}")
        self.workers = self.worker_pool.workers
        self.output = OutputPump(host.loop, host.uplink, host.quota, self.worker_pool)
        self.calls = AgentCalls(host, mail.answer_to, self.memory, self.worker_pool, self.output)
        self._on_stopped = on_stopped
        self.store = self._make_store(spawn.arrangement.host_rank)

    @property
    def is_all_here(self) -> bool:
        """Whether no rank of the mesh lives on another host."""
        arrangement = self.memory.arrangement
        return arrangement is not None and arrangement.hosts == 1

    # ---- controller to workers ----------------------------------------------------------------------------------

    def call(
        self,
        call: wire.Call,
        payload: Sequence[Buffer],
        answer: MailAnswer | None = None,
        had_by: AgentWorker | None = None,
    ) -> Sequence[AgentWorker]:
        """Pass a call on to its members here, and return them. answer: takes the answers to a worker's call. had_by:
        the worker that has told us of it, as it came there past us; the others get it here, once."""
        found = members = self.worker_pool.members(call.target)
        if call.reply and members:
            members = self.calls.expect(call, members, answer)
        if call.segment is not None:
            key = call.segment.pid, call.segment.segment
            self._host.segment_refs.lend(key, members)
            if not members:
                self._host.segment_refs.end(key)
        data = pack([wire.encode(call), *payload])
        for worker in members:
            if worker is had_by:
                continue
            if call.mailbox:
                worker.send_packed_mail(data)
            else:
                worker.calls.send_packed(data)
        return found

    def _came_early(self, worker: AgentWorker, call: wire.Call) -> None:
        """Expect a worker's answer to a call that has come there by a direct link."""
        if worker.untold and not self.memory.knows(call.id):
            self.call(call, (), had_by=worker)  # the controller has gone: other members may not have got it
        else:
            self.calls.expect_late(call, worker)

    def refuse(self, call: wire.Call, error: MeshError) -> None:
        """Answer a call that cannot be passed on, for its members here."""
        if not call.reply:
            return
        ranks = [rank for rank in self.workers if wire.target_has(call.target, rank)]
        self._uplink.send(*failed_replies(call, ranks, self._host.name, error))

    def answer(self, query: wire.Query) -> None:
        """Answer a question for the members here, or have their control threads answer it."""
        members = self.worker_pool.members(query.target)
        answer = functools.partial(self._answer_query, query.id)
        match query.asked:
            case wire.AskRank():
                if members:
                    self.calls.expect_answers(query.id, {worker.rank for worker in members})
                for worker in members:
                    worker.urgent.send([wire.encode(query)])
            case wire.AskProcesses(in_order):
                states = {worker.rank: _state_of(worker.pid) for worker in members if worker.pid}
                if in_order:
                    for worker in members:
                        worker.read_waiting()
                    self._uplink.send(agents_answer(query.id, states))
                else:
                    answer(states)
            case wire.AskPrinted():
                for worker in members:
                    worker.read_waiting()  # what threads of earlier cells have printed
                    worker.drain()
                self.output.flush()
                self._uplink.send(agents_answer(query.id, {}))  # not urgent: it must not overtake the texts
            case wire.AskStacks() as asked:
                OutsideStacks(self._loop, members, asked, answer).start()
            case wire.ReadLogs() as asked:
                answer(
                    self._logs([rank for rank in self.worker_pool.logs if wire.target_has(query.target, rank)], asked)
                )
            case wire.ReadOn() as asked:
                self._drain(rank for rank, _ in asked.offsets)
                answer({piece.rank: piece for piece in read_on(self.worker_pool.logs, asked)})
            case wire.Retire() as asked:
                self._retire(query.id, asked)
            case other:
                assert_never(other)

    def _answer_query(self, id: int, answers: Mapping[int, object]) -> None:
        self._uplink.send_urgent(agents_answer(id, answers))

    def abort_groups(self, abort: wire.AbortGroups) -> None:
        """Pass the message on to its members here."""
        for worker in self.worker_pool.members(abort.target):
            worker.urgent.send([wire.encode(abort)])

    def to_worker(self, rank: int, message: wire.ToWorker) -> bool:
        """Send an urgent message to one worker, if it lives here; return whether it does."""
        if (worker := self.workers.get(rank)) is None:
            return False
        worker.urgent.send([wire.encode(message)])
        return True

    def cancel(self, cancel: wire.Cancel) -> None:
        """Pass a cancel on to its members here."""
        self.calls.cancel(cancel)

    # ---- workers to controller ----------------------------------------------------------------------------------

    def on_message(self, worker: AgentWorker, message: wire.FromWorker, payload: list[bytes]) -> None:
        """Act on a message of a worker; text that it printed before goes first."""
        match message:
            case wire.Reply():
                self.calls.on_reply(worker, message, payload)
            case wire.DisplayData():
                worker.drain()  # all that was printed before
                worker.output.show(ShownDisplay(message, payload))
                self.output.send(worker)
            case wire.Prompted(output=output, at=at):
                self.output.send(worker, final=True)
                self._uplink.send(wire.Prompted(self.id, worker.rank, output, at))
            case wire.Logged():
                self.output.send_logged(
                    worker, msgspec.structs.replace(message, mesh=self.id, rank=worker.rank), payload
                )
            case wire.StreamText():
                if worker.output.is_writing(message.output):
                    worker.drain()  # its thread has printed there while its cell still ran
                worker.output.add_late(message, time.monotonic())
                self.output.on_output()
            case wire.StoreRequest(request=request, op=op):
                if worker not in self.worker_pool.leaving:
                    self.store.ask(worker.rank, request, op)
            case wire.SegmentFree(pid, segment):
                self._host.segment_refs.take_back(worker, (pid, segment))
            case wire.Call():
                self.mail.call(worker, self.id, message, payload)
            case wire.Cancel():
                self.mail.cancel(worker, self.id, message)
            case wire.CameEarly(call):
                if worker not in self.worker_pool.leaving:
                    self._came_early(worker, call)
            case wire.ToldAll():
                worker.untold -= 1
            case wire.Begun(control_thread=thread, dump_fd=fd):
                worker.control_thread, worker.dump_fd = thread, fd
                worker.advance(WorkerEvent.BEGUN)
                for mesh, moves in self._host.moves.items():
                    worker.urgent.send([wire.encode(wire.Moved(mesh, moves))])
                self.worker_pool.report_ready()

    def on_output(self) -> None:
        """Send output soon, since a worker has printed."""
        self.output.on_output()

    def on_mail_sent(self, worker: AgentWorker) -> None:
        """Release the senders that wait for a worker."""
        self.mail.release(worker)

    def on_exit(self, worker: AgentWorker, cause: str, was_killed: bool) -> None:
        """Settle the calls and segments of a worker that ended, and report why it did."""
        worker.output.release()
        self.output.send(worker, final=True)
        told = self.worker_pool.left(worker)
        worker.close()
        remove_listener(self.worker_pool.direct, worker.pid)
        if not told:
            self.store.drop_client(worker.rank)
        for segment in tuple(worker.segments):
            self._host.segment_refs.take_back(worker, segment)
        if not self.worker_pool.ending and not told:
            tail = last_words(
                log_tail(worker.output.log.path, CRASH_REPORT_LINES, worker.output.log.begin), LOG_TAIL_LINES
            )
            alone = was_killed and not any(is_ending(other.pid) for other in self.workers.values())
            exited = wire.WorkerExited(self.id, worker.rank, worker.pid, cause, tail, worker.request, alone)
            self.memory.on_lost(exited, worker.device, str(worker.output.log.path))
            self._uplink.send(exited)
            death = wire.DeathCause(self.worker_pool.host, cause, tail, alone)
        else:
            death = self.death(worker.rank)
        if not told:  # else nothing has reached it since, also where its rank is another's by now
            self.calls.forget_rank(worker.rank, death)
        self.tell_if_stopped()

    def tell_if_stopped(self) -> None:
        """Report that the mesh has stopped, if it has: a process has gone, or was never forked."""
        if self.worker_pool.ending and not self.workers and not self.worker_pool.leaving:
            self._on_stopped(self.id)

    def _retire(self, id: int, retire: wire.Retire) -> None:
        """Have workers leave; answers that are still due from them will not come."""
        self.memory.on_retire(retire.ranks)
        for worker in self.worker_pool.retire(id, retire):
            worker.drain()
            worker.output.release()
            self.output.send(worker, final=True)
            self.store.drop_client(worker.rank)
            self.calls.forget_rank(worker.rank, self.death(worker.rank))

    def death(self, rank: int) -> wire.DeathCause:
        """Return why a rank that has no worker here does not answer."""
        if (exited := self.memory.exit_of(rank)) is not None:
            return wire.DeathCause(self.worker_pool.host, exited.cause, exited.log_tail)
        return wire.DeathCause(self.worker_pool.host, "it was told to leave, or its mesh was stopped", "")

    def renumber(self, renumber: wire.Renumber) -> None:
        """Give the workers other ranks, or only the store another home; groups will be formed again."""
        if self.memory.is_resized_by(renumber):
            self.calls.rename({seat.known_as: seat.rank for seat in renumber.seats}, self.death)
        self.memory.on_renumber(renumber)
        self.worker_pool.renumber(renumber)
        self.store = self._make_store(renumber.arrangement.host_rank)

    def _make_store(self, host_rank: int) -> StoreHome | StoreRelay:
        if host_rank:
            return StoreRelay(self.id, self.to_worker, self._uplink.send_urgent)
        return StoreHome(self.id, self.to_worker, self._uplink.send_urgent)

    # ---- logs --------------------------------------------------------------------------------------------------------

    def _logs(self, ranks: Sequence[int], asked: wire.ReadLogs) -> dict[int, str]:
        """Return the last lines that each of ``ranks`` wrote, even if it has ended."""
        self._drain(ranks)
        return {rank: log_tail(self.worker_pool.logs[rank], asked.lines, containing=asked.containing) for rank in ranks}

    def _drain(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if (worker := self.workers.get(rank)) is not None:
                worker.drain()
                worker.output.log.settle()

    # ---- stop ---------------------------------------------------------------------------------------------------

    def stop(self, grace_s: float) -> None:
        """End all workers: idle ones leave by themselves, busy ones are killed after ``grace_s``."""
        self.worker_pool.ending = True
        death = wire.DeathCause(self.worker_pool.host, "its mesh was stopped", "")
        self.calls.give_up_mail(death)
        self.tell_if_stopped()
        for worker in self.workers.values():
            worker.calls.end_writing()
        if self.workers or self.worker_pool.leaving:
            self._loop.call_later(grace_s, self.worker_pool.kill_all)
