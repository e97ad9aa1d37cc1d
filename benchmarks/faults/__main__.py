"""`python -m benchmarks.faults`: hurt a mesh under load and report what came of it; 1 when anything did.

The short form takes some minutes, and `--long` most of an hour. `make test-slow` runs each campaign at a smaller size.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine
from benchmarks.faults.actors import run_actors
from benchmarks.faults.beside import run_beside, run_retries
from benchmarks.faults.checks import Held, mark_ourselves, new_threads, orphans, shared_memory_names, thread_names
from benchmarks.faults.crossed import run_crossed
from benchmarks.faults.document import write
from benchmarks.faults.endurance import run_calls, run_flood
from benchmarks.faults.faults import run_faults
from benchmarks.faults.findings import Findings
from benchmarks.faults.forks import run_forks
from benchmarks.faults.hosts import run_hosts
from benchmarks.faults.kernels import run_kernels, run_lone, run_spread
from benchmarks.faults.large import run_large
from benchmarks.faults.links import run_links
from benchmarks.faults.mutation import run_mutation
from benchmarks.faults.order import run_order
from benchmarks.faults.saves import run_saves
from benchmarks.faults.shapes import run_shapes
from benchmarks.faults.silence import run_silence
from benchmarks.faults.texts import run_texts
from meshbook import shutdown, this_host


class Sized(NamedTuple):
    """A campaign, with its size in each form."""

    run: Callable[[int, int], Findings]
    """Gets the seed and the size."""
    tiny: int
    """The sizes with which the tests run it, in seconds."""
    short: int
    long: int


CAMPAIGNS: dict[str, Sized] = {
    "faults": Sized(run_faults, tiny=14, short=40, long=1000),
    "actors": Sized(run_actors, tiny=12, short=20, long=500),
    "kernels": Sized(run_kernels, tiny=2, short=6, long=200),
    "links": Sized(run_links, tiny=2, short=6, long=60),
    "calls": Sized(run_calls, tiny=3_000, short=5_000, long=1_000_000),
    "flood": Sized(run_flood, tiny=10_000_000, short=20_000_000, long=5_000_000_000),
    "order": Sized(run_order, tiny=25, short=60, long=1000),
    "crossed": Sized(run_crossed, tiny=12, short=40, long=400),
    "beside": Sized(run_beside, tiny=16, short=30, long=200),
    "retries": Sized(run_retries, tiny=8, short=20, long=1000),
    "large": Sized(run_large, tiny=12, short=30, long=300),
    "lone": Sized(run_lone, tiny=3, short=10, long=100),
    "spread": Sized(run_spread, tiny=3, short=10, long=100),
    "forks": Sized(run_forks, tiny=12, short=60, long=600),
    "hosts": Sized(run_hosts, tiny=7, short=14, long=70),
    "mutation": Sized(run_mutation, tiny=12, short=60, long=300),
    "silence": Sized(run_silence, tiny=2, short=5, long=100),
    "saves": Sized(run_saves, tiny=8, short=20, long=100),
    "shapes": Sized(run_shapes, tiny=8, short=30, long=500),
    "texts": Sized(run_texts, tiny=40, short=100, long=1000),
}
"""Campaigns in the order in which they run: faults or kills, calls, bytes, or what else they have many of."""

LEASE_S = 60  # so long what we started outlives us, should we be killed


def run(sizes: Mapping[str, int], seed: int) -> list[Findings]:
    """Run campaigns, and after each look for what it left: processes, files, threads, names in /dev/shm."""
    mark = mark_ourselves()
    with this_host().spawn_procs({"gpus": 1}, name="warm", device="cpu"):
        pass
    shutdown()
    findings = []
    for name, size in sizes.items():
        before, shared, threads = Held.of(os.getpid()), shared_memory_names(), thread_names()
        found = CAMPAIGNS[name].run(seed, size)
        shutdown()
        found.left += [f"process {pid}" for pid in orphans(mark)]
        after = Held.of(os.getpid())
        found.notes.append(f"this process, afterwards: {after.since(before)}")
        if after.files > before.files or after.memory_files > before.memory_files:
            found.left.append(f"in this process: {after.since(before)}")
        found.left += [f"thread {thread}" for thread in new_threads(threads)]
        found.left += [f"/dev/shm/{entry}" for entry in shared_memory_names() - shared]
        print("\n".join(found.lines()), flush=True)
        findings.append(found)
    return findings


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; 1 when anything hung, was wrong or was left."""
    options = _parse(argv)
    machine.forget_test_settings()
    os.environ.setdefault("MESHBOOK_LEASE_S", str(LEASE_S))
    print(machine.describe(), flush=True)
    sizes = {name: getattr(CAMPAIGNS[name], options.form) for name in options.only} | dict(options.count)
    findings = run(sizes, options.seed)
    if options.write:
        command = f"python -m benchmarks.faults {shlex.join(argv if argv is not None else sys.argv[1:])}"
        write(options.write, command.strip(), findings)
    return 0 if all(found.ok for found in findings) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--long", action="store_const", dest="form", const="long", default="short", help="most of an hour"
    )
    parser.add_argument("--tiny", action="store_const", dest="form", const="tiny", help="some seconds for each")
    names = tuple(CAMPAIGNS)
    parser.add_argument("--only", type=_names, default=names, metavar=",".join(names), help="which, in this order")
    parser.add_argument("--seed", type=int, default=1, help="of the plan")
    parser.add_argument("--count", type=_count, action="append", default=[], metavar="NAME=N", help="how many of one")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the figures into this document")
    return parser.parse_args(argv)


def _count(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in CAMPAIGNS or not count.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: write NAME=N; NAME is one of {', '.join(CAMPAIGNS)}")
    return name, int(count)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in CAMPAIGNS]:
        raise argparse.ArgumentTypeError(f"no campaign is called {unknown[0]}; there are {', '.join(CAMPAIGNS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
