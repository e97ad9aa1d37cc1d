"""The C++ group behind an `AbortableGroup`, one incarnation of it, from its making to its end.

Each gloo group has a device of its own, that is a listening socket and a thread: groups that share one confuse their
connections when these are made lazily. By the device's address the sockets of an abandoned group are found.

A group must not be destroyed while an operation is under way: its destructor waits for it. `dispose` ends them first.
Accepted connections are shut down, which ends the waits for a peer on both sides. A wait for a peer to connect has no
socket yet: a connection of our own, which greets as that peer would and then ends, takes its place. The listening
socket is left alone, since gloo ends the process when it fails.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from meshbook.concurrency.background import SerialQueue, run_in_background
from meshbook.groups.gloo import (
    connections,
    descriptors,
    gloo_devices,
    gloo_threads,
    greet_and_leave,
    is_poll,
    listening_at,
    park_threads,
)
from meshbook.groups.group_state import BEING_FORMED, Failures, GroupState, Users
from meshbook.groups.records import Operands, Torn, settle
from meshbook.groups.work import PeerWork
from meshbook.system.descriptors import above_standard
from meshbook.torch_internals import Backend, PrefixStore, Store

NcclOptions: TypeAlias = "dist.ProcessGroupNCCL.Options"
"""torch without CUDA has none."""

_NUMBERS_ARE_SET = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Later versions of torch begin at 0 by themselves, and warn where it is set."""

HELD_MAX_S = 24 * 3600.0
"""C++ cannot be told that a deadline stands still (`meshbook.groups.group_state.GroupState.hold`): it gets one so
much later."""

_TOO_MUCH = "a rank has sent more than this one has room for: they disagree on a size"

_device_lock = threading.Lock()


class GroupSpec(NamedTuple):
    """The recipe to make a group again, equal on all members but for ``rank``."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks of the members, in group order."""
    rank: int
    """Ours, within the group."""
    backend: str
    """The backend as it was given: ``gloo``, ``cpu:gloo,cuda:nccl``."""
    timeout_s: float
    description: str
    tag: str
    """The tag that torch was given; empty for the default group."""

    @property
    def devices(self) -> dict[str, str]:
        """Kind of device to name of backend."""
        return dict(c10d.BackendConfig(c10d.Backend(self.backend)).get_device_backend_map())


BegunOperation: TypeAlias = "tuple[dist.Work, str, int, int | None, float, Operands | None]"
"""Its work, name, number, peer, since when it is under way (monotonic), operands; plain, since that is made fastest."""


class BackendGroup:
    """A C++ group with its operations under way."""

    def __init__(
        self,
        recipe: GroupSpec,
        store: Store,
        guard: GroupState,
        users: Users,
        options: NcclOptions | None = None,
        device_id: torch.device | None = None,
    ) -> None:
        self.guard = guard
        self.name, self.timeout_s = recipe.name, recipe.timeout_s
        self.dead = ""
        """The reason why the group is of no use any more; empty while it is."""
        self.closed = ""
        """The reason why no operation begins in it: it is dead, or being formed."""
        self.failures, self.users = Failures(guard.note_broken), users
        self.open_peer_works: set[PeerWork] = set()
        self._size, self._rank = len(recipe.ranks), recipe.rank
        self._torn: dict[tuple[str, int], Torn] | None = {}
        """Operations that were given up, by name and number; None when that was taken."""
        self.begun: deque[BegunOperation] = deque()
        """The operations that are under way, in the order in which they were begun."""
        self.on_device: deque[BegunOperation] = deque()
        """The operations of these that CUDA works on."""
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, int, int], SerialQueue] = {}
        self._listening: list[tuple[str, int]] = []
        self._polls: list[int] = []
        """The epoll descriptors of gloo's threads."""
        self.is_lost = False
        """Whether gloo's thread has given it up (`meshbook.groups.gloo`); it must never be destroyed."""
        self.group = self._build(recipe, store, options, device_id)
        self.closed = self.dead or (BEING_FORMED if guard.forming else "")

    # ---- making -------------------------------------------------------------------------------------------------

    def _build(
        self, recipe: GroupSpec, store: Store, options: NcclOptions | None, device_id: torch.device | None
    ) -> Any:
        devices = recipe.devices
        kinds = dist.ProcessGroup.BackendType
        group: Any = dist.ProcessGroup(store, recipe.rank, self._size)
        group._set_default_backend(kinds.NCCL if "nccl" in devices.values() else kinds.GLOO)
        if device_id is not None:
            group.bound_device_id = device_id
        made: dict[str, Backend] = {}
        for device, name in devices.items():
            if name not in made:
                prefixed = PrefixStore(f"{device}/", store)
                made[name] = self._gloo(recipe, prefixed) if name == "gloo" else self._nccl(recipe, prefixed, options)
                if _NUMBERS_ARE_SET:
                    made[name]._set_sequence_number_for_group()
            group._register_backend(torch.device(device), kinds.GLOO if name == "gloo" else kinds.NCCL, made[name])
        group._set_group_name(recipe.name)
        group._set_group_desc(recipe.description)
        if device_id is not None and "nccl" in made:
            made["nccl"].eager_connect_single_device(device_id)
        return group

    def _gloo(self, recipe: GroupSpec, store: Store) -> Backend:
        options = vars(dist.ProcessGroupGloo)["_Options"]()  # its name in all versions of torch
        with _device_lock, above_standard():
            before, threads = descriptors(), gloo_threads()
            options._devices = gloo_devices()
            park_threads(gloo_threads() - threads, self.lose_thread)
            made = descriptors() - before
            self._listening = [name for fd in made if (name := listening_at(fd)) is not None]
            self._polls = [fd for fd in made if is_poll(fd)]
        return dist.ProcessGroupGloo(store, recipe.rank, self._size, _for_group(recipe, options))

    def _nccl(self, recipe: GroupSpec, store: Store, options: NcclOptions | None) -> Backend:
        if options is None:
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = False
        return dist.ProcessGroupNCCL(store, recipe.rank, self._size, _for_group(recipe, options))

    # ---- what is under way --------------------------------------------------------------------------------------

    def add(
        self,
        work: dist.Work,
        operation: str,
        number: int,
        peer: int | None = None,
        operands: Operands | None = None,
    ) -> None:
        """An operation of C++ is under way."""
        self.begun.append((work, operation, number, peer, time.monotonic(), operands))

    def note_torn(self, operation: str, number: int, operands: Operands | None, raw: dist.Work, waited: bool) -> str:
        """Return the tensors that an abandoned or failed operation may have left half done, in words."""
        noted, key = self._torn, (operation, number)
        if operands is None or noted is None:
            return ""
        if key not in noted:
            torn = noted[key] = Torn(operation, operands, raw, waited)
            if torn.text:
                (self.guard.copied if torn.is_copied else self.guard.torn).append(torn.text)
        return noted[key].text

    def _note_under_way(self) -> None:
        """Note the operations under way that no thread waits for, since nothing sees their end; threads note their own.

        This is done while C++ still works on them: works that have failed can be asked for their error only once.
        """
        waited = {(work.operation, work.number) for work in list(self.guard.waits.values()) if work.inner is self}
        with self._lock:
            left = list(self.begun)
        for raw, operation, number, _, _, operands in left:
            if (operation, number) not in waited and not raw.is_completed():
                self.note_torn(operation, number, operands, raw, False)

    def take_torn(self) -> list[Torn]:
        """Return all that was noted of torn operations, and forget it."""
        noted, self._torn = self._torn or {}, None
        return [each for each in noted.values() if each.text]

    def add_peer_work(self, work: PeerWork, direction: str, peer: int, tag: int) -> None:
        """Have a side thread run ``work``, after those of the same direction, peer and tag: they match in order."""
        self.open_peer_works.add(work)
        lane = self._lanes.get((direction, peer, tag))
        if lane is None:
            lane = self._lanes[direction, peer, tag] = SerialQueue()
        lane.add(work.run)

    def forget_completed(self) -> None:
        """Let go of operations that have ended: they hold tensors."""
        begun = self.begun
        with self._lock:
            while begun and begun[0][0].is_completed():
                begun.popleft()

    def forget(self, work: dist.Work) -> None:
        """Let go of one whose end was seen; most often there is no other."""
        begun = self.begun
        with self._lock:
            if begun and begun[0][0] is work:
                begun.popleft()
        if begun:
            self.forget_completed()

    def note_on_device(self) -> None:
        """The last operation that was begun is CUDA's."""
        self.oldest_on_device()
        self.on_device.append(self.begun[-1])

    def oldest_on_device(self) -> BegunOperation | None:
        """The first operation that CUDA has not ended; from any thread."""
        begun = self.on_device
        with self._lock:
            while begun and begun[0][0].is_completed():
                begun.popleft()
        return begun[0] if begun else None

    def oldest(self) -> BegunOperation | None:
        """The first operation that has not ended; from any thread."""
        self.forget_completed()
        begun = list(self.begun)
        return begun[0] if begun else None

    def give_up(self, reason: str) -> None:
        """End all waits; from any thread. The operations themselves go on until the group is disposed of."""
        if not self.dead:
            self.dead = reason
            self._note_under_way()
        self.closed = self.dead
        for peer_work in list(self.open_peer_works):
            peer_work.wake()
        for work in list(self.guard.futures):
            if work.inner is self:
                work.fail_future()

    def lose_thread(self) -> None:
        """Handle an error after which gloo's thread cannot go on; runs on that thread."""
        self.is_lost = True
        self.give_up(_TOO_MUCH)

    @property
    def on_cuda(self) -> bool:
        """Whether it has communicators on CUDA devices."""
        return any(device.type == "cuda" for device in self.group._device_types)

    def abort_communicators(self) -> None:
        """Abort the operations on CUDA devices; may block, and frees threads that wait for the device."""
        for device in self.group._device_types:
            if device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # aborted already, or never connected
                    self.group._get_backend(device).abort()

    # ---- the end ------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether C++ still works on an operation."""
        self.forget_completed()
        return bool(self.begun or self.open_peer_works)

    @property
    def connected(self) -> bool:
        """Whether gloo's threads still read connections to other ranks."""
        return any(is_read for poll in self._polls for _, is_read in connections(poll))

    def end_operations(self, greet: bool) -> None:
        """Make the operations that are still under way fail. greet: those too that wait for a peer to connect."""
        for sock, _ in (found for poll in self._polls for found in connections(poll)):
            with contextlib.suppress(OSError):  # the peer was quicker
                sock.shutdown(socket.SHUT_RDWR)
        for address in self._listening if greet else ():
            for peer in range(self._size):
                if peer != self._rank:
                    greet_and_leave(address, peer)


def _for_group(recipe: GroupSpec, options: Any) -> Any:
    options._timeout = timedelta(seconds=recipe.timeout_s + HELD_MAX_S)
    options.global_ranks_in_group = list(recipe.ranks)
    options.group_name = recipe.name
    return options


GIVE_UP_AFTER_S = 600.0
"""Operations that have not ended so long after their group was given up keep it for the life of the process."""

_GRACE_S = 2.0
"""A group that was given up listens so much longer: who connects late to a closed port tries again for half an hour."""

_LOOK_S = 0.02
_AGAIN_S = 0.25
_kept_for_ever: list[BackendGroup] = []


def dispose(groups: Iterable[BackendGroup]) -> None:
    """Destroy groups whose waits were all ended, aside, as soon as nothing is under way in them."""
    left = list(groups)
    aborted = [group for group in left if group.dead]
    for group in left:
        group.give_up("its process group was given up")
    if left:
        torn = [(each, group.is_lost) for group in left for each in group.take_torn()]
        guard = left[0].guard
        run_in_background(lambda: _dispose(left, aborted))
        if torn:
            guard.restored += settle(torn)


def _dispose(left: list[BackendGroup], aborted: list[BackendGroup]) -> None:
    _end_operations(aborted, greet=False)  # also of idle ones: peers wait for what comes over their connections
    lost = [group for group in left if group.is_lost]
    _kept_for_ever.extend(lost)
    _end_operations(lost, greet=True)
    left[:] = [group for group in left if not group.is_lost]
    begun = again = time.monotonic()
    while (now := time.monotonic()) < begun + _GRACE_S or (
        any(group.busy for group in left) and now < begun + GIVE_UP_AFTER_S
    ):
        if now >= again:
            again = now + _AGAIN_S
            _end_operations([group for group in left if group.busy], greet=now < begun + 2 * _AGAIN_S)
        time.sleep(_LOOK_S)
    # gloo's thread ends when it has nothing to read. A connection that ends while its group is destroyed is not closed
    # any more, only read again and again, and whoever destroys the group waits for that thread: so all end before.
    _end_operations(left, greet=False)
    closed = time.monotonic() + _GRACE_S
    while any(group.connected for group in left) and time.monotonic() < closed:
        time.sleep(_LOOK_S)
    _kept_for_ever.extend(group for group in left if group.busy or group.connected)
    left.clear()


def _end_operations(groups: list[BackendGroup], greet: bool) -> None:
    for group in groups:
        group.end_operations(greet)
