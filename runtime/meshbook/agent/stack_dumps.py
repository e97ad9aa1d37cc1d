"""The host agent reads the stacks of workers that cannot tell them: native code holds the GIL, or they are stopped.

    running          faulthandler's handler, by a signal to the control thread: 1-4 ms, needs nothing installed
    stopped, state D py-spy, where it is installed: it reads the memory of the process and does not touch it
    native frames    py-spy, which halts the process for some milliseconds

Nothing here waits: the agent goes on with its other work. Few py-spy run at a time, and each is ended at the deadline.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshbook.lifecycle import WorkerPhase
from meshbook.stacks.dump import DumpRequest, parse_faulthandler, parse_py_spy
from meshbook.system.event_loop import EventLoop, Watch
from meshbook.system.processes import process_state
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.agent.worker import AgentWorker

POLL_S = 0.01
SIGNAL_S = 0.15  # a process that runs has written its dump by then
AT_ONCE = 4  # the most py-spy that run at the same time
MAX_BYTES = 8 << 20
ADVICE = "py-spy reads it from outside; on that host: pip install 'meshbook[stacks]'"


class OutsideStacks:
    """The stacks of workers from outside, for one question of the controller."""

    def __init__(
        self,
        loop: EventLoop,
        workers: Iterable[AgentWorker],
        ask: wire.AskStacks,
        answer: Callable[[Mapping[int, wire.RankDump]], object],
    ) -> None:
        self._loop, self._ask, self._answer = loop, ask, answer
        self._until = time.monotonic() + ask.wait_s
        self._workers = [w for w in workers if w.pid and w.phase is not WorkerPhase.DEAD]
        self._dumps: dict[int, wire.RankDump] = {}
        self._asked: dict[AgentWorker, DumpRequest] = {}
        self._queue: deque[AgentWorker] = deque()
        self._spies: set[_Spy] = set()
        self._ended = False

    def start(self) -> None:
        """Begin; the answer follows at the latest when its time is over."""
        for worker in self._workers:
            if self._ask.native or process_state(worker.pid) not in ("R", "S"):
                self._queue.append(worker)
                continue
            try:
                self._asked[worker] = DumpRequest(worker.pid, worker.control_thread, worker.dump_fd)
            except OSError:
                self._queue.append(worker)
        self._signal_until = time.monotonic() + SIGNAL_S
        self._go_on()

    def _go_on(self) -> None:
        """Read the dumps that have come, begin others, and come back soon."""
        if self._ended:
            return
        now = time.monotonic()
        for worker, request in list(self._asked.items()):
            is_gone = False
            try:
                text = request.poll()
            except OSError:
                text, is_gone = "", True
            if threads := parse_faulthandler(text):
                self._dumps[worker.rank] = wire.RankDump(worker.rank, threads, "signal")
                del self._asked[worker]
            elif is_gone or now >= self._signal_until:
                del self._asked[worker]
                self._queue.append(worker)
        while self._queue and len(self._spies) < AT_ONCE:
            self._spy(self._queue.popleft())
        if now >= self._until or len(self._dumps) == len(self._workers):
            self._end()
        else:
            self._loop.call_later(POLL_S, self._go_on)

    def _spy(self, worker: AgentWorker) -> None:
        program = find_py_spy()
        if program is None:
            self._dumps[worker.rank] = wire.RankDump(worker.rank, (), "", ADVICE)
            return
        native = self._ask.native and process_state(worker.pid) in ("R", "S")

        def on_end(spy: _Spy) -> None:
            self._spies.discard(spy)
            self._dumps[worker.rank] = spy.dump(worker.rank)

        try:
            self._spies.add(_Spy(self._loop, program, worker.pid, native, on_end))
        except OSError as error:
            self._dumps[worker.rank] = wire.RankDump(worker.rank, (), "", f"py-spy could not be started: {error}")

    def _end(self) -> None:
        self._ended = True
        for spy in list(self._spies):
            spy.end()
        for worker in self._workers:
            late = wire.RankDump(worker.rank, (), "", f"its stack could not be read within {self._ask.wait_s:g} s")
            self._dumps.setdefault(worker.rank, late)
        self._answer(self._dumps)


class _Spy:
    """A process of py-spy that reads one worker."""

    def __init__(self, loop: EventLoop, program: str, pid: int, native: bool, on_end: Callable[[_Spy], None]) -> None:
        """Raises: OSError if the process cannot be started."""
        self._loop, self._pid, self._on_end = loop, pid, on_end
        self._text = bytearray()
        how = "--native" if native else "--nonblocking"
        self._process = subprocess.Popen(
            [program, "dump", "--json", how, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._watch: Watch | None = loop.watch(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        self._text += data
        if not data or len(self._text) > MAX_BYTES:
            self.end()

    def end(self) -> None:
        """End the process if it runs."""
        if self._watch is None:
            return
        self._loop.forget(self._watch)
        self._watch = None
        self._process.kill()  # it has closed its output, or is late
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._on_end(self)

    def dump(self, rank: int) -> wire.RankDump:
        """Return the stacks that it has found."""
        text = self._text.decode(errors="replace")
        try:
            return wire.RankDump(rank, parse_py_spy(text, self._pid), "py-spy")
        except msgspec.DecodeError:
            return wire.RankDump(rank, (), "", _explain(text))


def _explain(text: str) -> str:
    """Return why py-spy has found no stack."""
    said = " ".join(text.split())[:200]
    if "ermission" in said:
        return (
            "py-spy may not look at the rank's process: it needs the right to trace it (kernel.yama.ptrace_scope=0, or "
            "--cap-add SYS_PTRACE for a container)"
        )
    return f"py-spy could not read it{f': {said}' if said else ' in time'}"


def find_py_spy() -> str | None:
    """Return the path of py-spy beside this Python, or on the PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
