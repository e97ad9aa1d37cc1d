"""Commands that look at variables of ranks without bringing them: vars, diff."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshbook.formatting import Table, format_bytes, format_some_ranks, group_ranks, name_ranks
from meshbook_extension.commands import Command, on_ranks
from meshbook_extension.commands.values import AT, NOW, TIMEOUT, check_expression, look, target_of
from meshbook_extension.notebook.grammar import Arguments
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import show_tables
from meshbook_extension.output.publisher import sink_for

if TYPE_CHECKING:
    from meshbook.shape.value_mesh import ValueMesh
    from meshbook.values.summaries import ValueSummary

SUMMARIES = "__import__('meshbook.values.summaries', fromlist=['_'])"
RANKS_CHARS = 24
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
    expression = f"{SUMMARIES}.summarize_variables(globals(), get_ipython().user_ns_hidden)"
    look(session, arguments, procs, expression, lambda values: _show_variables(session, values))


def _show_variables(session: Session, values: ValueMesh[Any]) -> None:
    found = _by_name(values)
    rows = [row for name in sorted(found, key=str.lower) for row in _rows(name, found[name], values.ranks)]
    if not rows:
        print(f"no variables on {name_ranks(values.ranks)} yet. Make some: %%mesh above a cell, or %mesh push NAME")
        return
    heads = ["name", "type", "shape", "dtype", "size", "device", "value", "ranks"]
    show_tables(sink_for(session.shell), [Table(heads, rows, "<<<<><<<").without_empty()])


def _by_name(values: ValueMesh[Any]) -> dict[str, dict[int, ValueSummary]]:
    """Return the summaries of each name by rank."""
    found: dict[str, dict[int, ValueSummary]] = {}
    for rank in values.ranks:
        for name, summary in values[rank].items():
            found.setdefault(name, {})[rank] = summary
    return found


def _rows(name: str, summaries: Mapping[int, ValueSummary], ranks: tuple[int, ...]) -> list[list[str]]:
    """Return a row for each form that a variable has on ranks."""
    rows = []
    forms = group_ranks((rank, each._replace(text="", place="", digest="")) for rank, each in summaries.items())
    for form, having in forms.items():
        texts = {summaries[rank].text for rank in having}
        size = format_bytes(form.size_bytes) if form.size_bytes else ""
        where = _describe_equal({rank: summaries[rank] for rank in having}, set(having) == set(ranks))
        text = texts.pop() if len(texts) == 1 else ""
        rows.append([name, form.kind, form.shape, form.dtype, size, form.device, text, where])
    return rows


def _describe_equal(summaries: Mapping[int, ValueSummary], is_everywhere: bool) -> str:
    """Write ``equal on 0-3``, ``differs: [0,1] [2,3]``, or ``on 0-3`` where it is not known."""
    on = format_some_ranks(summaries, RANKS_CHARS)
    if not all(each.digest for each in summaries.values()):
        return f"on {on}"
    groups = _equal_groups(summaries)
    if any(each.place for each in summaries.values()):
        return f"{'in parts' if all(len(each) == 1 for each in groups) else 'parts differ'} on {on}"
    if len(summaries) == 1:
        return f"on {on}" if is_everywhere else f"only on {on}"
    if len(groups[0]) == 1:
        return f"equal on {on}"
    if len(groups[0]) == len(summaries):
        return f"differs on each of {on}"
    return f"differs: {_write_groups(groups[0])}"


def _equal_groups(summaries: Mapping[int, ValueSummary]) -> list[list[list[int]]]:
    """Return the ranks with equal values together, for each part that ranks hold; most ranks first."""
    parts: dict[str, dict[str, list[int]]] = {}
    for rank, each in summaries.items():
        key = f"{each.kind} {each.shape} {each.dtype} {each.digest}"
        parts.setdefault(each.place, {}).setdefault(key, []).append(rank)
    return [sorted(each.values(), key=len, reverse=True) for each in parts.values()]


def _write_groups(groups: list[list[int]]) -> str:
    shown = " ".join(f"[{format_some_ranks(ranks, RANKS_CHARS)}]" for ranks in groups[:4])
    return f"{shown} and {len(groups) - 4} more" if len(groups) > 4 else shown


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
    found = _by_name(values)
    unknown = [path for path, each in found.items() if not all(summary.digest for summary in each.values())]
    compared = {path: each for path, each in found.items() if path not in set(unknown)}
    alone = [path for path, each in compared.items() if len(_equal_groups(each)) == len(values.ranks) > 1]
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
        where = f"only on {format_some_ranks(compared[path], RANKS_CHARS)}" if lacking else _write_groups(groups)
        rows.append([path or written, one.shape or one.kind, one.dtype, where])
    if rows:
        heads = ["differs", "shape", "dtype", "equal ranks"]
        show_tables(sink_for(session.shell), [Table(heads, rows)])
    if len(differing) > ROWS:
        print(f"and {len(differing) - ROWS} more differ")
    return differing


def _differing(summaries: Mapping[int, ValueSummary], ranks: tuple[int, ...]) -> list[list[int]]:
    """Return the groups of ranks with equal values, where they are several for one part, or a rank lacks it."""
    parts = _equal_groups(summaries)
    missing = [rank for rank in ranks if rank not in summaries]
    if missing:
        return [*(group for groups in parts for group in groups), missing]
    return [group for groups in parts if len(groups) > 1 for group in groups]
