"""An actor in its process: a thread that takes one message at a time from its inbox and runs the endpoint.

    thread of the mail ──deliver──> inbox ──> thread of the actor ──reply──> the caller
                       ──cancel───> drops a message that waits, interrupts the one that runs

A class with an ``async`` endpoint gets an asyncio loop on that thread; its plain endpoints run there too. Messages are
still handled one at a time, except those to a `concurrent_endpoint`, and what `__supervise__` is told. The first
message makes the actor. When that fails it stays, and answers everything with what was raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from meshbook.actor.belongings import Belongings
from meshbook.actor.context import ActorInstance, Context, current_context
from meshbook.actor.decorators import EndpointMethod
from meshbook.actor.environment import ActorEnvironment, errors_to, point_of
from meshbook.actor.errors import CircularCallError, NoEndpointError, cause_of
from meshbook.actor.inbox import Inbox, InboxMessage
from meshbook.actor.interruptible import InterruptibleCoroutine
from meshbook.actor.ports import Port, ResponsePort
from meshbook.actor.reload import RELOAD, has_async_endpoints, swap_class
from meshbook.actor.supervision import SUPERVISE, MeshFailure
from meshbook.calls.answer import Outcome
from meshbook.calls.mailboxes import LoadArgs, ReplyTo
from meshbook.concurrency.future import Future
from meshbook.concurrency.thread_interrupts import ThreadGate
from meshbook.errors import Failure, MailboxClosed, UsageError
from meshbook.shape.members import Members, Point
from meshbook.source.cells import add_cell
from meshbook.source.functions import CellSource
from meshbook.source.location import users_place
from meshbook.source.thread_frames import frame_of
from meshbook.system.descriptors import above_standard
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.actor.actor_mesh import ActorMesh


class ActorRunner:
    """One actor; `deliver` and `cancel` are for the thread of the mail, `state` for any."""

    def __init__(self, environment: ActorEnvironment, mailbox: int, name: str) -> None:
        self.mailbox, self.name = mailbox, name
        self.class_name = ""
        self.owner: Port[Any] | None = None
        """Who is told of failures."""
        self.current: dict[int, tuple[wire.Call, float]] = {}
        """Messages that are being handled, by serial, and since when."""
        self.mesh: ActorMesh[Any] | None = None
        """All actors that were spawned together with this one."""
        self._environment = environment
        self._inbox = Inbox()
        self._actor: Any = None
        self._instance: ActorInstance | None = None
        self._broken: Failure | None = None
        self._made: Future[Outcome] = Future()
        self._tasks: dict[int, asyncio.Task[Outcome | None]] = {}
        self._beside: set[asyncio.Task[None]] = set()
        """What runs beside other messages."""
        self._contexts: dict[int, Context] = {}
        self._promised: dict[int, tuple[InboxMessage, ResponsePort[Any]]] = {}
        """Messages whose answer is to come on their response port, by serial."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._why_ended = ""
        self.served = False
        """Whether it has handled its last message, and at most cleans up."""
        self.belongings = Belongings()
        self.gate: ThreadGate | None = None
        self.thread = threading.Thread(target=self._run, name=f"actor {name}", daemon=True)

    # ---- the thread of the mail ---------------------------------------------------------------------------------

    def deliver(self, call: wire.Call, load: LoadArgs, reply: ReplyTo) -> None:
        """Take a message; the first one is the class with its arguments."""
        self._inbox.put(call, load, reply)
        for name in call.chain:
            self._refuse_circular(name)

    def answer_when_made(self, reply: ReplyTo) -> None:
        """Say that the actor was made, or why it could not be, as soon as that is known."""
        self._made.add_done_callback(lambda made: reply(made.get(0)))

    def end(self) -> None:
        """Have the actor clean up and end after the messages that have come."""
        self._inbox.end()

    def end_now(self, why: str = "") -> None:
        """Have the actor clean up and end without more messages; what it handles is interrupted. On any thread.

        why: for callers who get no other answer, as `meshbook.errors.MailboxClosed` has it.
        """
        self._why_ended = why
        self._inbox.clear(self._closed() if why else Outcome(wire.DROPPED))
        self._inbox.end()
        for call, _ in list(self.current.values()):
            self.cancel(call, False)

    def _closed(self) -> Outcome:
        why = self._why_ended or f'the actors "{self.name}" were stopped'
        error = MailboxClosed(self._environment.rank, self.mailbox, why)
        return Outcome(wire.RAISED, failure=self._environment.describe(error))

    def cancel(self, call: wire.Call, insist: bool) -> None:
        """The sender wants the end of ``call``."""
        if self._inbox.drop(call):
            return
        for message, _ in list(self._promised.values()):
            if message.call is call:
                self._keep_promise(message, self._failed(message, KeyboardInterrupt()))
        serial = next((serial for serial, (other, _) in list(self.current.items()) if other is call), 0)
        if (context := self._contexts.get(serial)) is not None:
            context.interrupted = True
        gate, loop, task = self.gate, self._loop, self._tasks.get(serial)
        if gate is not None and not gate.interrupt(serial) and task is not None and loop is not None:
            loop.call_soon_threadsafe(task.cancel)

    def _refuse_circular(self, name: int) -> None:
        """Whoever waits for the call ``name`` takes no message that has come of it. On any thread."""
        waits_in = next((context.endpoint for context in list(self._contexts.values()) if name in context.waits), None)
        if waits_in is not None:
            self._inbox.refuse(lambda call: name in call.chain, functools.partial(self._circular, waits_in))

    def _circular(self, waits_in: str, call: wire.Call) -> Outcome:
        error = CircularCallError(self.name, waits_in, call.endpoint)
        return Outcome(wire.RAISED, failure=self._environment.describe(error))

    # ---- any thread ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """Plain data: what it is, what it does, and since when."""
        running = list(self.current.values())
        oldest = min((since for _, since in running), default=None)
        return {
            "mailbox": self.mailbox,
            "name": self.name,
            "class": self.class_name,
            "queued": len(self._inbox.waiting()),
            "doing": [call.endpoint for call, _ in running],
            "where": users_place(frame_of(self.thread.ident)) if running else "",
            "busy_s": time.monotonic() - oldest if oldest is not None else 0.0,
            "broken": self._broken is not None,
        }

    @property
    def is_busy(self) -> bool:
        """Whether it handles a message, or has one waiting."""
        return bool(self.current or self._inbox.waiting())

    # ---- the actor's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is the main thread's
        self.gate = ThreadGate()
        fault: BaseException | None = None
        try:
            first = self._inbox.get()
            if first is not None:
                self._answer(first, lambda: self._make(first))
                self._made.set_result(self._how_made())
                if has_async_endpoints(type(self._actor)):
                    self._serve_in_loop()
                else:
                    self._serve()
        except BaseException as error:  # a fault of ours: what user code raises is an answer
            fault = error
        finally:
            self.served = True
            self._actor = None  # files that it holds are closed now
            self.belongings.stop()
            self.gate.end()
            if not self._made.done():
                self._made.set_result(self._closed())
            for message, port in list(self._promised.values()):
                if not port.passed_on:
                    self._keep_promise(message, self._closed())
            self._environment.actor_ended(self, fault)

    def _make(self, message: InboxMessage) -> Outcome:
        """The actor itself; the payload: the view's labels, its owner, its source, its class, its arguments."""
        try:
            (view, self.mesh, self.owner, sources, cls, *args), kwargs = message.load()
            self._learn(cls, sources)
            place = point_of(self._environment.rank, message.call, view)
            self._instance = ActorInstance(self.name, self.class_name, self._environment.mesh_name, place, self.mailbox)
            with self._context(message, view):
                self._actor = cls(*args, **kwargs)
            return Outcome(wire.OK, None, has_value=True)
        except BaseException as error:
            self._broken = self._environment.describe(error)
            raise

    def _how_made(self) -> Outcome:
        if self._broken is None:
            return Outcome(wire.OK, None, has_value=True)
        return self._closed() if self._why_ended else Outcome(wire.RAISED, failure=self._broken)

    def _learn(self, cls: type, sources: Iterable[CellSource]) -> None:
        """Know the class by its name, and its cells for tracebacks."""
        for source in sources:
            add_cell(source.text, source.number, source.file_name)
        self.class_name = cls.__qualname__

    def _reload(self, message: InboxMessage) -> Outcome:
        """Take the class that was sent. Raises: ReloadError."""
        if self._broken is not None:
            raise UsageError(f"{self.name} could not be made")  # the reply tells what was raised there
        (sources, cls), _ = message.load()
        swap_class(self._actor, cls, self._inbox.waiting(), has_loop=self._loop is not None)
        self._learn(cls, sources)
        return Outcome(wire.OK, None, has_value=True)

    def _serve(self) -> None:
        while (message := self._inbox.get()) is not None:
            self._answer(message, functools.partial(self._handle, message))
            del message  # it may hold large arguments
        self._answer_cleanup()

    def _answer(self, message: InboxMessage, handle: Callable[[], Outcome | None]) -> None:
        """Run ``handle``, in which an interrupt may be raised, and reply."""
        gate = self.gate
        assert gate is not None
        serial, call = message.serial, message.call
        self.current[serial] = (call, time.monotonic())
        with self._environment.output_of(call.output):
            try:
                answer: Outcome | None
                try:
                    gate.open(serial)
                    answer = handle()
                finally:
                    gate.close()
            except BaseException as error:  # whatever user code raises, SystemExit included, becomes the reply
                gate.close()  # the interrupt may have come just before it was
                answer = self._failed(message, error)
        self._finish(message, answer)

    def _finish(self, message: InboxMessage, answer: Outcome | None) -> None:
        self._environment.end_child(None if answer is None else answer.failure)
        self.current.pop(message.serial, None)
        if answer is not None:
            self._promised.pop(message.serial, None)
            message.reply(answer)

    def _failed(self, message: InboxMessage, error: BaseException) -> Outcome:
        error = cause_of(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and self._why_ended:
            return self._closed()
        broken = self._broken if self._actor is None else None
        failure = broken or self._environment.describe(error)
        self._environment.end_child(failure)
        if not message.call.reply and not interrupted:
            self._tell_owner(failure, message.call.endpoint)
        return Outcome(wire.INTERRUPTED if interrupted else wire.RAISED, failure=failure)

    def _tell_owner(self, failure: Failure, endpoint: str) -> None:
        if self.mesh is not None:
            told = failure._replace(exception=None)  # its class need not exist there
            self._environment.tell_owner(self, MeshFailure(self.mesh, f"{self.name}.{endpoint}", [told]))

    def _handle(self, message: InboxMessage) -> Outcome | None:
        """A plain endpoint: its answer, or what it raises."""
        if message.call.endpoint == RELOAD:
            return self._reload(message)
        if message.call.endpoint == SUPERVISE:
            (failure,), _ = message.load()
            with self._context(message, ""):
                return self._supervised(self._supervise(failure), failure)
        method, port, args, kwargs = self._prepare(message)
        with self._context(message, args[0]), errors_to(args[1]):
            value = method(*([port] if port is not None else []), *args[2:], **kwargs)
            return self._answer_of(message, value, port, args[1])
        return None

    def _prepare(self, message: InboxMessage) -> tuple[Any, Port[Any] | None, tuple[Any, ...], dict[str, Any]]:
        """The method, its response port if it wants one, and the payload: the view's labels, a port, arguments."""
        if self._broken is not None:
            raise UsageError(f"{self.name} could not be made")  # the reply tells what was raised there
        declared = inspect.getattr_static(type(self._actor), message.call.endpoint, None)
        if declared is None or message.call.endpoint.startswith("__"):
            known = [n for n in dir(self._actor) if isinstance(getattr(type(self._actor), n, None), EndpointMethod)]
            raise NoEndpointError(self.class_name, message.call.endpoint, known)
        args, kwargs = message.load()
        port: Port[Any] | None = None
        if isinstance(declared, EndpointMethod) and declared.explicit_response_port:
            port = args[1] or self._promise(message)
        return getattr(self._actor, message.call.endpoint), port, args, kwargs

    def _promise(self, message: InboxMessage) -> Port[Any]:
        reply = functools.partial(self._keep_promise, message)
        port: ResponsePort[Any] = ResponsePort(reply, functools.partial(self._failed, message))
        self._promised[message.serial] = message, port
        return port

    def _keep_promise(self, message: InboxMessage, answer: Outcome) -> None:
        self._promised.pop(message.serial, None)
        message.reply(answer)

    def _answer_of(
        self, message: InboxMessage, value: Any, port: Port[Any] | None, to: Port[Any] | None
    ) -> Outcome | None:
        """The answer of an endpoint that has returned; None where another one will come, or goes to a port."""
        if port is not None:
            return None
        if to is not None:
            to.send(value)
            return Outcome(wire.OK, None, has_value=True)
        return Outcome(wire.OK, value, has_value=True, what=f"the result of {self.name}.{message.call.endpoint}")

    @contextlib.contextmanager
    def _context(self, message: InboxMessage, view: str | Members) -> Generator[None, None, None]:
        instance, environment = self._instance, self._environment
        assert instance is not None
        point: Callable[[], Point] = functools.partial(point_of, environment.rank, message.call, view)
        context = Context(instance, point, environment.port_to(self.mailbox))
        context.belongings = self.belongings
        context.chain, context.endpoint = message.call.chain, message.call.endpoint
        if not self._is_concurrent(message):
            context.on_wait = self._refuse_circular
        self._contexts[message.serial] = context
        token = current_context.set(context)
        try:
            yield
        finally:
            current_context.reset(token)
            self._contexts.pop(message.serial, None)

    def _supervise(self, failure: MeshFailure) -> Any:
        """Ask the actor to deal with a failure of what it has spawned; returns what it says."""
        supervise = getattr(self._actor, SUPERVISE, None)
        return supervise(failure) if supervise is not None else False

    def _supervised(self, handled: object, failure: MeshFailure) -> Outcome:
        if not handled and self.mesh is not None:
            self._environment.tell_owner(self, failure.pass_on(self.mesh))
        return Outcome(wire.OK, None, has_value=True)

    # ---- in an event loop ---------------------------------------------------------------------------------------

    def _serve_in_loop(self) -> None:
        with above_standard():
            self._loop = loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._inbox.enter_loop(loop, self._take_aside)
        serving = loop.create_task(self._serve_async())
        try:
            while not serving.done():
                try:
                    loop.run_until_complete(serving)
                except KeyboardInterrupt:  # raised in a step of a task, which has it too
                    continue
        finally:
            loop.close()

    async def _serve_async(self) -> None:
        while (message := await self._inbox.get_async()) is not None:
            if self._is_concurrent(message):
                self._answer_beside(message)
            else:
                await asyncio.wait({asyncio.ensure_future(self._answer_async(message))})
            del message
        while self._beside:
            await asyncio.wait(self._beside)
        task = asyncio.ensure_future(self._clean_up_async())
        await asyncio.wait({task})

    def _answer_beside(self, message: InboxMessage) -> None:
        task = asyncio.ensure_future(self._answer_async(message))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _take_aside(self, message: InboxMessage) -> bool:
        """Failures of what it has spawned are told at once: the endpoint that runs may be waiting for just that."""
        if message.call.endpoint != SUPERVISE:
            return False
        if self._inbox.begin(message):
            self._answer_beside(message)
        return True

    def _is_concurrent(self, message: InboxMessage) -> bool:
        if message.call.endpoint == SUPERVISE:
            return self._loop is not None
        declared = inspect.getattr_static(type(self._actor), message.call.endpoint, None)
        return isinstance(declared, EndpointMethod) and declared.concurrent

    async def _answer_async(self, message: InboxMessage) -> None:
        """Handle a message in a task of its own, so that it can be cancelled."""
        self.current[message.serial] = (message.call, time.monotonic())
        with self._environment.output_of(message.call.output):
            answer: Outcome | None
            task = asyncio.ensure_future(self._handle_async(message))
            self._tasks[message.serial] = task
            await asyncio.wait({task})
            self._tasks.pop(message.serial, None)
            try:
                answer = task.result()
            except asyncio.CancelledError as error:
                answer = self._failed(message, KeyboardInterrupt().with_traceback(error.__traceback__))
            except BaseException as error:
                answer = self._failed(message, error)
        self._finish(message, answer)

    async def _handle_async(self, message: InboxMessage) -> Outcome | None:
        assert self.gate is not None
        try:
            return await InterruptibleCoroutine(self.gate, message.serial, self._call_async(message))
        except (KeyboardInterrupt, SystemExit) as error:  # which would end the loop
            return self._failed(message, error)

    async def _call_async(self, message: InboxMessage) -> Outcome | None:
        if message.call.endpoint == RELOAD:
            return self._reload(message)
        if message.call.endpoint == SUPERVISE:
            (failure,), _ = message.load()
            with self._context(message, ""):
                handled = self._supervise(failure)
                if inspect.isawaitable(handled):
                    handled = await handled
                return self._supervised(handled, failure)
        method, port, args, kwargs = self._prepare(message)
        with self._context(message, args[0]), errors_to(args[1]):
            value = method(*([port] if port is not None else []), *args[2:], **kwargs)
            if inspect.isawaitable(value):
                value = await value
            return self._answer_of(message, value, port, args[1])
        return None

    # ---- the end ------------------------------------------------------------------------------------------------

    def _answer_cleanup(self) -> None:
        """Run ``__cleanup__``; what it raises is told to the owner."""
        self.served = True
        cleanup = getattr(self._actor, "__cleanup__", None)
        if cleanup is None:
            return
        with self._environment.output_of(0):
            try:
                result = cleanup(None)
                if inspect.isawaitable(result):
                    asyncio.run(_await(result))
            except BaseException as error:
                self._tell_owner(self._environment.describe(error), "__cleanup__")

    async def _clean_up_async(self) -> None:
        self.served = True
        cleanup = getattr(self._actor, "__cleanup__", None)
        if cleanup is None:
            return
        with self._environment.output_of(0):
            try:
                result = cleanup(None)
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:
                self._tell_owner(self._environment.describe(error), "__cleanup__")


async def _await(result: Any) -> Any:
    return await result
