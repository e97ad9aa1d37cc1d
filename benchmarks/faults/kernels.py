"""SIGKILL for the kernel, again and again, with calls under way: the next one attaches and goes on with the same ranks.

Each call is in the ranks' ledgers once and in order, whoever sent it, and its result was told to a kernel: to the one
that asked, or to its successor. Of the calls under way when a kernel died a few may have been told to it without its
having written so; they are counted apart, and are at most as many as were under way.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.findings import Findings
from benchmarks.faults.kernel import UNDER_WAY

DEADLINE_S = 60.0  # a kernel starts an interpreter, and its first one a template; on a busy machine that takes its time
LONGEST_LIFE_S = 0.6
LEASE_S = 60  # so long the mesh outlives this campaign, should no kernel attach any more
_ROOT = Path(__file__).parents[2]


class Kernel:
    """A kernel process, and the lines that it has written."""

    def __init__(self, session: str | None, options: Sequence[str], program: str = "benchmarks.faults.kernel") -> None:
        command = [sys.executable, "-m", program, *options, *([session] if session else [])]
        environment = {**os.environ, "MESHBOOK_LEASE_S": str(LEASE_S)}
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        self._rest = b""
        self.lines: list[tuple[str, str]] = []

    def wait_for(self, what: str, deadline: float) -> str | None:
        """The rest of the first line that begins with ``what``; None at the deadline, or if the kernel ends before."""
        while True:
            for begin, rest in self.lines:
                if begin == what:
                    return rest
            if not self._read(deadline - time.monotonic()):
                return None

    def kill(self) -> None:
        """SIGKILL, and read what it still wrote."""
        self._process.kill()
        while self._read(1.0):
            pass
        self._close()

    def end(self) -> str | None:
        """Ask it to end; returns the ledgers that it writes, or None if it does not in time."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"end\n")
        self._process.stdin.flush()
        ledgers = self.wait_for("ledgers", time.monotonic() + DEADLINE_S)
        while ledgers is not None and self._read(DEADLINE_S):
            pass
        self._close()
        return ledgers

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.kill()
        self._process.wait()

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], max(0.0, timeout_s))[0]:
            return False
        data = os.read(self._fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            begin, _, rest = line.decode().partition(" ")
            self.lines.append((begin, rest))
        return bool(data)


def run_kernels(seed: int, kills: int) -> Findings:
    """Kill ``kills`` kernels of one mesh."""
    return _run(Findings("kernel kills", f"{kills}, with {UNDER_WAY} calls under way"), seed, kills, UNDER_WAY)


def run_lone(seed: int, kills: int) -> Findings:
    """The same with one call at a time, to one rank, which goes past the agent."""
    findings = Findings("kernel kills, one call at a time", f"{kills}, seed {seed}")
    return _run(findings, seed, kills, 1, "--lone")


def run_spread(seed: int, kills: int) -> Findings:
    """The same with one call at a time, to several ranks: a datagram to each."""
    findings = Findings("kernel kills, one call to several ranks at a time", f"{kills}, seed {seed}")
    return _run(findings, seed, kills, 1, "--spread")


def _run(findings: Findings, seed: int, kills: int, under_way: int, *options: str) -> Findings:
    draw = random.Random(seed)
    started = time.monotonic()
    session: str | None = None
    told: dict[int, int] = {}
    killed_at = 0.0
    for number in range(kills + 1):
        kernel = Kernel(session, options)
        if (took_s := kernel.wait_for("ready", time.monotonic() + DEADLINE_S)) is None:
            findings.hangs.append(f"kernel {number} was not ready: {kernel.lines[-3:]}")
            kernel.kill()
            break
        if session is None:
            session = kernel.wait_for("session", time.monotonic())
        else:
            findings.time("attach", float(took_s))
        if kernel.wait_for("answer", time.monotonic() + DEADLINE_S) is None:
            findings.hangs.append(f"kernel {number} got no answer: {kernel.lines[-3:]}")
        elif killed_at > 0:
            findings.time("from the kill to the next kernel's first answer", time.monotonic() - killed_at)
        ledgers = None
        if number < kills:
            time.sleep(draw.uniform(0, LONGEST_LIFE_S))
            kernel.kill()
            killed_at = time.monotonic()
        elif (ledgers := kernel.end()) is None:
            findings.hangs.append("the last kernel did not end")
        _collect(kernel, told, findings)
        if ledgers is not None:
            _judge(json.loads(ledgers), told, kills * under_way, findings)
    findings.seconds = time.monotonic() - started
    return findings


def _collect(kernel: Kernel, told: dict[int, int], findings: Findings) -> None:
    for begin, rest in kernel.lines:
        if begin in ("answer", "adopted"):
            told[int(rest)] = told.get(int(rest), 0) + 1
            findings.count("results adopted" if begin == "adopted" else "results told")
        elif begin == "wrong":
            findings.wrong.append(rest)


def _judge(ledgers: list[list[int]], told: dict[int, int], may_miss: int, findings: Findings) -> None:
    ran = set(ledgers[0])
    for rank, ledger in enumerate(ledgers):
        if ledger != sorted(set(ledger)):
            findings.wrong.append(f"rank {rank} ran calls twice or out of order")
        if set(ledger) != ran:
            findings.wrong.append(f"rank {rank} ran other calls than rank 0")
    if missing := set(told) - ran:
        findings.wrong.append(f"answered and never run: {sorted(missing)[:10]}")
    untold = ran - set(told)
    if len(untold) > may_miss:
        findings.wrong.append(f"{len(untold)} results were lost")
    findings.counts["calls that ran"] = len(ran)
    findings.counts["under way at a kill, told to nobody who wrote it down"] = len(untold)
    findings.counts["told to two kernels"] = sum(times > 1 for times in told.values())
