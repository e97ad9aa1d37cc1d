"""The table of the ranks' variables: a row for each form that a variable has, and the ranks that hold equal values."""

from __future__ import annotations

from collections.abc import Mapping

from meshbook.formatting import format_bytes, format_some_ranks, group_ranks
from meshbook.values.summaries import ValueSummary

SUMMARIES = "__import__('meshbook.values.summaries', fromlist=['_'])"
SUMMARIZE = f"{SUMMARIES}.summarize_variables(globals(), get_ipython().user_ns_hidden)"
"""The expression whose value on a rank is a summary of each of its variables."""
VARIABLE_HEADS = ["name", "type", "shape", "dtype", "size", "device", "value", "ranks"]
RANKS_CHARS = 24


def variable_rows(values: Mapping[int, Mapping[str, ValueSummary]]) -> list[list[str]]:
    """Return the rows below `VARIABLE_HEADS`. values: the summaries by name, of each rank."""
    found = by_name(values)
    return [row for name in sorted(found, key=str.lower) for row in _rows(name, found[name], tuple(values))]


def by_name(values: Mapping[int, Mapping[str, ValueSummary]]) -> dict[str, dict[int, ValueSummary]]:
    """Return the summaries of each name by rank."""
    found: dict[str, dict[int, ValueSummary]] = {}
    for rank, summaries in values.items():
        for name, summary in summaries.items():
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
    groups = equal_groups(summaries)
    if any(each.place for each in summaries.values()):
        return f"{'in parts' if all(len(each) == 1 for each in groups) else 'parts differ'} on {on}"
    if len(summaries) == 1:
        return f"on {on}" if is_everywhere else f"only on {on}"
    if len(groups[0]) == 1:
        return f"equal on {on}"
    if len(groups[0]) == len(summaries):
        return f"differs on each of {on}"
    return f"differs: {write_groups(groups[0])}"


def equal_groups(summaries: Mapping[int, ValueSummary]) -> list[list[list[int]]]:
    """Return the ranks with equal values together, for each part that ranks hold; most ranks first."""
    parts: dict[str, dict[str, list[int]]] = {}
    for rank, each in summaries.items():
        key = f"{each.kind} {each.shape} {each.dtype} {each.digest}"
        parts.setdefault(each.place, {}).setdefault(key, []).append(rank)
    return [sorted(each.values(), key=len, reverse=True) for each in parts.values()]


def write_groups(groups: list[list[int]]) -> str:
    shown = " ".join(f"[{format_some_ranks(ranks, RANKS_CHARS)}]" for ranks in groups[:4])
    return f"{shown} and {len(groups) - 4} more" if len(groups) > 4 else shown
