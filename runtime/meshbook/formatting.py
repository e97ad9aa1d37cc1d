"""The project's way to write ranks as ranges, sizes and times short, and to name near misses."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as the output labels do: ``0-3``, ``0,2``, ``0-2,5``; no ranks give an empty text."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(
        str(low) if low == high else f"{low}-{high}" if high > low + 1 else f"{low},{high}" for low, high in runs
    )


def format_some_ranks(ranks: Iterable[int], chars: int) -> str:
    """Write ranks as `format_ranks` does, but cut at a comma to at most ``chars`` characters: ``0,2,4,...``."""
    text = format_ranks(ranks)
    return text if len(text) <= chars else text[: chars - 3].rpartition(",")[0] + ",..."


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2,5``."""
    ranks = sorted(set(ranks))
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(ranks)}"


def format_sizes(sizes: Mapping[str, int]) -> str:
    """``hosts=2, gpus=4``, or ``no axes (one member)``."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axes (one member)"


def format_bytes(size_bytes: int) -> str:
    """Three significant digits with a decimal unit: ``950 B``, ``1.21 MB``."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_bytes_per_rank(sizes: Collection[int]) -> str:
    """``1.2 MB per rank``; where ranks hold more than others, from and to. sizes: of each rank, in bytes."""
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    return f"{least if least == most else f'{least} to {most}'} per rank"


def utf8_text(text: str) -> str:
    """``text`` for where only UTF-8 goes: lone surrogates, as of bad file names, get backslashes."""
    return text.encode(errors="backslashreplace").decode()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean "gpus"?`` with its leading space, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


_SHELL_NAMES = frozenset({"In", "Out", "exit", "get_ipython", "open", "quit"})


def did_you_mean_variable(word: str, names: Iterable[str]) -> str:
    """The same for variables of an IPython shell, without those that it has by itself."""
    return did_you_mean(word, (name for name in names if not name.startswith("_") and name not in _SHELL_NAMES))


def group_ranks(values: Iterable[tuple[int, K]]) -> dict[K, list[int]]:
    """Return each value with the ranks that have it, in the order in which they come."""
    groups: dict[K, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups
