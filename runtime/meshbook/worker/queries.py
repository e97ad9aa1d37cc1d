"""The queries that a rank answers while its main thread is busy: its state, its stacks, completion, inspection.

`QUERIES` are answered by the control thread, always; those of `SLOW_QUERIES` on a side thread, so that no interrupt
waits behind them. Each gets the worker and plain data, and returns plain data.

An object may do anything when it is looked at for completion or inspection: raise, print, sleep. So the asker waits
only for so long, and a question that hangs is not asked again meanwhile; None means that no answer can be had.
"""

from __future__ import annotations

import linecache
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from meshbook.actor.identity import ActorState
from meshbook.calls.mailboxes import pack_failure
from meshbook.calls.rank_state import Completions, Peeked, Reaction, StatusAnswer
from meshbook.checkpoint.folder import SavingState
from meshbook.curves.nan_watch import nan_watch
from meshbook.groups.progress import Collectives
from meshbook.source.location import (
    MAX_THREADS,
    Activity,
    Frame,
    ThreadStack,
    cut_frames,
    describe_frame,
    frame_activity,
    is_users_code,
    make_frame,
    users_place,
)
from meshbook.source.thread_frames import cell_frames, exception_of, frame_of, frames, task_frames
from meshbook.stacks.mesh_stacks import RankTold
from meshbook.system.interfaces import chosen_interface
from meshbook.system.processes import resident_bytes
from meshbook.worker import debug_queries
from meshbook.worker.debug_queries import debugged_place
from meshbook.worker.peek import Peek

if TYPE_CHECKING:
    from meshbook.worker.parts import WorkerParts

RECENT = 16  # operations of each group that a rank reports to a person


def where(worker: WorkerParts) -> str:
    """Return the activity of the main thread: ``idle``, or ``in all_reduce (cell 7, line 5)``."""
    return _doing(worker)[1]


def _doing(worker: WorkerParts) -> tuple[Activity, str]:
    frame = frame_of(worker.main_thread)
    if worker.claims.running is None or frame is None:
        return Activity.IDLE, "idle"
    if place := worker.shell.debugger.place:
        return Activity.PAUSED, f"stopped at {place}"
    if place := debugged_place(worker):
        return Activity.PAUSED, f"stopped by the debugger at {place}"
    if operation := worker.groups.waits_in(worker.main_thread):
        place = users_place(frame)
        return Activity.COLLECTIVE, f"in {operation} ({place})" if place else f"in {operation}"
    if worker.shell.loop.is_running() and (awaiting := cell_frames(worker.shell.loop)):
        place = next((at for each in awaiting if (at := users_place(each))), "")
        if place and not users_place(frame):  # else a coroutine runs just now
            return Activity.CODE, f"awaiting at {place}"
    return frame_activity(frame), describe_frame(frame)


def collectives(worker: WorkerParts, recent: int = 0) -> Collectives:
    """Return the progress of the rank's process groups, with the last ``recent`` operations of each, and its waits."""
    current = worker.claims.running
    told = worker.groups.collectives(current.id if current else 0, recent=recent)
    return told._replace(actors=worker.registry.busy, handling=worker.registry.handling)


def reaction(worker: WorkerParts) -> Reaction:
    """Return `where`, and how the running call takes an interrupt that was sent to it."""
    activity, place = _doing(worker)
    if worker.claims.running is None:
        return Reaction(place, has_stopped=True)
    if not worker.gate.is_open:
        return _STOPPED_NOW
    if not worker.gate.meant:
        return Reaction(place, has_stopped=False)
    if worker.gate.unheard:
        return Reaction(f"{place}; native code there does not look at interrupts", has_stopped=False)
    if activity is Activity.RUNTIME:
        return _STOPPED_NOW
    return Reaction(f"{place}; {_why_it_goes_on(worker)}", has_stopped=False)


_STOPPED_NOW = Reaction("it stopped just now", has_stopped=True)


def _why_it_goes_on(worker: WorkerParts) -> str:
    if worker.gate.has_handler:
        return "it deals with interrupts itself (signal.signal), and goes on"
    handled = exception_of(worker.main_thread)
    handled = handled[1] if isinstance(handled, tuple) else handled  # until Python 3.11
    if isinstance(handled, KeyboardInterrupt):
        return "it is still cleaning up after KeyboardInterrupt"
    return "it caught KeyboardInterrupt and goes on"


def status(worker: WorkerParts) -> StatusAnswer:
    """Return the state of a rank for a person who looks at the mesh."""
    current, place = worker.claims.running, worker.shell.debugger.place or debugged_place(worker)
    activity, doing = _doing(worker)
    return StatusAnswer(
        busy=current.endpoint if current else "",
        busy_s=time.monotonic() - current.since if current else 0.0,
        where=place or doing,
        paused=place,
        in_collective=activity is Activity.COLLECTIVE,
        rss_bytes=resident_bytes(os.getpid()),
        moved_bytes=worker.groups.moved_bytes,
        gpu=worker.gpu.last(),
        kept_bytes=worker.kept.last(worker.shell),
    )


def clock(worker: WorkerParts) -> float:
    """Return the wall clock of this machine, in seconds since the epoch."""
    return time.time()


def versions(worker: WorkerParts) -> dict[str, str]:
    """Return the versions of software in which ranks of one mesh should not differ."""
    told = {"Python": platform.python_version()}
    if (torch := sys.modules.get("torch")) is not None:
        told["torch"] = str(torch.__version__)
        if (cuda := torch.version.cuda) is not None:
            told["CUDA"] = str(cuda)
    return told


def way(worker: WorkerParts) -> str:
    """Return the address, with its interface, by which other hosts know this host; empty if it is the only one."""
    return chosen_interface()


def progress(worker: WorkerParts) -> RankTold:
    """Return the rank's activity and the progress of its groups, without its stacks."""
    current, paused = worker.claims.running, worker.shell.debugger.place or debugged_place(worker)
    busy_s = time.monotonic() - current.since if current else 0.0
    told = worker.groups.collectives(current.id if current else 0, recent=RECENT, look_deeper=True)
    return RankTold(busy_s, paused or where(worker), paused, told, ())


def stacks(worker: WorkerParts, all_threads: bool) -> RankTold:
    """Return `progress` with the stacks of the main thread, or of all threads."""
    return progress(worker)._replace(threads=read_threads(worker, all_threads))


def actors(worker: WorkerParts) -> list[ActorState]:
    """Return the states of the rank's actors."""
    return worker.registry.states()


def source_lines(worker: WorkerParts, places: Sequence[tuple[str, int]]) -> list[Frame]:
    """Return the lines in another rank's stack, as far as this rank knows them."""
    return [make_frame("", file, line, linecache.getline(file, line)) for file, line in places]


def peek(worker: WorkerParts, expression: str, timeout_s: float) -> Peeked:
    """Return the value of an expression in the midst of what the rank runs; see `meshbook.worker.peek`."""
    answer = Peek(worker, expression, timeout_s).ask()
    if answer is None:
        current, place = worker.claims.running, where(worker)
        return Peeked(place, missed=f"{place}, {time.monotonic() - current.since:.0f} s" if current else place)
    if isinstance(answer, BaseException):
        failure = pack_failure(worker.shell.describe(answer))
        return Peeked("", failure=[bytes(each) for each in failure])
    return answer


T = TypeVar("T")
AT_ONCE_MAX = 8  # side threads that may hang in an object at the same time

_open: set[tuple[object, ...]] = set()
_changed = threading.Condition()

TURN_S = 0.1  # a question waits so long for the same one before it


def complete(worker: WorkerParts, code: str, cursor: int) -> Completions | None:
    """See `meshbook.shell.completer.complete`."""

    def answer() -> Completions:
        start, end, items = worker.shell.complete(code, cursor)
        return Completions(start, end, [(text, type, signature) for text, type, signature in items if _sendable(text)])

    return _answer(("complete", _looked_at(code, cursor)), answer)


def inspect(worker: WorkerParts, code: str, cursor: int, detail: int) -> str | None:
    """Return the text for Shift-Tab, with ANSI colours; empty: there is no such name."""

    def answer() -> str:
        return worker.shell.inspect(code, cursor, detail).encode(errors="replace").decode()

    return _answer(("inspect", _looked_at(code, cursor)), answer)


def user_names(worker: WorkerParts, prefix: str) -> list[str] | None:
    """Return the names of the rank's variables."""
    return _answer(("names",), lambda: [name for name in worker.shell.names(prefix) if _sendable(name)])


def _answer(key: tuple[object, ...], work: Callable[[], T]) -> T | None:
    """Answer unless the same question, by ``key``, or too many others are being answered."""
    with _changed:
        if not _changed.wait_for(lambda: key not in _open and len(_open) < AT_ONCE_MAX, TURN_S):
            return None
        _open.add(key)
    try:
        try:
            return work()
        except RuntimeError:  # the main thread has changed an object that was being read
            return work()
    except Exception:
        return None
    finally:
        with _changed:
            _open.discard(key)
            _changed.notify_all()


def _looked_at(code: str, cursor: int) -> str:
    """Return the line before the name that is being typed."""
    return re.sub(r"\w*$", "", code[:cursor].rpartition("\n")[2])


def _sendable(text: str) -> bool:
    """Whether a name can be sent: names made by ``setattr`` may be any text, lone surrogates too."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_OURS = "meshbook."  # prefix of our threads' names


def read_threads(worker: WorkerParts, all_threads: bool) -> tuple[ThreadStack, ...]:
    """Return the stacks of this process's threads, the main thread first; omit it when the rank is idle."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: list[ThreadStack] = []
    for ident, frame in frames().items():
        name = names.get(ident, f"thread {ident}")
        is_main = ident == worker.main_thread
        if is_main and worker.claims.running is not None:
            awaiting = cell_frames(worker.shell.loop) if worker.shell.loop.is_running() else []
            running = awaiting and users_place(frame)  # a coroutine is on the stack already
            threads.insert(0, ThreadStack("main", True, _read([*([] if running else awaiting), *_callers(frame)])))
        elif all_threads and not is_main and len(threads) < MAX_THREADS:
            thread = ThreadStack(name, False, _read(_callers(frame)))
            if thread.users or not name.startswith(_OURS):  # ours may run the user's code: an actor's
                threads.append(thread)
    if all_threads and worker.shell.loop.is_running():
        tasks = task_frames(worker.shell.loop)[: MAX_THREADS - len(threads)]
        threads += [ThreadStack(name, False, _read(frames)) for name, frames in tasks if frames]
    return tuple(threads)


def saving(worker: WorkerParts, name: str) -> SavingState:
    """Return how far the rank is with a save that it writes aside."""
    if (module := sys.modules.get("meshbook.checkpoint.saving")) is None:
        return SavingState(True, "the rank was started again meanwhile")
    state: SavingState = module.progress(name)
    return state


def watch_nan(worker: WorkerParts, is_on: bool) -> bool:
    """Watch modules and gradients for values that are not finite, or do not any more; return whether it is done."""
    if not is_on:
        nan_watch.end()
    return not is_on or nan_watch.begin()


def _read(frames: Iterable[FrameType]) -> tuple[Frame, ...]:
    return cut_frames(_describe(frame) for frame in frames)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(frame: FrameType) -> Frame:
    code, line = frame.f_code, frame.f_lineno or 0
    source = linecache.getline(code.co_filename, line) if is_users_code(code) else ""
    return make_frame(getattr(code, "co_qualname", code.co_name), code.co_filename, line, source)


_QUICK = (
    where,
    reaction,
    status,
    collectives,
    clock,
    actors,
    versions,
    way,
    watch_nan,
    saving,
    *debug_queries.QUICK,
)
_SLOW = (complete, inspect, user_names, peek, progress, stacks, source_lines, *debug_queries.SLOW)

QUERIES: dict[str, Callable[..., object]] = {function.__name__: function for function in (*_QUICK, *_SLOW)}

# the queries that may take longer than a few milliseconds
SLOW_QUERIES = frozenset(function.__name__ for function in _SLOW)
