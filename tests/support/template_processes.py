"""The processes beside the ranks below an agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container

import psutil


def children_of(agent: int, ranks: Container[int]) -> list[psutil.Process]:
    """Those of an agent that are no ranks, and have not ended."""
    found = []
    for child in psutil.Process(agent).children():
        with contextlib.suppress(psutil.Error):  # what has ended is reaped in a moment
            if child.status() != psutil.STATUS_ZOMBIE and child.pid not in ranks:
                found.append(child)
    return found


def torch_templates_of(agent: int, ranks: Container[int]) -> list[psutil.Process]:
    """Those that are forked from the agent's first template, which has no torch and is in the agent's own session."""
    return [child for child in children_of(agent, ranks) if os.getsid(child.pid) == child.pid]
