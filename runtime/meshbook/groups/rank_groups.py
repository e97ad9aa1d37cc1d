"""The torch.distributed groups of one rank: formed, proved, used by cells, taken down, formed again.

Each forming has its own *epoch*, a number that the controller raises, so keys of a former group are never read again
and can be dropped by prefix. Ranks meet in the store (`meshbook.groups.meeting`) before torch is asked for a group:
that wait can be interrupted, torch's own cannot. gloo connects lazily, two ranks at their first operation: 64 ranks on
2 cores take 0.45 s, not 1.9, and a group that nobody uses costs two threads and no socket pair.

Importing this module starts no thread, opens no socket and makes no group: workers are forked with it imported.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshbook.concurrency.background import run_in_background
from meshbook.errors import SpawnError, UsageError
from meshbook.groups.agreements import Progress, Splits, Told, encode_told
from meshbook.groups.backend_group import BegunOperation
from meshbook.groups.factory import (
    DESTROYED,
    DefaultGroup,
    DeviceMeshes,
    GroupFactory,
    join,
    rebuild,
    repair_modules,
    watch_modules,
)
from meshbook.groups.group import AbortableGroup
from meshbook.groups.group_state import GroupState, Handled
from meshbook.groups.meeting import Agreement, RankMeeting, set_environment
from meshbook.groups.progress import Collectives, OperationLog, Waiting
from meshbook.groups.records import MessageRecord
from meshbook.groups.store_client import LinkStore, Rpc
from meshbook.groups.work import AbortableWork, watch_backward
from meshbook.source.location import users_place
from meshbook.source.thread_frames import frame_of
from meshbook.torch_internals import PrefixStore, Store, forget_traced_rules
from meshbook.wire.messages import Identity

LATE_S = 1.0
"""Operations that are under way for longer are told of."""

FORM_TIMEOUT_S = 120.0
"""The time that ranks wait for each other when a group is formed."""

_OUTGROWN = (
    "this process group was made for {} ranks, and the mesh has {} now. Make again, on all ranks, what uses it: groups "
    "(dist.new_group), DeviceMeshes, DTensors, DDP and FSDP modules. The name mesh is bound to the new DeviceMesh."
)


def warm() -> None:
    """Do once, in the template, the work that would cost each rank a millisecond at its first group."""
    forget_traced_rules()  # torch does so before each default group; cleared caches are quick


def choose_backend(device: str) -> str:
    """Name the backend for ranks on ``device``: the one place where this is decided."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


def own_groups() -> RankGroups:
    """The process groups of this rank. Raises: UsageError in a process that is none."""
    if _own is None:
        raise UsageError("this process is no rank of a mesh with torch")
    return _own


_own: RankGroups | None = None
"""A process has one."""


def _set_own(groups: RankGroups | None) -> None:
    global _own
    _own = groups


class RankGroups:
    """The owner of this rank's default process group and the groups built on it. All calls come on the main thread."""

    def __init__(self) -> None:
        self._place: Identity | None = None
        self._torchrun: dict[str, str] = {}
        self._on_new_controller: list[Callable[[], object]] = []
        self._guard = GroupState()
        self._meeting = RankMeeting(self._guard.roads)
        self._factory = GroupFactory(self._guard, lambda: self._default.tell_destroyed())
        self._default = DefaultGroup(self._factory, self._meeting)
        self._device_meshes = DeviceMeshes(self._factory)
        _set_own(self)

    # ---- forming and closing ----------------------------------------------------------------------------------

    @property
    def formed(self) -> bool:
        """Whether there is a default group, ours or one that a cell made."""
        return self._default.formed

    @property
    def destroyed(self) -> bool:
        """Whether the mesh's default group was destroyed, and there is no other."""
        return self._default.destroyed

    @property
    def place(self) -> Identity:
        """The rank's place in the mesh. Raises: UsageError before the ranks have met."""
        if self._place is None:
            raise UsageError("the ranks of this mesh have not met: it was spawned without process groups")
        return self._place

    @property
    def store(self) -> LinkStore:
        """The ranks' store; waits in it end when the groups are aborted or formed again."""
        return self._our_link

    @property
    def scope(self) -> str:
        """The prefix for keys in the store that are dropped when the groups are formed again."""
        return self._meeting.scope

    def require(self) -> None:
        """Raise UsageError if there is no default group."""
        if not self.formed:
            raise UsageError(
                "there is no process group on this rank: the mesh was spawned without one, or a cell destroyed it. "
                "Run dist.init_process_group() on all ranks to have it again."
            )

    def form(
        self,
        rpc: Rpc,
        place: Identity,
        *,
        epoch: int,
        groups: Collection[str] = (),
        timeout_s: float = FORM_TIMEOUT_S,
    ) -> None:
        """Form the default group with all other ranks and prove it with a collective.

        Present groups of as many ranks are formed again in place (`meshbook.groups.factory`): handles
        stay. Others are closed, and their handles say what to make again.

        rpc: how to reach the runtime's store.
        epoch: the same on all ranks, larger than that of any group before.
        groups: only these are formed again, by name; others are in use and go on.
        Raises: SpawnError if not all ranks came or the collective failed; KeyboardInterrupt at any time.
        """
        with self._forming():
            agreement = self._meet(rpc, place, epoch, timeout_s, keep_link=bool(groups), reaches=True)
            if place.device.startswith("cuda"):
                index = torch.device(place.device).index  # not always the local rank: ranks come and go
                torch.cuda.set_device(min(place.local_rank if index is None else index, torch.cuda.device_count() - 1))
            try:
                renewed: Collection[object] | None = None
                if place.rank not in agreement.fresh:
                    renewed = rebuild(self._factory, self._our_link, agreement, place.rank, groups)
                else:
                    self._make_anew(place, agreement)
                self._default.lineage = agreement.lineage
                if renewed is None or dist.group.WORLD in renewed:
                    self._prove(timeout_s)
            except BaseException as error:
                if place.rank in agreement.fresh:
                    self.close()
                else:
                    self.abort(epoch, f"they could not be formed again: {error}")
                raise
            self._default.is_kept = self._default.is_kept or renewed is None
            repair_modules(renewed)
        self.device_mesh(place.axes, place.sizes)

    @contextlib.contextmanager
    def _forming(self) -> Iterator[None]:
        """Operations of other threads wait for the end of the block: none of them meets the proof."""
        self._guard.forming = threading.get_ident()
        try:
            yield
        finally:
            for group in list(self._factory.groups.values()):
                if (inner := group.inner) is not None:
                    inner.closed = inner.dead
            self._guard.forming = 0

    def prepare(self, rpc: Rpc, place: Identity, *, epoch: int, timeout_s: float = FORM_TIMEOUT_S) -> None:
        """Meet the other ranks and set torchrun's variables, without a group: cells may then make their own.

        Raises: SpawnError if not all ranks came within ``timeout_s``.
        """
        self.close()
        self._meet(rpc, place, epoch, timeout_s)

    def _meet(
        self,
        rpc: Rpc,
        place: Identity,
        epoch: int,
        timeout_s: float,
        *,
        keep_link: bool = False,
        reaches: bool = False,
    ) -> Agreement:
        """Meet the other ranks (`RankMeeting.meet`); from then on cells may make groups too."""
        if epoch <= self._guard.epoch:
            raise ValueError(f"epoch {epoch} is not newer than epoch {self._guard.epoch}")
        self._guard.renew(epoch)
        self._place, meeting = place, self._meeting
        lineage = self._lineage_for(place)
        agreement = meeting.meet(
            rpc, place, epoch, timeout_s, lineage, self._factory.made, keep_link=keep_link, reaches=reaches,
            check_begun=lambda: self._guard.check_begun(epoch),
        )  # fmt: skip
        master = meeting.master(agreement)
        self._torchrun = set_environment(place, master)
        self._default.master = master
        self._default.wrap_init()
        self._factory.install()
        watch_modules()
        watch_backward(self._guard)
        return agreement

    def _lineage_for(self, place: Identity) -> str:
        """Return the lineage of our groups, if they can be rebuilt at this place."""
        world = dist.group.WORLD
        if not isinstance(world, AbortableGroup):
            return ""
        same = (world.recipe.rank, len(world.recipe.ranks)) == (place.rank, place.world_size)
        return self._default.lineage if same else ""

    def _make_anew(self, place: Identity, agreement: Agreement) -> None:
        """Make the default group, or join the groups that the others have."""
        link = self._our_link
        former = dist.get_world_size() if self.formed else place.world_size
        self.close(_OUTGROWN.format(former, place.world_size) if former != place.world_size else "", keep_link=True)
        if len(agreement.fresh) == place.world_size:
            self._create(choose_backend(place.device), PrefixStore(agreement.prefix, link))
        else:
            rank, size = place.rank, place.world_size
            join(self._factory, link, agreement, rank, size, self._create)

    @property
    def _our_link(self) -> LinkStore:
        assert self._meeting.link is not None
        return self._meeting.link

    def close(self, reason: str = "", *, keep_link: bool = False) -> None:
        """Destroy the default group and the groups built on it, if there is one.

        reason: the text that remaining handles then show.
        """
        self._default.is_kept = False
        if self.formed:
            self._default.retire_all(reason or DESTROYED)
            dist.destroy_process_group()
        self._device_meshes.forget()
        self._default.lineage = ""
        if not keep_link:
            self._meeting.close()

    def forget(self) -> None:
        """Destroy groups that have no peers, at once and on this thread; this process has none, and is no rank."""
        for group in list(self._factory.groups.values()):
            group.retire(DESTROYED)
        if self.formed:
            self._default.is_kept = False
            dist.destroy_process_group()
        self._device_meshes.forget()
        self._meeting.close()
        _set_own(None)

    def _create(self, backend: str, store: Store) -> None:
        assert self._place is not None
        self._default.create(backend, store, self._place.rank, self._place.world_size)

    def prove(self) -> None:
        """Prove the default group with a collective. Raises: SpawnError, UsageError, GroupAborted."""
        self.require()
        self._prove(FORM_TIMEOUT_S)

    def _prove(self, timeout_s: float) -> None:
        """Sum up ones: every rank counts every rank, on each device that the group serves."""
        expected = dist.get_world_size()
        ones = torch.ones(1, dtype=torch.int64, device="cpu")
        work: dist.Work | None = None
        try:
            work = dist.all_reduce(ones, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            late = f"its first collective took more than {timeout_s:g} s"
            why = late if isinstance(work, AbortableWork) and work.has_timed_out else error
            raise SpawnError(f"the process group did not form: {why}") from None
        counted = [int(ones.item())]
        if self._place is not None and self._place.device.startswith("cuda"):
            on_device = torch.ones(1, dtype=torch.int64, device="cuda")
            dist.all_reduce(on_device)
            counted.append(int(on_device.item()))
        if set(counted) != {expected}:
            raise SpawnError(f"the process group of {expected} ranks does not work: an all_reduce counted {counted}")

    # ---- abort, and what the controller asks -------------------------------------------------------------------------

    def ask_of_actors(self, handled: Callable[[], Handled]) -> None:
        """Set where to ask which messages actors handle, and on which threads."""
        self._guard.ask_of_actors(handled)

    def call_on_new_controller(self, action: Callable[[], object]) -> None:
        """Call ``action`` when another controller attaches the mesh, to free values held for the former one."""
        if action not in self._on_new_controller:
            self._on_new_controller.append(action)

    def on_new_controller(self) -> None:
        for action in self._on_new_controller:
            action()

    def abort(self, epoch: int, reason: str, names: Collection[str] = ()) -> None:
        """End all waits in groups of up to ``epoch`` with GroupAborted, and later operations; from any thread.

        names: only in these groups.
        """
        if epoch < self._guard.epoch:  # of the past: they are being formed again already
            return
        if not names:
            self._guard.abort(epoch, reason)
            if (link := self._meeting.link) is not None:
                link.abort(reason)
        for name, group in list(self._factory.groups.items()):
            if names and name not in names:
                continue
            group.give_up(reason)
            if (inner := group.inner) is not None and inner.on_cuda:
                run_in_background(inner.abort_communicators)  # who waits for the device hears no more; it may block

    def hold_deadlines(self, held: bool) -> None:
        """Waits do not time out while ``held``; from any thread."""
        self._guard.hold(held)

    def interrupt_backward(self) -> None:
        """End the operation that a backward pass waits for in C++, deaf to signals; runs on the control thread."""
        if self._guard.backward:
            for work in list(self._guard.futures):
                work.fail_future()

    def note_failed(self, call: int) -> None:
        """Note how far the groups are as a call fails on the main thread: later operations belong to later calls."""
        counts = {name: group.issued for name, group in list(self._factory.groups.items())}
        self._guard.last_failure = self._guard.epoch, call, counts

    # ---- reports to the controller; from any thread -----------------------------------------------------------------

    def tell(self) -> bytes:
        """Return the news of the groups for the controller (`meshbook.groups.agreements.Told`), packed; or nothing."""
        guard = self._guard
        if not (guard.used or guard.broken or guard.torn or guard.copied or guard.restored):
            return b""
        used, broken, torn, copied, restored = guard.take_news()
        groups = [group for group in used if isinstance(group, AbortableGroup) and not group.retired]
        told = [Progress(group.recipe.name, *group.record.told) for group in groups]
        told += [Progress(each.name, *each.told) for each in used if isinstance(each, MessageRecord)]
        splits = [
            Splits(group.recipe.name, *group.record.splits, len(group.recipe.ranks))
            for group in groups
            if group.record.splits[0]
        ]
        news = Told(guard.epoch, tuple(told), tuple(torn), tuple(copied), tuple(restored), broken, tuple(splits))
        return encode_told(news)

    def collectives(self, call: int, *, recent: int = 0, look_deeper: bool = False) -> Collectives:
        """Return how far the groups are, and the waiting operations.

        call: the one that runs on the main thread.
        recent: so many of the last operations of each group are told too.
        look_deeper: also operations under way, which asks the CUDA driver and may block while that is in trouble.
        """
        guard = self._guard
        groups = tuple(group.progress(recent) for group in list(self._factory.groups.values()))
        waiting = guard.describe_waits() or self._on_devices()
        epoch = guard.epoch if groups else -1
        waited_s = sum(list(guard.waited_s.values()))  # first: a wait that ends meanwhile is not counted twice
        waited_s += sum(time.monotonic() - work.since for work in list(guard.waits.values()))
        under_way = self._under_way() if look_deeper and not waiting else ()
        told = Collectives(epoch, call, groups, waiting, guard.reason, waited_s, under_way, destroyed=self.destroyed)
        told = told._replace(made=self._factory.made if groups else ())
        failed_in, call, counts = guard.last_failure
        return told._replace(failed_call=call, failed_at=counts) if failed_in == epoch else told

    def _on_devices(self) -> tuple[Waiting, ...]:
        """Return the operations that CUDA waits for; so do threads that need their results, in no wait of ours."""
        inners = [inner for group in list(self._factory.groups.values()) if (inner := group.inner) and inner.on_device]
        if not inners or any(inner.dead for inner in inners):
            return ()
        return self._late([(inner.name, begun) for inner in inners if (begun := inner.oldest_on_device()) is not None])

    def _under_way(self) -> tuple[Waiting, ...]:
        inners = [inner for group in list(self._factory.groups.values()) if (inner := group.inner) and not inner.dead]
        return self._late([(inner.name, begun) for inner in inners if (begun := inner.oldest()) is not None])

    def _late(self, oldest: Sequence[tuple[str, BegunOperation]]) -> tuple[Waiting, ...]:
        now = time.monotonic()
        late = [(name, begun) for name, begun in oldest if now - begun[4] > LATE_S]
        if not late:
            return ()
        place = users_place(frame_of(threading.main_thread().ident))
        return tuple(
            Waiting(name, operation, number, peer, place, now - since)
            for name, (_, operation, number, peer, since, _) in late
        )

    @property
    def moved_bytes(self) -> int:
        """Payload of all operations of all groups so far; from any thread."""
        return self._guard.moved_bytes

    def waits_in(self, thread: int) -> str:
        """The operation that ``thread`` waits in, or nothing."""
        work = self._guard.waits.get(thread)
        return work.operation if work is not None else ""

    def waited_s(self, thread: int) -> float:
        """The seconds that ``thread`` has spent waiting in operations, in all; not those on CUDA streams."""
        return self._guard.waited_s.get(thread, 0.0)

    def log_operations(self, log: OperationLog | None) -> None:
        """Put the operations of groups into ``log`` from now on; None: into none."""
        self._guard.log = log

    def keep_environment(self) -> None:
        """Put back those of torchrun's variables that a library has removed, as Lightning does at its end."""
        for name in self._torchrun:
            if name not in os.environ:
                os.environ[name] = self._torchrun[name]

    def device_mesh(self, axes: Sequence[str], sizes: Sequence[int], ranks: Sequence[int] | None = None) -> DeviceMesh:
        """Return the torch DeviceMesh with these axes, in C order; to be called on all its ranks.

        ranks: all by default. Equal groups are shared: renamed axes and repeated calls make no new ones, and an axis
        that spans all ranks uses the default group. They are named by their ranks, so that no rank needs another to
        make one, and a rank that was started again finds those of the others.
        Raises: LayoutError if the sizes do not multiply to the number of ranks; UsageError without a group.
        """
        self.require()
        on_cuda = self._place is not None and self._place.device.startswith("cuda")
        return self._device_meshes.get("cuda" if on_cuda else "cpu", axes, sizes, ranks)
