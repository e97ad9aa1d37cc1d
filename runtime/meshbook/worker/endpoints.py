"""What a worker can be asked to do: the endpoints of the process itself.

`CALLS` run on the main thread, in order, and may run user code. `QUERIES` are answered by the control thread, always;
those of `SLOW_QUERIES` on a side thread, so that no interrupt waits behind them.
Each call endpoint gets the worker, the call and the sender's arguments, and returns an `Outcome`. A query gets the
worker and plain data, and returns plain data.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING

from meshbook.actor.listing import ActorState
from meshbook.calls.answer import Outcome
from meshbook.calls.rank_state import Reaction, StatusAnswer
from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook.groups.collectives_off import NoGroups
from meshbook.groups.progress import Collectives
from meshbook.profiling.recorder import recorded
from meshbook.shape.members import Extent
from meshbook.shell.failures import describe_briefly
from meshbook.shell.postmortem_memory import free as free_kept
from meshbook.source.cells import CellSource, add_cell, learn_source
from meshbook.source.frames import Frame
from meshbook.source.location import Activity, describe_frame, frame_activity, users_place
from meshbook.source.tasks import cell_frames
from meshbook.source.thread_frames import exception_of, frame_of
from meshbook.stacks.mesh_stacks import RankTold
from meshbook.system.interfaces import chosen_interface
from meshbook.system.processes import resident_bytes
from meshbook.values.main_names import brought
from meshbook.values.pickling import dumps, dumps_bounded
from meshbook.values.remote_value import RemoteValue
from meshbook.wire import messages as wire
from meshbook.worker.completion import complete, inspect, user_names
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
from meshbook.worker.stacks import lines_of, place_in_debugger, read_threads

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker

RECENT = 16
"""Operations of each group that a rank tells of when somebody looks at it."""

RESULT_MAX_BYTES = 1 << 20
"""A cell's last expression travels to the notebook up to this size; larger ones stay on the rank."""


def _ok(value: object = None, what: str = "the result") -> Outcome:
    return Outcome(wire.OK, value, has_value=True, what=what)


def run_cell(
    worker: Worker,
    call: wire.Call,
    code: str,
    cell_number: int | None = None,
    line_offset: int = 0,
    forbid_collectives: bool = False,
    debug_name: str = "",
    profile: str = "",
) -> Outcome:
    """Run a cell in the rank's shell; the value is that of its last expression.

    profile: record it under this name (`meshbook.profiling.recorder`); empty: do not.
    """
    if worker.debug_session is not None:
        worker.debug_session.trace_again()
    worker.groups.keep_environment()
    with recorded(profile, worker.groups, worker.gate.shield) if profile else contextlib.nullcontext():
        outcome = worker.shell.run_cell(
            code,
            cell_id=call.output,
            cell_number=cell_number,
            line_offset=line_offset,
            forbid_collectives=forbid_collectives,
            debug_name=debug_name,
        )
    if outcome.failure is not None:
        return Outcome(wire.INTERRUPTED if outcome.interrupted else wire.RAISED, failure=outcome.failure)
    if not outcome.has_value:
        return _ok()
    pickled = dumps_bounded(outcome.value, RESULT_MAX_BYTES)
    if pickled is None:
        return _ok(RemoteValue.describing(outcome.value, worker.identity.rank))
    return Outcome(wire.OK, has_value=True, pickled=pickled)


def invoke(
    worker: Worker, call: wire.Call, function: Callable[..., object], *args: object, **kwargs: object
) -> Outcome:
    """Call a function that travelled here; of one that is ``async`` the value is that of its coroutine."""
    value = function(*args, **kwargs)
    if hasattr(type(value), "__await__") and isinstance(value, Coroutine):  # which takes longer
        value = worker.shell.run_coroutine(value)
    what = f"the result of {getattr(function, '__name__', 'the function')}"
    return Outcome(wire.OK, value, has_value=True, pickled=dumps(value, what=what))  # here it can be interrupted


def invoke_with_source(
    worker: Worker,
    call: wire.Call,
    file_name: str,
    text: str,
    function: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> Outcome:
    """`invoke` a function of a file that this rank has not heard of. text: what stands there; empty for a file of
    the machine."""
    if text:
        learn_source(file_name, text)
    return invoke(worker, call, function, *args, **kwargs)


def push(worker: Worker, call: wire.Call, values: Mapping[str, object], sources: Sequence[CellSource] = ()) -> Outcome:
    """Bind names in the rank's namespace. sources: the cells that functions and classes among the values come from."""
    for source in sources:
        add_cell(source.text, source.number, source.file_name)
    worker.shell.namespace.update(values)
    for hidden in brought.release(values):
        print(hidden)
    return _ok()


def pull(worker: Worker, call: wire.Call, names: Sequence[str], joins: Sequence[int] = ()) -> Outcome:
    """Return the values of expressions, most often names; one value for one name.

    joins: the ranks whose values will be joined, in this order, so that they can be without a copy.
    """
    values = [_evaluate(worker, name) for name in names]
    rank = worker.identity.rank
    position = joins.index(rank) if rank in joins else 0
    if len(names) > 1:
        roots = dict(zip(names, values, strict=True))
        pickled = dumps(tuple(values), what="values", roots=roots)
    else:
        pickled = dumps(values[0], what=names[0])
    return Outcome(wire.OK, values, has_value=True, pickled=pickled, position=position)


def _evaluate(worker: Worker, expression: str) -> object:
    if not expression.isidentifier():
        return worker.shell.evaluate(expression)
    try:
        return worker.shell.namespace[expression]
    except KeyError:
        near = did_you_mean(expression, (name for name in worker.shell.namespace if not name.startswith("_")))
        raise NameError(f"name '{expression}' is not defined on the rank.{near}") from None


def form_group(worker: Worker, call: wire.Call, epoch: int, groups: Sequence[str] = ()) -> Outcome:
    """Form the default process group and the DeviceMesh; proves itself with a collective. groups: only these."""
    identity = worker.identity
    worker.groups.form(worker.control.store_rpc, identity, epoch=epoch, groups=groups)
    return set_axes(worker, call, identity.axes, identity.sizes)


def prove_group(worker: Worker, call: wire.Call) -> Outcome:
    """Prove the default process group with a collective."""
    worker.groups.prove()
    return _ok()


def prepare_group(worker: Worker, call: wire.Call, epoch: int) -> Outcome:
    """Meet the other ranks and set torchrun's variables, so that a cell can form a group of its own."""
    worker.groups.prepare(worker.control.store_rpc, worker.identity, epoch=epoch)
    return _ok()


def postmortem(worker: Worker, call: wire.Call) -> Outcome:
    """Open a prompt on the frames of the rank's last exception; returns when the person has seen enough."""
    kept, worker.shell.debugger.refusal = worker.shell.last_error, ""  # who asks for it is there
    if kept is None or kept.error.__traceback__ is None:
        raise UsageError("this rank has no exception with frames to look at.")
    error = kept.error
    worker.shell.debugger.post_mortem(error.__traceback__, describe_briefly(error))
    return _ok()


def free(worker: Worker, call: wire.Call) -> Outcome:
    """Let go of the last exception's frames, and of device caches."""
    return _ok(free_kept(worker.shell))


def set_axes(worker: Worker, call: wire.Call, axes: Sequence[str], sizes: Sequence[int]) -> Outcome:
    """Rebind ``mesh`` and ``point`` to other axes over the same ranks."""
    names: dict[str, object] = {"point": Extent(tuple(axes), tuple(sizes)).point(worker.identity.rank)}
    if worker.groups.formed:
        names["mesh"] = worker.groups.device_mesh(tuple(axes), tuple(sizes))
    worker.shell.define(names)
    return _ok()


def broadcast(worker: Worker, call: wire.Call, name: str, src: int) -> Outcome:
    """Bind ``name`` everywhere to its value on rank ``src``, by the process group."""
    if isinstance(worker.groups, NoGroups):
        worker.groups.require()
    from meshbook.groups.broadcast import broadcast_value  # which imports torch

    broadcast_value(name, worker.shell.namespace, src, worker.groups)
    return _ok()


INVOKING = (invoke, invoke_with_source)
"""Calls of functions, whose exceptions are kept for a post-mortem."""

_CALLS = (
    *INVOKING, run_cell, push, pull, form_group, prove_group, prepare_group, set_axes, broadcast, postmortem, free,
)  # fmt: skip

CALLS: dict[str, Callable[..., Outcome]] = {function.__name__: function for function in _CALLS}


# ---- queries: on the control thread ----------------------------------------------------------------------------


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
