"""Commands for values of the ranks: eval, push, pull, scatter, gather, broadcast; vars and diff look at them there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from meshbook.concurrency.future import Future
from meshbook.errors import CallFailed, UsageError
from meshbook.formatting import Table, format_bytes, format_some_ranks, group_ranks, name_ranks
from meshbook.mesh import states
from meshbook.mesh.peeks import TIMEOUT_S, NoValue, Peeks, peek
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.rank_calls import pull_together
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shape.value_tables import describe_large
from meshbook.values.summaries import ValueSummary
from meshbook_extension.cells.names import pull_hint, push_hints
from meshbook_extension.cells.running import brief, show_as
from meshbook_extension.commands import Command, on_ranks
from meshbook_extension.notebook.grammar import PAIR, Arguments, Option, check_identifier
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS, one_rank
from meshbook_extension.output.labels import label, label_block, show_tables
from meshbook_extension.output.publisher import sink_for
from meshbook_extension.widget.variables import (
    RANKS_CHARS,
    SUMMARIES,
    SUMMARIZE,
    VARIABLE_HEADS,
    by_name,
    equal_groups,
    variable_rows,
    write_groups,
)

T = TypeVar("T")
AXIS, DIM = "axis", "dim"
"""The pairs that are not part of the target in scatter and gather."""

_VARIABLE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\$([^\W\d]\w*)""")
"""A text, in which $ means nothing, or a variable of the notebook."""

AT = Option("--at", "the ranks of a named slice, or of another mesh", str, "SLICE")
OUT = Option("--out", "the notebook's name for it, if another", str, "VAR")
ROWS = 50
"""The most parts that differ that are listed."""
PATIENCE_S = 1.0
"""The time after which a command names the cell that it waits behind."""
LOOKS = "--now looks anyway"
NOW = Option("--now", "look at ranks that are busy too, between two steps of Python of what they run")
TIMEOUT = Option("--timeout", f"with --now: the longest that it may take on a rank ({TIMEOUT_S:g} s)", float, "S")


@Command(
    name="%mesh eval",
    summary="Evaluate an expression on the ranks and show its values, equal ones once.",
    pairs="[AXIS=.. ...]",
    options=(AT, OUT, NOW, TIMEOUT),
    tail="EXPR",
    examples=(
        "%mesh eval loss.item()",
        "%mesh eval --now len(losses)",
        "%mesh eval gpus=0 model.training",
        "%mesh eval --at left x.shape",
        "%mesh eval losses[$step]",
    ),
    notes=f"""
{FORMS}
The expression is the rest of the line, as it stands, but $x is the notebook's x: a number, a text, or such in
containers. _mesh is bound to the values.
With --now nothing is waited for, collectives neither, and what the expression changes in names and in random state is
undone. A rank that runs native code for more than 0.5 s says where.""",
)
def evaluate(session: Session, arguments: Arguments) -> ValueMesh[object]:
    expression = _VARIABLE.sub(lambda found: _written(session, found), arguments.tail)
    check_expression(session, expression, arguments.grammar.name)
    procs = target_of(session, arguments)
    peeks = _peek(arguments, procs, expression)
    values = peeks.values if peeks else answer(session, procs.evaluate(expression), procs, LOOKS)
    session.keep_result(values, arguments.text("--out"))
    failed = peeks.failed if peeks else ()
    found = ((rank, values.get(rank)) for rank in values.ranks if rank not in failed)
    equal = group_ranks((rank, describe_large(value) or repr(value)) for rank, value in found)
    if equal:
        print("\n".join(label_block(ranks, text) for text, ranks in equal.items()))
    if peeks:
        _end(session, peeks)
    return values


def check_expression(session: Session, expression: str, command: str) -> None:
    """Refuse a text that is no expression; targets stand in front of one. Raises: UsageError."""
    try:
        ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        first, _, rest = expression.strip().partition(" ")
        *words, last = expression.split()
        hint = ""
        if rest and (first in session.slices or first in session.meshes):
            hint = f"\n  the ranks of a slice: {command} --at {first} {rest}"
        elif words and PAIR.fullmatch(last):
            hint = f"\n  ranks come first: {command} {last} {' '.join(words)}"
        lines = expression.strip().splitlines()
        shown = lines[min(error.lineno or 1, len(lines)) - 1]
        caret = " " * (error.offset - 1 if error.offset else len(shown)) + "^"
        raise UsageError(f"{command}: {error.msg}\n    {shown}\n    {caret}{hint}") from None
    except (ValueError, MemoryError, RecursionError):
        return  # the ranks say it with their own words


def _written(session: Session, found: re.Match[str]) -> str:
    """Write the notebook's value of ``x`` for ``$x``, in Python. Raises: UsageError."""
    if not (name := found[1]):
        return found[0]
    known = session.shell.user_ns
    if name not in known:
        raise UsageError(f"the notebook has no {name}, which ${name} stands for.")
    text = repr(known[name])
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        kind = type(known[name]).__name__
        raise UsageError(f"${name} is a {kind}, which no expression can hold: %mesh push {name} first.") from None
    return text


@Command(
    name="%mesh push",
    names="notebook",
    summary="Copy variables of the notebook to the ranks.",
    words="NAME [NAME ...]",
    pairs="[AXIS=.. ...]",
    options=(AT,),
    examples=("%mesh push config", "%mesh push a b gpus=0", "%mesh push a --at left"),
    notes=FORMS,
)
def push(session: Session, arguments: Arguments) -> None:
    values = {name: _own_value(session, check_identifier(name, arguments.grammar.name)) for name in arguments.words}
    procs = target_of(session, arguments)
    answer(session, procs.push(values), procs)
    print(f"{', '.join(arguments.words)} on {name_ranks(procs.ranks)}")


@Command(
    name="%mesh pull",
    names="ranks",
    summary="Bring variables of the ranks; each name is bound to the ValueMesh of all ranks' values.",
    words="NAME [NAME ...]",
    pairs="[AXIS=.. ...]",
    options=(AT, OUT, NOW, TIMEOUT),
    examples=(
        "%mesh pull loss",
        "%mesh pull a b gpus=0",
        "%mesh pull loss --out losses",
        "%mesh pull losses --now",
        "%mesh pull a --at left",
    ),
    notes=f"{FORMS}\nValues: loss[rank], loss.item(gpus=0), loss.values().",
)
def pull(session: Session, arguments: Arguments) -> object:
    names = [check_identifier(name, arguments.grammar.name) for name in arguments.words]
    out = arguments.text("--out")
    if out is not None and len(names) > 1:
        raise arguments.grammar.refuse("--out names one variable, but several are pulled.", "--out")
    procs = target_of(session, arguments)
    peeks = _peek(arguments, procs, names[0] if len(names) == 1 else f"({', '.join(names)})")
    pulled = _columns(peeks, names) if peeks else answer(session, pull_together(procs, names), procs, LOOKS)
    for name, values in pulled.items():
        bound = out or name
        former = type(session.shell.user_ns.get(bound, values)).__name__
        instead = f" in place of the notebook's {former}" if former != type(values).__name__ else ""
        session.bind(bound, values)
        print(f"{bound}: ValueMesh of {name_ranks(values.ranks)}{instead}; one of them: {bound}[{values.ranks[0]}]")
    if peeks:
        _end(session, peeks)
    return pulled if len(names) > 1 else pulled.get(names[0])


def _peek(arguments: Arguments, procs: ProcMesh, expression: str) -> Peeks | None:
    """Return the answers of the ranks with ``--now``, None without it. Raises: UsageError for a time that means
    nothing."""
    timeout_s, is_now = arguments.number("--timeout"), arguments.flag("--now")
    if timeout_s is not None and not is_now:
        raise arguments.grammar.refuse("--timeout says how long --now may take; without that there is no limit.")
    return peek(procs, expression, TIMEOUT_S if timeout_s is None else timeout_s) if is_now else None


def look(
    session: Session, arguments: Arguments, procs: ProcMesh, expression: str, show: Callable[[ValueMesh[Any]], T]
) -> T | None:
    """Show the values of an expression, with ``--now`` those of the ranks that gave one, and where these were.

    Raises: as `answer`; the error of a peek, when the values are shown.
    """
    if (peeks := _peek(arguments, procs, expression)) is None:
        return show(answer(session, procs.evaluate(expression), procs, LOOKS))
    values = peeks.values
    rows = zip(values.ranks, values.values(), strict=True)
    _tell_missed((rank, row.why) for rank, row in rows if rank not in peeks.places)
    shown = show(values.select([rank for rank in values.ranks if rank in peeks.places])) if peeks.places else None
    _end(session, peeks)
    return shown


def _columns(peeks: Peeks, names: Sequence[str]) -> dict[str, ValueMesh[Any]]:
    """Return the values of each name; none where no rank gave any. Say why some did not."""
    rows = ((rank, peeks.values.get(rank)) for rank in peeks.values.ranks if rank not in peeks.failed)
    _tell_missed((rank, row.why) for rank, row in rows if isinstance(row, NoValue))
    if not peeks.places:
        return {}
    if len(names) == 1:
        return {names[0]: peeks.values}

    def column(at: int) -> ValueMesh[Any]:
        return peeks.values.map(lambda row: row if isinstance(row, NoValue) else row[at])

    return {name: column(at) for at, name in enumerate(names)}


def _tell_missed(missed: Iterable[tuple[int, str]]) -> None:
    """Print why ranks gave no value, equal reasons once."""
    for why, ranks in group_ranks(missed).items():
        print(label_block(ranks, f"no value: {why}"))


def _end(session: Session, peeks: Peeks) -> None:
    """Say where the ranks were. Raises: the error of those that failed or ended."""
    where = group_ranks(peeks.places.items())
    shown = (place if len(where) == 1 else f"{label(ranks)} {place}" for place, ranks in where.items())
    if where:
        print(f"at that time: {'; '.join(shown)}")
    if isinstance(error := peeks.error, CallFailed):
        raise briefly(session, error)
    if error is not None:
        raise error


@Command(
    name="%mesh scatter",
    names="notebook",
    summary="Cut a tensor, an array or a list of the notebook, and give each index of an axis its piece.",
    words="NAME",
    pairs="[axis=AXIS] [dim=D] [AXIS=.. ...]",
    options=(AT,),
    examples=("%mesh scatter x", "%mesh scatter x axis=gpus dim=1", "%mesh scatter x --at left"),
    notes="axis may be left out where there is only one.",
)
def scatter(session: Session, arguments: Arguments) -> None:
    name = check_identifier(arguments.words[0], arguments.grammar.name)
    value = _own_value(session, name)
    axis, dim = _axis_and_dim(arguments)
    procs = target_of(session, arguments)
    answer(session, procs.scatter(name, value, axis=axis, dim=dim), procs)
    along = axis or next(iter(procs.sizes))
    print(f"{name}: {procs.sizes[along]} pieces along {along}, on {name_ranks(procs.ranks)}")


@Command(
    name="%mesh gather",
    names="ranks",
    summary="Bring the pieces of a variable and join them, along dim, into one in the notebook.",
    words="NAME",
    pairs="[axis=AXIS] [dim=D] [AXIS=.. ...]",
    options=(AT, OUT),
    examples=(
        "%mesh gather x",
        "%mesh gather x axis=gpus dim=1",
        "%mesh gather x --out whole",
        "%mesh gather x --at left",
    ),
    notes="axis may be left out where there is only one.",
)
def gather(session: Session, arguments: Arguments) -> object:
    name = check_identifier(arguments.words[0], arguments.grammar.name)
    bound = arguments.text("--out") or name
    axis, dim = _axis_and_dim(arguments)
    procs = target_of(session, arguments)
    value = answer(session, procs.gather(name, axis=axis, dim=dim), procs)
    session.bind(bound, value)
    shape = getattr(value, "shape", None)
    size = f"shape {tuple(shape)}" if shape is not None else f"{len(value)} items"
    print(f"{bound}: {type(value).__name__}, {size}, from {name_ranks(procs.ranks)}")
    return value


@Command(
    name="%mesh broadcast",
    names="ranks",
    summary="Give every rank of the mesh the value that a variable has on one of them, over the process group.",
    words="NAME",
    options=(Option("--from", "whose value (rank 0)", str, "rank=R"),),
    examples=("%mesh broadcast x", "%mesh broadcast x --from rank=2"),
)
def broadcast(session: Session, arguments: Arguments) -> None:
    name = check_identifier(arguments.words[0], arguments.grammar.name)
    procs = session.mesh()
    rank = one_rank(procs, arguments.text("--from") or "0")
    answer(session, procs.broadcast(name, src=rank), procs)
    print(f"{name} of rank {rank} on {name_ranks(procs.ranks)}")


def answer(session: Session, future: Future[T], procs: ProcMesh, hint: str = "an interrupt drops it") -> T:
    """Wait for the ranks; a rank that does not have the name says so without a traceback.

    hint: the advice in the line that names the cell in front, if that takes long.
    Raises: CallFailed, WorkerLost, CallInterrupted.
    """
    try:
        try:
            return future.get(PATIENCE_S)
        except TimeoutError:
            if future.done():
                raise  # it is the ranks' own
        behind = [f"{what} on {name_ranks(ranks)}" for what, ranks in states.ahead(procs).items()]
        if behind:
            print(f"waits behind {', '.join(behind)}; {hint}", flush=True)
        return future.get()
    except CallFailed as error:
        raise briefly(session, error) from None


def briefly(session: Session, error: CallFailed) -> CallFailed:
    """Have the error shown without a traceback where none leads to code of the user's."""
    if not any(failure.where for failure in error.failures):
        show_as(error, [*brief(error), *push_hints(session, error)])
    return error


def _own_value(session: Session, name: str) -> object:
    """Return a value of the notebook. Raises: UsageError, which says where the name is."""
    try:
        return session.lookup(name)
    except UsageError as error:
        hint = pull_hint(session, name).partition(",")[0]
        raise (UsageError(f'the notebook has no "{name}"; {hint}') if hint else error) from None


def target_of(session: Session, arguments: Arguments) -> ProcMesh:
    """Return the ranks that axes and ``--at`` name."""
    at = arguments.text("--at")
    pairs = {axis: text for axis, text in arguments.pairs.items() if axis not in (AXIS, DIM)}
    return session.target([at] if at else [], pairs)


def _axis_and_dim(arguments: Arguments) -> tuple[str | None, int]:
    dim = arguments.pairs.get(DIM, "0")
    if not dim.removeprefix("-").isdigit():
        raise arguments.grammar.refuse(f"{DIM}={dim} is no dim of a tensor; give a number.", DIM)
    return arguments.pairs.get(AXIS), int(dim)


@on_ranks(
    name="%mesh vars",
    summary="The variables of the ranks: type, shape, dtype, size, device, and on which ranks they are equal.",
    options=(NOW, TIMEOUT),
    examples=("%mesh vars", "%mesh vars gpus=0:2", "%mesh vars --now"),
    notes="Values are compared on the ranks, by a hash of their bytes; those above 64 MB by %mesh diff NAME alone.\n\n",
)
def variables(session: Session, arguments: Arguments) -> None:
    def show(values: ValueMesh[Any]) -> None:
        rows = variable_rows({rank: values[rank] for rank in values.ranks})
        if rows:
            show_tables(sink_for(session.shell), [Table(VARIABLE_HEADS, rows, "<<<<><<<").without_empty()])
        else:
            print(f"no variables on {name_ranks(values.ranks)} yet. Make some: %%mesh above a cell, or %mesh push NAME")

    look(session, arguments, session.target(arguments.words, arguments.pairs), SUMMARIZE, show)


@Command(
    name="%mesh diff",
    names="ranks",
    summary="Whether ranks hold the same: each tensor of a module, an optimizer or containers, and where they differ.",
    pairs="[AXIS=.. ...]",
    options=(AT, NOW, TIMEOUT),
    tail="EXPR",
    examples=("%mesh diff model", "%mesh diff optimizer", "%mesh diff gpus=0:2 batch", "%mesh diff --now model.module"),
    notes="""
Ranks hash the bytes; no tensor is sent. Parts of a DTensor are compared where ranks hold the same part. The value is a
dict of the paths that differ, each with its groups of equal ranks: bad = %mesh diff model""",
)
def diff(session: Session, arguments: Arguments) -> dict[str, list[list[int]]] | None:
    written = arguments.tail.strip()
    check_expression(session, written, arguments.grammar.name)
    expression = f"{SUMMARIES}.summarize_parts({written})"
    procs = target_of(session, arguments)
    return look(session, arguments, procs, expression, lambda values: _show_diff(session, written, values))


def _show_diff(session: Session, written: str, values: ValueMesh[Any]) -> dict[str, list[list[int]]]:
    """Show the parts that differ, and return them with their groups of equal ranks."""
    found = by_name({rank: values[rank] for rank in values.ranks})
    unknown = [path for path, each in found.items() if not all(summary.digest for summary in each.values())]
    compared = {path: each for path, each in found.items() if path not in set(unknown)}
    alone = [path for path, each in compared.items() if len(equal_groups(each)) == len(values.ranks) > 1]
    differing = {path: groups for path, each in compared.items() if (groups := _differing(each, values.ranks))}
    same, where = len(compared) - len(differing) - len(alone), name_ranks(values.ranks)
    size = max(sum(each.size_bytes for each in row.values()) for row in values.values())
    told = [f"{same} of {len(found)} parts equal on {where}"]
    if len(found) == 1:
        told = [f"{'equal' if same else 'differs'} on {where}"] if same or differing else []
    if alone:
        told.append(f"{len(alone)} not compared: each rank holds another part of a DTensor")
    if unknown:
        told.append(f"{len(unknown)} not compared, without bytes: {', '.join(each or written for each in unknown[:3])}")
    print(f"{written}{f' ({format_bytes(size)})' if size else ''}: {'; '.join(told) or 'nothing to compare'}")
    rows = []
    for path, groups in list(differing.items())[:ROWS]:
        one, lacking = compared[path][groups[0][0]], len(compared[path]) < len(values.ranks)
        where = f"only on {format_some_ranks(compared[path], RANKS_CHARS)}" if lacking else write_groups(groups)
        rows.append([path or written, one.shape or one.kind, one.dtype, where])
    if rows:
        heads = ["differs", "shape", "dtype", "equal ranks"]
        show_tables(sink_for(session.shell), [Table(heads, rows)])
    if len(differing) > ROWS:
        print(f"and {len(differing) - ROWS} more differ")
    return differing


def _differing(summaries: Mapping[int, ValueSummary], ranks: tuple[int, ...]) -> list[list[int]]:
    """Return the groups of ranks with equal values, where they are several for one part, or a rank lacks it."""
    parts = equal_groups(summaries)
    missing = [rank for rank in ranks if rank not in summaries]
    if missing:
        return [*(group for groups in parts for group in groups), missing]
    return [group for groups in parts if len(groups) > 1 for group in groups]
