"""The host agent reads the stacks of workers that cannot tell them: native code holds the GIL, or they are stopped.

    running          faulthandler's handler, by a signal to the control thread: 1-4 ms, needs nothing installed
    stopped, state D py-spy, where it is installed: it reads the memory of the process and does not touch it
    native frames    py-spy, which halts the process for some milliseconds

The agent goes on with its other work meanwhile. Few py-spy run at a time, and each is ended at the deadline.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshbook.concurrency.future import Future, in_background
from meshbook.lifecycle import WorkerPhase
from meshbook.stacks.dump import DumpRequest, parse_faulthandler, parse_py_spy
from meshbook.system.event_loop import EventLoop
from meshbook.system.processes import process_state
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.agent.worker import AgentWorker

POLL_S = 0.01
SIGNAL_S = 0.15  # a process that runs has written its dump by then
LATE_S = 0.1  # time for a py-spy that was ended at the deadline to be gone
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
        self._spies: set[Future[wire.RankDump]] = set()

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
        for spy in [each for each in self._spies if each.done()]:
            self._spies.discard(spy)
            dump = spy.get(0)
            self._dumps[dump.rank] = dump
        while self._queue and len(self._spies) < AT_ONCE:
            self._spy(self._queue.popleft(), max(0.0, self._until - now))
        late_s = LATE_S if self._spies else 0.0
        if now >= self._until + late_s or len(self._dumps) == len(self._workers):
            self._end()
        else:
            self._loop.call_later(POLL_S, self._go_on)

    def _spy(self, worker: AgentWorker, timeout_s: float) -> None:
        if (program := find_py_spy()) is None:
            self._dumps[worker.rank] = wire.RankDump(worker.rank, (), "", ADVICE)
            return
        native = self._ask.native and process_state(worker.pid) in ("R", "S")
        self._spies.add(in_background(functools.partial(_read_by_py_spy, program, worker, native, timeout_s)))

    def _end(self) -> None:
        for worker in self._workers:
            late = wire.RankDump(worker.rank, (), "", f"its stack could not be read within {self._ask.wait_s:g} s")
            self._dumps.setdefault(worker.rank, late)
        self._answer(self._dumps)


def _read_by_py_spy(program: str, worker: AgentWorker, native: bool, timeout_s: float) -> wire.RankDump:
    """Return the stacks of a worker as py-spy reads them. It waits for that, so it runs aside."""
    how = "--native" if native else "--nonblocking"
    command = [program, "dump", "--json", how, "--pid", str(worker.pid)]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
        text = ended.stdout[:MAX_BYTES].decode(errors="replace")
        return wire.RankDump(worker.rank, parse_py_spy(text, worker.pid), "py-spy")
    except msgspec.DecodeError:
        return wire.RankDump(worker.rank, (), "", _explain(text))
    except subprocess.TimeoutExpired:
        return wire.RankDump(worker.rank, (), "", _explain(""))
    except OSError as error:
        return wire.RankDump(worker.rank, (), "", f"py-spy could not be started: {error}")


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
