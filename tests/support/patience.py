"""Waiting for what other processes and threads bring about."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshbook import ProcMesh


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def stays(condition: Callable[[], object], seconds: float) -> None:
    """The condition holds for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert condition()
        time.sleep(0.1)


@contextlib.contextmanager
def beside(*actions: Callable[[], object], timeout_s: float = 90.0) -> Iterator[None]:
    """Do each of these on a thread of its own meanwhile; the first error is raised at the end."""
    raised: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads)
    for error in raised:
        raise error


def kill(mesh: ProcMesh, *ranks: int) -> None:
    """End ranks from outside, and wait until the mesh knows."""
    statuses = {status.rank: status for status in mesh.base().status()}
    for rank in ranks:
        os.kill(statuses[rank].pid, signal.SIGKILL)
    wait_until(lambda: set(ranks) <= set(mesh.base().lost))


def interrupt_when(condition: Callable[[], object], after_s: float = 0.0) -> threading.Thread:
    """Press interrupt once, some time after the condition holds; returns the thread, to be joined."""

    def press() -> None:
        wait_until(condition)
        time.sleep(after_s)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread
