"""Processes that user code starts: an interrupt reaches them as Ctrl-C in a terminal would.

A module of its own because other interrupts of a worker are of its threads; what a shell's commands get is told by
`meshbook.shell.commands`.
"""

from __future__ import annotations

import os
import signal
import time

from meshbook.shell.commands import OURS
from meshbook.system.processes import descendants, start_time

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def interrupt_children(since: float) -> None:
    """SIGINT to the children that were started after ``since`` (monotonic clock) and did not leave our process group.

    Older ones, a server from an earlier cell say, run on; `!commands` are told by their own code.
    """
    since_ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - since)) * _TICKS_PER_S - 1
    group = os.getpgrp()
    spared: set[int] = set()
    for command in tuple(OURS):
        spared.update(descendants(command))
    for pid in descendants(os.getpid())[1:]:
        if pid in spared:
            continue
        try:
            if os.getpgid(pid) == group and (start_time(pid) or 0) >= since_ticks:
                os.kill(pid, signal.SIGINT)
        except (ProcessLookupError, PermissionError):
            pass
