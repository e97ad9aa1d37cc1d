"""The process groups that ranks hold: permanent, while the C++ groups behind them are replaced.

    all_reduce(t, group) ──> AbortableGroup ──> BackendGroup ──> torch's ProcessGroup ──> gloo, NCCL
         DTensor, DDP ──────────┘  │ numbers operations, returns interruptible works
                                   └ after an abort: a new BackendGroup over the new epoch's store

torch's registries hold the AbortableGroup, so names, DeviceMeshes, DTensors and handles stay valid when groups are
formed again. A group's inner one is made at its first operation: a mesh may have many that nobody uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist

from meshbook.errors import GroupAborted, UsageError
from meshbook.groups.backend_group import HELD_MAX_S, BackendGroup, GroupSpec, NcclOptions, dispose
from meshbook.groups.collectives_off import public_name, refusals, refuse_if_off
from meshbook.groups.group_state import Counts, GroupState, Users
from meshbook.groups.operands import (
    IN_ONE_PIECE,
    Description,
    Landing,
    describe,
    describe_message,
    laid_in_one_piece,
    lies_in_one_piece,
    parts_of,
    payload_bytes,
)
from meshbook.groups.progress import ANY_PEER, CellCounts, GroupProgress
from meshbook.groups.records import COPIED_BYTES, MessageRecord, Operands, Record, copy_small
from meshbook.groups.work import AsideWork, CollectiveWork, PeerWork
from meshbook.torch_internals import Store

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter",
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "_end_coalescing",
)  # fmt: skip
"""Operations that all members enter, by torch's names, older and newer ones."""


_BARRIER_GRACE = timedelta(seconds=1)
"""The time that C++ may take to end a monitored barrier after its timeout."""


class AbortableGroup(dist.ProcessGroup):
    """A process group that can be aborted and made again."""

    def __init__(
        self,
        recipe: GroupSpec,
        store: Store,
        guard: GroupState,
        options: NcclOptions | None = None,
        device_id: torch.device | None = None,
        on_retired: Callable[[], object] = lambda: None,
        on_destroyed: Callable[[], object] = lambda: None,
    ) -> None:
        """on_retired: called when the group can never be used again. on_destroyed: called before, by its end."""
        super().__init__(recipe.rank, len(recipe.ranks))  # type: ignore[call-arg]
        self.recipe = recipe
        self.issued = 0
        self.record = Record(guard.epoch)
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self._messages: dict[tuple[str, int], MessageRecord] = {}
        """The records by ``send`` or ``recv`` and peer (base rank)."""
        self.by_cells = Counts()
        """The operations of the main thread among these."""
        self._counting = threading.Lock()
        """Numbers are in the order in which C++ gets the operations, whichever threads begin them."""
        self._together: list[tuple[str, int, int]] = []
        """The messages that NCCL begins together: operation, number and peer (base rank)."""
        self._users = Users()
        self._aborted = ""
        """The reason why the group cannot be used until it is formed again."""
        self.retired = ""
        """The reason why the group can never be used again."""
        self._on_retired, self._on_destroyed = on_retired, on_destroyed
        self._store, self._guard, self._options = store, guard, options
        self._inner: BackendGroup | None = None
        self._making = threading.Lock()
        self._uses_cuda = "cuda" in recipe.devices and torch.cuda.is_available()
        if device_id is not None:
            self.bound_device_id = device_id

    # ---- life ---------------------------------------------------------------------------------------------------

    @property
    def live(self) -> BackendGroup:
        """The inner group; made now if there is none. Raises: GroupAborted; UsageError for a group of the past."""
        if self._guard.reason:
            self._users.told()
            self._guard.check()
        if (inner := self._inner) is None:
            inner = self._make()
        return self._when_open(inner) if inner.closed else inner

    def _make(self) -> BackendGroup:
        if self.retired:
            raise UsageError(self.retired)
        if self._aborted:
            raise GroupAborted(self._aborted)
        guard = self._guard
        guard.await_formed()
        with self._making:
            if self._inner is None:
                device_id = self.bound_device_id
                self._inner = BackendGroup(self.recipe, self._store, guard, self._users, self._options, device_id)
        if reason := guard.reason or self._aborted:  # aborted meanwhile, by another thread
            self._inner.give_up(reason)
        return self._inner

    def _when_open(self, inner: BackendGroup) -> BackendGroup:
        """Return the group at once to the thread that forms the groups, to others when they are proved."""
        guard = self._guard
        if guard.is_forming and not inner.dead:
            return inner
        if guard.forming:
            guard.await_formed()
            return self.live
        self._users.told()
        raise GroupAborted(inner.closed)

    @property
    def inner(self) -> BackendGroup | None:
        """The inner group, if one was made."""
        return self._inner

    def give_up(self, reason: str) -> None:
        """End all waits, and refuse operations until it is formed again; from any thread."""
        self._aborted = reason
        if (inner := self._inner) is not None:
            inner.give_up(reason)

    def renew(self, store: Store) -> BackendGroup | None:
        """Speak over ``store`` from the next operation on, counting from 0; returns the former inner group."""
        with self._making:  # another thread may be at it, over the former store
            former, self._inner, self._store, self._aborted = self._inner, None, store, ""
            self._forget_messages()
            self.issued, self.sent, self.received = 0, {}, {}
            self.record, self.by_cells = Record(self._guard.epoch), Counts()
        self._users.renew(self._guard.handled())
        return former

    def retire(self, reason: str) -> BackendGroup | None:
        """Refuse all further use; returns the inner group."""
        self.retired = self.retired or reason
        former, self._inner = self._inner, None
        self._forget_messages()
        self._on_retired()
        return former

    def shutdown(self) -> None:
        """End the group; `destroy_process_group` calls this."""
        self._on_destroyed()
        self._guard.note_broken()
        former = self.retire(f'the process group "{self.recipe.name}" was destroyed: make it again on all its ranks.')
        dispose([former] if former is not None else [])

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.give_up("it was aborted on this rank")

    def progress(self, recent: int = 0) -> GroupProgress:
        """Return how far the group is, with its last ``recent`` operations; from any thread."""
        recipe, record, inner, cells = self.recipe, self.record, self._inner, self.by_cells
        entered = record.recent(recent) if recent else ()
        messages = tuple(each.messages(recent) for each in list(self._messages.values())) if recent else ()
        issued, sent, received, broken, aborted = self.issued, dict(self.sent), dict(self.received), "", self._aborted
        if inner is not None:
            failures, aborted = inner.failures, aborted or inner.dead
            broken, issued = failures.why, failures.served(None, issued)
            sent = {peer: failures.served(peer, count, "send") for peer, count in sent.items()}
            received = {peer: failures.served(peer, count, "recv") for peer, count in received.items()}
        by_cells = CellCounts(cells.issued, dict(cells.sent), dict(cells.received))
        handled = self._guard.handled()
        return GroupProgress(
            recipe.name, recipe.ranks, issued, sent, received, record.epoch, *record.told, entered, by_cells, broken,
            self._users.at_work(handled), self._users.mailboxes(handled), aborted, messages,
        )  # fmt: skip

    # ---- sends and receives -------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        return self._to_peer("send", self.sent, dst, tag, lambda group: group.send(tensors, dst, tag), tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        return self._to_peer("recv", self.received, src, tag, lambda group: group.recv(tensors, src, tag), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        return self._to_peer(
            "recv", self.received, ANY_PEER, tag, lambda group: group.recv_anysource(tensors, tag), tensors
        )

    def _to_peer(
        self,
        operation: str,
        counts: dict[int, int],
        peer: int,
        tag: int,
        begin: Callable[[dist.ProcessGroup], dist.Work | None],
        tensors: list[torch.Tensor],
    ) -> dist.Work:
        refuse_if_off(operation)
        inner = self.live
        base = ANY_PEER if peer == ANY_PEER else self.recipe.ranks[peer]
        by_cells = self._by_cells()
        what = describe_message(operation, tensors[0])
        self._guard.moved_bytes += what.size_bytes
        on_cuda = self._uses_cuda and tensors[0].is_cuda
        with self._counting:
            number = counts[base] = counts.get(base, 0) + 1
            self._note_message(what, base, 1 if on_cuda else tag + 2)  # NCCL knows no tags
            if by_cells is not None:
                of_cells = by_cells.sent if operation == "send" else by_cells.received
                of_cells[base] = of_cells.get(base, 0) + 1
            if on_cuda:
                try:
                    raw = begin(inner.group)
                except BaseException as error:
                    inner.failures.note(operation, number, base, error)
                    raise
                if raw is None:
                    self._together.append((operation, number, base))
                    return None  # type: ignore[return-value]
                return self._on_stream(inner, raw, operation, number, base)
            work = PeerWork(inner, operation, number, base, lambda: begin(inner.group))
            inner.add_peer_work(work, operation, peer, tag)
        if inner.dead:  # aborted before it was known there
            work.wake()
        return work

    def _on_stream(
        self,
        inner: BackendGroup,
        raw: dist.Work,
        operation: str,
        number: int,
        base: int | None = None,
        operands: Operands | None = None,
    ) -> CollectiveWork:
        """Return the work of an operation that CUDA has begun. base: the peer of a message."""
        inner.add(raw, operation, number, base, operands)
        inner.note_on_device()
        work = CollectiveWork(inner, operation, number, raw)
        work.on_stream = True
        return work

    def begin_together(self, messages: Sequence[dist.P2POp]) -> list[dist.Work]:
        """Begin messages of CUDA tensors as one operation of NCCL, as `dist.batch_isend_irecv` does.

        Begun one after the other they fail where two ranks send to each other: each send waits for the other's receive.
        """
        refuse_if_off("batch_isend_irecv")
        inner, device = self.live, messages[0].tensor.device
        self._together = []
        inner.group._start_coalescing(device)
        try:
            for each in messages:
                end = "group_dst" if each.op is dist.isend else "group_src"
                each.op(each.tensor, group=self, tag=each.tag, **{end: each.group_peer})
        finally:  # else NCCL would take all that comes later for a part of this
            raw = inner.group._end_coalescing(device)
        if raw is None or torch.cuda.is_current_stream_capturing():
            return [raw] if raw is not None else []
        with self._counting:
            works = [self._on_stream(inner, raw, *each) for each in self._together]
        return list(works[-1:])

    def _note_message(self, what: Description, peer: int, lane: int) -> None:
        """A message from or to a peer (base rank) begins; under `_counting`."""
        if what.operation == "recv" and ANY_PEER in self.received:
            return  # nobody knows whose messages it has taken; the records of before stay right
        record = self._messages.get((what.operation, peer))
        if record is None:
            own = self.recipe.ranks[self.recipe.rank]
            ends = (own, peer) if what.operation == "send" else (peer, own)
            record = MessageRecord(self._guard.epoch, self.recipe.name, *ends)
            self._messages[what.operation, peer] = record
        record.add(record.number_after(lane), what)
        self._guard.used.add(record)

    def _forget_messages(self) -> None:
        """They must not be told any more: an answer goes under the epoch that is then."""
        former, self._messages = self._messages, {}
        self._guard.used.difference_update(former.values())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Raises: RuntimeError that names who has not come within ``timeout``.

        C++ keeps that time for messages, not for the connection that the first message between two ranks needs and that
        one of them does not come to make. So each rank says in the store that it has come, and the wait ends anyhow.
        """
        refuse_if_off("monitored_barrier")
        inner = self.live
        by_cells = self._by_cells()
        if timeout is None:
            timeout = timedelta(seconds=self.recipe.timeout_s)

        def begin() -> None:
            inner.group.monitored_barrier(timeout, wait_all_ranks)

        with self._counting:
            number = self._count(by_cells)
            self.record.add(number, describe("monitored_barrier", ()))
            self._guard.used.add(self)
            work = PeerWork(inner, "monitored_barrier", number, None, begin)
            inner.add_peer_work(work, "monitored_barrier", 0, 0)
        store, came = self._store, f"monitored_barrier {self.recipe.name} {number}"
        store.set(f"{came} {self.recipe.rank}", "")
        try:
            work.wait(timeout + _BARRIER_GRACE)
        except RuntimeError:
            if work.ended:  # C++ has found it out
                raise
            missing = [rank for rank in range(len(self.recipe.ranks)) if not store.check([f"{came} {rank}"])]
            who = f"Rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}" if missing else "A rank"
            what = f"{who} failed to pass monitoredBarrier in {timeout.total_seconds() * 1000:.0f} ms"
            raise RuntimeError(f"[Rank {self.recipe.rank}]: {what}") from None

    def _by_cells(self) -> Counts | None:
        """The counts of the main thread, where that calls. Raises: GroupAborted in others, see `Users.note`."""
        if get_ident() == self._guard.main:
            return self.by_cells
        self._users.note()
        return None

    def _count(self, by_cells: Counts | None) -> int:
        """The number of the collective that begins now; under `_counting`."""
        self.issued += 1
        if by_cells is not None:
            by_cells.issued += 1
        return self.issued

    def _take_back(self, by_cells: Counts | None) -> None:
        """It was never begun: the others must not count on it."""
        self.issued -= 1
        if by_cells is not None:
            by_cells.issued -= 1

    def __repr__(self) -> str:
        """torch's errors show it, those for a group of the past included."""
        state = self.retired or f"{len(self.recipe.ranks)} ranks, {self.recipe.backend}"
        return f'<process group "{self.recipe.name}": {state}>'

    # ---- what torch asks of a group -----------------------------------------------------------------------------

    def name(self) -> str:
        return "nccl" if "nccl" in self.recipe.devices.values() else "gloo"

    _get_backend_name = name

    def getBackendName(self) -> str:
        """Return a name for C++ (DDP's logger), which takes a group called gloo for one that holds gloo's object."""
        return f"guarded {self.name()}"

    def getGroupName(self) -> str:
        return self.recipe.name

    def setGroupName(self, name: str) -> None:
        self.recipe = self.recipe._replace(name=name)

    def getGroupDesc(self) -> str:
        return self.recipe.description

    def setGroupDesc(self, description: str) -> None:
        self.recipe = self.recipe._replace(description=description)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.recipe.devices]

    def _get_backend(self, device: torch.device) -> Any:
        return self.live.group._get_backend(device)

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self.recipe = self.recipe._replace(timeout_s=timeout.total_seconds())
        inner = self.live
        inner.timeout_s = timeout.total_seconds()
        inner.group.set_timeout(timeout + timedelta(seconds=HELD_MAX_S))

    def _start_coalescing(self, device: torch.device) -> None:
        self.live.group._start_coalescing(device)

    def _set_sequence_number_for_group(self) -> None:
        return None  # done when the inner group is made

    def _get_sequence_number_for_group(self) -> int:
        return int(self.live.group._get_sequence_number_for_group())


def _collective(method: str) -> Callable[..., dist.Work | None]:
    operation = public_name(method)
    in_place = method in ("allreduce", "broadcast", "reduce")
    writes = method not in ("barrier", "_end_coalescing")
    may_be_aside, in_one_piece, gives = "reduce_scatter" in method, method in IN_ONE_PIECE, method == "scatter"
    has_parts = public_name(method).startswith("all_to_all")

    def collective(self: AbortableGroup, *args: Any, **kwargs: Any) -> dist.Work | None:
        if refusals.may_refuse:
            refuse_if_off(operation)
        guard, inner = self._guard, self._inner
        if inner is None or inner.closed or guard.reason:
            inner = self.live
        is_captured = self._uses_cuda and torch.cuda.is_current_stream_capturing()
        if inner.begun and not is_captured:  # a graph is spoilt by a question
            inner.forget_completed()
        by_cells = self.by_cells if get_ident() == guard.main else self._by_cells()
        landing: Landing = ()
        is_apart = in_one_piece and not (lies_in_one_piece(args[0]) and (not gives or lies_in_one_piece(args[1])))
        if is_apart and not _on_cuda(args):  # NCCL refuses them
            args, landing = laid_in_one_piece(operation, args)
        with self._counting:
            number = self.issued = self.issued + 1
            if by_cells is not None:
                by_cells.issued += 1
            record = self.record
            told, splits, what = record.told, record.splits, describe(method, args)
            if has_parts:
                recipe = self.recipe
                record.add(number, what, parts_of(args, len(recipe.ranks)), recipe.rank)
            else:
                record.add(number, what)
            guard.used.add(self)
            guard.moved_bytes += what.size_bytes if in_place else payload_bytes((*args, *kwargs.values()))
            is_small = in_place and what.size_bytes <= COPIED_BYTES
            operands = None
            if writes and not landing:
                operands = (args[0], copy_small(args[0][0], what.size_bytes) if is_small else None)
            on_cuda = self._uses_cuda and _on_cuda(args)
            if on_cuda:
                _ask_for_work(args)
            try:
                raw: dist.Work | None = getattr(inner.group, method)(*args, **kwargs)
            except Exception:
                self._take_back(by_cells)
                record.take_back(told, splits)
                raise
            except BaseException as error:  # an interrupt: nobody knows whether C++ has it
                inner.failures.note(operation, number, None, error)
                raise
        if raw is None or (on_cuda and is_captured):  # one of several that NCCL begins together, or of a CUDA graph
            return raw
        if on_cuda:
            work = self._on_stream(inner, raw, operation, number, operands=operands)
        elif may_be_aside or landing:
            work = AsideWork(inner, operation, number, raw, landing)
            inner.add(work, operation, number, None, operands)
        else:
            inner.begun.append((raw, operation, number, None, time.monotonic(), operands))
            work = CollectiveWork(inner, operation, number, raw)
        work.operands = operands
        return work

    collective.__name__ = method
    return collective


def _on_cuda(value: object) -> bool:
    """Whether the first tensor among (nested) arguments is on a CUDA device; a barrier's device is CUDA then."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, dist.BarrierOptions):
        device = getattr(value, "device", None)
        return device is not None and device.type == "cuda"
    return value.device.type == "cuda" if isinstance(value, torch.Tensor) else False


def _ask_for_work(args: Sequence[object]) -> None:
    """Ask for a work object: NCCL omits it where the caller waits at once, and without one a hang is not seen."""
    for each in args:
        if hasattr(each, "asyncOp"):
            each.asyncOp = True


for _method in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _method):
        setattr(AbortableGroup, _method, _collective(_method))
