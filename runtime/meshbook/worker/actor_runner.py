"""An actor in its process: a thread that takes one message at a time from its inbox and runs the endpoint.

    reader of the mail ──deliver──> inbox ──> thread of the actor ──reply──> the caller
                       ──cancel───> drops a message that waits, interrupts the one that runs

All of it is coroutines. A class with an ``async`` endpoint gets an asyncio loop on that thread, where its plain
endpoints run too; without a loop the same coroutines never wait for anything but the inbox, so that a single step runs
them. Messages are handled one at a time, except messages to a `concurrent_endpoint` and to `__supervise__`. The first
message makes the actor. When that fails it stays, and answers everything with that error.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from contextvars import Token
from typing import TYPE_CHECKING, Protocol, TypeVar

from meshbook.actor.classes import RELOAD, EndpointMethod, has_async_endpoints, swap_class
from meshbook.actor.context import ActorInstance, Belongings, Context, current_context, name_actors_in_logs
from meshbook.actor.errors import CircularCallError, NoEndpointError, SupervisionError, cause_of, why_stopped
from meshbook.actor.identity import ActorState
from meshbook.actor.ports import Port, ResponsePort
from meshbook.actor.router import Place
from meshbook.actor.supervision import SUPERVISE, MeshFailure
from meshbook.calls.mailboxes import LoadArgs, Outcome, ReplyTo
from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import ThreadGate, interruptible
from meshbook.errors import Failure, FailureKind, MailboxClosed, UsageError
from meshbook.shape.members import Members, Point, Region
from meshbook.source.location import CellSource, add_cell, users_place
from meshbook.source.thread_frames import frame_of
from meshbook.system.descriptors import above_standard
from meshbook.values.pickling import Pickled
from meshbook.wire import messages as wire
from meshbook.worker.actor_inbox import Inbox, InboxMessage

if TYPE_CHECKING:
    from meshbook.actor.actor_mesh import ActorMesh

T = TypeVar("T")


class _Handling:
    """A message that is being handled."""

    __slots__ = ("call", "context", "since", "task")

    def __init__(self, call: wire.Call, task: asyncio.Task[bool] | None) -> None:
        self.call, self.task, self.since = call, task, time.monotonic()
        self.context: Context | None = None  # None until user code of the actor runs


class ActorProcess(Protocol):
    """The process in which actors live: that of a rank, or the one that drives meshes. Any thread may use it."""

    @property
    def identity(self) -> wire.Identity:
        """Return the identity of the process; another object when it has become another rank."""

    def describe(self, error: BaseException) -> Failure:
        """Describe an error of user code. Not called on two threads at once, unless one takes too long."""

    def dumps(self, value: object, *, what: str) -> Pickled:
        """Pickle an answer, on the thread of its actor. Raises: SerializationError."""

    def output_beside(self, output: int) -> AbstractContextManager[object]:
        """Attribute the text that the thread, or task, prints inside the block to the output of this id."""

    def end_child(self, failure: Failure | None) -> None:
        """End the process if user code has forked it in the call that ends."""

    def give_up(self, is_meant: Callable[[wire.Call], bool], answer: Outcome) -> None:
        """Answer the open calls that will get no other answer."""

    def new_inbox(self) -> Inbox:
        """Return a new inbox for an actor."""

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Return a new event loop; called on the thread of its actor."""


class RunnerOwner(Protocol):
    """The actors of a process, as one of them needs them (`meshbook.worker.actors.ActorRegistry`)."""

    process: ActorProcess
    session: str

    def describe(self, error: BaseException) -> Failure:
        """Describe an error of user code."""

    def stop(self, runner: ActorRunner, why: str) -> None:
        """Stop an actor."""

    def refuse(self, runner: ActorRunner, why: str) -> None:
        """Take no more messages for an actor."""

    def tell_owner(self, runner: ActorRunner, failure: MeshFailure) -> None:
        """Tell the owner of an actor of a failure that no caller waits for."""

    def actor_ended(self, runner: ActorRunner, fault: BaseException | None) -> None:
        """Note that the thread of an actor has ended."""


class ActorRunner:
    """An actor. `deliver` and `cancel` are for the reader of the mail, `state` for any thread."""

    def __init__(self, registry: RunnerOwner, mailbox: int, name: str) -> None:
        self.mailbox, self.name = mailbox, name
        self.class_name = ""
        self.owner: Port[MeshFailure] | None = None  # gets the reports of failures
        self.current: dict[int, _Handling] = {}  # messages that are being handled, by serial
        self.mesh: ActorMesh[object] | None = None  # the actors that were spawned together with this one
        self._registry = registry
        self._process = registry.process
        self._inbox = registry.process.new_inbox()
        self._actor: object = None
        self._instance: ActorInstance | None = None
        self._broken: Failure | None = None
        self.made: Future[Outcome] = Future()  # says that the actor was made, or why it could not be
        self._beside: set[asyncio.Task[bool]] = set()  # tasks that run beside other messages
        self._declared: dict[str, object] = {}  # the class's declarations, by the names of endpoints
        # the port for reports of failures, and the identity of the process when it was made
        self._port: tuple[Port[MeshFailure], wire.Identity] | None = None
        # messages whose answer is to come on their response port, by serial
        self._promised: dict[int, tuple[InboxMessage, ResponsePort[object]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._why_ended = ""
        # the failure that the actor has reported itself (`meshbook.actor.context`)
        self._failure: BaseException | None = None
        self._cleans_up = True
        self.served = False  # whether it has handled its last message, and at most cleans up
        self.belongings = Belongings()
        self.gate: ThreadGate | None = None
        self.thread = threading.Thread(target=self._run, name=f"actor {name}", daemon=True)

    # ---- the reader of the mail ---------------------------------------------------------------------------------

    def deliver(self, call: wire.Call, load: LoadArgs, reply: ReplyTo) -> None:
        """Take a message; the first one is the class with its arguments."""
        self._inbox.put(call, load, reply)
        for name in call.chain:
            self._refuse_circular(name)

    def end(self) -> None:
        """Have the actor clean up and end after the messages that have come."""
        self._inbox.end()

    def end_now(self, why: str = "") -> None:
        """Have the actor clean up and end without more messages, and interrupt its running ones. Any thread. why:
        for callers who get no other answer, see `meshbook.errors.MailboxClosed`."""
        self._why_ended = why
        self._inbox.refuse(lambda call: True, lambda call: self._closed() if why else Outcome(wire.DROPPED))
        self._inbox.end()
        for handling in list(self.current.values()):
            self.cancel(handling.call, False)

    def _closed(self, why: str = "") -> Outcome:
        why = why or self._why_ended or why_stopped(self.name)
        error = MailboxClosed(self._process.identity.rank, self.mailbox, why)
        return Outcome(wire.RAISED, failure=self._registry.describe(error))

    def cancel(self, call: wire.Call, insist: bool) -> None:
        """Cancel ``call`` where it waits or runs."""
        if self._inbox.drop(call):
            return
        for message, _ in list(self._promised.values()):
            if message.call is call:
                self._keep_promise(message, self._failed(message, KeyboardInterrupt()))
        serial, handling = next(((n, one) for n, one in list(self.current.items()) if one.call is call), (0, None))
        if handling is None:
            return
        if handling.context is not None:
            handling.context.interrupted = True
        gate, loop, task = self.gate, self._loop, handling.task
        if gate is not None and not gate.interrupt(serial) and task is not None and loop is not None:
            loop.call_soon_threadsafe(task.cancel)

    def _refuse_circular(self, name: int) -> None:
        """Refuse messages that have come of the call ``name`` if an endpoint waits for that call. Any thread."""
        contexts = [handling.context for handling in list(self.current.values()) if handling.context is not None]
        waits_in = next((context.endpoint for context in contexts if name in context.waits), None)
        if waits_in is not None:
            self._inbox.refuse(lambda call: name in call.chain, functools.partial(self._circular, waits_in))

    def _circular(self, waits_in: str, call: wire.Call) -> Outcome:
        error = CircularCallError(self.name, waits_in, call.endpoint)
        return Outcome(wire.RAISED, failure=self._registry.describe(error))

    # ---- any thread ---------------------------------------------------------------------------------------------

    def state(self) -> ActorState:
        """Return the actor's state: its messages, its activity, and since when."""
        running = list(self.current.values())
        oldest = min((handling.since for handling in running), default=None)
        return ActorState(
            self._process.identity.rank,
            self.mailbox,
            self.name,
            self.class_name,
            queued=len(self._inbox.waiting()),
            doing=tuple(handling.call.endpoint for handling in running),
            busy_s=time.monotonic() - oldest if oldest is not None else 0.0,
            where=users_place(frame_of(self.thread.ident)) if running else "",
            broken=self._broken is not None,
        )

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
            first = _run_through(self._inbox.get())
            if first is not None:
                if not _run_through(self._answer(first, self._make(first))):
                    return
                if self._broken is None:
                    self.made.set_result(_DONE)
                else:
                    unmade = Outcome(wire.RAISED, failure=self._broken)
                    self.made.set_result(self._closed() if self._why_ended else unmade)
                if has_async_endpoints(type(self._actor)):
                    self._serve_in_loop()
                else:
                    _run_through(self._serve())
        except BaseException as error:  # a fault of ours: what user code raises is an answer
            fault = error
        finally:
            self.served = True
            self._actor = None  # files that it holds are closed now
            self.belongings.stop()
            self.gate.end()
            if not self.made.done():
                self.made.set_result(self._closed())
            for message, port in list(self._promised.values()):
                if not port.passed_on:
                    self._keep_promise(message, self._closed())
            self._registry.actor_ended(self, fault)

    async def _make(self, message: InboxMessage) -> Outcome:
        """Make the actor, from the view, the owner, the creator, the sources, the class and its arguments."""
        try:
            (view, self.mesh, self.owner, creator, sources, cls, *args), kwargs = message.load()
            self._learn(cls, sources)
            name_actors_in_logs()
            who = self._process.identity
            self._instance = ActorInstance(
                self.name, self.class_name, who.name, point_of(who.rank, message.call, view), self.mailbox,
                module=cls.__module__, creator=creator, place=Place(who.mesh, who.rank, who.generation), control=self,
                procs=Region.of(dict(zip(who.axes, who.sizes, strict=True))),
            )  # fmt: skip
            before = self._enter(message, view)
            try:
                self._actor = cls(*args, **kwargs)
            finally:
                current_context.reset(before)
            return _DONE
        except BaseException as error:
            self._broken = self._registry.describe(error)._replace(unmade=True)
            raise

    def _learn(self, cls: type, sources: Iterable[CellSource]) -> None:
        """Note the class's name, and its cells for tracebacks."""
        for source in sources:
            add_cell(source.text, source.number, source.file_name)
        self.class_name = cls.__qualname__
        self._declared.clear()

    def _reload(self, message: InboxMessage) -> Outcome:
        """Replace the class by the one that was sent. Raises: ReloadError."""
        (sources, cls), _ = message.load()
        swap_class(self._actor, cls, self._inbox.waiting(), has_loop=self._loop is not None)
        self._learn(cls, sources)
        return _DONE

    def _serve_in_loop(self) -> None:
        with above_standard():
            self._loop = loop = self._process.new_loop()
        asyncio.set_event_loop(loop)
        self._inbox.enter_loop(loop, self._take_aside)
        serving = loop.create_task(self._serve())
        try:
            while not serving.done():
                try:
                    loop.run_until_complete(serving)
                except KeyboardInterrupt:  # raised in a step of a task, which has it too
                    continue
        finally:
            loop.close()

    async def _serve(self) -> None:
        while (message := await self._inbox.get()) is not None:
            if self._loop is None:
                await self._answer(message, self._call(message))
            elif self._is_concurrent(message):
                self._answer_beside(message)
            else:  # in a task of its own, so that it can be cancelled
                await asyncio.wait({asyncio.ensure_future(self._answer(message, self._call(message)))})
            del message  # it may hold large arguments
        while self._beside:
            await asyncio.wait(self._beside)
        await self._clean_up()

    def _answer_beside(self, message: InboxMessage) -> None:
        task = asyncio.ensure_future(self._answer(message, self._call(message)))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _take_aside(self, message: InboxMessage) -> bool:
        """Handle failures of actors that it has spawned at once: the endpoint that runs may wait for them."""
        if message.call.endpoint != SUPERVISE:
            return False
        self._answer_beside(message)
        return True

    def _is_concurrent(self, message: InboxMessage) -> bool:
        if message.call.endpoint == SUPERVISE:
            return self._loop is not None
        declared = self._declaration(message.call.endpoint)
        return isinstance(declared, EndpointMethod) and declared.concurrent

    def _declaration(self, endpoint: str) -> object:
        declared = self._declared.get(endpoint)
        if declared is None:
            declared = inspect.getattr_static(type(self._actor), endpoint, None)
            self._declared[endpoint] = declared
        return declared

    async def _answer(self, message: InboxMessage, handle: Coroutine[object, object, Outcome | None]) -> bool:
        """Run ``handle``, in which an interrupt may be raised, and reply. Return False if it was dropped before.

        The message counts as handled before it ceases to wait, so a cancel finds it.
        """
        gate, serial, call = self.gate, message.serial, message.call
        assert gate is not None
        self.current[serial] = _Handling(call, asyncio.current_task() if self._loop is not None else None)
        if not self._inbox.begin(message):
            self.current.pop(serial)
            handle.close()
            return False
        with self._process.output_beside(call.output):
            answer: Outcome | None
            try:
                answer = await interruptible(gate, serial, handle)
            except BaseException as error:  # whatever user code raises, SystemExit included, becomes the reply
                if self._loop is not None and isinstance(error, asyncio.CancelledError):
                    error = KeyboardInterrupt().with_traceback(error.__traceback__)
                answer = self._failed(message, error, functools.partial(self._describe, serial))
        self._finish(message, answer)
        return True

    def _describe(self, serial: int, error: BaseException) -> Failure:
        """Describe an error that a message has raised. The error's text may wait, and an interrupt ends that too."""
        gate = self.gate
        assert gate is not None
        try:
            gate.open(serial)
            return self._registry.describe(error)
        except KeyboardInterrupt as interrupt:
            gate.close()
            return self._registry.describe(interrupt)
        finally:
            gate.close()

    def _finish(self, message: InboxMessage, answer: Outcome | None) -> None:
        self._process.end_child(None if answer is None else answer.failure)
        self.current.pop(message.serial, None)
        if answer is not None:
            self._promised.pop(message.serial, None)
            message.reply(answer)

    def _failed(
        self, message: InboxMessage, error: BaseException, describe: Callable[[BaseException], Failure] | None = None
    ) -> Outcome:
        error = cause_of(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and self._why_ended:
            return self._closed()
        broken = self._broken if self._actor is None else None
        failure = broken or (describe or self._registry.describe)(error)
        self._process.end_child(failure)
        if not message.call.reply and not interrupted:
            self._tell_owner(failure, message.call.endpoint)
        return Outcome(wire.INTERRUPTED if interrupted else wire.RAISED, failure=failure)

    def _tell_owner(self, failure: Failure, endpoint: str) -> None:
        if self.mesh is not None:
            told = failure._replace(exception=None)  # its class need not exist there
            self._registry.tell_owner(self, MeshFailure(self.mesh, f"{self.name}.{endpoint}", [told]))

    async def _call(self, message: InboxMessage) -> Outcome | None:
        """Run the endpoint; return its answer, or None if another one will come. Raises: the endpoint's errors."""
        call = message.call
        if call.endpoint == SUPERVISE:
            return await self._supervise(message)
        if self._broken is not None:
            raise UsageError(f"{self.name} could not be made")  # the reply tells what was raised there
        if call.endpoint == RELOAD:
            return self._reload(message)
        declared = self._declaration(call.endpoint)
        if declared is None or call.endpoint.startswith("__"):
            known = [n for n in dir(self._actor) if isinstance(getattr(type(self._actor), n, None), EndpointMethod)]
            raise NoEndpointError(self.class_name, call.endpoint, known)
        (view, to, *args), kwargs = message.load()
        answers_later = isinstance(declared, EndpointMethod) and declared.explicit_response_port
        if answers_later:
            args.insert(0, to or self._promise(message))
        before = self._enter(message, view)
        try:
            value = getattr(self._actor, call.endpoint)(*args, **kwargs)
            if value is not None and inspect.isawaitable(value):
                value = await self._value_of(value)
            if answers_later:
                return None
            if to is None:
                what = f"the result of {self.name}.{call.endpoint}"
                pickled = self._process.dumps(value, what=what)  # here it can be interrupted
                return Outcome(wire.OK, value, has_value=True, pickled=pickled)
            to.send(value)
            return _DONE
        except Exception as error:
            if to is not None:
                to.exception(error)
                return None
            if isinstance(error, StopIteration):  # which no coroutine can raise
                return self._failed(message, error)
            raise
        finally:
            current_context.reset(before)

    async def _value_of(self, value: Awaitable[T]) -> T:
        return await value if self._loop is not None else asyncio.run(_await(value))

    def _promise(self, message: InboxMessage) -> Port[object]:
        reply = functools.partial(self._keep_promise, message)
        port: ResponsePort[object] = ResponsePort(reply, functools.partial(self._failed, message))
        self._promised[message.serial] = message, port
        return port

    def _keep_promise(self, message: InboxMessage, answer: Outcome) -> None:
        self._promised.pop(message.serial, None)
        message.reply(answer)

    def _enter(self, message: InboxMessage, view: str | Members) -> Token[Context]:
        """Make `context` describe ``message``. view: the view that was called; its labels suffice for a plain one."""
        instance, call = self._instance, message.call
        assert instance is not None
        point: Callable[[], Point] = functools.partial(point_of, self._process.identity.rank, call, view)
        on_wait = None if self._loop is not None and self._is_concurrent(message) else self._refuse_circular
        here = self._process.identity
        if self._port is None or self._port[1] is not here:  # its rank may have got another number
            place = Place(here.mesh, here.rank, here.generation)
            self._port = Port(self._registry.session, place, self.mailbox), here
        now = Context(instance, point, self._port[0], self.belongings, call.endpoint, call.chain, on_wait)
        self.current[message.serial].context = now
        return current_context.set(now)

    async def _supervise(self, message: InboxMessage) -> Outcome:
        """Ask the actor to deal with a failure of an actor that it has spawned; else report it to the owner."""
        (failure,), _ = message.load()
        supervise = getattr(self._actor, SUPERVISE, None)
        before = self._enter(message, "")
        try:
            handled = supervise(failure) if supervise is not None else False
            if inspect.isawaitable(handled):
                handled = await self._value_of(handled)
            if not handled and self.mesh is not None:
                self._registry.tell_owner(self, failure.pass_on(self.mesh))
            return _DONE
        finally:
            current_context.reset(before)

    # ---- what the actor says of itself (`meshbook.actor.context.ActorControl`) -------------------------------------

    def stop_itself(self, reason: str) -> None:
        self._registry.stop(self, why_stopped(self.name, reason))

    def fail_itself(self, reason: str, *, now: bool) -> None:
        why = why_stopped(self.name, reason)
        self._failure, self._cleans_up = SupervisionError(reason), not now
        self._registry.refuse(self, why)
        if self.mesh is not None:
            identity = self._process.identity
            kind = FailureKind.ABORTED
            failure = Failure(identity.rank, identity.host, "ActorAborted", reason, (), "", kind)
            self._registry.tell_owner(self, MeshFailure(self.mesh, self.name, [failure]))
        if now:
            self.end_now(why)
        else:
            self._inbox.refuse(lambda call: True, lambda call: self._closed(why))
            self.end()

    async def _clean_up(self) -> None:
        """Run ``__cleanup__``; report its errors to the owner."""
        self.served = True
        cleanup = getattr(self._actor, "__cleanup__", None)
        if cleanup is None or not self._cleans_up:
            return
        with self._process.output_beside(0):
            try:
                result = cleanup(self._failure)
                if inspect.isawaitable(result):
                    await self._value_of(result)
            except BaseException as error:
                self._tell_owner(self._registry.describe(error), "__cleanup__")


_DONE = Outcome(wire.OK, None, has_value=True)


def point_of(rank: int, call: wire.Call, view: str | Members) -> Point:
    if isinstance(view, str):
        view = Region(tuple(view.split(",")) if view else (), call.target[0])
    return view.point(rank)


def _run_through(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine that waits for no event of a loop; return its value."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("it waits, and there is no event loop")


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable
