"""Interrupts of cells that await, in the Meshbook kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def test_an_await_of_anything_ends_at_once(start_kernel: Callable[..., Any]) -> None:
    kernel = start_kernel()
    request = kernel.start("import asyncio; print('begun', flush=True); await asyncio.sleep(60)")
    kernel.wait_for_text("begun")
    time.sleep(0.3)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    assert kernel.reply_to(request)["status"] == "error"
    assert time.monotonic() - pressed < 2
    assert kernel.run("%mesh spawn gpus=2 --device cpu --out procs").ok
    request = kernel.start("print('begun', flush=True); await procs.run('import time; time.sleep(60)')")
    kernel.wait_for_text("begun")
    time.sleep(1)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.reply_to(request)
    assert time.monotonic() - pressed < 2
    assert reply["ename"] == "CallInterrupted" and "ranks 0,1 stopped, all variables kept" in reply["evalue"]
