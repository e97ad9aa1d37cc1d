"""Interrupts of a worker: KeyboardInterrupt in user code only, and only for the call that was meant.

The control thread receives a `Cancel` and sends a signal of ours to the main thread, which wakes it from system calls,
locks and sleeps. Between the two the call may have ended, so its handler raises only while the very call that was
cancelled runs, and never inside our own critical sections (a half-written message would break the stream).

SIGINT is the user's. One that comes by itself does nothing. Where user code has set a handler, the interrupt raises
SIGINT in place of KeyboardInterrupt, until that call ends; the next one has ours again, as each cell of a notebook has
its kernel's. SIG_IGN holds as well; under SIG_DFL KeyboardInterrupt is raised: an interrupt never ends a rank.

An insistent interrupt does more, under any handler: for `INSIST_S` KeyboardInterrupt is raised again and again,
and code that catches it and goes on (``while True: try: ... except KeyboardInterrupt: pass``) is left at the line after
the ``except`` block: outside of the ``try`` that would catch it once more (`SwallowedInterrupts`). ``finally`` and
``with`` blocks run as ever: while the exception is handled nothing happens. At the first line of the user's own code
that runs when it is no longer handled, it was swallowed, and it is raised again. Trace functions do that, as in a
debugger, so a rank that is traced already (a debugger, coverage) is left alone. Python ends the tracing when a trace
function raises: one layer of ``try`` is left per interrupt.
"""

from __future__ import annotations

import _thread
import dis
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from meshbook.concurrency import forks
from meshbook.concurrency.interrupts import GATES
from meshbook.shell.commands import OURS
from meshbook.source.location import is_users_code
from meshbook.system.processes import descendants, start_time

if TYPE_CHECKING:
    from _typeshed import TraceFunction

REPEAT_S = 0.02  # how often an interrupt is repeated until the main thread has noticed it
REPEAT_LATER_S = 0.25  # the same when it has not noticed for a second: it is in native code that does not look
INSIST_S = 0.55  # how long an insistent interrupt is repeated; less than the caller waits for it
INSIST_EVERY_S = 0.1  # time for clean-up code between two of them
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

INTERRUPT = signal.SIGURG  # the signal of ours: programs have no use for it, and debuggers and children ignore it
# the function without the enumeration, which takes 100 times as long
_peek_signal: Callable[[int], object] = vars(signal)["_signal"].getsignal


class InterruptGate:
    """Interrupts of the main thread. The control thread chooses the call; the rest is the main thread's."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._running = 0
        self._meant = 0
        self._meant_at = self._insist_until = self._again_at = 0.0
        self._target = 0
        self.has_held_back = False  # whether an interrupt has come inside the `shield`
        self._visits: deque[Callable[[FrameType | None], object]] = deque()
        self._on_signal: Callable[[], object] | None = None
        self._caught = SwallowedInterrupts()
        self.raised = 0  # how many times KeyboardInterrupt was raised in the running call
        # ``with gate.shield:`` an interrupt that arrives inside is raised at the end, on any thread that has a gate
        self.shield = _Shield(self)
        self.take_signal()
        forks.INTERRUPTS.add(INTERRUPT)

    # ---- control thread -----------------------------------------------------------------------------------------

    def interrupt(self, call: int, *, insist: bool = False) -> None:
        """Raise KeyboardInterrupt in ``call`` if it still runs; `tend` repeats it until it is noticed."""
        now = time.monotonic()
        self._meant, self._meant_at = call, now
        self._insist_until = now + INSIST_S if insist else 0.0
        self._raise_again(now)

    def tend(self) -> float | None:
        """Repeat an interrupt that was not noticed, or is insistent; return when to call again, None for never.

        A signal that comes between a look of the interpreter and a system call is noticed only after that call.
        """
        call, now = self._meant, time.monotonic()
        if not call or self._running not in (0, call) or (not self._running and now > self._meant_at + 1):
            self._meant = 0
            return None
        if self._target == call:
            self.wake()
            if now > self._meant_at + 1 and _peek_signal(signal.SIGINT) is _ignore:
                signal.pthread_kill(self._main, signal.SIGINT)  # native code may look out for that
            return REPEAT_S if now < max(self._meant_at + 1, self._insist_until) else REPEAT_LATER_S
        if now < self._insist_until:
            if now >= self._again_at:
                self._raise_again(now)
            return REPEAT_S
        return None

    def _raise_again(self, now: float) -> None:
        self._again_at = now + INSIST_EVERY_S
        self._target = self._meant
        self.wake()

    def visit(self, action: Callable[[FrameType | None], object], *, wakes: bool = True) -> None:
        """Have the main thread call ``action(frame)`` when it looks at its signals next; it must not raise.

        wakes: send a signal, which ends system calls; without one it looks between two bytecodes only, and native code
        that would take the early end of a system call for a failure never notices.
        """
        if action not in self._visits:
            self._visits.append(action)
        if wakes:
            self.wake()
        else:
            _thread.interrupt_main(INTERRUPT)

    def hand_signals_to(self, action: Callable[[], object] | None) -> None:
        """Call ``action`` at the signals that come inside a visit, from its begin on; None: the visit is over."""
        self._on_signal = action

    def wake(self) -> None:
        """Have the main thread look at its signals; it ends its system call for that."""
        signal.pthread_kill(self._main, INTERRUPT)

    @property
    def meant(self) -> bool:
        """Whether the call that runs was interrupted."""
        return self._meant != 0 and self._meant == self._running

    @property
    def has_handler(self) -> bool:
        """Whether user code has set a handler of its own in the call that runs."""
        return _peek_signal(signal.SIGINT) not in _OURS

    @property
    def unheard(self) -> bool:
        """Whether the interrupted call still runs and the main thread has not looked at its signals since."""
        return self._target != 0 and self._target == self._running

    # ---- main thread --------------------------------------------------------------------------------------------

    def open(self, call: int) -> bool:
        """Let user code of ``call`` run from here; return False if it was interrupted before."""
        self.has_held_back, self.raised = False, 0
        self._running = call
        return self._meant != call

    @property
    def is_open(self) -> bool:
        """Whether user code runs on the main thread."""
        return self._running != 0

    def close(self) -> None:
        """Note that no user code runs any more: no interrupt is raised once this has returned."""
        while self._running:
            try:
                self._running = self._meant = 0
                self.take_signal()
            except KeyboardInterrupt:  # it came at the last moment
                continue
        if self._caught.watching:
            self._caught.end()

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._on_signal is not None:  # in the midst of a visit; what was meant for the call is for later
            self._on_signal()
            return
        while self._visits:
            try:
                visit = self._visits.popleft()
            except IndexError:  # a signal that came after the look has taken it
                break
            visit(frame)
        if not self._running or self._target != self._running:
            return
        self._target = 0
        if self.shield.depth:
            self.has_held_back = True
            return
        self._raise(frame)

    def raise_held_back(self) -> None:
        """Raise at the end of the shield the interrupt that has come inside it."""
        if self._running:
            self.has_held_back = False
            self._raise(None)

    def _raise(self, frame: FrameType | None) -> None:
        if self.has_handler and not self._insist_until:
            signal.raise_signal(signal.SIGINT)
            return
        self.raised += 1
        if self._insist_until and self.raised > 1:
            self._caught.begin(frame)
        raise KeyboardInterrupt

    # ---- handlers of user code ----------------------------------------------------------------------------------

    def take_signal(self) -> None:
        """Set our handlers, again after user code has run that may have set its own."""
        for each, ours in ((INTERRUPT, self._on_interrupt), (signal.SIGINT, _ignore)):
            if _peek_signal(each) != ours:
                signal.signal(each, ours)

    def after_fork(self) -> None:
        """Make SIGINT in a forked child as in any process of Python; a handler that user code has set stays.

        A child that an actor's thread has forked keeps SIGINT blocked, as that thread does.
        """
        if forks.held.get(signal.SIGINT) is _ignore:
            forks.held[signal.SIGINT] = signal.default_int_handler


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, which the children of the rank would inherit."""


_OURS = (_ignore, signal.SIG_DFL, signal.default_int_handler)
HANDLER = vars(InterruptGate)["_on_interrupt"].__code__


class _Shield:
    """The sections of the main thread that must not be torn, counted by depth; on the path of every message. Threads
    with a `meshbook.concurrency.interrupts.ThreadGate` count for themselves."""

    __slots__ = ("_gate", "_main", "depth")

    def __init__(self, gate: InterruptGate) -> None:
        self._gate = gate
        self._main = threading.get_ident()
        self.depth = 0

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self.depth += 1
        elif (gate := GATES.get(threading.get_ident())) is not None:
            gate.__enter__()

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            self.depth -= 1
            if not self.depth and self._gate.has_held_back:
                self._gate.raise_held_back()
        elif (gate := GATES.get(threading.get_ident())) is not None:
            gate.__exit__()


def interrupt_children(since: float) -> None:
    """Send SIGINT to children that were started after ``since`` (monotonic clock) and did not leave our process group.
    Older ones, a server from an earlier cell say, run on; `!commands` are told by their own code."""
    since_ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - since)) * _TICKS_PER_S - 1
    group = os.getpgrp()
    spared: set[int] = set()
    for command in tuple(OURS):
        spared.update(descendants(command))
    for pid in descendants(os.getpid())[1:]:
        if pid in spared:
            continue
        try:
            if os.getpgid(pid) == group and (start_time(pid) or 0) >= since_ticks:
                os.kill(pid, signal.SIGINT)
        except (ProcessLookupError, PermissionError):
            pass


_PUSH_EXC_INFO = dis.opmap.get("PUSH_EXC_INFO")  # the first instruction of each handler, from Python 3.11 on


class SwallowedInterrupts:
    """The frames of the main thread, watched from a KeyboardInterrupt on. All calls come on that thread."""

    def __init__(self) -> None:
        self.watching = False

    def begin(self, frame: FrameType | None) -> None:
        """Watch ``frame`` and its callers; a KeyboardInterrupt is raised there next."""
        if self.watching or sys.gettrace() is not None:
            return
        self.watching = True
        while frame is not None:
            if is_users_code(frame.f_code):
                frame.f_trace = self._on_event
            frame = frame.f_back
        self._handled = False
        sys.settrace(_trace_no_new_frames)

    def end(self) -> None:
        """Stop watching the main thread's frames."""
        if self.watching:
            self.watching = False
            if sys.gettrace() is _trace_no_new_frames:
                sys.settrace(None)

    def _on_event(self, frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        if not self.watching:
            return None
        if event == "line":
            handled, self._handled = self._handled, _handles_interrupt(frame)
            if handled and not self._handled:
                self.end()
                raise KeyboardInterrupt
        return self._on_event


def _handles_interrupt(frame: FrameType) -> bool:
    if isinstance(sys.exc_info()[1], KeyboardInterrupt):
        return True
    return _PUSH_EXC_INFO is not None and frame.f_code.co_code[frame.f_lasti] == _PUSH_EXC_INFO  # about to


def _trace_no_new_frames(frame: FrameType, event: str, arg: object) -> None:
    return None
