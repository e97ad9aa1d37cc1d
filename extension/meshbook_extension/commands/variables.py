"""Commands that look at variables of ranks without bringing them: vars, diff."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshbook.formatting import Table, format_bytes, format_some_ranks, name_ranks
from meshbook_extension.commands import Command, on_ranks
from meshbook_extension.commands.values import AT, NOW, TIMEOUT, check_expression, look, target_of
from meshbook_extension.notebook.grammar import Arguments
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import show_tables
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

if TYPE_CHECKING:
    from meshbook.shape.value_mesh import ValueMesh
    from meshbook.values.summaries import ValueSummary

ROWS = 50


@on_ranks(
    name="%mesh vars",
    summary="The variables of the ranks: type, shape, dtype, size, device, and on which ranks they are equal.",
    options=(NOW, TIMEOUT),
    examples=("%mesh vars", "%mesh vars gpus=0:2", "%mesh vars --now"),
    notes="Values are compared on the ranks, by a hash of their bytes; those above 64 MB by %mesh diff NAME alone.\n\n",
)
def variables(session: Session, arguments: Arguments) -> None:
    procs = session.target(arguments.words, arguments.pairs)
    look(session, arguments, procs, SUMMARIZE, lambda values: _show_variables(session, values))


def _show_variables(session: Session, values: ValueMesh[Any]) -> None:
    rows = variable_rows({rank: values[rank] for rank in values.ranks})
    if not rows:
        print(f"no variables on {name_ranks(values.ranks)} yet. Make some: %%mesh above a cell, or %mesh push NAME")
        return
    show_tables(sink_for(session.shell), [Table(VARIABLE_HEADS, rows, "<<<<><<<").without_empty()])


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
