"""A worker: one rank's process. It runs the user's code on its main thread and stays answerable on another.

    main thread      receives calls from the agent, one at a time, runs them, replies
    control thread   receives urgent messages: cancel, abort of groups, queries, answers of the store, freed
                     segments; blocks SIGINT
    mail thread      receives calls to mailboxes, once there are any (`meshbook.worker.mail`); an idle actor may do that

Each thread reads its own socket; writers hold that socket's lock. The process ends when the agent closes the call
socket, and dies with its agent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import time
from typing import TYPE_CHECKING

from meshbook.actor.actor_mesh import ask_controller
from meshbook.calls.mailboxes import Outcome, pack
from meshbook.concurrency import forks
from meshbook.curves.nan_watch import nan_watch
from meshbook.curves.recorder import DEVICE_S, recorder
from meshbook.errors import MeshError
from meshbook.errors.advice import set_advice
from meshbook.groups.collectives_off import NO_DISTRIBUTED, leave_to_parent
from meshbook.shape.members import Extent
from meshbook.shell.postmortem_memory import HeldMemoryGauge
from meshbook.shell.shell import RankShell
from meshbook.stacks.dump import accept_dumps
from meshbook.system.devices import GpuGauge, bind
from meshbook.system.processes import may_be_traced, set_title
from meshbook.wire import messages as wire
from meshbook.worker.control_thread import ControlThread
from meshbook.worker.direct_calls import CalleeLink
from meshbook.worker.endpoints import CALLS, INVOKING
from meshbook.worker.parts import WorkerParts
from meshbook.workspace.modules import ask_for_missing

if TYPE_CHECKING:
    from meshbook.workspace.modules import FoundModules

LONG_CALL_S = 0.02  # other calls may wait behind a call that took longer, and may have been cancelled meanwhile


class Worker(WorkerParts):
    """The worker of this process: its life, and the calls that its main thread runs."""

    def __init__(self, shell: RankShell, call_fd: int, urgent_fd: int, mail_fd: int) -> None:
        super().__init__(shell, call_fd, urgent_fd, mail_fd)
        self.control = ControlThread(self)
        self._was_long = False

    # ---- life ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the identity that the agent gives, start the control thread, and report that."""
        received = self.calls.receive()
        if received is None:
            os._exit(0)
        begin = received[0]
        assert isinstance(begin, wire.Begin)
        self.identity = identity = begin.identity
        self.output.marker = begin.marker
        self.direct.open(begin.direct, controller_is_here=begin.controller_is_here)
        self.mail.open_direct(begin.direct, controller_is_here=begin.controller_is_here)
        self.gpu, self.kept = GpuGauge(identity.device), HeldMemoryGauge()
        forks.at_fork(in_child=self._leave_to_parent)
        enter_environment(begin)
        set_title(f"{identity.name} rank {identity.rank}")
        if not begin.spawn.shares_files:
            ask_for_missing(ask_for_module)
        seed()
        self.shell.start_rank(rank=identity.rank, host=identity.host, sink=self.output, namespace=self._names())
        self.shell.debugger.begin(self.output.tell_prompt)
        self.gate.take_signal()  # modules that were imported just now may have set a handler
        control = self.control.start()
        may_be_traced()
        self.calls.send(wire.Begun(os.getpid(), control, accept_dumps()))

    def serve_calls(self) -> None:
        """Run calls until the agent closes the socket."""
        while (received := self._receive()) is not None:
            message, frames, link = received
            if isinstance(message, wire.Renumbered):
                self._renumber(message.identity)
            else:
                assert isinstance(message, wire.Call)
                self._run_call(message, frames, link)

    def _receive(self) -> tuple[wire.ToWorker, list[bytes], CalleeLink | None] | None:
        """Wait for the next message, of the controller's link or of the agent; return None at the end.

        What is there by the link goes first: it was sent before what the agent has brought.
        """
        arrivals, frames = self.arrivals, self.calls.frames
        while True:
            if arrivals.early:
                return arrivals.early.popleft()
            is_there = arrivals.fd >= 0 and not frames.has_message
            if is_there and not arrivals.wait():
                continue
            if (received := self.calls.receive(is_there=is_there)) is None:
                return None
            call = received[0]
            if isinstance(call, wire.Call):
                if call.direct and not self.direct.is_news(call):
                    continue
                self.direct.note(call)
            return *received, None

    def _leave_to_parent(self) -> None:
        """Close the sockets in a process that user code has forked: it is no rank."""
        for end in (self.calls, self.urgent, self.mail):
            end.close()
        self.direct.abandon()
        self.gate.after_fork()
        self.registry.after_fork()
        leave_to_parent(self._generation)

    def _renumber(self, now: wire.Identity) -> None:
        """Become another rank; the process groups follow when they are formed again."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() == self.identity.threads:  # else the user has chosen
            torch.set_num_threads(now.threads)
        self.identity = now
        set_title(f"{now.name} rank {now.rank}")
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

    def _run_call(self, call: wire.Call, frames: list[bytes], link: CalleeLink | None) -> None:
        if self._was_long:
            self.control.catch_up()
        if not self.claims.start(call.id, call.endpoint):
            self.payloads.discard(call)
            return
        if call.output != self.output.current:
            self.output.begin(call.output)
        started, waited_s = time.monotonic(), self.groups.waited_s(self.main_thread)
        said = self.calls.sent
        try:
            answer = self._answer(call, frames)
        finally:
            self.claims.finished.append(call.id)
            self.claims.running = None
        if self._generation != forks.generation:
            self.end_child(answer.failure)
        if answer.failure is not None:
            self.groups.note_failed(call.id)
        self.shell.flush()
        if nan_watch.is_on:
            with self.shell.output_of(call.output):
                nan_watch.settle()
        if recorder.is_due:
            recorder.flush(DEVICE_S)  # here no interrupt can come in the midst of it
        self.shell.reopen()
        duration_s = time.monotonic() - started
        self._was_long = duration_s > LONG_CALL_S
        self._reply(call, link, answer, duration_s, self.groups.waited_s(self.main_thread) - waited_s, said)
        del answer
        if self.shell.is_untidy:
            self.shell.tidy()

    def _answer(self, call: wire.Call, frames: list[bytes]) -> Outcome:
        self.shell.debugger.refusal = call.no_prompt
        try:
            is_wanted = self.gate.open(call.id)
            try:
                if not is_wanted:
                    raise KeyboardInterrupt
                args, kwargs = self.payloads.load(call, frames, self.identity)
                return CALLS[call.endpoint](self, call, *args, **kwargs)
            finally:
                self.gate.close()
                self.shell.debugger.end_call()
        except BaseException as error:  # whatever user code raises, SystemExit included, becomes the reply
            self.gate.close()  # the interrupt may have come just before it was
            status = wire.INTERRUPTED if isinstance(error, KeyboardInterrupt) else wire.RAISED
            failure = self.shell.describe(error)
            if CALLS.get(call.endpoint) in INVOKING:
                with contextlib.suppress(Exception):  # the exception's own code may raise
                    self.shell.keep_error(error, call.id)
            return Outcome(status, failure=failure)

    def _reply(
        self, call: wire.Call, link: CalleeLink | None, answer: Outcome, duration_s: float, waited_s: float, said: int
    ) -> None:
        """Send the answer. said: how many messages the agent had of ours when the call began."""
        write = self.payloads.pool.write
        if answer.position:
            write = functools.partial(write, position=answer.position)
        status, payload, inline, segment = pack(answer, write, self.shell.describe)
        freed, groups = self.payloads.take_freed(), self.groups.tell()
        message = wire.Reply(call.id, status, duration_s, segment, inline, waited_s, None, groups, freed)
        if link is None:
            self.calls.send(message, payload)
        else:
            self.direct.answer(link, message, payload, may_pass=not (segment or freed) and said == self.calls.sent)


ASK_S = 20.0  # a module may take so long to come from the notebook


def enter_environment(begin: wire.Begin) -> None:
    """Enter the folder and the environment that the agent gives. Raises: the errors of preloaded modules."""
    spawn = begin.spawn
    if not spawn.command.inherits:
        os.environb.clear()
    os.environb.update({**spawn.environment, **begin.environment})
    for name in (name for name, value in spawn.command.environment.items() if value is None):
        os.environ.pop(name, None)
    if begin.binding:
        bind(begin.binding)
    set_advice(spawn.advice)
    if spawn.cwd:
        try:
            os.chdir(spawn.cwd)
        except OSError as error:
            print(f"cannot enter the notebook's folder: {error}", file=sys.stderr)
    sys.path[:0] = [path for entry in spawn.sys_path if (path := os.fsdecode(entry)) not in sys.path]
    sys.argv = ["meshbook-worker"]
    if (torch := sys.modules.get("torch")) is not None:
        threads = begin.identity.threads
        torch.set_num_threads(min(threads, len(os.sched_getaffinity(0))) if begin.binding else threads)
    for module in spawn.preload if begin.imports else ():
        __import__(module)


def ask_for_module(name: str) -> FoundModules | None:
    """Ask for the notebook's own module of this name, which is not on this machine. Raises: ModuleNotFoundError."""
    try:
        found: FoundModules | None = ask_controller("find_module", (name,), {}, "the workspace").get(ASK_S)
    except (MeshError, TimeoutError) as error:
        raise ModuleNotFoundError(
            f"No module named '{name}' here, and the notebook cannot be asked: {error}", name=name
        ) from error
    return found


def seed() -> None:
    """Give this rank random states of its own: forks share the template's."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is None:
        return
    if torch.backends.cuda.is_built():
        torch.seed()
    else:
        torch.default_generator.seed()  # for devices torch.seed() keeps stacks: 2 ms and 1.3 MB of each rank
