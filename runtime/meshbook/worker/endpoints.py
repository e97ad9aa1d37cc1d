"""The calls that a worker's process answers itself: cells, functions, values, process groups (`CALLS`).

They run on the main thread, in order, and may run user code. Each gets the worker, the call and the sender's arguments,
and returns an `Outcome`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING

from meshbook.calls.mailboxes import Outcome
from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean_variable
from meshbook.groups.collectives_off import NoGroups
from meshbook.profiling.recorder import recorded
from meshbook.shape.members import Extent
from meshbook.shell.failures import describe_briefly
from meshbook.shell.postmortem_memory import free as free_kept
from meshbook.shell.scripts import Script
from meshbook.source.location import CellSource, add_cell
from meshbook.values.main_names import brought
from meshbook.values.pickling import dumps, dumps_bounded
from meshbook.values.remote_value import RemoteValue
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.worker.parts import WorkerParts

# a cell's last expression travels to the notebook up to this size; larger ones stay on the rank
RESULT_MAX_BYTES = 1 << 20


def _ok(value: object = None, what: str = "the result") -> Outcome:
    return Outcome(wire.OK, value, has_value=True, what=what)


def run_cell(
    worker: WorkerParts,
    call: wire.Call,
    code: str | Script,
    cell_number: int | None = None,
    line_offset: int = 0,
    forbid_collectives: bool = False,
    debug_name: str = "",
    profile: str = "",
) -> Outcome:
    """Run a cell, or a program, in the rank's shell; the value is that of a cell's last expression.

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
    worker: WorkerParts, call: wire.Call, function: Callable[..., object], *args: object, **kwargs: object
) -> Outcome:
    """Call a function that travelled here; for an ``async`` one the value is that of its coroutine."""
    value = function(*args, **kwargs)
    if hasattr(type(value), "__await__") and isinstance(value, Coroutine):  # which takes longer
        value = worker.shell.run_coroutine(value)
    what = f"the result of {getattr(function, '__name__', 'the function')}"
    return Outcome(wire.OK, value, has_value=True, pickled=dumps(value, what=what))  # here it can be interrupted


def invoke_with_source(
    worker: WorkerParts,
    call: wire.Call,
    source: CellSource,
    function: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> Outcome:
    """`invoke` a function of a cell that this rank does not know. source: without text for a file of the machine."""
    if source.text:
        add_cell(source.text, source.number, source.file_name)
    return invoke(worker, call, function, *args, **kwargs)


def push(
    worker: WorkerParts, call: wire.Call, values: Mapping[str, object], sources: Sequence[CellSource] = ()
) -> Outcome:
    """Bind names in the rank's namespace. sources: the cells that functions and classes among the values come from."""
    for source in sources:
        add_cell(source.text, source.number, source.file_name)
    worker.shell.namespace.update(values)
    for hidden in brought.release(values):
        print(hidden)
    return _ok()


def pull(worker: WorkerParts, call: wire.Call, names: Sequence[str], joins: Sequence[int] = ()) -> Outcome:
    """Return the values of expressions, most often names; one value for one name. joins: the ranks whose values will be
    joined, in this order, so that they can be without a copy."""
    values = [evaluate(worker, name) for name in names]
    rank = worker.identity.rank
    position = joins.index(rank) if rank in joins else 0
    if len(names) > 1:
        roots = dict(zip(names, values, strict=True))
        pickled = dumps(tuple(values), what="values", roots=roots)
    else:
        pickled = dumps(values[0], what=names[0])
    return Outcome(wire.OK, values, has_value=True, pickled=pickled, position=position)


def evaluate(worker: WorkerParts, expression: str, names: dict[str, object] | None = None) -> object:
    """Return the value of a name or an expression.

    names: as of `RankShell.evaluate`. Raises: NameError with a near match; the errors of the expression.
    """
    if not expression.isidentifier():
        return worker.shell.evaluate(expression, names)
    known = worker.shell.namespace if names is None else names
    try:
        return known[expression]
    except KeyError:
        near = did_you_mean_variable(expression, known)
        raise NameError(f"name '{expression}' is not defined on the rank.{near}") from None


def form_group(worker: WorkerParts, call: wire.Call, epoch: int, groups: Sequence[str] = ()) -> Outcome:
    """Form the default process group and the DeviceMesh, and prove it with a collective. groups: form only these."""
    identity = worker.identity
    worker.groups.form(worker.store.ask, identity, epoch=epoch, groups=groups)
    return set_axes(worker, call, identity.axes, identity.sizes)


def prove_group(worker: WorkerParts, call: wire.Call) -> Outcome:
    """Prove the default process group with a collective."""
    worker.groups.prove()
    return _ok()


def prepare_group(worker: WorkerParts, call: wire.Call, epoch: int) -> Outcome:
    """Meet the other ranks and set torchrun's variables, so that a cell can form a group of its own."""
    worker.groups.prepare(worker.store.ask, worker.identity, epoch=epoch)
    return _ok()


def postmortem(worker: WorkerParts, call: wire.Call) -> Outcome:
    """Open a prompt on the frames of the rank's last exception; return when the person has closed it."""
    kept, worker.shell.debugger.refusal = worker.shell.last_error, ""  # who asks for it is there
    if kept is None or kept.error.__traceback__ is None:
        raise UsageError("this rank has no exception with frames to look at.")
    error = kept.error
    worker.shell.debugger.post_mortem(error.__traceback__, describe_briefly(error))
    return _ok()


def free(worker: WorkerParts, call: wire.Call) -> Outcome:
    """Let go of the last exception's frames, and of device caches."""
    return _ok(free_kept(worker.shell))


def set_axes(worker: WorkerParts, call: wire.Call, axes: Sequence[str], sizes: Sequence[int]) -> Outcome:
    """Rebind ``mesh`` and ``point`` to other axes over the same ranks."""
    names: dict[str, object] = {"point": Extent(tuple(axes), tuple(sizes)).point(worker.identity.rank)}
    if worker.groups.formed:
        names["mesh"] = worker.groups.device_mesh(tuple(axes), tuple(sizes))
    worker.shell.define(names)
    return _ok()


def broadcast(worker: WorkerParts, call: wire.Call, name: str, src: int) -> Outcome:
    """Bind ``name`` everywhere to its value on rank ``src``, by the process group."""
    if isinstance(worker.groups, NoGroups):
        worker.groups.require()
    from meshbook.groups.broadcast import broadcast_value  # which imports torch

    broadcast_value(name, worker.shell.namespace, src, worker.groups)
    return _ok()


INVOKING = (invoke, invoke_with_source)  # calls of functions, whose exceptions are kept for a post-mortem
_CALLS = (
    *INVOKING, run_cell, push, pull, form_group, prove_group, prepare_group, set_axes, broadcast, postmortem, free,
)  # fmt: skip

CALLS: dict[str, Callable[..., Outcome]] = {function.__name__: function for function in _CALLS}
