"""Waits on the main thread of a notebook, as `CallFuture.get` waits, with tasks that are done meanwhile.

The wait is synchronous: ipykernel does not wake an idle event loop for SIGINT, and an ``await`` in a cell would go on
for seconds. The thread serves the controller's sockets itself, so any message of ranks wakes it, as an interrupt does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from meshbook.calls.call_future import CallFuture

T = TypeVar("T")

STEP_S = 0.1

WHILE_WAITING: list[Callable[[], None]] = []
"""Tasks of each `STEP_S` of a wait that only the waiting main thread can do. Mostly there are none."""


def wait_until_done(
    future: CallFuture[T],
    timeout_s: float | None = None,
    *,
    look: Callable[[], float] = lambda: math.inf,
    wanted: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until ``future`` is done, with a result or an error; returns False at the deadline.

    look: called first, whenever ``wanted()``, and after the seconds that it returns. clock: the clock of ``timeout_s``.
    Raises: KeyboardInterrupt.
    """
    deadline = math.inf if timeout_s is None else clock() + timeout_s
    while True:
        # a thread of a subshell serves no sockets, so nothing that ranks tell wakes it
        step_s = STEP_S if WHILE_WAITING or threading.current_thread() is not threading.main_thread() else math.inf
        left_s = min(look(), step_s, deadline - clock())
        if future.wait(None if left_s == math.inf else max(0.0, left_s), wanted):
            return True
        if clock() >= deadline:
            return False
        run_tasks()


def pause(duration_s: float) -> None:
    """Wait a moment. Raises: KeyboardInterrupt."""
    time.sleep(duration_s)
    run_tasks()


def run_tasks() -> None:
    """Do the tasks of each step of a wait."""
    for task in WHILE_WAITING:
        task()
