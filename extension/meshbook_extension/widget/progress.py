"""Progress bars of several ranks as one: tqdm's text, as it was printed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BAR = re.compile(r"(?:^|(?P<title>[^|]*?):?\s*)(?P<percent>\d{1,3})%\|[^|]*\|\s*(?:(?P<done>\S+?)/(?P<total>\S+))?")
_LEFT = re.compile(r"<\s*(?P<left>[\d:]+)")
_PERCENT = re.compile(r"(?P<percent>\d{1,3})(?:\.\d+)?\s*%")


class Progress(NamedTuple):
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


def merge_bars(bars: Iterable[tuple[Sequence[int], str]]) -> Progress | None:
    """One progress for the bars of all ranks; each bar with the ranks that show it. None without a readable bar."""
    read = [(ranks, bar) for ranks, text in bars if ranks and (bar := _read(text)) is not None]
    count = sum(len(ranks) for ranks, _ in read)
    if not count:
        return None
    ranks, (_, least, _) = min(read, key=lambda entry: entry[1][1])
    titles = {title for _, (title, _, _) in read}
    return Progress(
        title=titles.pop() if len(titles) == 1 else "",
        ranks=count,
        mean=sum(len(ranks) * fraction for ranks, (_, fraction, _) in read) / count,
        least=least,
        slowest=min(ranks),
        left=max((left for _, (_, _, left) in read), key=lambda left: (len(left), left)),
    )


def _read(text: str) -> tuple[str, float, str] | None:
    """(title, fraction, time left) of the bar in ``text``."""
    found = _BAR.search(text)
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
