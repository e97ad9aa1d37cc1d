"""torch.profiler on a rank, for one cell: recorded while it runs, taken afterwards by a call of its own.

The record stays on the rank until it is taken or the next recording begins, so a cell that fails or is
interrupted has its trace too. `take` makes the part that travels: the events that matter most as a piece of Chrome's
JSON (`meshbook.profiling.events` joins the pieces), and the time in each kind of operation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshbook.groups.progress import Operation, OperationLog
from meshbook.profiling.events import Event, RankEvents
from meshbook.source.thread_frames import without_collector
from meshbook.system.descriptors import above_standard, open_above
from meshbook.system.os_errors import explain

if TYPE_CHECKING:
    from torch.profiler import profile

    from meshbook.groups.collectives_off import NoGroups
    from meshbook.groups.rank_groups import RankGroups

_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""torch's profiler writes a line to stderr at each start and end, unless this says otherwise when it first starts."""


RECORD_S = 20.0
"""Recording ends after so long, while the cell runs on: a second of it may well be 100,000 operations, and 100 MB."""


class OpTime(NamedTuple):
    """The time of a kind of operation on one rank. Seconds; ``self`` leaves out the operations that it called."""

    calls: int
    self_s: float
    gpu_s: float


class RankTrace(NamedTuple):
    """The recording of a cell on one rank."""

    problem: str
    """The reason why there is nothing else here; empty when all is well."""
    cell_s: float = 0.0
    """The time that the cell was recorded."""
    waited_s: float = 0.0
    """The time in operations of process groups, on the main thread."""
    gpu_s: float = 0.0
    gpu_collectives_s: float = 0.0
    ops: Mapping[str, OpTime] = {}
    operations: tuple[Operation, ...] = ()
    """The operations of process groups; seconds since the base that `take` was given."""
    events: bytes = b""
    """zlib: JSON objects, separated by commas; times are microseconds since the base, processes are ranks."""
    left_out: int = 0
    """The number of the shortest events that are not in it."""
    is_cut: bool = False
    """Whether the cell ran on after ``cell_s``."""


class _Recording:
    def __init__(self) -> None:
        self.problem = ""
        self.profiler: profile | None = None
        self.log = OperationLog()
        self.main_thread = threading.get_ident()
        self.main_tid = threading.get_native_id()
        self.begun = self.ended = 0.0
        self.is_cut = False


_kept: dict[str, _Recording] = {}
"""The last recording by its name, until it is taken."""


@contextlib.contextmanager
def recorded(
    name: str, groups: RankGroups | NoGroups, shield: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    """Record the events of this process inside the block, under ``name``.

    shield: holds interrupts back while the profiler starts and stops. Never raises: `take` reports the errors.
    """
    _kept.clear()
    recording = _kept[name] = _Recording()

    def end() -> None:
        if not recording.ended:
            recording.ended = time.monotonic()
            with shield:
                groups.log_operations(None)
                try:
                    if recording.profiler is not None:
                        recording.profiler.stop()
                except Exception as error:
                    recording.problem, recording.profiler = f"torch.profiler did not stop: {error}", None

    def cut() -> None:
        recording.is_cut = not recording.ended
        end()

    with shield:
        _start(recording)
        groups.log_operations(recording.log)
    recording.begun = time.monotonic()
    try:
        with _alarm(RECORD_S, cut):
            yield
    finally:
        end()


@contextlib.contextmanager
def _alarm(after_s: float, action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` on the main thread when the block lasts so long; not where the user's code has the signal."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return

    def ours(signum: int, frame: object) -> None:
        action()

    signal.signal(signal.SIGALRM, ours)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is ours:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _start(recording: _Recording) -> None:
    chosen = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        profiler.start()
        recording.profiler = profiler
    except Exception as error:
        recording.problem = f"torch.profiler did not start: {error}"
    finally:
        if chosen is None:
            os.environ.pop(_LOG_LEVEL, None)


def take(name: str, base_s: Mapping[int, float], max_events: int) -> RankTrace:
    """Return the recording of ``name``, and let go of it. Runs on a rank.

    base_s: for each rank the time of its clock (as `time.time`) that becomes 0. max_events: the most that travel.
    """
    with without_collector():  # so many objects, and no garbage among them
        return _take(name, base_s, max_events)


def _take(name: str, base_s: Mapping[int, float], max_events: int) -> RankTrace:
    if (recording := _kept.pop(name, None)) is None:
        return RankTrace(f"{name} did not run there")
    if recording.problem:
        return RankTrace(recording.problem)
    rank = int(os.environ["RANK"])
    try:
        exported = _export(recording)
    except OSError as error:
        return RankTrace(f"its trace could not be written to a temporary file: {explain(error)}")
    shift_s = recording.log.wall_minus_monotonic_s - base_s[rank]
    shift_us = (exported.baseTimeNanoseconds - round(base_s[rank] * 1e9)) / 1000  # floats of such size are coarse
    found = RankEvents(exported.traceEvents, shift_us, recording.main_tid)
    found.add_cell(name, recording.begun + shift_s, recording.ended + shift_s)
    waits = [wait for wait in recording.log.waits if wait.thread == recording.main_thread]
    for wait in waits:
        found.add_wait(f"waiting: {wait.what}", wait.begun + shift_s, wait.ended + shift_s)
    operations = tuple(
        each._replace(begun=each.begun + shift_s, ended=each.ended + shift_s) for each in recording.log.operations
    )
    gpu_s, gpu_collectives_s = found.gpu_times()
    ops = {op: OpTime(*times) for op, times in found.op_times().items()}
    left_out = found.keep_longest(max_events)
    return RankTrace(
        problem="",
        cell_s=recording.ended - recording.begun,
        is_cut=recording.is_cut,
        waited_s=sum(wait.ended - wait.begun for wait in waits),
        gpu_s=gpu_s,
        gpu_collectives_s=gpu_collectives_s,
        ops=ops,
        operations=operations[:max_events],
        events=zlib.compress(found.chrome(rank), 1),
        left_out=left_out,
    )


class _Exported(msgspec.Struct):
    """The profiler's file. Times are microseconds since its base, which is nanoseconds since the epoch."""

    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0


def _export(recording: _Recording) -> _Exported:
    """Return the profiler's events. Raises: OSError."""
    with above_standard():
        handle, path = tempfile.mkstemp(suffix=".json", prefix="meshbook-")
        os.close(handle)
    try:
        assert recording.profiler is not None
        recording.profiler.export_chrome_trace(path)
        recording.profiler = None
        with open_above(lambda: open(path, "rb")) as file:
            exported = msgspec.json.decode(file.read(), type=_Exported, strict=False)
    finally:
        os.unlink(path)
    return exported
