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
from meshbook.calls.rank_state import Completions, Reaction, StatusAnswer
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
from meshbook.worker.debug_queries import (
    debug_close,
    debug_names,
    debug_open,
    debug_prepare,
    debug_read,
    debug_write,
    debugged_place,
    hold_deadlines,
    last_error,
    meet_controller,
    pdb_break_in,
    pdb_command,
    pdb_prompt,
)

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker

RECENT = 16
"""Operations of each group that a rank tells of when somebody looks at it."""


def where(worker: Worker) -> str:
    """What the main thread is doing: ``idle``, or ``in all_reduce (cell 7, line 5)``."""
    return _doing(worker)[1]


def _doing(worker: Worker) -> tuple[Activity, str]:
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


def collectives(worker: Worker, recent: int = 0) -> Collectives:
    """How far the rank's process groups are, with the last ``recent`` operations of each, and what it waits in."""
    current = worker.claims.running
    told = worker.groups.collectives(current.id if current else 0, recent=recent)
    return told._replace(actors=worker.registry.busy, handling=worker.registry.handling)


def reaction(worker: Worker) -> Reaction:
    """`where`, and how the running call takes an interrupt that was sent to it."""
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


def _why_it_goes_on(worker: Worker) -> str:
    if worker.gate.has_handler:
        return "it deals with interrupts itself (signal.signal), and goes on"
    handled = exception_of(worker.main_thread)
    handled = handled[1] if isinstance(handled, tuple) else handled  # until Python 3.11
    if isinstance(handled, KeyboardInterrupt):
        return "it is still cleaning up after KeyboardInterrupt"
    return "it caught KeyboardInterrupt and goes on"


def status(worker: Worker) -> StatusAnswer:
    """What a person who looks at the mesh is shown of a rank."""
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


def clock(worker: Worker) -> float:
    """The wall clock of this machine, in seconds since the epoch."""
    return time.time()


def versions(worker: Worker) -> dict[str, str]:
    """What this rank runs, as far as ranks of one mesh should not differ in it."""
    told = {"Python": platform.python_version()}
    if (torch := sys.modules.get("torch")) is not None:
        told["torch"] = str(torch.__version__)
        if (cuda := torch.version.cuda) is not None:
            told["CUDA"] = str(cuda)
    return told


def way(worker: Worker) -> str:
    """The address, with its interface, by which this rank's host is known to the others; empty where it is the only."""
    return chosen_interface()


def progress(worker: Worker) -> RankTold:
    """What the rank does, and how far its groups are, without its stacks."""
    current, paused = worker.claims.running, worker.shell.debugger.place or place_in_debugger(worker)
    busy_s = time.monotonic() - current.since if current else 0.0
    told = worker.groups.collectives(current.id if current else 0, recent=RECENT, look_deeper=True)
    return RankTold(busy_s, paused or where(worker), paused, told, ())


def stacks(worker: Worker, all_threads: bool) -> RankTold:
    """The same with the stacks of the main thread, or of all threads."""
    return progress(worker)._replace(threads=read_threads(worker, all_threads))


def actors(worker: Worker) -> list[ActorState]:
    """What the actors of the rank are doing."""
    return worker.registry.states()


def source_lines(worker: Worker, places: Sequence[tuple[str, int]]) -> list[Frame]:
    """What this rank knows of lines in another one's stack."""
    return lines_of(places)


T = TypeVar("T")

AT_ONCE_MAX = 8
"""So many side threads may hang in what they look at."""

_open: set[tuple[object, ...]] = set()
_changed = threading.Condition()

TURN_S = 0.1
"""How long the same question waits for the one before it."""


def complete(worker: Worker, code: str, cursor: int) -> Completions | None:
    """See `meshbook.shell.completer.complete`."""

    def answer() -> Completions:
        start, end, items = worker.shell.complete(code, cursor)
        return Completions(start, end, [(text, type, signature) for text, type, signature in items if _sendable(text)])

    return _answer(("complete", _looked_at(code, cursor)), answer)


def inspect(worker: Worker, code: str, cursor: int, detail: int) -> str | None:
    """What Shift-Tab shows, with ANSI colours; empty: there is no such name."""

    def answer() -> str:
        return worker.shell.inspect(code, cursor, detail).encode(errors="replace").decode()

    return _answer(("inspect", _looked_at(code, cursor)), answer)


def user_names(worker: Worker, prefix: str) -> list[str] | None:
    """The variables of the rank."""
    return _answer(("names",), lambda: [name for name in worker.shell.names(prefix) if _sendable(name)])


def _answer(key: tuple[object, ...], work: Callable[[], T]) -> T | None:
    """Answer unless the same question, by ``key``, or too many others are being answered."""
    with _changed:
        if not _changed.wait_for(lambda: key not in _open and len(_open) < AT_ONCE_MAX, TURN_S):
            return None
        _open.add(key)
    try:
        return _twice(work)
    except Exception:
        return None
    finally:
        with _changed:
            _open.discard(key)
            _changed.notify_all()


def _looked_at(code: str, cursor: int) -> str:
    """The line before the name that is being typed."""
    return re.sub(r"\w*$", "", code[:cursor].rpartition("\n")[2])


def _twice(work: Callable[[], T]) -> T:
    """The main thread may change what is being read; then once more."""
    try:
        return work()
    except RuntimeError:
        return work()


def _sendable(text: str) -> bool:
    """Names made by ``setattr`` may be anything, lone surrogates too."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_OURS = "meshbook."
"""What our threads' names begin with."""


def read_threads(worker: Worker, all_threads: bool) -> tuple[ThreadStack, ...]:
    """The threads of this process, the main thread first; of an idle rank only what else there is."""
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


def place_in_debugger(worker: Worker) -> str:
    """Where an editor's debugger has stopped the main thread; empty when it has not."""
    for frame in _callers(frame_of(worker.main_thread)):
        if "pydevd" in frame.f_code.co_filename and "wait_suspend" in frame.f_code.co_name:
            return users_place(frame)
        if is_users_code(frame.f_code):
            break
    return ""


def lines_of(places: Sequence[tuple[str, int]]) -> list[Frame]:
    """Frames for (file, line) pairs of another rank's stack, with what is known of them here."""
    return [make_frame("", file, line, linecache.getline(file, line)) for file, line in places]


def _read(frames: Iterable[FrameType]) -> tuple[Frame, ...]:
    return cut_frames(_describe(frame) for frame in frames)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(frame: FrameType) -> Frame:
    code, line = frame.f_code, frame.f_lineno or 0
    source = linecache.getline(code.co_filename, line) if is_users_code(code) else ""
    return make_frame(getattr(code, "co_qualname", code.co_name), code.co_filename, line, source)


_QUICK = (
    *(where, reaction, status, collectives, clock, actors, versions, way),
    *(pdb_prompt, pdb_command, pdb_break_in, hold_deadlines, last_error),
)
_SLOW = (
    *(complete, inspect, user_names, progress, stacks, source_lines, meet_controller),
    *(debug_prepare, debug_open, debug_read, debug_write, debug_close, debug_names),
)

QUERIES: dict[str, Callable[..., object]] = {function.__name__: function for function in (*_QUICK, *_SLOW)}

SLOW_QUERIES = frozenset(function.__name__ for function in _SLOW)
"""Those of `QUERIES` that may take longer than a few milliseconds."""
