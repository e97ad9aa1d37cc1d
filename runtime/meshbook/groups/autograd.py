"""Backward passes, in which DDP waits for the futures of its collectives in C++, where no signal gets through.

The thread that runs one is known, so that what it waits for can be told and ended from the control thread. torch wraps
the error of a future in text; here it becomes itself again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.autograd

from meshbook.concurrency.patches import patch
from meshbook.errors import GroupAborted
from meshbook.groups.group_state import LOST_CONNECTION, GroupState

_torch_run_backward: Callable[..., object] = torch.autograd._engine_run_backward  # type: ignore[attr-defined,unused-ignore]
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Callbacks run when all gradients of the running pass are there, in the order in which they came; DDP's waits."""


def install(guard: GroupState) -> None:
    """From now on backward passes of this process are known to ``guard``. Idempotent."""

    computed_at: dict[int, float] = {}
    """By thread: when its backward pass had only the futures of collectives left to wait for; 0 before."""

    def expect_wait() -> None:
        thread = threading.get_ident()
        if thread in guard.backward and thread not in computed_at:
            computed_at[thread] = 0.0
            _queue_callback(lambda: computed_at.__setitem__(thread, time.monotonic()))

    guard.on_future = expect_wait

    def run_backward(*args: object, **kwargs: object) -> object:
        thread = threading.get_ident()
        if thread in guard.backward:  # a backward pass inside another, as checkpointing makes
            return _torch_run_backward(*args, **kwargs)
        guard.backward.add(thread)
        try:
            return _torch_run_backward(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            guard.await_reason(text)
            if GroupAborted.__name__ in text or (LOST_CONNECTION in text and guard.reason):
                raise GroupAborted(guard.reason or "the backward pass was interrupted") from None
            raise
        finally:
            guard.backward.discard(thread)
            if since := computed_at.pop(thread, 0.0):
                guard.add_wait(thread, since, "the backward pass")

    patch(torch.autograd, "_engine_run_backward", run_backward)
