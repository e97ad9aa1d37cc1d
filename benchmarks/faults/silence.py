"""Host agents are stopped for random times, as a hanging disk or swapping does, and go on: nothing is lost by it."""

from __future__ import annotations

import os
import random
import signal
import time

from benchmarks.faults.findings import Findings
from benchmarks.faults.load import NumberedCalls
from meshbook import LocalLauncher, start_hosts
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
        pids = mesh.execute(os.getpid).get(DEADLINE_S).values()
        agents = mesh.execute(os.getppid).get(DEADLINE_S).values()
        calls = NumberedCalls(mesh, findings)
        for _ in range(count):
            _silence(calls, agents[draw.randrange(2)], draw.uniform(0.1, LONGEST_S))
        if mesh.execute(os.getpid).get(DEADLINE_S).values() != pids:
            findings.wrong.append("a rank has another process than before")
        calls.judge()


def _silence(calls: NumberedCalls, agent: int, seconds: float) -> None:
    os.kill(agent, signal.SIGSTOP)
    try:
        until = time.monotonic() + seconds
        calls.send(CALLS_PER_FAULT)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            if states.suspects(calls.mesh):
                calls.findings.count("looks at suspects")
    finally:
        os.kill(agent, signal.SIGCONT)
    calls.findings.count("agents stopped")
    calls.await_answers("the agent went on")
    if calls.mesh.lost:
        calls.findings.wrong.append(f"ranks {calls.mesh.lost} counted as lost")
