"""The calls that workers of a mesh on this host have to answer, and how their answers are combined on the way back.

Cancels go before calls that wait, so a cancel may come before its call. The ranks that it names are answered
for here, without a worker. Only a worker knows which calls it has begun: once a call was passed on, so are its cancels.
"""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TypeAlias

import msgspec

from meshbook.agent.journal import CallJournal, RememberedCall
from meshbook.agent.mail import MailAnswer
from meshbook.agent.output_pump import OutputPump
from meshbook.agent.resources import HostResources
from meshbook.agent.worker import AgentWorker
from meshbook.agent.worker_pool import WorkerPool
from meshbook.errors import MeshError
from meshbook.formatting import format_bytes
from meshbook.system.processes import process_state
from meshbook.wire import messages as wire
from meshbook.wire.replies import dropped_replies, explain_failure, lost_reply

KEPT_CANCELS = 1024  # the most cancels without a call that are remembered: most name calls that have ended
COMBINE_S = 0.002  # answers of one host wait this long for each other; failures do not wait

# the id of the controller's call; else the origin of a call with its id
CallKey: TypeAlias = int | tuple[wire.Origin, int]

_rank_of = attrgetter("rank")


class _OpenCall(msgspec.Struct):
    """A call whose answers are being collected on this host."""

    waiting: set[int]  # the ranks, by their present numbers
    prints: bool  # whether its output has a listener: all printed text goes before the answer
    answer: MailAnswer | None = None  # takes the answers; None: they go to the controller
    memory: RememberedCall | None = None  # notes the answers that the next controller may want
    names: dict[int, int] | None = None  # the caller's numbers of the ranks, where they differ
    replies: list[wire.RankReply] = []
    frames: list[bytes] = []

    def name_of(self, rank: int) -> int:
        """Return the caller's number of a rank."""
        return rank if self.names is None else self.names[rank]

    def rename(self, now: Mapping[int, int]) -> None:
        """Follow ranks to other numbers; the caller goes on to use the old ones."""
        self.names = {now[rank]: self.name_of(rank) for rank in self.waiting}
        self.waiting = set(self.names)


class AgentCalls:
    """The open calls of one mesh on one host."""

    def __init__(
        self,
        host: HostResources,
        answer_to: Callable[[wire.Origin], MailAnswer],
        memory: CallJournal,
        pool: WorkerPool,
        output: OutputPump,
    ) -> None:
        """answer_to: returns a function that takes the answers to a worker's call.

        memory: notes calls of the controller, and their answers. output: its texts go before the answers.
        """
        self._host, self._answer_to, self._memory, self._pool, self._output = host, answer_to, memory, pool, output
        self._loop, self._uplink = host.loop, host.uplink
        self._open: dict[CallKey, _OpenCall] = {}
        # the members of calls that this host does not know (yet) for which they were cancelled, by call
        self._early_cancels: OrderedDict[int, wire.Target] = OrderedDict()
        self._combining = False

    def expect(
        self, call: wire.Call, members: tuple[AgentWorker, ...], answer: MailAnswer | None
    ) -> tuple[AgentWorker, ...]:
        """Note a call that wants answers; return the members on which it was not cancelled before it came."""
        ranks = set(map(_rank_of, members))
        key = call.id if call.origin is None else (call.origin, call.id)
        if (opened := self._open.get(key)) is not None:  # others of its ranks have got it by links, and told us
            opened.waiting |= ranks
            return members
        opened = self._open[key] = _OpenCall(ranks, prints=call.output != 0, answer=answer)
        if answer is not None:
            return members
        opened.memory = self._memory.on_call(call, ranks)
        if call.direct:  # it may have begun: only the rank can say whether it is dropped
            return members
        if self._early_cancels and (dropped := self.take_early_cancels(call.id, ranks)):
            members = tuple(worker for worker in members if worker.rank not in dropped)
            opened.waiting -= dropped
            replies = dropped_replies(call.id, dropped)
            for reply in replies.replies:
                opened.memory.keep(reply, ())
            self._uplink.send(replies)
            if not opened.waiting:
                del self._open[call.id]
                self._memory.on_ended(call.id)
        return members

    def expect_late(self, call: wire.Call, worker: AgentWorker) -> None:
        """Note that a worker has a call to answer that did not come by us."""
        key = call.id if call.origin is None else (call.origin, call.id)
        opened = self._open.get(key)
        if opened is None and call.origin is None:
            memory = self._memory.on_call(call, set())
            opened = self._open[key] = _OpenCall(memory.waiting, prints=False, memory=memory)
        elif opened is None:
            assert call.origin is not None
            opened = self._open[key] = _OpenCall(set(), prints=True, answer=self._answer_to(call.origin))
        opened.waiting.add(worker.rank)

    def expect_answers(self, question: int, ranks: set[int]) -> None:
        """Expect answers of the control threads of ``ranks`` to a question."""
        self._open[question] = _OpenCall(ranks, False)

    def take_early_cancels(self, call: int, ranks: Iterable[int]) -> set[int]:
        """Return the ranks among ``ranks`` for which ``call``, which has come now, was cancelled."""
        target = self._early_cancels.pop(call, ())
        return {rank for rank in ranks if wire.target_has(target, rank)}

    def cancel(self, cancel: wire.Cancel) -> None:
        """Pass a cancel on to the members that have not answered; an insistent one also continues stopped processes."""
        call = self._open.get(cancel.call if cancel.origin is None else (cancel.origin, cancel.call))
        if call is None and not cancel.direct:
            if cancel.origin is None:  # else it came behind its call, which has ended
                before = self._early_cancels.pop(cancel.call, ())
                self._early_cancels[cancel.call] = (*before, *cancel.target)
                if len(self._early_cancels) > KEPT_CANCELS:
                    self._early_cancels.popitem(last=False)
            return
        members = [
            worker
            for worker in self._pool.workers.values()
            if (
                wire.target_has(cancel.target, worker.rank)
                if call is None or cancel.direct
                else worker.rank in call.waiting and wire.target_has(cancel.target, call.name_of(worker.rank))
            )
        ]
        for worker in members:
            if cancel.is_mail:
                worker.send_mail([wire.encode(cancel)])  # behind the call
            else:
                worker.urgent.send([wire.encode(cancel)])
            if cancel.insist and worker.pid and process_state(worker.pid) == "T":  # a debugger's stops are left to it
                os.kill(worker.pid, signal.SIGCONT)

    # ---- answers ------------------------------------------------------------------------------------------------

    def on_reply(self, worker: AgentWorker, reply: wire.Reply, payload: list[bytes]) -> None:
        """Take the answer of a worker."""
        for each in reply.freed:  # before the answer goes on, so that the next payload finds its segment free
            self._host.segment_refs.take_back(worker, each)
        key = reply.id if reply.origin is None else (reply.origin, reply.id)
        call = self._open.get(key)
        if call is None or worker.rank not in call.waiting or worker in self._pool.leaving:
            if reply.segment is not None:
                worker.urgent.send([wire.encode(wire.SegmentFree(worker.pid, reply.segment.segment))])
            return
        if call.prints:
            self._output.send(worker, final=True)
            worker.output.renew()
        if call.answer is None:
            answer, payload = self._pass_on(worker, reply, payload)
            if call.memory is not None:
                call.memory.keep(answer, payload)
                if reply.status == wire.GONE:
                    call.memory.is_over = True
        else:
            answer = wire.RankReply(
                call.name_of(worker.rank), reply.status, len(payload), reply.duration_s, reply.segment, None,
                reply.inline,
            )  # fmt: skip
        call.replies.append(answer)
        call.frames += payload
        call.waiting.discard(worker.rank)
        if not call.waiting or answer.status != wire.OK:
            self._flush_call(key)
        elif not self._combining:
            self._combining = True
            self._loop.call_later(COMBINE_S, self.flush)  # one timer serves all calls, and rests when there is none

    def _pass_on(
        self, worker: AgentWorker, reply: wire.Reply, payload: list[bytes]
    ) -> tuple[wire.RankReply, list[bytes]]:
        """Return a worker's answer in the form for the controller, and its frames."""
        quota = self._host.quota
        if not quota.listening and not quota.result(
            size := sum(map(len, payload)) + (reply.segment.size_bytes if reply.segment else 0)
        ):
            if reply.segment is not None:
                worker.urgent.send([wire.encode(wire.SegmentFree(worker.pid, reply.segment.segment))])
            why = f"its value ({format_bytes(size)}) was not kept: results made while nobody listened were too large"
            gone = wire.RankReply(
                worker.rank, wire.GONE, 0, reply.duration_s, None, inline=why.encode(), groups=reply.groups
            )
            return gone, []
        status, inline, segment, bulk = reply.status, reply.inline, None, None
        try:
            if reply.segment is not None:
                segment, bulk = self._host.segment_refs.export(reply.segment, self._uplink)
        except MeshError as error:
            status, inline, payload = wire.RAISED, b"", [explain_failure(worker.rank, self._host.name, error)]
        if segment is not None:
            worker.lent.add(segment.segment)
        answer = wire.RankReply(
            worker.rank, status, len(payload), reply.duration_s, segment, bulk, inline, reply.waited_s, reply.groups
        )
        return answer, payload

    def flush(self) -> None:
        """Send now the answers that wait for others."""
        self._combining = False
        for key in [key for key, call in self._open.items() if call.replies]:
            self._flush_call(key)

    def _flush_call(self, key: CallKey) -> None:
        call = self._open.get(key)
        if call is None:
            return
        if not call.waiting:
            del self._open[key]
        origin, id = (None, key) if isinstance(key, int) else key
        if call.replies:
            replies, frames = wire.Replies(id, tuple(call.replies), origin), call.frames
            call.replies, call.frames = [], []
            if call.answer is not None:
                call.answer(replies, frames)
            else:
                self._uplink.send(replies, frames)
        if not call.waiting and call.memory is not None:
            self._memory.on_ended(id)

    # ---- answers that will not come -----------------------------------------------------------------------------

    def forget_rank(self, rank: int, death: wire.DeathCause) -> None:
        """Expect no answer of a rank any more: tell workers that wait for it; the controller knows."""
        for key, call in tuple(self._open.items()):
            if call.answer is not None and rank in call.waiting:
                call.replies.append(lost_reply(call.name_of(rank), death))
            call.waiting.discard(rank)
            if not call.waiting or (call.answer is not None and call.replies):
                self._flush_call(key)

    def give_up_mail(self, death: wire.DeathCause) -> None:
        """Tell workers that wait for ranks here that they will get no answer."""
        for key, call in tuple(self._open.items()):
            if call.answer is not None:
                call.replies += [lost_reply(call.name_of(rank), death) for rank in sorted(call.waiting)]
                call.waiting.clear()
                self._flush_call(key)

    def rename(self, now: Mapping[int, int], death_of: Callable[[int], wire.DeathCause]) -> None:
        """Follow ranks to other numbers: calls of workers go on; of the controller's none is open. now: the new numbers
        of the ranks here, by their old ones. death_of: why a rank that is not among them does not answer."""
        self._open = {key: call for key, call in self._open.items() if call.answer is not None}
        for rank in set().union(*(call.waiting for call in self._open.values())) - now.keys():
            self.forget_rank(rank, death_of(rank))
        for call in self._open.values():
            call.rename(now)
