"""Figures as a table on the screen, and as JSON for keeping."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from benchmarks.figures import Figure

HEAD = ("what", "size", "subject", "median", "p99", "quartiles", "n", "against", "ratio", "goal", "met")
_MET = {True: "yes", False: "NO", None: ""}


def number(value: float) -> str:
    """Return three significant digits, without an exponent; whole numbers from 100 on."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.4f}"


def cells(figure: Figure) -> tuple[str, ...]:
    """Return the table's columns for one figure, in the order of `HEAD`."""
    summary = figure.summary
    return (
        figure.what,
        figure.size,
        figure.subject,
        f"{number(summary.median)} {figure.unit}",
        number(summary.p99),
        f"{number(summary.low)}-{number(summary.high)}",
        str(summary.samples),
        figure.floor,
        f"{figure.ratio:.2f}" if figure.ratio is not None else "",
        str(figure.goal) if figure.goal else "",
        _MET[figure.met],
    )


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as lines whose columns line up."""
    kept = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in kept
    )


def table(figures: Iterable[Figure]) -> str:
    """Return one benchmark's figures as an aligned table."""
    return aligned([HEAD, *map(cells, figures)])


def as_json(head: dict[str, object], figures: Iterable[Figure]) -> str:
    """Return the run as JSON: what ``head`` says of it, and every figure with ``met`` worked out."""
    rows = [{**asdict(figure), "summary": figure.summary._asdict(), "met": figure.met} for figure in figures]
    for row in rows:
        row["goal"] = list(row["goal"]) if row["goal"] else None
    return json.dumps({**head, "figures": rows}, indent=1)
