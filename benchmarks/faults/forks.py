"""Children of ranks, in cells and in actors, while payloads come and go: none answers, all see what they were given."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np

from benchmarks.faults import forking
from benchmarks.faults.findings import Findings
from meshbook import ProcMesh, errors, this_host
from meshbook.calls.output import OutputEvent, OutputTarget, RankDone, StreamText
from meshbook.mesh import states
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import new_output_id
from meshbook.mesh.rank_calls import start_cell

RANKS = 2
DEADLINE_S = 90.0
ELEMENTS = 1 << 18  # float64: 2 MB, which is mapped and not copied
LONGEST_HOLD_S = 0.3  # so long children look on while the next payloads come
OPEN_NOTHING = {"closes", "returns", "exits", "asks"}
"""Kinds that open no file themselves, beside which descriptors are closed; the runtime's threads do all the same."""
CELL = """
data = given; del given
found = forking.fork({kind!r}, {number}, {hold_s}, data, echo); del data
print('seen', {number})
"""
INTERRUPTED = "data = given; del given\nforking.sleep_with_child({number}, data)"


class ForkCampaign:
    """One mesh with an actor on each rank that forks, and one whom children must not reach."""

    def __init__(self, mesh: ProcMesh, findings: Findings, seed: int) -> None:
        self.mesh, self.findings, self.draw = mesh, findings, random.Random(seed)
        set_front_end(output_source=lambda procs: OutputTarget(new_output_id(procs), lambda event: None))
        echo = mesh.slice(gpus=0).spawn("echo", forking.Echo)
        self.forkers: Any = mesh.spawn("forkers", forking.Forking, echo)
        mesh.push({"echo": echo}).get(DEADLINE_S)
        mesh.run("import os\nfrom benchmarks.faults import forking").get(DEADLINE_S)
        self.pids = mesh.run("os.getpid()").get(DEADLINE_S).values()

    def run(self, count: int) -> None:
        """Each fault is one kind of child in cells and one in actors, at once."""
        for number in range(1, count + 1):
            started = time.monotonic()
            self.mesh.push({"given": _data(number)}).get(DEADLINE_S)
            kinds = self.draw.choices([*forking.KINDS, "interrupt"], k=2)
            if kinds[0] == "interrupt":
                self._interrupt(number)
            else:
                self._fork(number, *kinds)
            self.findings.count(kinds[0])
            self._compare(f"after fault {number}, {kinds[0]}, there answer", "os.getpid()", self.pids)
            self.findings.time("fault", time.monotonic() - started)
            if number % 10 == 0 or number == count:
                self._end_children()

    def _fork(self, number: int, in_cell: str, in_actor: str) -> None:
        events: list[OutputEvent] = []
        hold_s = self.draw.uniform(0, LONGEST_HOLD_S)
        told = None
        if in_actor != "interrupt":
            self.findings.count(f"{in_actor} (actor)")
            told = self.forkers.fork.call(in_actor, -number, hold_s, _data(-number))
            if "closes" in (in_cell, in_actor) and not {in_cell, in_actor} <= OPEN_NOTHING:
                told.get(DEADLINE_S)  # their own file would get the number
        cell = start_cell(self.mesh, CELL.format(kind=in_cell, number=number, hold_s=hold_s), on_output=events.append)
        cell.future.get(DEADLINE_S)
        for rank, found in enumerate(self.mesh.pull("found").get(DEADLINE_S).values()):
            self.findings.wrong += [f"rank {rank}: {text}" for text in found]
        for rank in range(RANKS):
            _await_end(events, rank)
            text = "".join(
                e.text for e in events if isinstance(e, StreamText) and (e.rank, e.stream) == (rank, "stdout")
            )
            if text.count(f"seen {number}\n") not in ({1, 2} if in_cell == "returns" else {1}):  # the child comes by
                self.findings.wrong.append(f"{in_cell} {number}: rank {rank} printed {text[-80:]!r}")
        if told is not None:
            self.findings.wrong += [text for found in told.get(DEADLINE_S).values() for text in found]

    def _interrupt(self, number: int) -> None:
        """Interrupt a cell and the children that it has forked."""
        future = self.mesh.run(INTERRUPTED.format(number=number))
        beside = self.forkers.slice(gpus=0).fork.call_one("process", -number, 0.0, _data(-number))
        threading.Event().wait(self.draw.uniform(0, LONGEST_HOLD_S))
        deadline = time.monotonic() + DEADLINE_S
        while any("sleep" not in place for place in states.where(self.mesh).values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        future.cancel()
        try:
            future.get(DEADLINE_S)
            self.findings.wrong.append(f"interrupt {number}: the cell has ended by itself")
        except errors.CallFailed as failed:
            if any(each.ename != "KeyboardInterrupt" for each in failed.failures):
                self.findings.wrong.append(f"interrupt {number}: {failed}")
        self.findings.wrong += beside.get(DEADLINE_S)

    def _compare(self, what: str, code: str, expected: list[Any]) -> None:
        if (values := self.mesh.run(code).get(DEADLINE_S).values()) != expected:
            self.findings.wrong.append(f"{what}: {values} instead of {expected}")

    def _end_children(self) -> None:
        """All that were forked until now have ended as they must, and what they saw was given back."""
        for rank, found in enumerate(self.mesh.execute(forking.end_children).get(DEADLINE_S).values()):
            self.findings.wrong += [f"rank {rank}: {text}" for text in found]
        deadline = time.monotonic() + DEADLINE_S
        while any(kept := self.mesh.execute(_withheld).get(DEADLINE_S).values()):
            if time.monotonic() > deadline:
                self.findings.left.append(f"payloads that no child sees any more: {kept}")
                return
            time.sleep(0.02)


def _data(number: int) -> forking.Data:
    return np.full(ELEMENTS, float(number))


def _withheld() -> int:
    from meshbook.values import lent_memory

    return lent_memory.withheld()


def _await_end(events: list[OutputEvent], rank: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(isinstance(e, RankDone) and e.rank == rank for e in list(events)) and time.monotonic() < deadline:
        time.sleep(0.002)


def run_forks(seed: int, faults: int) -> Findings:
    """``faults`` times children in cells and actors."""
    findings = Findings("forks", f"{faults} times children of {RANKS} ranks, in cells and actors, seed {seed}")
    with (
        findings.running(),
        this_host().spawn_procs({"gpus": RANKS}, name="forks", device="cpu", group=False) as mesh,
    ):
        try:
            ForkCampaign(mesh, findings, seed).run(faults)
        except TimeoutError as error:
            findings.hangs.append(f"{error}; {os.linesep.join(states.where(mesh).values())}")
        finally:
            set_front_end()
    return findings
