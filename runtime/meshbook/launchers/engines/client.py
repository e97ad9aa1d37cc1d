"""A process beside us that starts agents elsewhere and speaks for them: what it says goes to a log, which outlives us.

It is our child, or was that of the controller before us; all that is known of it is its pid, and what is in the log.
"""

from __future__ import annotations

import contextlib
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from meshbook.launchers.local import release_child
from meshbook.system.exits import end_process
from meshbook.system.processes import is_same_process

END_S = 5.0
"""How long it may take to end when told to."""

Said = TypeVar("Said")


class Client(ABC, Generic[Said]):
    """process: where it is our child, whose stdin it reads. log: what it writes."""

    def __init__(self, log: Path, pid: int, started: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.log, self.pid, self.started, self._process = log, pid, started, process
        self._read_bytes, self._said = -1, self._read("")

    @abstractmethod
    def _read(self, text: str) -> Said:
        """What a log says."""

    @property
    def said(self) -> Said:
        """What its log says, read again whenever there is more of it."""
        with contextlib.suppress(OSError):
            if (size := self.log.stat().st_size) != self._read_bytes:
                self._read_bytes, self._said = size, self._read(self.log.read_text(errors="replace"))
        return self._said

    def poll(self) -> int | None:
        """How it has ended, as in `subprocess`; None while it runs."""
        if self._process is not None:
            return self._process.poll()
        return None if is_same_process(self.pid, self.started) else 0

    def write(self, data: bytes) -> None:
        """Give it something to read."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its log says why
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def end(self, timeout_s: float) -> None:
        """Wait until it ends, as it does with its agents, then end it; idempotent."""
        self.close_stdin()
        if self._process is None:
            end_process(self.pid, self.started, timeout_s)
            return
        for deadline_s, end in ((timeout_s, self._process.terminate), (END_S, self._process.kill)):
            try:
                self._process.wait(deadline_s)
                return
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()

    def release(self) -> None:
        """Close its stdin: it sees that its controller has gone. It lives on."""
        self.close_stdin()
        if self._process is not None:
            release_child(self._process)
            self._process = None  # whoever attaches next, in this process too, finds it

    def close_stdin(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
