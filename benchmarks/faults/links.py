"""The road to a host breaks and falls silent while calls are under way: each runs once, in order, and is answered."""

from __future__ import annotations

import contextlib
import random
import time

from benchmarks.faults.findings import Findings
from benchmarks.faults.load import NumberedCalls
from benchmarks.faults.namespace import make_namespace
from benchmarks.faults.relay import RelayedLauncher
from meshbook import start_hosts

RESETS_OF_10 = 7  # so many of ten faults reset all connections; the others are silence
LONGEST_SILENCE_S = 3.0  # shorter than the silence after which a host counts as lost
CALLS_PER_FAULT = 200


def run_links(seed: int, faults: int) -> Findings:
    """``faults`` resets and silences, with calls under way all the time."""
    findings = Findings("links", f"{faults} resets and silences")
    draw = random.Random(seed)
    with (
        findings.running(),
        contextlib.closing(RelayedLauncher(make_namespace())) as launcher,
        start_hosts({}, launcher).spawn_procs({"gpus": 2}, name="far", device="cpu", owns_hosts=True) as mesh,
    ):
        calls = NumberedCalls(mesh, findings)
        for _ in range(faults):
            calls.send(CALLS_PER_FAULT)
            _break(launcher, draw, findings)
            calls.await_answers("a fault")
        if not findings.hangs:
            calls.judge()
    return findings


def _break(launcher: RelayedLauncher, draw: random.Random, findings: Findings) -> None:
    relay, namespace = launcher.relay, launcher.namespace
    assert relay is not None
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
