"""Many calls, and much output: nothing may be lost, and nothing may grow."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from benchmarks.faults import on_rank
from benchmarks.faults.checks import Held
from benchmarks.faults.findings import Findings
from benchmarks.faults.load import Printed
from meshbook import Future, ProcMesh, this_host
from meshbook.calls.output import OutputDropped, OutputEvent
from meshbook.mesh.rank_calls import start_cell

DEADLINE_S = 30.0
UNDER_WAY = 100  # calls that are sent before the first of them is waited for
GROWTH_MB = 10.0
GROWTH_BYTES_PER_CALL = 20.0  # a process that has grown by more than either, whichever is larger, leaks
FLOOD_S_PER_GB = 60.0
LINE = "x" * 999


def run_calls(_seed: int, count: int, ranks: int = 2) -> Findings:
    """``count`` small calls to every rank, a hundred under way; memory of all processes before and after."""
    findings = Findings("calls", f"{count:,} to each of {ranks} ranks")
    with this_host().spawn_procs({"gpus": ranks}, name="calls", device="cpu", group=False) as mesh:
        mesh.run("ledger = __import__('collections').deque(maxlen=1)\ncounted = 0").get(DEADLINE_S)
        _call(mesh, findings, count // 10, first=-count)  # pools and caches fill
        before = _weigh(mesh)
        started = time.monotonic()
        _call(mesh, findings, count, first=1)
        findings.seconds = time.monotonic() - started
        after = _weigh(mesh)
        findings.counts["per second"] = int(count / max(findings.seconds, 1e-9))
        for who, held in after.items():
            grown_mb = held.resident_mb - before[who].resident_mb
            findings.notes.append(f"{who}: {held.since(before[who])}; {grown_mb * 1e6 / count:.1f} bytes a call")
            if held.files > before[who].files + 8 or grown_mb > max(GROWTH_MB, count * GROWTH_BYTES_PER_CALL / 1e6):
                findings.left.append(f"{who} grew: {held.since(before[who])}")
    return findings


def _call(mesh: ProcMesh, findings: Findings, count: int, first: int) -> None:
    under_way: deque[tuple[int, Future[Any]]] = deque()
    for number in range(first, first + count):
        under_way.append((number, mesh.execute(on_rank.note, number)))
        if len(under_way) >= UNDER_WAY:
            _take(findings, len(mesh), *under_way.popleft())
    while under_way:
        _take(findings, len(mesh), *under_way.popleft())


def _take(findings: Findings, ranks: int, number: int, future: Future[Any]) -> None:
    try:
        values = future.get(DEADLINE_S).values()
    except TimeoutError:
        findings.hangs.append(f"call {number}")
        return
    if values != [number] * ranks:
        findings.wrong.append(f"call {number} gave {values}")


def _weigh(mesh: ProcMesh) -> dict[str, Held]:
    hello = mesh._mesh.hosts[0].hello
    assert hello is not None
    ranks = {f"rank {status.rank}": Held.of(status.pid) for status in mesh.status()}
    return {"controller": Held.of(os.getpid()), "agent": Held.of(hello.pid), **ranks}


class _Flooded(Printed):
    """Counts what is shown and what is said to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: dict[int, int] = {}
        self.shown: dict[int, int] = {}

    def __call__(self, event: OutputEvent) -> None:
        if isinstance(event, OutputDropped):
            self.cut[event.rank] = event.size_bytes
        super().__call__(event)
        for rank, text in self.texts.items():
            self.shown[rank] = self.shown.get(rank, 0) + len(text)
        self.texts.clear()


def run_flood(_seed: int, size_bytes: int, ranks: int = 2) -> Findings:
    """Every rank prints ``size_bytes``: all of it is shown or counted, and the agent stays small and answers."""
    findings = Findings("output", f"{size_bytes / 1e9:g} GB from each of {ranks} ranks")
    lines = size_bytes // (len(LINE) + 1)
    with this_host().spawn_procs({"gpus": ranks}, name="flood", device="cpu", group=False) as mesh:
        before = _weigh(mesh)
        listener = _Flooded()
        started = time.monotonic()
        code = f"line = '{LINE}'\nfor _ in range({lines}): print(line)"
        future = start_cell(mesh, code, on_output=listener).future
        most_mb, deadline = 0.0, started + 10 + FLOOD_S_PER_GB * ranks * size_bytes / 1e9
        while not future.done() and time.monotonic() < deadline:
            asked = time.monotonic()
            mesh.status()
            findings.time("status while the flood lasts", time.monotonic() - asked)
            most_mb = max(most_mb, _weigh(mesh)["agent"].resident_mb)
            time.sleep(0.2)
        if not future.done():
            findings.hangs.append("the flood did not end")
            future.cancel()
        findings.seconds = time.monotonic() - started
        for rank in range(ranks):
            told = listener.shown.get(rank, 0) + listener.cut.get(rank, 0)
            if told != lines * (len(LINE) + 1):
                findings.wrong.append(f"rank {rank}: {told:,} bytes shown or counted of {lines * (len(LINE) + 1):,}")
        findings.notes.append(f"agent at most {most_mb:.0f} MB; {_weigh(mesh)['agent'].since(before['agent'])}")
    return findings
