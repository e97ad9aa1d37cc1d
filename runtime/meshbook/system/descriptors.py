"""Descriptors 0, 1 and 2 belong to user code; the rank's own have higher numbers.

Linux gives the lowest number that is free. So when user code closes its stdout, the next file of another thread of ours
would become that stdout: text would go into it, and leading the stream back to its pipe would take the file away from
its owner.

    open_above, above_standard     how the runtime opens anything in a rank while user code may run
    fill, replace                  how a stream gets its pipe back
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from meshbook.concurrency import forks

FIRST = 3
"""The lowest number that is the runtime's."""


_guard = forks.ForkLock()
"""Reentrant, since a signal's handler may print."""


class _File(Protocol):
    def fileno(self) -> int: ...

    def close(self) -> None: ...


Opened = TypeVar("Opened", bound="int | _File")


def open_above(open: Callable[[], Opened]) -> Opened:
    """Return the result of ``open`` (a descriptor, or an object that has one), with a number of `FIRST` or more.

    open: called again for each lower number that it gets; it leaves nothing but its descriptor behind.
    Raises: the errors of ``open``.
    """
    with _guard.lock:
        if _all_open():  # nearly always, and this way takes few calls of Python
            if _number(opened := open()) >= FIRST:
                return opened
            _close(opened)  # user code on another thread has closed one just now
    with above_standard(), contextlib.ExitStack() as low:
        while _number(opened := open()) < FIRST:
            low.callback(_close, opened)
        return opened


@contextlib.contextmanager
def above_standard() -> Iterator[None]:
    """Give a number above the standard ones to all that is opened in this block, be it several files or none.

    Lower numbers are taken meanwhile, by files that take no text: nothing is printed into a file of ours.
    """
    with _guard.lock, contextlib.ExitStack() as low:
        if not _all_open():
            while (fd := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) < FIRST:
                low.callback(_close, fd)
            os.close(fd)
        yield


def fill(fd: int, source: int) -> bool:
    """Make ``fd`` another descriptor of the file of ``source``, if it is closed. Returns: whether it was.

    In one step, so that nothing that is opened meanwhile is replaced.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
        return False
    except OSError:  # it is closed
        got = fcntl.fcntl(source, fcntl.F_DUPFD, fd)
    if got != fd:
        os.close(got)
    return got == fd


def replace(fd: int, source: int) -> None:
    """Make ``fd``, which user code has redirected, another descriptor of the file of ``source``."""
    with _guard.lock:
        os.dup2(source, fd)


def _all_open() -> bool:
    try:
        for fd in range(FIRST):
            fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _number(opened: int | _File) -> int:
    return opened if isinstance(opened, int) else opened.fileno()


def _close(opened: int | _File) -> None:
    with contextlib.suppress(OSError):  # user code that closes its stdout twice has closed it
        if isinstance(opened, int):
            os.close(opened)
        else:
            opened.close()
