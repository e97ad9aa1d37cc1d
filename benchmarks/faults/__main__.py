"""`python -m benchmarks.faults`: hurt a mesh under load and report what came of it; 1 when anything did.

The short form takes some minutes, and `--long` most of an hour. `make test-slow` runs each campaign at a smaller size.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine
from benchmarks.faults.actors import ActorCampaign
from benchmarks.faults.beside import run_beside, run_retries
from benchmarks.faults.checks import Held, mark_ourselves, new_threads, orphans, shared_memory_names, thread_names
from benchmarks.faults.crossed import run_crossed
from benchmarks.faults.document import write
from benchmarks.faults.endurance import run_calls, run_flood
from benchmarks.faults.faults import Campaign
from benchmarks.faults.findings import Findings
from benchmarks.faults.forks import run_forks
from benchmarks.faults.hosts import run_hosts
from benchmarks.faults.kernels import run_kernels, run_lone, run_spread
from benchmarks.faults.large import run_large
from benchmarks.faults.links import run_links
from benchmarks.faults.mutation import run_mutation
from benchmarks.faults.order import run_order
from benchmarks.faults.plan import make_plan
from benchmarks.faults.shapes import run_shapes
from benchmarks.faults.silence import run_silence
from benchmarks.faults.texts import run_texts
from meshbook import shutdown, this_host


class Sizes(NamedTuple):
    """How much of everything."""

    faults: int
    ranks: int
    kernels: int
    links: int
    calls: int
    flood_bytes: int
    seconds: float  # after so long the random faults stop, those into actors too
    actor_faults: int


SHORT = Sizes(faults=40, ranks=4, kernels=6, links=6, calls=5_000, flood_bytes=20_000_000, seconds=60, actor_faults=20)
LONG = Sizes(
    faults=1_000,
    ranks=4,
    kernels=200,
    links=60,
    calls=1_000_000,
    flood_bytes=5_000_000_000,
    seconds=3600,
    actor_faults=500,
)


class Counted(NamedTuple):
    """A campaign whose size is one number, with that of each form."""

    tiny: int  # as the tests run it: seconds
    short: int
    long: int
    run: Callable[[int, int], Findings]  # seed, how many


COUNTED: dict[str, Counted] = {
    "order": Counted(tiny=25, short=60, long=1000, run=run_order),
    "crossed": Counted(tiny=12, short=40, long=400, run=run_crossed),
    "beside": Counted(tiny=16, short=30, long=200, run=run_beside),
    "retries": Counted(tiny=8, short=20, long=1000, run=run_retries),
    "large": Counted(tiny=12, short=30, long=300, run=run_large),
    "lone": Counted(tiny=3, short=10, long=100, run=run_lone),
    "spread": Counted(tiny=3, short=10, long=100, run=run_spread),
    "forks": Counted(tiny=12, short=60, long=600, run=run_forks),
    "hosts": Counted(tiny=7, short=14, long=70, run=run_hosts),
    "mutation": Counted(tiny=12, short=60, long=300, run=run_mutation),
    "silence": Counted(tiny=2, short=5, long=100, run=run_silence),
    "shapes": Counted(tiny=8, short=30, long=500, run=run_shapes),
    "texts": Counted(tiny=40, short=100, long=1000, run=run_texts),
}
"""Campaigns by name; `--count NAME=N` overrides their size."""

LEASE_S = 60  # so long what we started outlives us, should we be killed
NAMES = ("faults", "actors", "kernels", "links", "calls", "flood", *COUNTED)


def campaigns(sizes: Sizes, counts: Mapping[str, int], seed: int) -> dict[str, Callable[[], Findings]]:
    """By name, in the order in which they run."""
    plan = make_plan(seed, sizes.faults, sizes.ranks)
    size = f"{sizes.faults:,} into {sizes.ranks} ranks, seed {seed}"
    actor_plan = make_plan(seed, sizes.actor_faults, sizes.ranks)
    actor_size = f"{sizes.actor_faults:,} faults into {sizes.ranks} ranks on two hosts, seed {seed}"
    return {
        "faults": lambda: Campaign(sizes.ranks, size).run(plan, time.monotonic() + sizes.seconds),
        "actors": lambda: ActorCampaign(sizes.ranks, actor_size).run(actor_plan, time.monotonic() + sizes.seconds),
        "kernels": lambda: run_kernels(seed, sizes.kernels),
        "links": lambda: run_links(seed, sizes.links),
        "calls": lambda: run_calls(sizes.calls),
        "flood": lambda: run_flood(sizes.flood_bytes),
        **{name: functools.partial(COUNTED[name].run, seed, count) for name, count in counts.items()},
    }


def run(names: Sequence[str], sizes: Sizes, counts: Mapping[str, int], seed: int) -> list[Findings]:
    """Run campaigns, and after each look for what it left: processes, files, threads, names in /dev/shm."""
    mark = mark_ourselves()
    with this_host().spawn_procs({"gpus": 1}, name="warm", device="cpu"):
        pass
    shutdown()
    findings = []
    for name in names:
        before, shared, threads = Held.of(os.getpid()), shared_memory_names(), thread_names()
        found = campaigns(sizes, counts, seed)[name]()
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
    sizes = (LONG if options.long else SHORT)._replace(
        **{name: value for name in Sizes._fields if (value := getattr(options, name)) is not None}
    )
    counts = {name: each.long if options.long else each.short for name, each in COUNTED.items()}
    findings = run(options.only, sizes, counts | dict(options.count), options.seed)
    if options.write:
        command = f"python -m benchmarks.faults {shlex.join(argv if argv is not None else sys.argv[1:])}"
        write(options.write, command.strip(), findings)
    return 0 if all(found.ok for found in findings) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--long", action="store_true", help="the long form")
    parser.add_argument("--only", type=_names, default=NAMES, metavar=",".join(NAMES), help="which, in this order")
    parser.add_argument("--seed", type=int, default=1, help="of the plan")
    for name in Sizes._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=float if name == "seconds" else int)
    parser.add_argument("--count", type=_count, action="append", default=[], metavar="NAME=N", help="how many of one")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the figures into this document")
    return parser.parse_args(argv)


def _count(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in COUNTED or not count.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: write NAME=N; NAME is one of {', '.join(COUNTED)}")
    return name, int(count)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no campaign is called {unknown[0]}; there are {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
