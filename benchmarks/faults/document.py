"""Writes the figures into a document, between two marks, one block per campaign."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks import machine
from benchmarks.faults.findings import Findings


def write(document: Path, command: str, findings: Sequence[Findings]) -> None:
    """Replace the block of each campaign that was run; blocks of others stay. Blocks that are missing are added."""
    for found in findings:
        replace_block(document, found.name, _block(command, found))


def replace_block(document: Path, name: str, block: str) -> None:
    """Put a text between the marks of this name, which are added at the end where they are missing."""
    text = document.read_text()
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, mark, rest = text.partition(begin)
    marked = f"{begin}\n{block}\n{end}"
    document.write_text(before + marked + rest.partition(end)[2] if mark else f"{text.rstrip()}\n\n{marked}")


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
