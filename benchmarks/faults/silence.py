"""Host agents are stopped for random times, as a hanging disk or swapping does, and go on: nothing is lost by it."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from benchmarks.faults import on_rank
from benchmarks.faults.findings import Findings
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.concurrency.future import Future
from meshbook.mesh import states

DEADLINE_S = 60.0
LONGEST_S = 15.0  # longer than a machine elsewhere may go without an acknowledgement
CALLS_PER_FAULT = 50


def run_silence(seed: int, count: int) -> Findings:
    """``count`` silences of agents, here and over TCP as if elsewhere, with calls under way all the time."""
    findings = Findings("silence", f"{count} agents stopped for up to {LONGEST_S:g} s, here and over TCP, seed {seed}")
    draw = random.Random(seed)
    with findings.running():
        for separate, number in ((False, count // 2), (True, count - count // 2)):
            _run_on(LocalLauncher(separate_hosts=separate), draw, number, findings)
    return findings


def _run_on(launcher: LocalLauncher, draw: random.Random, count: int, findings: Findings) -> None:
    hosts = start_hosts({"hosts": 2}, launcher)
    with findings.judging(""), hosts.spawn_procs({"gpus": 1}, name="quiet", device="cpu", owns_hosts=True) as mesh:
        mesh.run("ledger = []").get(DEADLINE_S)
        pids = mesh.execute(os.getpid).get(DEADLINE_S).values()
        agents = mesh.execute(os.getppid).get(DEADLINE_S).values()
        numbers: list[int] = []
        for _ in range(count):
            _silence(mesh, agents[draw.randrange(2)], draw.uniform(0.1, LONGEST_S), numbers, findings)
        if mesh.execute(os.getpid).get(DEADLINE_S).values() != pids:
            findings.wrong.append("a rank has another process than before")
        if mesh.run("ledger").get(DEADLINE_S).values() != [numbers, numbers]:
            findings.wrong.append("calls were lost, doubled or out of order")


def _silence(mesh: ProcMesh, agent: int, seconds: float, numbers: list[int], findings: Findings) -> None:
    calls: list[tuple[int, Future[Any]]] = []
    os.kill(agent, signal.SIGSTOP)
    try:
        until = time.monotonic() + seconds
        for _ in range(CALLS_PER_FAULT):
            numbers.append(len(numbers) + 1)
            calls.append((numbers[-1], mesh.execute(on_rank.note, numbers[-1])))
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            if states.suspects(mesh):
                findings.count("looks at suspects")
    finally:
        os.kill(agent, signal.SIGCONT)
    began = time.monotonic()
    findings.count("agents stopped")
    for number, call in calls:
        with findings.judging(f"call {number}"):
            if call.get(DEADLINE_S).values() != [number, number]:
                findings.wrong.append(f"call {number} has another result")
    findings.time("calls answered after the agent went on", time.monotonic() - began)
    if mesh.lost:
        findings.wrong.append(f"ranks {mesh.lost} counted as lost")
