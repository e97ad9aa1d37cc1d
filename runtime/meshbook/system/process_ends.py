"""Descriptors that become readable when a process ends: pidfds, or what stands in for them.

Where the kernel or its sandbox knows no pidfds (Linux before 5.3, some versions of gVisor, old filters of system calls)
one thread looks at all watched processes a few times a second and writes to the pipes that stand for them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import signal
import threading
from typing import NamedTuple

from meshbook.system.processes import is_same_process, kill_tree, start_time

LOOK_S = 0.05
"""How late the stand-in may be."""


def open_end(pid: int) -> int:
    """A descriptor, to be closed, that is readable from the end of ``pid`` on. Raises: OSError if there is none."""
    return os.pidfd_open(pid) if has_pidfds() else _watcher.open(pid)


def end_process(pid: int, started: int, grace_s: float, *, below: bool = False) -> None:
    """Wait until the process that was recorded has ended; kill it after ``grace_s``. Never another one of its pid.

    below: and all that it has started.
    """
    try:
        fd = open_end(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not is_same_process(pid, started) or poll.poll(grace_s * 1000):
            return
        if below:
            kill_tree(pid)
        elif has_pidfds():
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        elif is_same_process(pid, started):  # as close to the kill as can be: no descriptor holds the pid
            os.kill(pid, signal.SIGKILL)
        poll.poll(5000)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


@functools.cache
def has_pidfds() -> bool:
    """Whether there are pidfds here."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, PermissionError):
        return False
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


class _Watched(NamedTuple):
    pid: int
    started: int


class _Watcher:
    """The stand-in of one process. Its thread lives as long as anything is watched."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        """By our end of the pipe."""

    def open(self, pid: int) -> int:
        if self._owner != os.getpid():  # a fork has neither the thread nor, for sure, the lock
            self.__init__()  # type: ignore[misc]
        started = start_time(pid)
        if started is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        theirs, ours = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with self._lock:
            self._watched[ours] = _Watched(pid, started)
            if len(self._watched) == 1:
                threading.Thread(target=self._look, name="meshbook.ends", daemon=True).start()
        return theirs

    def _look(self) -> None:
        while True:
            poll = select.poll()
            for fd in tuple(self._watched):
                poll.register(fd, 0)  # says when the other end was closed
            closed = {fd for fd, _ in poll.poll(LOOK_S * 1000)}
            with self._lock:
                for fd, (pid, started) in tuple(self._watched.items()):
                    if fd in closed or not is_same_process(pid, started):
                        del self._watched[fd]
                        with contextlib.suppress(OSError):  # nobody waits any more
                            os.write(fd, b"\0")
                        os.close(fd)
                if not self._watched:
                    return


_watcher = _Watcher()
