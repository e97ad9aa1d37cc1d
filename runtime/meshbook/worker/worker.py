"""A worker: one rank's process. It runs the user's code on its main thread and stays answerable on another.

    main thread      receives calls from the agent, one at a time, runs them, replies
    control thread   receives urgent messages: cancel, abort of groups, queries, answers of the store, freed
                     segments; blocks SIGINT
    mail thread      receives calls to mailboxes, once there are any (`meshbook.worker.mail`); an idle actor may do that

Each thread reads its own socket; writers hold that socket's lock. The process ends when the agent closes the call
socket, and dies with its agent.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import os
import queue
import random
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from meshbook.actor.proc_ref import ask_controller
from meshbook.actor.router import set_own_router
from meshbook.calls.answer import Outcome, pack, pack_failure
from meshbook.concurrency import forks
from meshbook.concurrency.background import hidden_thread, run_in_background
from meshbook.concurrency.own_faults import attempt
from meshbook.concurrency.thread_interrupts import gate_of_this_thread
from meshbook.debug.dap_session import DebugSession
from meshbook.errors import Failure, MeshError, MessageTooLarge
from meshbook.errors.advice import set_advice
from meshbook.formatting import format_bytes
from meshbook.groups.absent import NO_DISTRIBUTED, NoGroups
from meshbook.groups.collectives_off import leave_to_parent
from meshbook.shape.generations import Moves
from meshbook.shape.members import Extent
from meshbook.shell.postmortem_memory import HeldMemoryGauge
from meshbook.shell.shell import RankShell
from meshbook.stacks.dump import accept_dumps
from meshbook.system.binding import bind
from meshbook.system.gpu import GpuGauge
from meshbook.system.processes import may_be_traced
from meshbook.wire import messages as wire
from meshbook.wire.kv_store import StoreOp, StoreResult
from meshbook.wire.messages import PLACE, SHOWN_HERE
from meshbook.wire.shortcuts import RankShortcut
from meshbook.worker.actor_process import RankProcess
from meshbook.worker.actors import ActorRegistry
from meshbook.worker.channel import AgentChannel, RankPayloads
from meshbook.worker.endpoints import CALLS, QUERIES, SLOW_QUERIES
from meshbook.worker.interrupt_gate import InterruptGate, interrupt_children
from meshbook.worker.mail import WorkerMail
from meshbook.worker.open_files import write_buffers
from meshbook.worker.router import WorkerRouter
from meshbook.workspace.synced_modules import ask_for_missing

if TYPE_CHECKING:
    from meshbook.groups.rank_groups import RankGroups
    from meshbook.workspace.local_modules import FoundModules

IDLE_S = 0.5
"""How often the control thread looks after things that nobody tells it."""

LONG_CALL_S = 0.02
"""Behind a call that took longer, others may wait, and may have been cancelled meanwhile."""

ASK_S = 20.0
"""How long a module may take to come from the notebook."""

LATE_PIECE_CHARS = 1 << 16

KEPT_FINISHED = 1024
"""Ended calls that are remembered, for cancels that come too late."""


class Worker:
    """The process's one worker: its sockets, its shell, its process groups."""

    def __init__(self, shell: RankShell, call_fd: int, urgent_fd: int, mail_fd: int) -> None:
        self.shell = shell
        self.gate = InterruptGate()
        self.calls = AgentChannel(call_fd, self.gate)
        self.urgent = AgentChannel(urgent_fd, self.gate)
        self.moves: dict[int, Moves] = {}
        """How ranks of meshes got other numbers."""
        self.groups = _groups()
        self.main_thread = threading.get_ident()
        self.current: tuple[int, str, float] | None = None
        """(call, endpoint, monotonic start) while a call runs."""
        self.debug_session: DebugSession | None = None
        """The debug session of this process, the last one if there is none."""
        self._payloads = RankPayloads(self.urgent, shell.describe)
        mail = AgentChannel(mail_fd, self.gate, takes_descriptors=True)
        self.mail = WorkerMail(mail, self._payloads, lambda: self.identity, self._limit_prompts, self.groups.tell)
        self.registry = ActorRegistry(RankProcess(self), self.mail.boxes)
        self.groups.ask_of_actors(self.registry.handled)
        self._cancelled: set[int] = set()
        """Calls that were dropped, and answered for, by the control thread; they must not run when they come."""
        self._finished: deque[int] = deque(maxlen=KEPT_FINISHED)
        self._claims = threading.Lock()
        """Held to decide whether a call starts or is dropped."""
        self._hearing = threading.Lock()
        """Held by the control thread while it handles a message."""
        self._waiting: dict[int, queue.SimpleQueue[StoreResult]] = {}
        self._request_ids = itertools.count(os.getpid() << 32)  # never those of a process that had our rank
        self._output = -1
        self._places = itertools.count(1)
        self._was_long = False
        self._generation = forks.generation
        self._call_fd = call_fd
        self._arrivals = select.poll()
        """What the main thread waits for where calls may come past the agent."""
        self._shortcut = self._open_shortcut("")

    # ---- life ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the identity that the agent gives, start the control thread, and say so."""
        received = self.calls.receive()
        if received is None:
            os._exit(0)
        begin = received[0]
        assert isinstance(begin, wire.Begin)
        self.identity = identity = begin.identity
        self._marker = begin.marker
        self._shortcut = self._open_shortcut(begin.shortcut)
        self.mail.open_shortcut(begin.shortcut)
        self.gpu, self.kept = GpuGauge(identity.device), HeldMemoryGauge()
        self.gate.keep_signal()
        forks.at_fork(in_child=self._leave_to_parent)
        _enter_environment(begin)
        if not begin.shares_files:
            ask_for_missing(_ask_for_module)
        _seed()
        self.shell.start_rank(rank=identity.rank, host=identity.host, sink=self, namespace=self._names())
        self.shell.debugger.begin(self._tell_prompt)
        self.gate.take_signal()  # modules that were imported just now may have set a handler
        control = self._start_control_thread()
        may_be_traced()
        self.calls.send(wire.Begun(os.getpid(), control, accept_dumps()))

    def serve_calls(self) -> None:
        """Run calls until the agent closes the socket."""
        while (received := self._receive()) is not None:
            message, frames = received
            if isinstance(message, wire.Renumbered):
                self._renumber(message.identity)
            else:
                assert isinstance(message, wire.Call)
                self._run_call(message, frames)

    def _receive(self) -> tuple[wire.ToWorker, list[bytes]] | None:
        """Wait for the next message of the agent, or call that comes past it; None at the end. Each call once.

        What the agent has brought goes first.
        """
        shortcut, frames = self._shortcut, self.calls.frames
        while True:
            is_open = shortcut.fd >= 0 and not frames.has_message
            if is_open and self._call_fd not in dict(self._arrivals.poll()):
                if (early := shortcut.take(self.identity)) is not None:
                    return early, []
                continue
            received = self.calls.receive(is_there=is_open)
            call = None if received is None else received[0]
            if not isinstance(call, wire.Call) or not call.shortcut or shortcut.is_news(call, self.identity):
                return received

    def _open_shortcut(self, path: str) -> RankShortcut:
        def watch(fd: int) -> None:
            self._arrivals = select.poll()
            for each in (self._call_fd, fd):
                self._arrivals.register(each, select.POLLIN)

        return RankShortcut(path, self.calls.send, watch, is_mail=False)

    def _leave_to_parent(self) -> None:
        """In a process that user code has forked: it is no rank."""
        for end in (self.calls, self.urgent, self.mail, self._shortcut):
            end.close()
        self.gate.after_fork()
        self.registry.after_fork()
        leave_to_parent(self._generation)

    def end_child(self, failure: Failure | None) -> None:
        """Where a call ends: end the process if user code has forked it in that call, and has not ended it.

        Else two would answer. failure: what was raised in it.
        """
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

    def _renumber(self, now: wire.Identity) -> None:
        """Be another rank; the process groups follow when they are formed anew."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() == self.identity.threads:  # else the user has chosen
            torch.set_num_threads(now.threads)
        self.identity = now
        self.shell.become(now.rank)
        self.shell.define(self._names())

    def _names(self) -> dict[str, object]:
        identity = self.identity
        names = {
            "rank": identity.rank,
            "local_rank": identity.local_rank,
            "world_size": identity.world_size,
            "point": Extent(identity.axes, identity.sizes).point(identity.rank),
            "device": identity.device,
            "dist": NO_DISTRIBUTED,
        }
        if (torch := sys.modules.get("torch")) is not None:
            names |= {"device": torch.device(identity.device), "dist": torch.distributed, "torch": torch}
        return names

    # ---- calls --------------------------------------------------------------------------------------------------

    def _run_call(self, call: wire.Call, frames: list[bytes]) -> None:
        if not self._start(call):
            return
        if call.output != self._output:
            self._mark_output(call.output)
        started, waited_s = time.monotonic(), self.groups.waited_s(self.main_thread)
        said = self.calls.sent
        try:
            answer = self._answer(call, frames)
        finally:
            self._finished.append(call.id)
            self.current = None
        if self._generation != forks.generation:
            self.end_child(answer.failure)
        self.shell.flush()
        self.shell.reopen()
        duration_s = time.monotonic() - started
        self._was_long = duration_s > LONG_CALL_S
        self._reply(call, answer, duration_s, self.groups.waited_s(self.main_thread) - waited_s, said)
        del answer
        if self.shell.is_untidy:
            self.shell.tidy()

    def _start(self, call: wire.Call) -> bool:
        """Whether the call is to run; when it was dropped, let go of its payload."""
        if self._was_long:
            self._hear_cancels()
        with self._claims:
            if call.id not in self._cancelled:
                self.current = (call.id, call.endpoint, time.monotonic())
                return True
            self._cancelled.discard(call.id)
        self._payloads.discard(call)
        self._shortcut.drop(call)
        return False

    def _hear_cancels(self) -> None:
        """Let the control thread read what has come while native code kept it from running."""
        deadline = time.monotonic() + 1
        while self.urgent.wait(0) and time.monotonic() < deadline:
            time.sleep(0.0005)
        with self._hearing:
            pass

    def _answer(self, call: wire.Call, frames: list[bytes]) -> Outcome:
        self.shell.debugger.refusal = call.no_prompt
        try:
            is_wanted = self.gate.open(call.id)
            try:
                if not is_wanted:
                    raise KeyboardInterrupt
                args, kwargs = self._payloads.load(call, frames, self.identity)
                return CALLS[call.endpoint](self, call, *args, **kwargs)
            finally:
                self.gate.close()
                self.shell.debugger.end_call()
        except BaseException as error:  # whatever user code raises, SystemExit included, becomes the reply
            self.gate.close()  # the interrupt may have come just before it was
            status = wire.INTERRUPTED if isinstance(error, KeyboardInterrupt) else wire.RAISED
            failure = self.shell.describe(error)
            if call.endpoint == "invoke":
                with contextlib.suppress(Exception):  # the exception's own code may raise
                    self.shell.keep_error(error, call.id)
            return Outcome(status, failure=failure)

    def _reply(self, call: wire.Call, answer: Outcome, duration_s: float, waited_s: float, said: int) -> None:
        """said: how many messages the agent had of ours when the call began."""
        write = self._payloads.pool.write
        if answer.position:
            write = functools.partial(write, position=answer.position)
        status, payload, inline, segment = pack(answer, write, self.shell.describe)
        freed, groups = self._payloads.take_freed(), self.groups.tell()
        message = wire.Reply(call.id, status, duration_s, segment, inline, waited_s, None, groups, freed)
        if call.shortcut:
            is_value = status == wire.OK and not (payload or segment or freed or groups)
            may_pass = is_value and said == self.calls.sent
            if self._shortcut.answer(call, message, self.identity.rank, may_pass=may_pass):
                return
        self.calls.send(message, payload)

    # ---- output: what the shell calls (`meshbook.shell.shell.OutputSink`) --------------------------------------------

    def _mark_output(self, output: int) -> None:
        """Tell the agent, in the pipes themselves, that what follows belongs to ``output``."""
        self._output = output
        self.shell.mark_text(self._marker + b"%d\n" % output)

    def display(
        self,
        data: Mapping[str, object],
        metadata: Mapping[str, object],
        transient: Mapping[str, object],
        *,
        update: bool,
        is_result: bool,
        cell_id: int,
        is_late: bool,
    ) -> None:
        self.shell.flush_text()
        content = wire.encode(wire.Bundle(*map(_by_text, (data, metadata, transient))))
        with self.gate.shield:  # sent first: so it is on its way when the agent reads the mark
            place = 0 if is_late else next(self._places)
            try:
                self._lane().send(wire.DisplayData(wire.OWN_RANK, cell_id, update, is_result, place), [content])
            except MessageTooLarge as error:
                size, limit = format_bytes(error.size_bytes), format_bytes(error.limit_bytes)
                print(f"{size} to be shown at once are left out; {limit} are the most", file=sys.stderr)
                return
            if place:
                self.shell.mark_text(self._marker + SHOWN_HERE + b"%d\n" % place)

    def mark_place(self) -> None:
        with self.gate.shield:
            self.shell.mark_text(self._marker + PLACE + b"%d\n" % next(self._places))

    def late_text(self, stream: str, text: str, cell_id: int) -> None:
        for at in range(0, len(text), LATE_PIECE_CHARS):  # the agent cuts what is too much, a piece at a time
            self._lane().send(wire.StreamText(wire.OWN_RANK, stream, text[at : at + LATE_PIECE_CHARS], cell_id))

    def _lane(self) -> AgentChannel | WorkerMail:
        """Where replies of the calling thread will go, so that what it shows comes before them."""
        return self.calls if gate_of_this_thread() is None else self.mail

    def _limit_prompts(self, call: wire.Call) -> None:
        """A call to a mailbox, as it is read: whether somebody is there to answer prompts."""
        if call.origin is None:  # a worker that calls another does not know
            self.shell.debugger.refusal = call.no_prompt

    def _tell_prompt(self, at: wire.AtPrompt) -> None:
        self.shell.flush_text()
        self.calls.send(wire.Prompted(0, wire.OWN_RANK, self.shell.output_here or self._output, at))

    # ---- the store of torch.distributed -------------------------------------------------------------------------

    def store_rpc(self, op: StoreOp, timeout_s: float, answer: queue.SimpleQueue[StoreResult]) -> StoreResult:
        """Ask the runtime's store; callable from any thread. Raises: TimeoutError."""
        request = next(self._request_ids)
        self._waiting[request] = answer
        try:
            self.urgent.send(wire.RankStore(request, op))
            return answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"the store did not answer {op.op} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request, None)

    # ---- control thread -----------------------------------------------------------------------------------------

    def _start_control_thread(self) -> int:
        """Returns the kernel's number of it."""
        thread = hidden_thread(self._control, "meshbook.control")
        thread.start()
        return thread.native_id or 0

    def _control(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            while not self.urgent.wait(timeout_s=self.gate.tend() or IDLE_S):
                self._payloads.tell_freed()
                if self.gate.unheard:
                    self.groups.interrupt_backward()
                if self.current is not None:
                    self.shell.flush_text()  # the start of a line, a prompt or a progress bar, shows before its end
            with self._hearing:
                if (received := self.urgent.receive()) is None:
                    break
                attempt(functools.partial(self._hear, received[0]), "a message of the agent")
        time.sleep(5)  # the agent is gone: the main thread has this long to end by itself
        os._exit(1)

    def _hear(self, message: wire.ToWorker) -> None:
        match message:
            case wire.RankStored(request, result):
                if (waiting := self._waiting.get(request)) is not None:
                    waiting.put(result)
            case wire.Cancel():
                self._cancel(message)
            case wire.AbortGroups(epoch=epoch, reason=reason, groups=groups):
                self.groups.abort(epoch, reason, groups)
            case wire.SegmentFree(segment=segment):
                self._payloads.pool.release(segment)
            case wire.MailHold():
                self.mail.hold(message)
            case wire.OpenMail():
                self.mail.start()
            case wire.Moved(mesh, moves):
                self.moves[mesh] = moves
            case wire.ControllerGone():
                self._shortcut.give_up()
                self.mail.give_up_shortcut()
            case wire.Query(id, asked=wire.AskRank() as asked):
                if asked.endpoint in SLOW_QUERIES:
                    run_in_background(lambda: self._answer_query(id, asked))
                else:
                    self._answer_query(id, asked)
            case other:
                raise AssertionError(f"{other!r} does not belong on the urgent socket")

    def _cancel(self, cancel: wire.Cancel) -> None:
        """Interrupt the call if it runs; drop it, and say so, if it waits; nothing if it has ended."""
        call = cancel.call
        with self._claims:
            current = self.current
            runs = current is not None and current[0] == call
            if not runs and (call in self._finished or call in self._cancelled):
                return
            if not runs:
                self._cancelled.add(call)
        if runs and current is not None:
            self.shell.debugger.interrupt()
            self.gate.interrupt(call, insist=cancel.insist)
            interrupt_children(since=current[2])
        else:
            self.urgent.send(wire.Reply(call, wire.DROPPED, 0.0))

    def _answer_query(self, id: int, asked: wire.AskRank) -> None:
        try:
            args = msgspec.msgpack.decode(asked.args, type=list)
            answer = Outcome(wire.OK, QUERIES[asked.endpoint](self, *args), has_value=True)
        except Exception as error:
            answer = Outcome(wire.RAISED, failure=self.shell.describe(error))
        payload = pack_failure(answer.failure) if answer.failure else [wire.encode(answer.value)]
        with contextlib.suppress(MessageTooLarge):  # as if it had not answered
            self.urgent.send(wire.Reply(id, answer.status, 0.0), payload)


def run_worker(shell: RankShell, call_fd: int, urgent_fd: int, mail_fd: int, stdout_fd: int, stderr_fd: int) -> None:
    """Be a worker until the agent says otherwise; never returns. Called in a fresh fork of the template."""
    code = 1
    gc.enable()
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(source, target)
            os.close(source)
        worker = Worker(shell, call_fd, urgent_fd, mail_fd)
        router = WorkerRouter(worker)
        set_own_router(lambda: router, takes_all=True)
        worker.begin()
        worker.serve_calls()
        worker.registry.end_all()
        _keep_operators()
        atexit._run_exitfuncs()
        write_buffers()
        worker.shell.flush()
        code = 0
    except BrokenPipeError:
        pass  # the agent is gone, and we go with it
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(code)


def _groups() -> RankGroups | NoGroups:
    """Those of torch, if the template that we were forked from has it."""
    module = sys.modules.get("meshbook.groups.rank_groups")
    return NoGroups() if module is None else cast("RankGroups", module.RankGroups())


def _keep_operators() -> None:
    """Have PyTorch not take back the operators that it has defined: 30 ms of each rank's end, for nobody."""
    registry: dict[weakref.finalize[..., object], object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        if (alive := finalizer.peek()) is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False


def _enter_environment(begin: wire.Begin) -> None:
    if not begin.command.inherits:
        os.environb.clear()
    os.environb.update(begin.environment)
    for name in (name for name, value in begin.command.environment.items() if value is None):
        os.environ.pop(name, None)
    if begin.binding:
        bind(begin.binding)
    set_advice(begin.advice)
    if begin.cwd:
        try:
            os.chdir(begin.cwd)
        except OSError as error:
            print(f"cannot enter the notebook's folder: {error}", file=sys.stderr)
    sys.path[:0] = [path for entry in begin.sys_path if (path := os.fsdecode(entry)) not in sys.path]
    sys.argv = ["meshbook-worker"]
    if (torch := sys.modules.get("torch")) is not None:
        threads = begin.identity.threads
        torch.set_num_threads(min(threads, len(os.sched_getaffinity(0))) if begin.binding else threads)
    for module in begin.preload:
        __import__(module)


def _ask_for_module(name: str) -> FoundModules | None:
    """The notebook's own module of this name, which is not on this machine. Raises: ModuleNotFoundError."""
    try:
        found: FoundModules | None = ask_controller("find_module", (name,), {}, "the workspace").get(ASK_S)
    except (MeshError, TimeoutError) as error:
        raise ModuleNotFoundError(
            f"No module named '{name}' here, and the notebook cannot be asked: {error}", name=name
        ) from error
    return found


def _by_text(items: Mapping[str, object]) -> dict[str, object]:
    """Kinds of content are text, whatever a user's bundle has."""
    return {kind if type(kind) is str else str(kind): item for kind, item in items.items()}


def _seed() -> None:
    """Forks share the template's random state; each rank needs its own."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is None:
        return
    if torch.backends.cuda.is_built():
        torch.seed()
    else:
        torch.default_generator.seed()  # for devices torch.seed() keeps stacks: 2 ms and 1.3 MB of each rank
