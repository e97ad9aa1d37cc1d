"""Random faults into a mesh under load: every call ends, every result is right, everybody comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.faults import on_rank
from benchmarks.faults.checks import Held
from benchmarks.faults.findings import Findings
from benchmarks.faults.load import Load, Printed, Watched
from benchmarks.faults.plan import DEADLY, SIGNALS, Fault, make_plan
from meshbook import ProcMesh, errors, this_host
from meshbook.mesh import states

DEADLINE_S = 15.0  # what is not over by then counts as a hang
STOPPED_S = 0.1
LONGEST_S = 3600.0
RANKS = 4


class PlannedCampaign:
    """A mesh that is hurt as a plan says, again and again, and mended in between. signals: of deadly faults."""

    signals: Mapping[str, signal.Signals]

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.mesh = self._spawn()

    def run(self, plan: Sequence[Fault]) -> Findings:
        """Serve the plan, or as much of it as fits into an hour."""
        until = time.monotonic() + LONGEST_S
        with self.findings.running():
            for fault in plan:
                if time.monotonic() > until:
                    self.findings.size = f"{fault.number - 1} of {self.findings.size}, when the time was up"
                    break
                self.findings.count(fault.kind)
                is_served = False
                with self.findings.judging(str(fault)):
                    self._serve(fault)
                    is_served = True
                if not is_served:
                    self.findings.notes += [
                        f"{fault}: rank {rank} was {place}" for rank, place in states.where(self.mesh).items()
                    ]
                    self._replace()
                self._look_after(fault)
            self.mesh.stop()
        return self.findings

    def _spawn(self) -> ProcMesh:
        raise NotImplementedError

    def _serve(self, fault: Fault) -> None:
        raise NotImplementedError

    def _look_after(self, fault: Fault) -> None:
        """Look at something when a fault is over."""

    def _replace(self) -> None:
        self.mesh.stop()
        self.mesh = self._spawn()

    def _signal(self, fault: Fault, pids: Mapping[int, int]) -> None:
        """Hurt a rank, or its agent, by signals, where that is the fault. pids: of ranks."""
        if fault.kind in self.signals:
            os.kill(pids[fault.rank], self.signals[fault.kind])
        elif fault.kind == "stop":
            os.kill(pids[fault.rank], signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pids[fault.rank], signal.SIGCONT)
        elif fault.kind == "agent":
            os.kill(self._agent_of(fault.rank), signal.SIGKILL)

    def _all_have_ended(self, fault: Fault, calls: Iterable[Watched], deadline: float) -> bool:
        """Wait for calls; those that hang cost the mesh its place."""
        late = [watched for watched in calls if not watched.wait(deadline)]
        self.findings.hangs += [f"{fault}: {watched.sort} {watched.number}" for watched in late]
        if late:
            self._replace()
        return not late

    def _agent_of(self, rank: int) -> int:
        hello = self.mesh._mesh.host_of(rank).hello
        assert hello is not None
        return hello.pid


class Campaign(PlannedCampaign):
    """Calls, cells, collectives and payloads under faults."""

    signals = {**SIGNALS, "exit": signal.SIGUSR2}

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._agent: tuple[int, Held] | None = None
        self._agent_grew = ""

    def run(self, plan: Sequence[Fault]) -> Findings:
        findings = super().run(plan)
        findings.notes.append(f"the last agent, since its first fault: {self._agent_grew}")
        return findings

    # ---- one fault ----------------------------------------------------------------------------------------------

    def _serve(self, fault: Fault) -> None:
        self.mesh.run("ledger = []").get(DEADLINE_S)
        load = Load(self.mesh)
        load.send(fault.calls)
        time.sleep(fault.delay_s)
        held, seen = self._hold(fault, load) or (None, None)
        pids = {status.rank: status.pid for status in self.mesh.status()} if fault.kind != "raise" else {}
        if fault.kind == "exit" and seen is not None:
            seen.wait_for_text(fault.rank, time.monotonic() + DEADLINE_S)
        hurt_at = time.monotonic()
        self._signal(fault, pids)
        if fault.kind == "interrupt":
            assert held is not None
            held.future.cancel()
        deadline = time.monotonic() + DEADLINE_S
        if held is not None and seen is not None and fault.kind in DEADLY:
            if seen.wait_for_end(fault.rank, deadline):
                self.findings.time("death of a rank: known to the caller", seen.ended_at[fault.rank] - hurt_at)
            if not _in_collective(fault):
                held.future.cancel()
        if not self._all_have_ended(fault, load.watched, deadline):
            return
        if held is not None:
            self.findings.time(f"{_sort_of(fault)}: its cell over on all ranks", held.ended_at - hurt_at)
        self._judge(fault, load, held)
        self._check_ledgers(fault, load)
        self._mend(fault)

    def _hold(self, fault: Fault, load: Load) -> tuple[Watched, Printed] | None:
        """Something that is under way when the fault comes, so that it has somebody to tell."""
        if fault.kind == "raise":
            return None
        if fault.kind == "stop":
            load.send(1)
            return None
        code = on_rank.HOLD_IN_COLLECTIVE if _in_collective(fault) else on_rank.HOLD
        return load.hold(on_rank.HOLD_AND_EXIT if fault.kind == "exit" else code, rank=fault.rank)

    def _judge(self, fault: Fault, load: Load, held: Watched | None) -> None:
        wrong = self.findings.wrong
        for watched in load.watched:
            self.findings.count("calls")
            error = watched.error
            if error is None:
                wrong += [f"{fault}: {line}" for line in watched.wrong_results()]
                if watched is held:
                    wrong.append(f"{fault}: the held cell ended without an error")
                continue
            self.findings.count("calls that failed")
            if not self._fits(fault, error, watched is held):
                wrong.append(f"{fault}: {watched.sort} {watched.number} failed with {type(error).__name__}: {error}")
        wrong += [f"{fault}: {line}" for line in load.wrong_output()]

    def _fits(self, fault: Fault, error: BaseException, is_held: bool) -> bool:
        """Whether this fault may end a call with this error."""
        if fault.kind in DEADLY:
            if isinstance(error, errors.CallFailed):  # it had ended its part of a collective, and others had not
                return fault.rank in error.partial and {each.ename for each in error.failures} == {"GroupAborted"}
            return isinstance(error, errors.WorkerLost) and error.ranks == (fault.rank,)
        if fault.kind == "agent":
            return isinstance(error, errors.WorkerLost)
        if fault.kind == "interrupt" and is_held:
            return isinstance(error, errors.CallInterrupted | errors.CallFailed)
        return False

    def _check_ledgers(self, fault: Fault, load: Load) -> None:
        """Each acknowledged call ran once, and all in the order in which they were sent."""
        living = [rank for rank in self.mesh.ranks if rank not in self.mesh.lost]
        if not living:
            return
        part = self.mesh.select(living)
        for rank, ledger in zip(living, part.pull("ledger").get(DEADLINE_S).values(), strict=True):
            if ledger != sorted(set(ledger)):
                self.findings.wrong.append(f"{fault}: rank {rank} ran calls twice or out of order: {ledger}")
            missing = {w.number for w in load.watched if rank in w.results() and w.expected is not None} - set(ledger)
            if missing:
                self.findings.wrong.append(f"{fault}: rank {rank} answered calls that it has not run: {missing}")

    # ---- mending ------------------------------------------------------------------------------------------------

    def _mend(self, fault: Fault) -> None:
        """Bring everybody back, and prove it with a collective."""
        started = time.monotonic()
        if fault.kind == "raise":
            self._raise_in_collective(fault)
        elif fault.kind == "agent":
            self._replace()
        elif self.mesh.lost:
            self.mesh.heal(force=True)
        proof = self.mesh.run(on_rank.PROVE).get(DEADLINE_S).values()
        if proof != [RANKS] * RANKS:
            self.findings.wrong.append(f"{fault}: the group counts {proof} afterwards")
        self.findings.time(f"{_sort_of(fault)}: mended, with a proof", time.monotonic() - started)

    def _raise_in_collective(self, fault: Fault) -> None:
        started = time.monotonic()
        cell = Watched(
            self.mesh.run(on_rank.RAISE.format(rank=fault.rank, number=fault.number)), 0, "raising cell", None
        )
        if not cell.wait(started + DEADLINE_S):
            self.findings.hangs.append(f"{fault}: the others were not freed")
            self._replace()
            return
        error = cell.error
        self.findings.time("raise: all ranks freed", cell.ended_at - started)
        raised = [f for f in error.failures if f.ename == "ValueError"] if isinstance(error, errors.CallFailed) else []
        if [failure.rank for failure in raised] != [fault.rank]:
            self.findings.wrong.append(f"{fault}: the cell ended with {type(error).__name__}: {error}")

    def _spawn(self) -> ProcMesh:
        return this_host().spawn_procs({"gpus": RANKS}, name="hurt", device="cpu")

    def _look_after(self, fault: Fault) -> None:
        """Remember what an agent held when we first saw it, and tell of the last one."""
        pid = self._agent_of(0)
        held = Held.of(pid)
        if self._agent is None or self._agent[0] != pid:
            self._agent = (pid, held)
            self.findings.counts["agents"] = self.findings.counts.get("agents", 0) + 1
        self._agent_grew = held.since(self._agent[1])


def run_faults(seed: int, count: int) -> Findings:
    """``count`` faults into calls, cells, collectives and payloads."""
    campaign = Campaign(Findings("random faults", f"{count:,} into {RANKS} ranks, seed {seed}"))
    return campaign.run(make_plan(seed, count, RANKS))


def _in_collective(fault: Fault) -> bool:
    """Whether the others wait in a collective for the rank that is hurt."""
    return fault.number % 2 == 0 and fault.kind != "exit"


def _sort_of(fault: Fault) -> str:
    return "death of a rank" if fault.kind in DEADLY else fault.kind
