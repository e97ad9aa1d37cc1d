"""Writes the figures into a document, between two marks, one block per campaign."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks import machine
from benchmarks.faults.findings import Findings


def write(document: Path, command: str, findings: Sequence[Findings]) -> None:
    """Replace the block of each campaign that was run; blocks of others stay. Blocks that are missing are added."""
    text = document.read_text()
    for found in findings:
        begin, end = f"<!-- {found.name} -->\n", f"<!-- end of {found.name} -->\n"
        block = f"{begin}\n{_block(command, found)}\n{end}"
        before, mark, rest = text.partition(begin)
        text = before + block + rest.partition(end)[2] if mark else f"{text.rstrip()}\n\n{block}"
    document.write_text(text)


def _block(command: str, found: Findings) -> str:
    counts = ", ".join(f"{what} {count:,}" for what, count in sorted(found.counts.items()))
    lines = [
        f"### {found.name.capitalize()}: {found.size}",
        "",
        f"`{command}` on {date.today()}, {machine.describe()}; {found.seconds:.0f} s.",
        "",
        f"**Hangs {len(found.hangs)}. Wrong, lost or doubled {len(found.wrong)}. Left behind {len(found.left)}.**"
        + (f" {counts}." if counts else ""),
        *(["", *found.table()] if found.times else []),
        *(["", *(f"- {note}" for note in found.notes)] if found.notes else []),
    ]
    return "\n".join(lines) + "\n"
