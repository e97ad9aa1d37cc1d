"""Random faults into actors that call each other, on two hosts: every call ends, errors name who and why, no message is
lost or comes twice."""

from __future__ import annotations

import time

from benchmarks.faults.actor_load import EXIT_CODE, ActorLoad
from benchmarks.faults.faults import DEADLINE_S, RANKS, PlannedCampaign
from benchmarks.faults.findings import Findings
from benchmarks.faults.load import Watched
from benchmarks.faults.plan import DEADLY, SIGNALS, Fault, make_plan
from meshbook import LocalLauncher, ProcMesh, errors, start_hosts
from meshbook.actor import ActorError, SupervisionError

HOSTS = 2
CAUSES = {kind: number.name for kind, number in SIGNALS.items()} | {"exit": f"exit code {EXIT_CODE}"}
"""What an error must say of a death."""


def run_actors(seed: int, count: int) -> Findings:
    """``count`` faults into actors of two hosts."""
    size = f"{count:,} faults into {RANKS} ranks on two hosts, seed {seed}"
    return ActorCampaign(Findings("actors", size)).run(make_plan(seed, count, RANKS))


class ActorCampaign(PlannedCampaign):
    """A mesh whose actors are hurt; it has new actors after each fault."""

    signals = SIGNALS

    def _serve(self, fault: Fault) -> None:
        load = ActorLoad(self.mesh, fault.number)
        pids = {status.rank: status.pid for status in self.mesh.status()}
        held = load.hold(fault.rank) if fault.kind not in ("stop", "raise") else None
        load.send(fault.calls)
        time.sleep(fault.delay_s)
        hurt_at = time.monotonic()
        raised = self._hurt(fault, load, held, pids)
        deadline = time.monotonic() + DEADLINE_S
        if not self._all_have_ended(fault, [*load.watched, *raised], deadline):
            return
        self._judge(fault, load, held)
        for watched in raised:
            self._judge_raised(fault, watched)
        if held is not None:
            self._time(fault, load, held, hurt_at)
        living = [rank for rank in self.mesh.ranks if rank not in self.mesh.lost]
        if living:
            self.findings.wrong += [f"{fault}: {line}" for line in load.wrong_ledgers(living)]
        load.stop()
        self._mend(fault)

    def _hurt(self, fault: Fault, load: ActorLoad, held: Watched | None, pids: dict[int, int]) -> list[Watched]:
        self._signal(fault, pids)
        if fault.kind == "exit":
            load.members.select([fault.rank]).exit.broadcast()
        elif fault.kind == "interrupt":
            assert held is not None
            held.future.cancel()
            load.waits.popitem()[1].future.cancel()
            for wait in load.waits.values():
                wait.future.cancel()
        elif fault.kind == "raise":
            return [Watched(load.members.fail.call(fault.rank, fault.number), fault.number, "raising call", None)]
        return []

    # ---- judging ------------------------------------------------------------------------------------------------

    def _judge(self, fault: Fault, load: ActorLoad, held: Watched | None) -> None:
        wrong = self.findings.wrong
        for watched in load.watched:
            self.findings.count("calls")
            wrong += [f"{fault}: {line}" for line in watched.wrong_results()]
            error = watched.error
            is_held = watched is held or watched in load.waits.values()
            if error is not None:
                self.findings.count("calls that failed")
                if not self._fits(fault, error, is_held or watched.sort == "wait of an actor"):
                    wrong.append(f"{fault}: {watched.sort} {watched.number}: {type(error).__name__}: {error}")
            elif watched is held:
                wrong.append(f"{fault}: the held call ended without an error")
            elif watched.sort == "wait of an actor":
                self._judge_told(fault, watched)

    def _judge_told(self, fault: Fault, watched: Watched) -> None:
        """An actor that waited for the one that was hurt knows who ended, and why."""
        (told,) = watched.results().values()
        if fault.kind == "interrupt":
            return
        if fault.rank not in told.ranks or CAUSES.get(fault.kind, "") not in told.text:
            self.findings.wrong.append(f"{fault}: the actor of rank {watched.number} was told {told.text!r}")

    def _judge_raised(self, fault: Fault, watched: Watched) -> None:
        error = watched.error
        failures = error.failures if isinstance(error, ActorError) else ()
        if [(failure.rank, failure.ename, failure.evalue) for failure in failures] != [
            (fault.rank, "ValueError", str(fault.number))
        ]:
            self.findings.wrong.append(f"{fault}: the call ended with {type(error).__name__}: {error}")
        self.findings.time("raise: known to the caller, behind other messages", watched.ended_at - watched.sent_at)

    def _fits(self, fault: Fault, error: BaseException, is_held: bool) -> bool:
        """Whether this fault may end a call with this error."""
        if fault.kind in DEADLY:
            named = isinstance(error, SupervisionError) and error.ranks == (fault.rank,)
            return named and CAUSES[fault.kind] in str(error)
        if fault.kind == "agent":
            return isinstance(error, SupervisionError) and set(error.ranks) <= set(self._ranks_beside(fault.rank))
        if fault.kind == "interrupt" and is_held:
            return isinstance(error, errors.CallInterrupted | ActorError)
        return False

    def _time(self, fault: Fault, load: ActorLoad, held: Watched, hurt_at: float) -> None:
        sort = "death of a rank" if fault.kind in DEADLY else fault.kind
        self.findings.time(f"{sort}: known to the caller of all", held.ended_at - hurt_at)
        if fault.kind == "interrupt":
            return
        for rank, wait in load.waits.items():
            if wait.error is None:
                (told,) = wait.results().values()
                where = "the same host" if rank in self._ranks_beside(fault.rank) else "the other host"
                self.findings.time(f"{sort}: known to an actor on {where} that waits", told.at - hurt_at)

    # ---- mending ------------------------------------------------------------------------------------------------

    def _mend(self, fault: Fault) -> None:
        if fault.kind == "agent":
            self._replace()
        elif self.mesh.lost:
            self.mesh.heal(force=True)

    def _spawn(self) -> ProcMesh:
        hosts = start_hosts({"hosts": HOSTS}, LocalLauncher(separate_hosts=True))
        per_host = {"gpus": RANKS // HOSTS}
        return hosts.spawn_procs(per_host, name="acting", device="cpu", group=False, owns_hosts=True)

    def _ranks_beside(self, rank: int) -> range:
        """The ranks of its host."""
        per_host = RANKS // HOSTS
        return range(rank // per_host * per_host, (rank // per_host + 1) * per_host)
