"""Waiting on the main thread of a notebook, so that an interrupt is answered at once.

It is a synchronous wait in short steps: ipykernel does not wake an idle event loop for SIGINT, and an ``await`` in a
cell would go on for seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshbook.concurrency.future import Future

STEP_S = 0.1

WHILE_WAITING: list[Callable[[], None]] = []
"""Called at each step of each wait: what nobody else can do while the main thread waits."""


def wait_until_done(
    future: Future[Any],
    timeout_s: float | None = None,
    on_step: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until ``future`` is done, with a result or an error; returns False at the deadline.

    on_step: called every `STEP_S` meanwhile. clock: what ``timeout_s`` is counted on. Raises: KeyboardInterrupt.
    """
    done = threading.Event()
    future.add_done_callback(lambda _future: done.set())
    deadline = None if timeout_s is None else clock() + timeout_s
    while True:
        left_s = STEP_S if deadline is None else min(STEP_S, deadline - clock())
        if done.wait(max(0.0, left_s)):
            return True
        if deadline is not None and clock() >= deadline:
            return False
        run_tasks()
        if on_step is not None:
            on_step()


def pause(duration_s: float) -> None:
    """Wait so long. Raises: KeyboardInterrupt."""
    deadline = time.monotonic() + duration_s
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(STEP_S, left_s))
        run_tasks()


def run_tasks() -> None:
    """What is to be done at each step of a wait."""
    for task in WHILE_WAITING:
        task()
