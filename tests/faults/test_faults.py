"""The short form of the reliability suite, a process of its own; the long form is run by hand (`make faults`)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.__main__ import CAMPAIGNS
from benchmarks.faults.document import write
from benchmarks.faults.findings import Findings
from benchmarks.faults.plan import DEADLY, WEIGHTS, make_plan

ROOT = Path(__file__).parents[2]


BASIC = ("faults", "actors", "kernels", "links", "calls", "flood")


def find_nothing(campaigns: str) -> None:
    command = [sys.executable, "-m", "benchmarks.faults", "--tiny", "--only", campaigns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=470)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_nothing_hangs_and_nothing_is_lost() -> None:
    find_nothing(",".join(BASIC))


@pytest.mark.nightly
@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", [name for name in CAMPAIGNS if name not in BASIC])
def test_a_campaign_finds_nothing(name: str) -> None:
    find_nothing(name)


def test_a_plan_is_equal_for_equal_seeds_and_has_every_kind() -> None:
    seed = random.randrange(1000)
    plan = make_plan(seed, 1000, 4)
    assert plan == make_plan(seed, 1000, 4)
    assert {fault.kind for fault in plan} == set(WEIGHTS)
    assert {fault.rank for fault in plan} == {0, 1, 2, 3}
    assert sum(fault.kind in DEADLY for fault in plan) > 300


def test_figures_replace_their_own_block_only(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# Title\n\nText.\n")
    first, second = Findings("calls", "10"), Findings("links", "2")
    first.time("a call", 0.001)
    write(document, "one", [first, second])
    first.hangs.append("x")
    write(document, "two", [first])
    text = document.read_text()
    assert text.startswith("# Title\n\nText.\n\n<!-- calls -->\n")
    assert text.count("### Calls: 10") == text.count("### Links: 2") == 1
    assert "**Hangs 1." in text and "`two`" in text and "`one`" in text
