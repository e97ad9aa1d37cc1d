"""`meshbook.log`: the scalars that a process logs, on their way out.

    log(loss=..) ──> a queue of points ──a hidden thread, ten times a second──> batches ──> the agent, or the own store
                                       └──the end of a call──────────────────┘

The caller pays for an append. A scalar on a GPU is copied while the device goes on, and read once it is there. Where
more comes than a picture can show, a batch has the lowest and the highest point of each stretch, and the last one.
"""

from __future__ import annotations

import math
import numbers
import queue
import signal
import sys
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from meshbook.concurrency.background import attempt, hidden_thread
from meshbook.concurrency.forks import at_fork
from meshbook.curves.series import STEP_MAX, LoggedPoints, Metrics, Points, extremes

FLUSH_S = 0.1
"""The time that a point waits for more."""
IDLE_S = 5.0
"""The time after which an unused thread ends."""
POINTS_MAX = 1 << 17
"""The most points that wait; older ones would give way."""
SERIES_MAX, BATCH_MAX = 256, 16_384
"""The most points of a batch: of one name, and of all."""
NAMES_MAX, NAME_CHARS = 1000, 200
"""The most names of a process, and the most characters of one."""
RUNS_MAX = 256
"""The number of cell runs whose calls of `log` are counted."""
DEVICE_S = 0.5
"""The time that the end of a call waits for scalars that a device still computes."""


SendBatches: TypeAlias = Callable[[int, list[LoggedPoints]], object]
"""Takes the output of a cell run, 0 for none, and the batches of it."""


class OnDevice(NamedTuple):
    """A scalar on a GPU: the copy in pinned memory, which holds once the event has come."""

    copy: Any
    event: Any


LoggedScalar: TypeAlias = tuple[int, str, float, float, "float | OnDevice"]
"""Output, name, step, time in seconds since the epoch, and value."""

own = Metrics()
"""The scalars that this process logs itself, where it is no rank."""
on_own: list[Callable[[tuple[str, ...]], object]] = []
"""Listeners that are called, on some thread, with the names of which `own` has news."""


def _to_own(output: int, batches: list[LoggedPoints]) -> None:
    own.add(output, None, batches)
    for listener in on_own:
        listener(tuple(batch.name for batch in batches))


class ScalarRecorder:
    """The recorder of a process, which is a rank once `begin` was called."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_due = False
        """Whether the thread is to send what was logged."""
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_running = False
        self._unread: list[LoggedScalar] = []
        """Points whose values a device has not computed."""
        self.stepped: tuple[int, float] | None = None
        """The output and the step of the last call of `log` with a step."""
        self.begin(lambda: 0, _to_own)

    def begin(self, origin: Callable[[], int | None], send: SendBatches) -> None:
        """Send batches by ``send`` from now on. origin: returns the output of the calling thread's cell run."""
        self.origin, self._send = origin, send
        self.points: deque[LoggedScalar] = deque(maxlen=POINTS_MAX)
        self.counts: dict[int, defaultdict[str, int]] = {}
        self._sending = threading.Lock()

    def count_for(self, origin: Callable[[], int]) -> None:
        """Have ``origin`` return the cell run, while this process sends its batches as before."""
        self.origin = origin

    def after_fork(self) -> None:
        """Record nothing in a child of user code, which has no way out of its own."""
        self.begin(self._refuse, lambda output, batches: None)
        self._unread, self.is_due, self._is_running = [], False, False

    def _refuse(self) -> int:
        self.origin = lambda: 0
        print("meshbook.log records nothing in a forked process: log in the process of the rank", file=sys.stderr)
        return 0

    def counts_of(self, output: int) -> defaultdict[str, int]:
        """Return the numbers of calls by name in one cell run."""
        if (counts := self.counts.get(output)) is None:
            if len(self.counts) >= RUNS_MAX:
                self.counts.pop(next(iter(self.counts)), None)
            counts = self.counts[output] = defaultdict(int)
        return counts

    def admit(self, name: str) -> None:
        """Take a new name. Raises: ValueError."""
        if len(name) > NAME_CHARS:
            raise ValueError(f"the name {name[:40]!r}... is longer than {NAME_CHARS} characters")
        if len(self.names) >= NAMES_MAX:
            raise ValueError(f"{name!r} is one name too many: {NAMES_MAX} are the most. Log the step as step=...")
        self.names.add(name)

    def wake(self) -> None:
        """Have the thread send soon."""
        self._wakeups.put(None)  # first: the thread, which may be about to end, looks for it
        if not self._is_running:
            self._is_running = True
            hidden_thread(self._run, "meshbook.log").start()
        self.is_due = True  # last: after an interrupt in between the next call does it again

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it must wake the main thread
        while True:
            try:
                self._wakeups.get(timeout=IDLE_S)
            except queue.Empty:
                self._is_running = False
                if self._wakeups.empty():
                    return
                self._is_running = True
                continue
            time.sleep(FLUSH_S)
            try:
                attempt(self.flush, "sending what was logged")
            except BrokenPipeError:
                return  # the agent is gone, and this process goes with it

    def flush(self, wait_s: float = 0.0) -> None:
        """Send what was logged by now. wait_s: the time that a device has to compute it.

        Any thread. What a device has not computed by then the thread sends later.
        """
        with self._sending:
            self.is_due = False
            points, self._unread = self._unread, []
            while self.points:
                points.append(self.points.popleft())
            until = time.monotonic() + wait_s
            outputs: dict[int, dict[str, list[LoggedScalar]]] = {}
            for point in points:
                value = point[4]
                if isinstance(value, OnDevice):
                    while not (is_there := value.event.query()) and time.monotonic() < until:
                        time.sleep(0.001)
                    if not is_there:
                        self._unread.append(point)
                        continue
                    point = (*point[:4], float(value.copy.item()))
                outputs.setdefault(point[0], {}).setdefault(point[1], []).append(point)
            for output, named in outputs.items():
                most = max(4, min(SERIES_MAX, BATCH_MAX // len(named)))
                self._send(output, [_batch(name, logged, most) for name, logged in named.items()])
        if self._unread:
            self.wake()


recorder = ScalarRecorder()
at_fork(in_child=recorder.after_fork)


def _batch(name: str, logged: list[LoggedScalar], most: int) -> LoggedPoints:
    _, _, steps, times, values = zip(*logged, strict=True)
    points = Points(array("d", steps), array("d", times), array("d", values))
    count = len(logged)
    if count > most:
        bins = most // 2 - 1
        kept = [at for n in range(bins) for at in extremes(points.values, n * count // bins, (n + 1) * count // bins)]
        points = points.choose(kept if kept[-1] == count - 1 else [*kept, count - 1])
    return LoggedPoints(name, count, points)


def log(step: float | None = None, **scalars: Any) -> None:
    """Record scalars under their names, to be watched while the program runs: ``meshbook.log(loss=loss, lr=lr)``.

    It works on ranks, in actors and in their threads, and in the notebook's own process; it never waits.
    A notebook draws the curves, `meshbook.metrics` has the numbers.
    step: a number; without it each name counts its own calls in one cell run. A step that goes back is kept as it is.
    scalars: numbers, or tensors with one element; NaN and infinity are kept. A tensor on a GPU is read when the device
    has computed it, any other at once.
    Raises: TypeError, ValueError.
    """
    if not scalars:
        raise TypeError("log() needs names: meshbook.log(loss=loss)")
    output = recorder.origin() or 0
    counts = recorder.counts_of(output) if step is None else None
    if step is not None and (type(step) is not int or not -STEP_MAX < step < STEP_MAX):
        step = _step(step)
    if step is not None:
        recorder.stepped = output, step
    now = time.time()
    for name, value in scalars.items():
        if type(value) is not float:
            value = number_of(name, value)
        if name not in recorder.names:
            recorder.admit(name)
        if counts is not None:
            step = counts[name]
            counts[name] = step + 1
        recorder.points.append((output, name, step, now, value))  # type: ignore[arg-type]  # it is known by now
    if not recorder.is_due:
        recorder.wake()


def _step(step: Any) -> float:
    number = number_of("step", step)
    number = float(number.copy.item()) if isinstance(number, OnDevice) else number
    if not abs(number) <= STEP_MAX:
        raise ValueError(f"step is {number:g}: give a number of at most 2**53")
    return number


def number_of(name: str, value: Any) -> float | OnDevice:
    """Return a scalar as a number, or its copy that a device makes. Raises: TypeError, ValueError."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "item"):
        return _plain_number(name, value)
    if shape and math.prod(shape) != 1:
        kind = "a tensor" if hasattr(value, "requires_grad") else "an array"
        raise TypeError(f"{name} is {kind} of shape {tuple(shape)}: log {name}.mean()")
    if getattr(value, "is_cuda", False):
        torch = sys.modules["torch"]
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_complex():
            copy = value.detach().to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(value.device))
            return OnDevice(copy, event)
    item = value.item()
    return item if type(item) is float else _plain_number(name, item)


def _plain_number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):  # bool is one
        advice = f": log {name}.mean()" if isinstance(value, (list, tuple)) else ""
        raise TypeError(f"{name} is a {type(value).__name__}, not a number{advice}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} has more digits than a float holds") from None
