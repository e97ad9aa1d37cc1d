"""People with a terminal, for tests of ``--on manual``: they run the command that a notebook shows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil

LINE = re.compile(r"^ (.+) -m meshbook\.join <<< (mb1-[^\s']+)'?$", re.MULTILINE)


def command(shown: str) -> str:
    """The last command that was shown, for this interpreter."""
    _, ticket = LINE.findall(shown)[-1]
    return f"'{sys.executable}' -m meshbook.join <<< {ticket}"


def whole_line(shown: str) -> str:
    """The last command that was shown, as it stands there."""
    return list(LINE.finditer(shown))[-1][0]


class Machine(subprocess.Popen[str]):
    """A shell that runs the command, in a process group of its own as in a terminal."""

    def __init__(self, line: str) -> None:
        super().__init__(
            ["bash", "-c", line], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip

    def press_interrupt(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def end(self, timeout_s: float = 60.0) -> str:
        """What it has said when it ends by itself."""
        return self.communicate(timeout=timeout_s)[0]


class People:
    """They look at what is shown, and run the commands. shown: what has been shown so far."""

    def __init__(self, shown: Callable[[], str]) -> None:
        self._shown = shown
        self.machines: list[Machine] = []
        self._threads: list[threading.Thread] = []

    def come(self, count: int) -> None:
        """Run the next command that is shown on so many machines."""
        seen = len(LINE.findall(self._shown()))

        def wait() -> None:
            deadline = time.monotonic() + 60
            while len(LINE.findall(self._shown())) == seen and time.monotonic() < deadline:
                time.sleep(0.02)
            line = command(self._shown())
            self.machines += [Machine(line) for _ in range(count)]

        self._threads.append(threading.Thread(target=wait))
        self._threads[-1].start()

    def machine_of(self, pid: int) -> Machine:
        """That on which the agent with this pid runs."""
        return next(each for each in self.machines if pid in [process.pid for process in each.processes()])

    def close(self) -> None:
        """All have gone home; the commands have ended."""
        for thread in self._threads:
            thread.join(60)
        for machine in self.machines:
            try:
                machine.communicate(timeout=30)
            finally:
                if machine.poll() is None:
                    machine.press_interrupt()
                    machine.communicate(timeout=30)


@contextlib.contextmanager
def people(shown: Callable[[], str]) -> Iterator[People]:
    found = People(shown)
    try:
        yield found
    finally:
        found.close()
