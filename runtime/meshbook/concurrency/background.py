"""Threads for calls into C++ that block and cannot be interrupted, so that the main thread waits in Python instead.

They are kept for the next call and end when idle, so their number follows what blocks at the same time.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from meshbook.concurrency.forks import at_fork

IDLE_S = 5.0
"""An unused thread ends after this long."""

BackgroundJob: TypeAlias = Callable[[], object]

_idle: list[queue.SimpleQueue[BackgroundJob]] = []
_lock = threading.Lock()


def run_in_background(job: BackgroundJob) -> None:
    """Run ``job``, which must not raise, on another thread, now."""
    with _lock:
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
            with _lock:
                if jobs in _idle:
                    _idle.remove(jobs)
                    return
            job = jobs.get()  # it was handed over just now
        job()
        del job  # it may hold tensors
        with _lock:
            _idle.append(jobs)


def _forget_threads() -> None:
    """In a forked child there are none."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


at_fork(in_child=_forget_threads)


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
    """Jobs that run one after the other, in the order in which they came, aside."""

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
