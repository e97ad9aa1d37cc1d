"""``make turns BEFORE=DIR ONLY=calls,payloads``: this checkout beside another one, in turns, so that noise meets both.

Each turn runs the short form of the benchmarks in both, in changing order. A figure of meshbook's is compared by the
ratio of its medians over the turns, above 1 where this checkout is slower, with a 90 % interval by bootstrap over the
turns. It has passed where that reaches below 1.05, and is not decided where it is wider than 0.15. Ends with 1 where a
figure is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report

HERE = Path(__file__).parents[1]
PACKAGES = ("runtime", "kernel", "extension", "")
LIMIT, WIDEST = 1.05, 0.15
SAMPLES = 2000
RUN_S = 600.0

Key = tuple[str, str, str, str]  # benchmark, what, size, unit


class Ratio(NamedTuple):
    """How much slower this checkout is, with the bounds of its interval."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low >= LIMIT:
            return "SLOWER"
        return "not decided" if self.high - self.low > WIDEST else "passed"


def ratio(before: Sequence[float], now: Sequence[float], *, is_rate: bool) -> Ratio:
    """Compare the values of one figure, a pair for each turn. is_rate: more is better."""
    if is_rate:
        before, now = now, before
    draw = random.Random(0)
    turns = range(len(now))

    def of(chosen: Sequence[int]) -> float:
        return statistics.median(now[at] for at in chosen) / statistics.median(before[at] for at in chosen)

    drawn = sorted(of(draw.choices(turns, k=len(turns))) for _ in range(SAMPLES))
    return Ratio(of(turns), drawn[SAMPLES // 20], drawn[-SAMPLES // 20])


def measure(checkout: Path, only: str) -> dict[Key, float]:
    """Run the benchmarks of a checkout once; returns the medians of what is meshbook's."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks", "--quick", "--only", only, "--json", str(kept)]
        path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
        done = subprocess.run(
            command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=RUN_S
        )
        if done.returncode:
            raise SystemExit(f"the benchmarks of {checkout} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        figures = json.loads(kept.read_text())["figures"]
    return {
        (each["benchmark"], each["what"], each["size"], each["unit"]): each["summary"]["median"]
        for each in figures
        if each["subject"] == "meshbook"
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--only", default="calls,payloads,output,actors,spawn,notebook", help="which benchmarks")
    parser.add_argument("--turns", type=int, default=11)
    options = parser.parse_args(arguments)
    seen: dict[Path, list[dict[Key, float]]] = {options.before.resolve(): [], HERE: []}
    for turn in range(options.turns):
        order = list(seen) if turn % 2 else list(seen)[::-1]
        for checkout in order:
            seen[checkout].append(measure(checkout, options.only))
        print(f"turn {turn + 1} of {options.turns}", file=sys.stderr, flush=True)
    before, now = seen.values()
    both = [key for key in now[0] if all(key in each and each[key] > 0 for each in (*before, *now))]
    rows, is_slower = [("what", "size", "ratio", "90 %", "")], False
    for key in both:
        found = ratio([each[key] for each in before], [each[key] for each in now], is_rate=key[3] in ("per s", "GB/s"))
        is_slower = is_slower or found.verdict == "SLOWER"
        rows.append((key[1], key[2], f"{found.median:.2f}", f"{found.low:.2f}-{found.high:.2f}", found.verdict))
    print(report.aligned(rows))
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
