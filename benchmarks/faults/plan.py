"""Which faults, in which order, on whom, when: drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from typing import NamedTuple

WEIGHTS: Mapping[str, int] = {
    "kill": 16,
    "segv": 8,
    "abort": 8,
    "exit": 10,
    "stop": 16,
    "raise": 20,
    "interrupt": 20,
    "agent": 2,
}
"""How often each kind comes. ``stop`` is SIGSTOP and, a moment later, SIGCONT; ``raise`` is one rank that raises while
the others wait in a collective; ``agent`` is SIGKILL for the host agent."""

SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}
DEADLY = frozenset({*SIGNALS, "exit"})  # faults that end one rank

LONGEST_DELAY_S = 0.06


class Fault(NamedTuple):
    """One fault and the load that it meets."""

    number: int
    kind: str
    rank: int
    delay_s: float  # from the first call of the load to the fault
    calls: int  # how many calls of each sort are under way

    def __str__(self) -> str:
        return f"fault {self.number}, {self.kind} of rank {self.rank} after {self.delay_s * 1000:.0f} ms"


def make_plan(seed: int, count: int, ranks: int, weights: Mapping[str, int] = WEIGHTS) -> list[Fault]:
    """``count`` faults for a mesh of ``ranks``; equal for equal arguments."""
    draw = random.Random(seed)
    kinds = draw.choices(list(weights), list(weights.values()), k=count)
    return [
        Fault(number, kind, draw.randrange(ranks), draw.uniform(0, LONGEST_DELAY_S), draw.randint(1, 6))
        for number, kind in enumerate(kinds, 1)
    ]
