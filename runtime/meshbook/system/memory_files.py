"""Files in memory that other processes of this machine open by ``/proc/<pid>/fd/<n>``, and their mappings.

Such a file is a memfd. Where the kernel or its sandbox knows none (Linux before 3.17, filters of system calls) it is a
file in /dev/shm, or beside the sessions, whose name is taken away at once: private and gone with its last process as
well, but it counts as shared memory or disk of the container, and nobody can be kept from cutting it short.

Files are mapped by libc: `mmap.mmap` keeps a duplicate of the descriptor for as long as it lives, and a process that
holds a thousand results would run out of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from meshbook.system.descriptors import above_standard, open_above
from meshbook.system.user_folders import runtime_base

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SHRINK = 1033, 1034, 2
_SHARED_MEMORY = Path("/dev/shm")


def create_memory_file(name: str) -> int:
    """A new file called ``name``; returns its descriptor."""
    if has_memfds():
        return open_above(lambda: os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    usable = os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    with above_standard():
        fd, path = tempfile.mkstemp(prefix=f"{name}.", dir=_SHARED_MEMORY if usable else runtime_base())
    os.unlink(path)
    return fd


def is_memory_file(path: str, name: str) -> bool:
    """Whether ``path``, a link in /proc, leads to a file that was made with this name. Raises: OSError."""
    target, _, rest = os.readlink(path).partition(" ")
    return rest == "(deleted)" and (target == f"/memfd:{name}" or Path(target).name.startswith(f"{name}."))


def forbid_shrinking(fd: int) -> None:
    """A mapping of a file that shrinks ends its process by SIGBUS: see to it that this one cannot."""
    if has_memfds():
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)


def may_be_mapped(fd: int, size_bytes: int) -> bool:
    """Whether the file is so large, and stays so as far as the kernel can promise it here."""
    if os.fstat(fd).st_size < size_bytes:
        return False
    return not has_memfds() or bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)


@functools.cache
def has_memfds() -> bool:
    """Whether there are memfds here."""
    try:
        os.close(os.memfd_create("meshbook-probe", os.MFD_CLOEXEC))
    except (AttributeError, PermissionError):
        return False
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


Bytes: TypeAlias = "npt.NDArray[np.uint8]"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_NORESERVE = 0x4000
_MOVE_KEEPING_OLD = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The owner of a mapping, which every view keeps alive; NumPy reads its ``__array_interface__``."""

    def __init__(self, address: int, size_bytes: int, writable: bool) -> None:
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


_mapped: dict[weakref.ref[_Mapping], tuple[int, int, int, Callable[[], None] | None]] = {}
"""The address, size and flags of each mapping that lives, and the callback at its end."""


def map_fd(
    fd: int, size_bytes: int, flags: int, on_unmap: Callable[[], None] | None = None, *, writable: bool = True
) -> Bytes:
    """Map a file until the last view of the array dies; then call ``on_unmap``. Who writes must have it writable."""
    import numpy as np

    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    address = _libc.mmap(None, size_bytes, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    owner = _Mapping(address, size_bytes, writable)
    _mapped[weakref.ref(owner, _unmap)] = address, size_bytes, flags, on_unmap
    return np.asarray(owner)


def _unmap(mapping: weakref.ref[_Mapping], ending: Callable[[], bool] = sys.is_finalizing) -> None:
    if not ending():  # views may outlive this module then
        address, size_bytes, _, on_unmap = _mapped.pop(mapping)
        _libc.munmap(address, size_bytes)
        if on_unmap is not None:
            on_unmap()


def join_mapped(pieces: Sequence[Bytes]) -> Bytes | None:
    """Return the content of privately mapped files as one array, without a copy; None where that is impossible.

    It can be where each piece lies as far behind the begin of a page as the one before ends: then its pages are mapped
    once more, behind those of the others, and only the bytes that share a page with the next piece are copied.
    pieces: nobody has written to them. They live as long as the returned array.

        pieces   |....aaaa|aaaaaaaa|aaa.....|  |...bbbbb|bbbbb...|
        joined   |....aaaa|aaaaaaaa|aaabbbbb|bbbbb...|
    """
    spans = [(piece.ctypes.data, piece.nbytes) for piece in pieces]
    start = end = spans[0][0] % mmap.PAGESIZE
    for address, size_bytes in spans:
        if address % mmap.PAGESIZE != end % mmap.PAGESIZE or size_bytes < mmap.PAGESIZE:
            return None
        if not _is_private_file(address, size_bytes):
            return None
        end += size_bytes
    kept = list(pieces)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    joined = map_fd(-1, end, flags, kept.clear)
    offset = start
    for number, (address, size_bytes) in enumerate(spans):
        before = address % mmap.PAGESIZE
        length = -(-(before + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        to = joined.ctypes.data + offset - before
        # The old mapping stays, so that whoever still looks at the piece finds it there, and is filled from the file.
        if _libc.mremap(address - before, length, length, _MOVE_KEEPING_OLD, to) == _MAP_FAILED:
            return None  # Linux before 5.13
        if number and before:
            joined[offset - before : offset] = pieces[number - 1][-before:]
        offset += size_bytes
    return joined[start:]


def _is_private_file(address: int, size_bytes: int) -> bool:
    return any(
        flags == mmap.MAP_PRIVATE and begin <= address and address + size_bytes <= begin + length
        for begin, length, flags, _ in tuple(_mapped.values())
    )


HUGE_PAGE_BYTES = 2 << 20


def expect_huge_pages(address: int, size_bytes: int) -> None:
    """Have the kernel give new memory in huge pages, where it can: giving 4 KB at a time takes longer than a copy.

    Only pages that lie within it: once it is filled it holds no more memory than without.
    """
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if begin < end:  # where the kernel has none, it says so, and nothing is lost
        _libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
