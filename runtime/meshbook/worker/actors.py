"""The actors of a process: how they are spawned and looked up in the mailbox `ACTORS`, and the process that they need.

A spawn is a call to `ACTORS` whose endpoint is ``<mailbox>:<session>:<name>``, since the reader of the mail unpickles
nothing. It opens the actor's mailbox at once, so that messages which come behind it find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from meshbook.actor.errors import ActorStuckError, why_stopped
from meshbook.actor.identity import ActorState
from meshbook.actor.router import ACTORS, FIRST_OF_RANKS, READY, STOP, WATCH
from meshbook.actor.supervision import SUPERVISE, MeshFailure
from meshbook.calls.mailboxes import LoadArgs, Mailboxes, Outcome, ReplyTo
from meshbook.concurrency.background import run_in_background, tell
from meshbook.errors import Failure, MailboxClosed, MeshError
from meshbook.source.location import users_place
from meshbook.source.thread_frames import frame_of
from meshbook.values.pickling import dumps
from meshbook.wire import messages as wire
from meshbook.worker.actor_inbox import Inbox
from meshbook.worker.actor_runner import ActorProcess, ActorRunner
from meshbook.worker.mail_turn import IdleSelector

if TYPE_CHECKING:
    from meshbook.shell.shell import RankShell
    from meshbook.worker.mail import WorkerMail


class RankProcess:
    """The process of a rank."""

    def __init__(
        self,
        shell: RankShell,
        mail: WorkerMail,
        identity: Callable[[], wire.Identity],
        end_child: Callable[[Failure | None], None],
    ) -> None:
        self._identity, self._turn = identity, mail.turn
        self.describe, self.output_beside = shell.describe, shell.output_beside
        self.end_child, self.give_up = end_child, mail.give_up
        self.dumps = dumps

    @property
    def identity(self) -> wire.Identity:
        return self._identity()

    def new_inbox(self) -> Inbox:
        return Inbox(self._turn.read_while, self._turn.wake)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        if type(loop) is not asyncio.SelectorEventLoop:  # of a policy that user code has set
            return loop
        loop.close()
        return asyncio.SelectorEventLoop(IdleSelector(self._turn))


EARLY_S = 2.0  # a message waits so long for the spawn of its actor
DESCRIBE_S = 0.5  # the failure of an actor waits so long for that of another one, whose text may never come
END_S = 0.8  # time for actors to clean up when their process is to end; after 1 s it is killed
STOP_GRACE_S = 3.0  # a stopped actor may go on so long with earlier messages; then it is interrupted
STOP_INSIST_S = 2.0  # it is interrupted again and again for so long, until it is said not to end
STOP_AGAIN_S = 0.5
_ENDED = Outcome(wire.OK, None, has_value=True)


class ActorRegistry:
    """The actors of a process."""

    def __init__(self, process: ActorProcess, mailboxes: Mailboxes, *, keeps_early: bool = True) -> None:
        """keeps_early: messages for mailboxes that have never been open may be for actors that are still to come."""
        self.process, self._mailboxes = process, mailboxes
        self.session = ""  # the id of the session, once an actor was spawned
        self._runners: dict[int, ActorRunner] = {}
        self._at_end: dict[int, list[ReplyTo]] = {}
        self._describing = threading.Lock()
        # messages for actors that are not there yet, by mailbox
        self._early: dict[int, list[tuple[wire.Call, LoadArgs, ReplyTo]]] = {}
        mailboxes.open(ACTORS, self._spawn, self._cancel_spawn)
        if keeps_early:
            mailboxes.open_rest(self._keep_early)

    def after_fork(self) -> None:
        """Replace the lock in a forked child: it may be that of a thread which the child lacks."""
        self._describing = threading.Lock()

    def states(self) -> list[ActorState]:
        """Return the state of each actor."""
        return [runner.state() for runner in list(self._runners.values())]

    @property
    def busy(self) -> int:
        """Return how many actors handle messages, or have some waiting. Any thread."""
        return sum(runner.is_busy for runner in list(self._runners.values()))

    @property
    def handling(self) -> dict[int, int]:
        """Return the mailboxes of busy actors, by their threads."""
        return {runner.thread.ident or 0: runner.mailbox for runner in list(self._runners.values()) if runner.is_busy}

    def handled(self) -> dict[int, tuple[int, Collection[int]]]:
        """Return each actor's mailbox and the serials of messages that it handles, by its thread. Any thread."""
        return {
            runner.thread.ident or 0: (runner.mailbox, tuple(runner.current)) for runner in list(self._runners.values())
        }

    # ---- the reader of the mail ---------------------------------------------------------------------------------

    def _spawn(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        mailbox, self.session, name = call.endpoint.split(":", 2)
        runner = ActorRunner(self, int(mailbox), name)
        self._runners[runner.mailbox] = runner
        self._mailboxes.open(runner.mailbox, functools.partial(self._deliver, runner), runner.cancel)
        runner.deliver(call, load_args, reply)
        runner.thread.start()  # before an early word that the actor is to stop
        for early in self._early.pop(runner.mailbox, []):
            self._deliver(runner, *early)

    def _keep_early(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        """Keep a message that may have overtaken, by another connection, the spawn of its actor."""
        closed = MailboxClosed(self.process.identity.rank, call.mailbox)
        if call.origin is None and call.mailbox < FIRST_OF_RANKS:  # who has spawned it was here before
            raise closed
        waiting = self._early.setdefault(call.mailbox, [])
        waiting.append((call, load_args, reply))
        if len(waiting) == 1:
            timer = threading.Timer(EARLY_S, self._give_up_early, [call.mailbox, closed])
            timer.daemon = True
            timer.start()

    def _give_up_early(self, mailbox: int, closed: MailboxClosed) -> None:
        for _, _, reply in self._early.pop(mailbox, []):
            reply(Outcome(wire.RAISED, failure=self.describe(closed)))

    def _cancel_spawn(self, call: wire.Call, insist: bool) -> None:
        for runner in list(self._runners.values()):
            runner.cancel(call, insist)

    def _deliver(self, runner: ActorRunner, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        if call.endpoint == WATCH:
            self._at_end.setdefault(runner.mailbox, []).append(reply)
            return
        if call.endpoint == READY:
            runner.made.add_done_callback(lambda made: reply(made.get(0)))
            return
        if call.endpoint != STOP:
            runner.deliver(call, load_args, reply)
            return
        self._at_end.setdefault(runner.mailbox, []).append(reply)
        self.stop(runner, why_stopped(runner.name))

    # ---- any thread ---------------------------------------------------------------------------------------------

    def stop(self, runner: ActorRunner, why: str) -> None:
        """End an actor behind the messages that have come, and see to it that it ends."""
        self.refuse(runner, why)
        runner.end()
        run_in_background(functools.partial(self._see_to_end, runner))

    def refuse(self, runner: ActorRunner, why: str) -> None:
        """Take no more messages for an actor."""
        self._mailboxes.close(runner.mailbox, why)

    def _see_to_end(self, runner: ActorRunner) -> None:
        """Interrupt an actor that does not end by itself; report it if that does not help. Runs on a side thread."""
        runner.thread.join(STOP_GRACE_S)
        until = time.monotonic() + STOP_INSIST_S
        while runner.thread.is_alive() and not runner.served and time.monotonic() < until:
            runner.end_now(why_stopped(runner.name))
            runner.thread.join(STOP_AGAIN_S)
        if runner.served:
            runner.thread.join()  # it cleans up, which may be saving something
        if runner.thread.is_alive():
            place = users_place(frame_of(runner.thread.ident))
            failure = self.describe(ActorStuckError(runner.name, self.process.identity.rank, place))
            self._answer_end(runner, Outcome(wire.RAISED, failure=failure))
            runner.belongings.stop()
        else:
            self._answer_end(runner, _ENDED)  # it may have ended before anybody asked

    def _answer_end(self, runner: ActorRunner, answer: Outcome) -> None:
        for reply in self._at_end.pop(runner.mailbox, []):
            reply(answer)

    # ---- the main thread, when the process is to end ---------------------------------------------------------------

    def end_all(self, within_s: float = END_S) -> None:
        """Interrupt running messages, drop waiting ones, and have every actor clean up; late ones are left behind."""
        deadline = time.monotonic() + within_s
        runners = list(self._runners.values())
        for runner in runners:
            runner.end_now()
        for runner in runners:
            if runner.thread.is_alive():
                runner.thread.join(max(0.0, deadline - time.monotonic()))

    # ---- threads of actors --------------------------------------------------------------------------------------

    def describe(self, error: BaseException) -> Failure:
        """Describe an error of user code."""
        alone = self._describing.acquire(timeout=DESCRIBE_S)  # IPython draws one traceback at a time
        try:
            return self.process.describe(error)
        finally:
            if alone:
                self._describing.release()

    def tell_owner(self, runner: ActorRunner, failure: MeshFailure) -> None:
        """Report a failure that no caller waits for to the owner; print it where the owner cannot be reached."""
        if runner.owner is not None:
            with contextlib.suppress(MeshError):
                runner.owner.post(SUPERVISE, failure)
                return
        print(failure.report(), flush=True)

    def actor_ended(self, runner: ActorRunner, fault: BaseException | None) -> None:
        """Forget an actor whose thread ends; answer its messages if the thread has failed."""
        self._runners.pop(runner.mailbox, None)
        if fault is not None:
            tell(fault, f'the thread of the actor "{runner.name}"')
            why = f'the thread of the actor "{runner.name}" has ended by a fault of meshbook: {fault!r}'
            self._mailboxes.close(runner.mailbox, why)  # first, so that no more come behind
            own, spawn = runner.mailbox, f"{runner.mailbox}:"
            self.process.give_up(
                lambda call: call.mailbox == own or (call.mailbox == ACTORS and call.endpoint.startswith(spawn)),
                Outcome(wire.RAISED, failure=self.describe(fault)._replace(evalue=why, exception=None)),
            )
        self._answer_end(runner, _ENDED)
