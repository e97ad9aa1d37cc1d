"""Maps a file descriptor into memory as a NumPy array, until the last view of it dies.

By libc: `mmap.mmap` keeps a duplicate of the file descriptor for as long as it lives, and a process that
holds a thousand results would run out of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """What every view of a mapping keeps alive; NumPy reads its ``__array_interface__``."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def map_fd(fd: int, size_bytes: int, flags: int, on_unmap: Callable[[], None] | None = None) -> Bytes:
    """Map readable and writable, until the last view of the array dies; then call ``on_unmap``."""
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    owner = _Mapping(address, size_bytes)
    finalizer = weakref.finalize(owner, _unmap, address, size_bytes, on_unmap)
    finalizer.atexit = False  # views may outlive it there
    return np.asarray(owner)


def _unmap(address: int, size_bytes: int, on_unmap: Callable[[], None] | None) -> None:
    _libc.munmap(address, size_bytes)
    if on_unmap is not None:
        on_unmap()
