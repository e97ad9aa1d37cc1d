"""The control thread of a worker, which answers urgent messages while the main thread is busy."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time

import msgspec

from meshbook.calls.mailboxes import Outcome, pack_failure
from meshbook.concurrency.background import attempt, hidden_thread, run_in_background
from meshbook.errors import MessageTooLarge
from meshbook.wire import messages as wire
from meshbook.worker.interrupt_gate import interrupt_children
from meshbook.worker.parts import WorkerParts
from meshbook.worker.queries import QUERIES, SLOW_QUERIES

IDLE_S = 0.5  # how often the control thread looks after conditions that cause no message


class ControlThread:
    """The only reader of the urgent socket; other threads that ask the store wait for the answers that it reads."""

    def __init__(self, worker: WorkerParts) -> None:
        self._worker, self._urgent = worker, worker.urgent
        self._hearing = threading.Lock()  # held while a message is handled

    def catch_up(self) -> None:
        """Let the control thread read messages that came while native code kept it from running."""
        deadline = time.monotonic() + 1
        while self._urgent.frames.wait(0) and time.monotonic() < deadline:
            time.sleep(0.0005)
        with self._hearing:
            pass

    def start(self) -> int:
        """Start the thread; return the kernel's number of it."""
        thread = hidden_thread(self._serve, "meshbook.control")
        thread.start()
        return thread.native_id or 0

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            while not self._urgent.frames.wait(self._worker.gate.tend() or IDLE_S):
                self._worker.payloads.tell_freed()
                if self._worker.gate.unheard:
                    self._worker.groups.interrupt_backward()
                if self._worker.claims.running is not None:
                    self._worker.shell.flush_text()  # a prompt or a progress bar shows before its line ends
            with self._hearing:
                if (received := self._urgent.receive()) is None:
                    break
                attempt(functools.partial(self._hear, received[0]), "a message of the agent")
        time.sleep(5)  # the agent is gone: the main thread has this long to end by itself
        os._exit(1)

    def _hear(self, message: wire.ToWorker) -> None:
        match message:
            case wire.StoreAnswer(request=request, result=result):
                self._worker.store.take(request, result)
            case wire.Cancel():
                self._cancel(message)
            case wire.AbortGroups(epoch=epoch, reason=reason, groups=groups):
                self._worker.groups.abort(epoch, reason, groups)
            case wire.SegmentFree(segment=segment):
                self._worker.payloads.pool.release(segment)
            case wire.MailHold():
                self._worker.mail.hold(message)
            case wire.OpenMail():
                self._worker.mail.start()
            case wire.Moved(mesh, moves):
                self._worker.moves[mesh] = moves
            case wire.ControllerGone():
                self._worker.direct.tell()
                self._worker.mail.direct.tell()
            case wire.Query(id, asked=wire.AskRank() as asked):
                if asked.endpoint in SLOW_QUERIES:
                    run_in_background(lambda: self._answer_query(id, asked))
                else:
                    self._answer_query(id, asked)
            case other:
                raise AssertionError(f"{other!r} does not belong on the urgent socket")

    def _cancel(self, cancel: wire.Cancel) -> None:
        """Interrupt the call if it runs; drop it, and reply so, if it waits; do nothing if it has ended."""
        running, is_dropped = self._worker.claims.cancel(cancel.call)
        if running is not None:
            self._worker.shell.debugger.interrupt()
            self._worker.gate.interrupt(cancel.call, insist=cancel.insist)
            interrupt_children(since=running.since)
        elif is_dropped:
            self._worker.direct.drop(wire.Reply(cancel.call, wire.DROPPED, 0.0))

    def _answer_query(self, id: int, asked: wire.AskRank) -> None:
        try:
            args = msgspec.msgpack.decode(asked.args, type=list)
            answer = Outcome(wire.OK, QUERIES[asked.endpoint](self._worker, *args), has_value=True)
        except Exception as error:
            answer = Outcome(wire.RAISED, failure=self._worker.shell.describe(error))
        payload = pack_failure(answer.failure) if answer.failure else [wire.encode(answer.value)]
        with contextlib.suppress(MessageTooLarge):  # as if it had not answered
            self._urgent.send(wire.Reply(id, answer.status, 0.0), payload)
