"""A peek into a rank: an expression that is evaluated in the midst of what the main thread runs.

    side thread  ── InterruptGate.visit ──>  the handler of its signal, on the main thread, between two bytecodes:
                                             evaluate, pickle, put everything back; then the cell goes on
                 <──────── answer ────────

- The main thread is woken by a signal only where it is idle, stands at a prompt, or waits in a function of Python's
  own, which takes up its wait again. Other native code may take the end of a system call for a failure: it gets none.
- A peek that takes too long is ended by a signal whose handler finds that the expression is on the stack and raises
  there: this ends loops, sleeps and waits for locks that the main thread itself may hold. The handler never raises for
  a peek at any other time, so the error cannot reach the cell. Native code in the expression runs to its end.
- An interrupt that comes during a peek ends that, and is raised in the cell then.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import random
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from meshbook.calls.rank_state import Peeked
from meshbook.groups.collectives_off import collectives_refused
from meshbook.source.location import name_running_call, users_place
from meshbook.source.thread_frames import cell_frames, frame_of
from meshbook.values.pickling import Pickled, dumps, dumps_bounded
from meshbook.values.remote_value import RemoteValue
from meshbook.worker.endpoints import evaluate
from meshbook.worker.interrupt_gate import HANDLER

if TYPE_CHECKING:
    from meshbook.worker.parts import WorkerParts

REACH_S = 0.5  # the longest wait for the main thread to come to a bytecode
TURN_S = 1.0  # the longest wait for the end of another peek
VALUE_MAX_BYTES = 16 << 20  # a larger value is only described
_AGAIN_S = 0.01  # time between two tries to reach the main thread, and to end the expression
_RAISE_AGAIN_S = 0.1  # time for clean-up code of the expression before it is ended once more
_END_S = 0.3  # time for the expression to end when it is told to

_one_at_a_time = threading.Lock()


class _PeekEnded(BaseException):
    """The end of an expression that took too long, or was in the way of an interrupt."""


class Peek:
    """A single peek; `ask` is for a side thread, the rest runs on the main thread."""

    def __init__(self, worker: WorkerParts, expression: str, timeout_s: float) -> None:
        self._worker, self._expression, self._timeout_s = worker, expression, timeout_s
        self._begun = threading.Lock()  # taken once: by the main thread as it begins, or by `ask` as it gives up
        self._answers: queue.SimpleQueue[Peeked | BaseException] = queue.SimpleQueue()
        self._until = self._raise_at = 0.0
        self._may_raise = False  # whether the expression is on the stack of the main thread
        self._place = ""

    def ask(self) -> Peeked | BaseException | None:
        """Return the answer of the main thread, or the error of the expression; None if it cannot be reached."""
        if not _one_at_a_time.acquire(timeout=TURN_S):
            return Peeked("", missed="another peek goes on there")
        try:
            if (internals := _loaded("meshbook.torch_internals")) is not None:
                internals.never_compile(HANDLER)  # it may come in the midst of a compiled function
            return self._ask()
        finally:
            _one_at_a_time.release()

    def _ask(self) -> Peeked | BaseException | None:
        gate, until = self._worker.gate, time.monotonic() + REACH_S
        while not self._begun.locked() and time.monotonic() < until:
            gate.visit(self._on_main_thread, wakes=self._may_be_woken())
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_AGAIN_S)
        if self._begun.acquire(blocking=False):
            return None
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, self._until - time.monotonic()))
        while time.monotonic() < self._until + _END_S:
            gate.wake()
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_AGAIN_S)
        return Peeked(self._place, missed=f"native code in the expression runs on after {self._timeout_s:g} s")

    def _may_be_woken(self) -> bool:
        if self._worker.claims.running is None or self._worker.shell.debugger.place:
            return True
        frame = frame_of(self._worker.main_thread)
        return frame is not None and (frame.f_code.co_filename in _WAITING or _sleeps(frame))

    # ---- main thread ------------------------------------------------------------------------------------------------

    def _on_main_thread(self, frame: FrameType | None) -> None:
        gate = self._worker.gate
        if gate.shield.depth or _is_recorded() or not self._begun.acquire(blocking=False):
            return  # it is tried again
        self._until = time.monotonic() + self._timeout_s
        gate.hand_signals_to(self._on_signal)
        try:
            self._place = _place(self._worker, frame)
            answer = self._look()
        except BaseException as error:
            answer = error
        gate.hand_signals_to(None)
        self._answers.put(answer)

    def _on_signal(self) -> None:
        now = time.monotonic()
        if self._may_raise and now >= self._raise_at and (now >= self._until or self._worker.gate.unheard):
            self._raise_at = now + _RAISE_AGAIN_S
            raise _PeekEnded

    def _look(self) -> Peeked | BaseException:
        outer = sys.exc_info()[1]  # the exception that the cell handles just now
        pickled: Pickled | None = None
        failed: BaseException | None = None
        with contextlib.ExitStack() as kept:
            debugger = self._worker.shell.debugger
            kept.callback(setattr, debugger, "refusal", debugger.refusal)
            debugger.refusal = "a peek (--now) evaluates it"
            _keep_random_state(kept)
            kept.enter_context(collectives_refused())
            try:
                self._may_raise = True
                if (numpy_random := _loaded("numpy.random")) is not None:  # which may wait for a lock
                    kept.callback(numpy_random.set_state, numpy_random.get_state())
                pickled = contextvars.copy_context().run(self._evaluate)
                self._may_raise = False
            except BaseException as error:
                self._may_raise = False
                failed = error
        if failed is None:
            assert pickled is not None
            return Peeked(self._place, pickled.head, [bytes(each) for each in pickled.buffers])
        return self._explained(failed, outer)

    def _evaluate(self) -> Pickled:
        value = evaluate(self._worker, self._expression, dict(self._worker.shell.namespace))
        pickled = dumps_bounded(value, VALUE_MAX_BYTES)
        return pickled or dumps(RemoteValue.describing(value, self._worker.identity.rank), what=self._expression)

    def _explained(self, error: BaseException, outer: BaseException | None) -> BaseException:
        """Return the error without that of the cell in its context; one that ended it says why."""
        if isinstance(error, _PeekEnded):
            why = "the cell was interrupted meanwhile"
            if not self._worker.gate.unheard:
                why = f"it took longer than {self._timeout_s:g} s (--timeout)"
            error = TimeoutError(f"the peek was ended: {why}. The cell goes on.").with_traceback(error.__traceback__)
        link: BaseException | None = error
        while link is not None:
            if link.__context__ is outer:
                link.__context__ = None
            link = link.__context__
        return error


def _place(worker: WorkerParts, frame: FrameType | None) -> str:
    """Return the line of the user's code that the main thread has reached, as ``cell 7, line 4``.

    frame: the innermost one. In a cell that awaits it is the event loop's, and the cell has reached its ``await``.
    """
    if worker.claims.running is None:
        return "idle"
    awaiting = cell_frames(worker.shell.loop) if worker.shell.loop.is_running() else []
    places = (users_place(each) for each in (frame, *awaiting))
    return next(filter(None, places), "outside of your code")


_STDLIB = f"{Path(threading.__file__).parent}/"
_MODULES = "threading queue selectors socket subprocess multiprocessing/connection multiprocessing/popen_fork"
_WAITING = frozenset(f"{_STDLIB}{name}.py" for name in _MODULES.split())
"""The files of Python's own that wait in functions which take up a wait again after a signal."""


def _sleeps(frame: FrameType) -> bool:
    """Whether the frame is in Python's own `time.sleep`."""
    holder, _, name = name_running_call(frame).rpartition(".")
    module = frame.f_globals.get(holder) if holder else None
    found = frame.f_globals.get(name) if not holder else vars(module).get(name) if isinstance(module, ModuleType) else 0
    return getattr(found, "__name__", "") == "sleep" and getattr(found, "__module__", "") == "time"


def _loaded(name: str) -> Any:
    """Return a module that is imported, and not only being imported."""
    module = sys.modules.get(name)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def _is_recorded() -> bool:
    """Whether torch records operations of the calling thread, for a compiled function or a graph of CUDA."""
    if (torch := _loaded("torch")) is None or (internals := _loaded("meshbook.torch_internals")) is None:
        return False
    in_graph = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return bool(in_graph or internals.is_traced())


def _keep_random_state(kept: contextlib.ExitStack) -> None:
    """Have gradient mode and random state restored at the end; until then no gradients are recorded."""
    kept.callback(random.setstate, random.getstate())
    if (torch := _loaded("torch")) is not None:
        kept.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        torch.set_grad_enabled(False)  # else DDP's forward would prepare for another backward pass than the cell's
        kept.callback(torch.default_generator.set_state, torch.default_generator.get_state())
        if torch.cuda.is_initialized():
            kept.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
