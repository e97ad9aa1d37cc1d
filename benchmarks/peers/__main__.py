"""`python -m benchmarks.peers`: meshbook and its peers, side by side in one run."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.peers import comparison
from benchmarks.peers.environments import PEERS, ROOT, InstallError, Peer, python_of, version_of
from benchmarks.processes import descendants, end, living

_PR_SET_CHILD_SUBREAPER = 36
_FAREWELL_S = 5.0


class Turn(NamedTuple):
    """One run of one peer: its answers, what went wrong if anything, and what it left running."""

    answers: list[dict[str, Any]]
    problem: str
    orphans: int


def main(argv: list[str] | None = None) -> int:
    """Run every peer ``--rounds`` times in turns; returns 1 when meshbook itself could not be measured."""
    options = _parse(argv)
    machine.forget_test_settings()
    _adopt_orphans()
    print(machine.describe(), flush=True)
    pythons, notes = _environments(options.only)
    asked = [flag for flag in ("--quick", "--actors") if getattr(options, flag[2:])]
    answers: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in pythons}
    loads: list[float] = []
    for number in range(options.rounds):
        for peer in list(pythons)[number % len(pythons) :] + list(pythons)[: number % len(pythons)]:
            loads.append(machine.others_load())
            print(f"round {number + 1}: {peer.name}", file=sys.stderr, flush=True)
            turn = _take_turn(peer, pythons[peer], asked, options.deadline)
            answers[peer.name] += turn.answers
            if turn.problem:
                notes.append(f"{peer.name}, round {number + 1}: {turn.problem}")
            if turn.orphans:
                notes.append(f"{peer.name}, round {number + 1}: left {turn.orphans} processes, ended by us")
    results = comparison.collect(answers)
    goals = comparison.ACTOR_GOALS if options.actors else comparison.CALL_GOALS
    print(comparison.table(results))
    print("\n".join(["", *comparison.goals(results, goals)]))
    notes += comparison.problems(answers)
    print("\n".join(["", *notes, f"others used {max(loads):.0%} of the machine at most, measured between runs"]))
    return 0 if results.get("meshbook") or all(peer.name != "meshbook" for peer in pythons) else 1


def _environments(peers: tuple[Peer, ...]) -> tuple[dict[Peer, Path], list[str]]:
    """Return the interpreter of every peer that could be installed, and why the others could not."""
    pythons: dict[Peer, Path] = {}
    notes = []
    for peer in peers:
        try:
            pythons[peer] = python_of(peer)
            notes.append(f"{peer.name} {version_of(peer, pythons[peer])}")
        except InstallError as error:
            notes.append(f"{peer.name} could not be installed: {error}")
    return pythons, notes


def _take_turn(peer: Peer, python: Path, asked: list[str], deadline_s: float) -> Turn:
    """Run one peer in its own session and folder; whatever of it still runs afterwards is ended."""
    folder = Path(tempfile.mkdtemp(prefix="meshbook-peer-"))
    answers, log = folder / "answers", folder / "log"
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [str(python), "-m", peer.module, "--answers", str(answers), *asked]
    problem = ""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--started", str(time.monotonic())],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            if process.wait(deadline_s):
                problem = f"ended with status {process.returncode}: {_tail(log)}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {deadline_s:.0f} s, ended by us: {_tail(log)}"
            end([process.pid, *descendants(process.pid)])
    orphans = _still_there()
    end(orphans)
    lines = answers.read_text().splitlines() if answers.exists() else []
    shutil.rmtree(folder, ignore_errors=True)
    return Turn([json.loads(line) for line in lines], problem, 0 if problem else len(orphans))


def _still_there() -> list[int]:
    """Return what still runs of a peer after it has had `_FAREWELL_S` to end by itself."""
    deadline = time.monotonic() + _FAREWELL_S
    while (pids := living(descendants(os.getpid()))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return pids


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(line.strip()[:160] for line in lines[-2:]) or "no output"


def _adopt_orphans() -> None:
    """Become the parent of what a peer leaves behind, so that it can be found and ended by pid."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    names = ",".join(peer.name for peer in PEERS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar=names, help="which, in this order")
    parser.add_argument("--actors", action="store_true", help="ask about actors")
    parser.add_argument("--rounds", type=int, default=2, help="how many times each peer runs (default 2)")
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS", help="of one peer's run")
    parser.add_argument("--quick", action="store_true", help="few samples, nothing above 100 MB")
    options = parser.parse_args(argv)
    known = {peer.name: peer for peer in PEERS}
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"no peer is called {unknown[0]}; there are {', '.join(known)}")
    options.only = tuple(known[name] for name in options.only or known)
    return options


if __name__ == "__main__":
    sys.exit(main())
