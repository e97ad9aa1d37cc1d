"""`python -m benchmarks`: run the benchmarks and print their tables."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

from benchmarks import machine, report
from benchmarks.figures import Benchmark, Figure, Settings

NAMES = (
    "spawn", "calls", "actors", "buffers", "payloads", "output", "errors", "recoveries", "completion", "notebook",
    "tensors", "clusters", "scripts", "saves",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Return 1 when a benchmark ended with an error; a goal that is missed is shown, and is no error."""
    options = _parse(argv)
    machine.forget_test_settings()
    print(machine.describe(), flush=True)
    settings = Settings(options.quick)
    figures: list[Figure] = []
    loads: dict[str, float] = {}
    failed = []
    for name in options.only:
        loads[name] = machine.others_load()
        try:
            figures += _run(name, settings, loads[name])
        except Exception:
            failed.append(name)
            traceback.print_exc()
    missed = [figure for figure in figures if figure.met is False]
    print(f"\n{len(figures)} figures, {len(missed)} miss their goal" + _named("; failed: ", failed))
    if options.json:
        head = {
            "machine": machine.describe()._asdict(),
            "quick": options.quick,
            "others_load": loads,
            "failed": failed,
        }
        options.json.write_text(report.as_json(head, figures))
    return 1 if failed else 0


def _run(name: str, settings: Settings, load: float) -> list[Figure]:
    """Run one benchmark and print its table; a figure that came before an error is printed too."""
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}")
    print(f"\n{name}: {benchmark.QUESTION}", flush=True)
    started = time.perf_counter()
    figures: list[Figure] = []
    try:
        for figure in benchmark.run(settings):
            figures.append(figure)
            print(f"  {figure.what}, {figure.size}: {figure.subject}", file=sys.stderr, flush=True)
    finally:
        if figures:
            print(report.table(figures))
        print(
            f"{time.perf_counter() - started:.0f} s; others used {load:.0%} of the machine before it",
            flush=True,
        )
    return figures


def _named(lead: str, names: list[str]) -> str:
    return lead + ", ".join(names) if names else ""


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=_names, default=NAMES, metavar=",".join(NAMES), help="which, in this order")
    parser.add_argument("--quick", action="store_true", help="few samples, no sizes above 8 ranks or 100 MB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every figure in FILE")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no benchmark is called {unknown[0]}; there are {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
