"""The road to a host breaks and falls silent while calls are under way: each runs once, in order, and is answered."""

from __future__ import annotations

import contextlib
import random
import time

from benchmarks.faults import on_rank
from benchmarks.faults.findings import Findings
from benchmarks.faults.load import Watched
from benchmarks.faults.namespace import make_namespace
from benchmarks.faults.relay import RelayedLauncher
from meshbook import ProcMesh, start_hosts

DEADLINE_S = 30.0
RESETS_OF_10 = 7  # so many of ten faults reset all connections; the others are silence
LONGEST_SILENCE_S = 3.0  # shorter than the silence after which a host counts as lost
CALLS_PER_FAULT = 200


def run_links(seed: int, faults: int) -> Findings:
    """``faults`` resets and silences, with calls and payloads under way all the time."""
    findings = Findings("links", f"{faults} resets and silences")
    with (
        findings.running(),
        contextlib.closing(RelayedLauncher(make_namespace())) as launcher,
        start_hosts({}, launcher).spawn_procs({"gpus": 2}, name="far", device="cpu", owns_hosts=True) as mesh,
    ):
        mesh.run("ledger = []").get(DEADLINE_S)
        watched = _break(mesh, launcher, random.Random(seed), faults, findings)
        deadline = time.monotonic() + DEADLINE_S
        findings.hangs += [f"call {each.number}" for each in watched if not each.wait(deadline)]
        if not findings.hangs:
            _judge(mesh, watched, findings)
    return findings


def _break(
    mesh: ProcMesh, launcher: RelayedLauncher, draw: random.Random, faults: int, findings: Findings
) -> list[Watched]:
    relay, namespace = launcher.relay, launcher.namespace
    assert relay is not None
    watched: list[Watched] = []
    for _ in range(faults):
        for _ in range(CALLS_PER_FAULT):
            number = len(watched) + 1
            watched.append(Watched(mesh.execute(on_rank.note, number), number, "call", number))
        if draw.randrange(10) < RESETS_OF_10:
            findings.count("connections reset", relay.cut())
        elif namespace is not None:
            findings.count("cables pulled between namespaces")
            namespace.pull()
            time.sleep(draw.uniform(0.2, LONGEST_SILENCE_S))
            namespace.plug()
        else:
            findings.count("silences")
            relay.silence(draw.uniform(0.2, LONGEST_SILENCE_S))
        broken_at = time.monotonic()
        if watched[-1].wait(broken_at + DEADLINE_S):
            findings.time("all answered after a fault", time.monotonic() - broken_at)
    return watched


def _judge(mesh: ProcMesh, watched: list[Watched], findings: Findings) -> None:
    findings.count("calls", len(watched))
    for each in watched:
        if each.error is not None:
            findings.wrong.append(f"call {each.number} failed with {each.error!r}")
        findings.wrong += each.wrong_results()
    expected = list(range(1, len(watched) + 1))
    for rank, ledger in enumerate(mesh.pull("ledger").get(DEADLINE_S).values()):
        if ledger != expected:
            findings.wrong.append(f"rank {rank} ran {len(ledger)} calls of {len(expected)}, or out of order")
