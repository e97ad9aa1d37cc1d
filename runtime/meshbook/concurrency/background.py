"""Threads of our own: jobs that run aside, and faults that no thread of ours may end by.

A call into C++ that blocks cannot be interrupted, so a thread aside makes it and the main thread waits in Python. These
threads are kept for the next call and end when idle, so their number follows the calls that block at the same time.

Users' errors are answers to calls, and a forbidden message costs its sender the link. Any other error is a fault of
ours: it is told once in full, as ours, and costs the action or the message that met it, never the thread.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import TypeAlias

from meshbook.concurrency import forks
from meshbook.errors import PeekRefused

REPEAT_S = 60.0
"""A fault at the same place is told again after so long only: a timer may meet it many times a second."""

WORDS = "meshbook: a fault of its own in"
"""The begin of each report of a fault."""

_told: dict[tuple[str, int], float] = {}

serving: set[int] = set()
"""The threads that serve the sockets now: they complete futures, so they cannot wait for one."""
peeking: set[int] = set()
"""The threads on which a peek runs (`meshbook.worker.peek`): nothing may be waited for there."""
forks.at_fork(in_child=serving.clear)
forks.at_fork(in_child=peeking.clear)


def refuse_in_peek(what: str) -> None:
    """Raises: PeekRefused if a peek runs on this thread. what: the thing that would be waited for."""
    if threading.get_ident() in peeking:
        raise PeekRefused(what)


def tell(error: BaseException, what: str) -> None:
    """Say on stderr that ``error`` is a fault of ours, with its traceback; never raises. what: where it was met."""
    entries = traceback.extract_tb(error.__traceback__)
    place = (entries[-1].filename, entries[-1].lineno or 0) if entries else ("", 0)
    now = time.monotonic()
    if now < _told.get(place, 0.0):
        return
    _told[place] = now + REPEAT_S
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):  # stderr is closed, or cannot write it
        print(f"{WORDS} {what}; it goes on. Please report this:\n{text}", file=sys.stderr)


_OURS = frozenset({"builtins", "meshbook", "meshbook_extension", "zmq", "msgspec", "_pickle", "struct", "zlib"})
"""The packages whose errors on a serving thread are faults of ours."""


def is_from_outside(error: BaseException) -> bool:
    """Whether an error was raised into the main thread for the user's code that waits: by a time limit, say.

    It came out of the handler of a signal, or another thread has sent it, which is told by its type alone.
    """
    if threading.get_ident() != forks.main_thread:
        return False
    handlers = {_code_of(signal.getsignal(each)) for each in signal.valid_signals()} - {None}
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return type(error).__module__.partition(".")[0] not in _OURS or not handlers.isdisjoint(codes)


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a function, a method, a partial, or an object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if (code := getattr(function, "__code__", None)) is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def attempt(action: Callable[[], object], what: str, fail: Callable[[Exception], object] | None = None) -> bool:
    """Run ``action``; return whether it ended well. Its error goes to ``fail``, or is told if there is no ``fail``.

    Raises: as `pass_on`.
    """
    try:
        action()
    except Exception as error:
        pass_on(error, what, fail)
        return False
    return True


def pass_on(error: Exception, what: str, fail: Callable[[Exception], object] | None) -> None:
    """Hand ``error`` to ``fail``; tell it if there is no ``fail``.

    Raises: ``error``, where it is not for us but for the code that waits on this thread, which serves meanwhile.
    """
    is_theirs = threading.get_ident() in serving and is_from_outside(error)
    if fail is not None:
        attempt(functools.partial(fail, error), what)
    elif not is_theirs:
        tell(error, what)
    if is_theirs:
        raise error


IDLE_S = 5.0
"""The time after which an unused thread ends."""

BackgroundJob: TypeAlias = Callable[[], object]

_idle: list[queue.SimpleQueue[BackgroundJob]] = []
_guard = forks.ForkLock()


def run_in_background(job: BackgroundJob) -> None:
    """Run ``job``, which must not raise, on another thread, now."""
    with _guard.lock:
        jobs = _idle.pop() if _idle else None
    if jobs is None:
        jobs = queue.SimpleQueue()
        hidden_thread(_serve, "meshbook.aside", jobs).start()
    jobs.put(job)


def _serve(jobs: queue.SimpleQueue[BackgroundJob]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it must wake the main thread
    while True:
        try:
            job = jobs.get(timeout=IDLE_S)
        except queue.Empty:
            with _guard.lock:
                if jobs in _idle:
                    _idle.remove(jobs)
                    return
            job = jobs.get()  # it was handed over just now
        job()
        del job  # it may hold tensors
        with _guard.lock:
            _idle.append(jobs)


forks.at_fork(in_child=_idle.clear)  # a forked child has none of the threads


def hidden_thread(target: Callable[..., object], name: str, *args: object) -> threading.Thread:
    """Make a thread of ours, to be started: it goes on, untraced, while a debugger stops the others."""
    thread = threading.Thread(target=target, name=name, args=args, daemon=True)
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return thread


def is_hidden(thread: threading.Thread) -> bool:
    """Whether it is a `hidden_thread`."""
    return hasattr(thread, "pydev_do_not_trace")


class SerialQueue:
    """A queue of jobs that run aside, one after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._jobs: deque[BackgroundJob] = deque()
        self._running = False
        self._lock = threading.Lock()

    def add(self, job: BackgroundJob) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._running:
                return
            self._running = True
        run_in_background(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job = self._jobs.popleft()
            job()
            del job
