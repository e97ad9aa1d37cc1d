"""The page of Monarch's names says what there is: `make monarch ARGS=--page` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.monarch.__main__ import OF_TYPES
from benchmarks.monarch.notes import BETTER, CUT, DIFFERENCES, INSTEAD
from benchmarks.monarch.surface import surface

PAGE = Path(__file__).parents[1] / "docs" / "monarch.md"
ROW = re.compile(r"\| `(\w+)` \| (same|better|same, in part|not here|elsewhere|cut) \| (.*?) ?\|")


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Module, name, what there is of it here, and what is said."""
    module = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            module = line.removeprefix("## ").removeprefix("monarch").removeprefix(".")
        elif found := ROW.fullmatch(line):
            yield (module, *found.groups())


def test_every_row_says_what_there_is_now() -> None:
    ours = surface("meshbook")
    seen = list(rows())
    assert len(seen) > 100
    for module, name, status, said in seen:
        here = ours[module]
        assert (name in here) == (status not in ("not here", "elsewhere", "cut")), f"{module}.{name}: {status}"
        without = re.findall(r"`(\w+)`", said.partition(";")[0]) if said.startswith("without ") else []
        assert status != "same, in part" or without
        if name in here and name not in OF_TYPES:
            assert not set(without) & set(here[name]), f"{module}.{name} has {without}"


@pytest.mark.parametrize("notes", [INSTEAD, BETTER, CUT], ids=["instead", "better", "cut"])
def test_what_is_noted_of_a_name_is_on_the_page(notes: dict[str, str]) -> None:
    said = {name: also for _, name, _, also in rows()}
    for name, note in notes.items():
        if name in said:
            assert said[name].endswith(note), name


def test_programs_that_differ_on_purpose_are_on_the_page() -> None:
    text = PAGE.read_text()
    assert [name for name, why in DIFFERENCES.items() if f"| `{name}` | {why} |" not in text] == []
