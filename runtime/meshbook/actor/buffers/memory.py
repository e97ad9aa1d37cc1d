"""Copies between this process's memory and another's on the same machine, without any help of the other.

    owner                                             caller
      its memory       <── process_vm_readv/writev ──   any thread
      a memfd, one byte per buffer: 1 = to be had
                       <── /proc/<pid>/fd/<n> ───────   opened for each access, read-locked while it lasts

The name of the memfd holds a random token, which shows that the pid is still the owner's and not that of a later
process. To drop a buffer the owner writes 0, then waits for the write lock before it frees the memory; the kernel ends
the locks of processes that die. Where one process may not look at another (other users, containers, Yama) `NotDirect`
is raised, and the caller goes by mail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import secrets
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshbook.actor.errors import BufferKindError
from meshbook.system.descriptors import open_above
from meshbook.system.memory_copies import ProcessMemoryError, copy_process_memory
from meshbook.system.memory_files import Bytes, create_memory_file, is_memory_file
from meshbook.system.processes import let_peers_read, memory_name

if TYPE_CHECKING:
    import torch


_LIVE, _DROPPED = b"\1", b"\0"


class NotDirect(Exception):
    """The memory cannot be had, or not without its owner's help."""


class RemoteAddress(NamedTuple):
    """The place of a buffer's memory. Small, and the same in every process."""

    memory: str
    """Processes that share this share memory."""
    pid: int
    fd: int
    """The descriptor of the owner's `LiveTable`."""
    token: str
    slot: int
    address: int


class LiveTable:
    """The owner's side: a table of its buffers that others may use, kept by these buffers."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.fd = create_memory_file(_guard_name(self.token))
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._memory = memory_name()
        self._slots = itertools.count()
        self._path = f"/proc/self/fd/{self.fd}"
        let_peers_read()

    def add(self, address: int) -> RemoteAddress:
        """Announce memory that others may use from now on."""
        slot = next(self._slots)
        os.pwrite(self.fd, _LIVE, slot)
        return RemoteAddress(self._memory, os.getpid(), self.fd, self.token, slot, address)

    def drop(self, slot: int, *, wait: bool = False) -> bool:
        """Refuse new accesses; return whether none is under way. wait: return only then."""
        os.pwrite(self.fd, _DROPPED, slot)
        own = open_above(lambda: os.open(self._path, os.O_RDWR | os.O_CLOEXEC))
        try:
            return _lock(own, fcntl.F_WRLCK, slot, wait=wait)
        finally:
            os.close(own)


_tables: weakref.WeakValueDictionary[int, LiveTable] = weakref.WeakValueDictionary()
"""The table of this process by its pid, and of the processes that it was forked from."""


def own_table() -> LiveTable:
    """Return the table of this process, a new one where it has no buffers."""
    if (table := _tables.get(os.getpid())) is None:
        table = _tables[os.getpid()] = LiveTable()
    return table


@contextlib.contextmanager
def access(spot: RemoteAddress) -> Iterator[None]:
    """Keep the memory at ``spot`` where it is within this block. Raises: NotDirect, also at the end if it has gone."""
    if spot.memory != memory_name() or spot.token in _refused:
        raise NotDirect
    path = f"/proc/{spot.pid}/fd/{spot.fd}"
    name = _guard_name(spot.token)
    try:
        guard = open_above(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        raise NotDirect from error
    try:
        if not _leads_to(f"/proc/self/fd/{guard}", name) or not _lock(guard, fcntl.F_RDLCK, spot.slot):
            raise NotDirect
        if os.pread(guard, 1, spot.slot) != _LIVE:
            raise NotDirect
        yield
        if not _leads_to(path, name):  # it has died: what was copied may be another's
            raise NotDirect
    finally:
        os.close(guard)  # and with it the lock


def copy(spot: RemoteAddress, address: int, size_bytes: int, *, write: bool, check: Callable[[], None]) -> None:
    """Copy the first bytes at ``spot`` to ``address`` of this process, or the other way; call within `access`.

    check: as `copy_process_memory` calls it. Raises: NotDirect.
    """
    try:
        copy_process_memory(spot.pid, spot.address, address, size_bytes, write=write, check=check)
    except ProcessMemoryError as error:
        if error.code in (errno.EPERM, errno.ENOSYS):
            _refused.add(spot.token)
        raise NotDirect from error


def _leads_to(path: str, name: str) -> bool:
    try:
        return is_memory_file(path, name)
    except OSError:
        return False


_refused: set[str] = set()
"""The tokens of processes that may not be looked at."""


def _guard_name(token: str) -> str:
    return f"meshbook-buffers-{token}"


def _lock(fd: int, kind: int, slot: int, *, wait: bool = False) -> bool:
    """Lock one byte for this opening of the file; False if somebody else's lock stands against it."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, slot, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True


# ---- this process's memory ------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """A run of bytes of this process, for as long as ``keep`` is kept."""

    address: int
    size_bytes: int
    writable: bool
    keep: object

    def view(self, offset: int = 0, size_bytes: int | None = None) -> Bytes:
        """An array of bytes over it, which does not keep it."""
        size_bytes = self.size_bytes - offset if size_bytes is None else size_bytes
        run = (ctypes.c_ubyte * size_bytes).from_address(self.address + offset)
        array = np.frombuffer(memoryview(run), np.uint8)
        array.flags.writeable = self.writable
        return array


def memory_of(value: object, what: str) -> Memory:
    """The bytes of a tensor, an array, a memoryview or a bytearray: one dim, without gaps, in this process's memory.

    what: how an error names the value. Raises: BufferKindError.
    """
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        return _memory_of_tensor(value, what)
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        raise BufferKindError(
            f"{what} is of type {type(value).__name__}; give a tensor, an array, a memoryview or a bytearray."
        ) from error
    if view.ndim != 1 or not view.c_contiguous:
        raise BufferKindError(_shape_error(what, "memory", view.shape, "array.reshape(-1) has one dim, a copy no gaps"))
    if view.nbytes == 0:
        return Memory(0, 0, not view.readonly, view)
    array = np.frombuffer(view, np.uint8)
    return Memory(array.ctypes.data, view.nbytes, not view.readonly, view)


def _memory_of_tensor(tensor: torch.Tensor, what: str) -> Memory:
    if tensor.device.type != "cpu":
        raise BufferKindError(
            f"{what} lies on {tensor.device}, where other processes cannot reach it: give a copy in host memory "
            "(tensor.cpu()), and copy_() it back where it was read into."
        )
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise BufferKindError(f"{what} is no plain dense tensor ({tensor.layout}); give a dense copy of it.")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        hint = "tensor.view(-1) has one dim, tensor.contiguous() no gaps"
        raise BufferKindError(_shape_error(what, "tensor", tensor.shape, hint))
    size_bytes = tensor.numel() * tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # some kinds refuse, others say 0
        address = 0
    if size_bytes and not address:
        raise BufferKindError(f"{what} is a {type(tensor).__name__} without memory of its own.")
    return Memory(address, size_bytes, True, tensor.detach())


def _shape_error(what: str, kind: str, shape: Iterable[int] | None, hint: str) -> str:
    return f"{what} is {kind} of shape {tuple(shape or ())}; give one dim without gaps: {hint}."
