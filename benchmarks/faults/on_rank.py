"""What the load runs on the ranks: every call writes its number into a ledger, once it runs."""

from __future__ import annotations

import sys
import time

import torch


def note(number: int, payload: torch.Tensor | None = None) -> float:
    """Write ``number`` down; returns it, or the last element of ``payload``."""
    vars(sys.modules["__main__"])["ledger"].append(number)
    return number if payload is None else float(payload[-1])


def note_slowly(number: int) -> float:
    """The same, but it takes a moment."""
    time.sleep(0.02)
    return note(number)


CELL = "ledger.append({number})\nprint('cell', {number})\n{number}"
COLLECTIVE = "for _ in range(3): dist.all_reduce(torch.ones(64))\nledger.append({number})\n{number}"
HOLD = "import time\nledger.append({number})\ntime.sleep(60)"  # a cell that is still running when the fault comes
HOLD_AND_EXIT = """
import os, signal, time
ledger.append({number})
if rank == {rank}:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    print("held", flush=True)
    signal.sigwait([signal.SIGUSR2])
    os._exit(3)
time.sleep(60)
"""
HOLD_IN_COLLECTIVE = """
import time
ledger.append({number})
if rank == {rank}: time.sleep(60)
dist.all_reduce(torch.ones(64))
"""
RAISE = """
if rank == {rank}: raise ValueError({number})
dist.all_reduce(torch.ones(64))
"""
PROVE = "proof = torch.ones(1)\ndist.all_reduce(proof)\nint(proof)"
"""Its value is the number of ranks, where the process group works."""
