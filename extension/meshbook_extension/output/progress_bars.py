"""Progress bars of several ranks as one: tqdm's text, as it was printed. Pure.

Bars belong together when they have the same title and count to the same total.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshbook.formatting import name_ranks

_BAR = re.compile(r"(?:^|(?P<title>[^|]*?):?\s*)(?P<percent>\d{1,3})%\|[^|]*\|\s*(?:(?P<done>\S+?)/(?P<total>\S+))?")
_BAR_WITHIN = 500
"""Characters: so early a bar begins in its line."""
_LEFT = re.compile(r"<\s*(?P<left>[\d:]+)")
_PERCENT = re.compile(r"(?P<percent>\d{1,3})(?:\.\d+)?\s*%")


_ENDED = re.compile(r"(?P<bar>.*\d{1,3}%\|[^|]*\| *\S+/\S+) \[[\d:]+<[\d:?]+, *[^],]+(?P<said>(?:, [^]]*)?)\]\s*")
_BEHIND = 0.05
"""Ranks that are further apart than this are named."""


class BarProgress(NamedTuple):
    """How far the ranks with a bar are."""

    title: str
    """What the bars call themselves; empty where they have no name, or several."""
    ranks: int
    mean: float
    """Between 0 and 1."""
    least: float
    slowest: int
    """The rank that is least far."""
    left: str
    """The longest time left as tqdm writes it, ``01:30``; empty where it is not known."""


def merge_bars(bars: Iterable[tuple[Sequence[int], str]]) -> BarProgress | None:
    """One progress for the bars of all ranks; each bar with the ranks that show it. None without a readable bar."""
    read = [(ranks, bar) for ranks, text in bars if ranks and (bar := _read(text)) is not None]
    count = sum(len(ranks) for ranks, _ in read)
    if not count:
        return None
    ranks, (_, least, _) = min(read, key=lambda entry: entry[1][1])
    titles = {title for _, (title, _, _) in read}
    return BarProgress(
        title=titles.pop() if len(titles) == 1 else "",
        ranks=count,
        mean=sum(len(ranks) * fraction for ranks, (_, fraction, _) in read) / count,
        least=least,
        slowest=min(ranks),
        left=max((left for _, (_, _, left) in read), key=lambda left: (len(left), left)),
    )


def _read(text: str) -> tuple[str, float, str] | None:
    """(title, fraction, time left) of the bar in ``text``."""
    found = _BAR.search(text, 0, _BAR_WITHIN)
    if found is None:
        plain = _PERCENT.search(text)
        return ("", min(1.0, int(plain["percent"]) / 100), "") if plain else None
    fraction = int(found["percent"]) / 100
    try:  # finer than whole percents, where the counts are plain numbers
        fraction = float(found["done"]) / float(found["total"])
    except (TypeError, ValueError, ZeroDivisionError):
        pass
    left = _LEFT.search(text, found.end())
    return (found["title"] or "").strip(), min(1.0, fraction), left["left"] if left else ""


def join_bars(bars: Iterable[tuple[Sequence[int], str]]) -> list[tuple[Sequence[int], str]]:
    """A line for all bars that belong together, in the state of the rank that is least far; the others as they are."""
    joined: list[tuple[Sequence[int], str]] = []
    together: dict[tuple[str, str], list[tuple[float, Sequence[int], str]]] = {}
    for ranks, text in bars:
        found = _BAR.search(text, 0, _BAR_WITHIN)
        if found is None or found["total"] is None:
            joined.append((ranks, text))
            continue
        read = _read(text)
        assert read is not None
        together.setdefault(((found["title"] or "").strip(), found["total"]), []).append((read[1], ranks, text))
    return joined + [_join(alike) for alike in together.values()]


def _join(alike: Sequence[tuple[float, Sequence[int], str]]) -> tuple[Sequence[int], str]:
    least, last, text = min(alike)
    most, first, _ = max(alike)
    if most - least > _BEHIND:
        text = f"{text}  {name_ranks(last)} last, {name_ranks(first)} at {most:.0%}"
    return sorted(rank for _, ranks, _ in alike for rank in ranks), text


def ended_bar(line: str) -> str:
    """What a bar that has become a line has in common with those of other ranks: all but its time and rate; else ""."""
    found = _ENDED.fullmatch(line)
    return f"{found['bar']}\0{found['said']}" if found else ""
