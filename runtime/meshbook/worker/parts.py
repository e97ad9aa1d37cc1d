"""The parts of a worker's process, which its threads share; and who decides which call its main thread runs.

Endpoints and queries (`CALLS`, `QUERIES`) work on `WorkerParts`; `meshbook.worker.worker.Worker` runs them.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec

from meshbook.concurrency import forks
from meshbook.concurrency.background import refuse_in_peek
from meshbook.debug.dap_session import DebugSession
from meshbook.errors import Failure
from meshbook.groups.collectives_off import NoGroups
from meshbook.shape.members import Moves
from meshbook.shell.postmortem_memory import HeldMemoryGauge
from meshbook.shell.shell import RankShell
from meshbook.system.devices import GpuGauge
from meshbook.wire import messages as wire
from meshbook.wire.kv_store import StoreOp, StoreResult
from meshbook.worker.actors import ActorRegistry, RankProcess
from meshbook.worker.channel import AgentChannel, RankPayloads, Send, WorkerOutput
from meshbook.worker.direct_calls import CalleeLinks, DirectArrivals
from meshbook.worker.interrupt_gate import InterruptGate
from meshbook.worker.mail import WorkerMail

if TYPE_CHECKING:
    from meshbook.groups.rank_groups import RankGroups

KEPT_FINISHED = 1024  # ended calls that are remembered, for cancels that come too late


class RunningCall(msgspec.Struct, frozen=True):
    """The call that the main thread runs."""

    id: int
    endpoint: str
    since: float  # in monotonic time


class Claims:
    """The decision whether a call starts or is dropped. running: None between calls."""

    def __init__(self) -> None:
        self.running: RunningCall | None = None
        self.finished: deque[int] = deque(maxlen=KEPT_FINISHED)
        # calls that the control thread has answered for; they must not run when they come
        self._dropped: set[int] = set()
        self._lock = threading.Lock()

    def start(self, call: int, endpoint: str) -> bool:
        """Begin a call on the main thread; return False if it was dropped before."""
        with self._lock:
            if call not in self._dropped:
                self.running = RunningCall(call, endpoint, time.monotonic())
                return True
            self._dropped.discard(call)
        return False

    def cancel(self, call: int) -> tuple[RunningCall | None, bool]:
        """Return the call, if it runs; else whether it is dropped now: not when it has ended."""
        with self._lock:
            running = self.running
            if running is not None and running.id == call:
                return running, False
            if call in self.finished or call in self._dropped:
                return None, False
            self._dropped.add(call)
            return None, True


class StoreQuestions:
    """The questions of this process to the runtime's store that are not answered; any thread may ask."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[int, queue.SimpleQueue[StoreResult]] = {}
        self._request_ids = itertools.count(os.getpid() << 32)  # never those of a process that had our rank

    def ask(self, op: StoreOp, timeout_s: float, answer: queue.SimpleQueue[StoreResult]) -> StoreResult:
        """Ask the store and wait. Raises: TimeoutError, PeekRefused."""
        refuse_in_peek("a question to the store of the process groups")
        request = next(self._request_ids)
        self._waiting[request] = answer
        try:
            self._send(wire.StoreRequest(0, wire.OWN_RANK, request, op), ())
            return answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"the store did not answer {op.op} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request, None)

    def take(self, request: int, result: StoreResult) -> None:
        """Hand an answer to the thread that waits for it."""
        if (waiting := self._waiting.get(request)) is not None:
            waiting.put(result)


class WorkerParts:
    """The parts of a worker: its sockets, its shell, its process groups, its actors."""

    identity: wire.Identity
    """The identity of the worker, from its first message."""
    gpu: GpuGauge
    kept: HeldMemoryGauge

    def __init__(self, shell: RankShell, call_fd: int, urgent_fd: int, mail_fd: int) -> None:
        self.shell = shell
        self.gate = InterruptGate()
        self.calls, self.urgent = AgentChannel(call_fd, self.gate), AgentChannel(urgent_fd, self.gate)
        self.arrivals = arrivals = DirectArrivals(call_fd)
        identity = functools.partial(getattr, self, "identity")
        self.direct = CalleeLinks(
            identity, self.calls.send, arrivals.put, arrivals.watch, arrivals.forget, is_mail=False
        )
        self.moves: dict[int, Moves] = {}  # moves of meshes whose ranks got other numbers
        self.groups = _groups()
        self.main_thread = threading.get_ident()
        self.claims = Claims()
        self.store = StoreQuestions(self.urgent.send)
        self.debug_session: DebugSession | None = None  # the debug session of this process, or the last one
        self.payloads = RankPayloads(self.urgent, shell.describe)
        mail = AgentChannel(mail_fd, self.gate)
        self.mail = WorkerMail(mail, self.payloads, identity, self._limit_prompts, self.groups.tell)
        process = RankProcess(shell, self.mail, identity, self.end_child)
        self.registry = ActorRegistry(process, self.mail.boxes)
        self.groups.ask_of_actors(self.registry.handled)
        self.output = WorkerOutput(shell, self.gate, self.calls, self.mail.send)
        self._generation = forks.generation

    def end_child(self, failure: Failure | None) -> None:
        """End the process, at the end of a call, if user code has forked it in that call, and has not ended it. Else
        two processes would answer. failure: the error of the call."""
        if self._generation == forks.generation:
            return
        error = None if failure is None else failure.exception
        code: object = 0 if failure is None else 1
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
        elif failure is not None:
            print(*failure.traceback, sep="\n", file=sys.stderr)
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        self.shell.flush_text()
        os._exit(code & 0xFF)

    def _limit_prompts(self, call: wire.Call) -> None:
        """Note, as a call to a mailbox is read, whether a person can answer prompts."""
        if call.origin is None:  # a worker that calls another does not know
            self.shell.debugger.refusal = call.no_prompt


def _groups() -> RankGroups | NoGroups:
    """Return torch's groups, if the template that we were forked from has torch."""
    module = sys.modules.get("meshbook.groups.rank_groups")
    return NoGroups() if module is None else cast("RankGroups", module.RankGroups())
