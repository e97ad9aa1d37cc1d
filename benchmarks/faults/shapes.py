"""Ranks that disagree in an operation: every one is told with its ranks, and healthy rounds in between never are.

They do so in cells and in actors, in the default group and in subgroups that outlive it all.
"""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.faults.findings import Findings
from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, endpoint
from meshbook.formatting import format_ranks

RANKS = 4
DEADLINE_S = 30.0
BEGIN = "halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]\nhalf = halves[rank // 2]"
HEALTHY = """
x = torch.ones({size})
dist.all_reduce(x)
dist.broadcast(x, src={root})
dist.all_reduce(x, group=half)
y = torch.zeros({size} * 4)
dist.all_to_all_single(y, torch.cat([x] * 4), [{size}] * 4, [{size}] * 4)
told = sorted(set(y.tolist()))
"""

ALL, HALF, SENDS, GIVES = "all", "half", "sends", "gives"


class Kind(NamedTuple):
    """A disagreement of rank ``odd`` with others."""

    code: str
    told: str = ALL
    """Who is told to disagree: it and all others, or its half; or what it sends, or gives, to the next rank."""


DISAGREEING = {
    "shape": Kind("dist.all_reduce(torch.ones({size} + odd))"),
    "shape of a broadcast": Kind("dist.broadcast(torch.ones({size} + odd), src={root})"),
    "shape of parts": Kind("dist.all_gather([torch.ones({size} + odd) for _ in range(4)], torch.ones({size} + odd))"),
    "dtype": Kind("dist.all_reduce(torch.ones({size}, dtype=torch.int32 if odd else torch.float32))"),
    "reduction": Kind("dist.all_reduce(torch.ones({size}), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)"),
    "root": Kind("dist.broadcast(torch.ones({size}), src=({root} + odd) % 4)"),
    "asynchronous": Kind("dist.all_reduce(torch.ones({size} + odd), async_op=True).wait()"),
    "order": Kind(
        "steps = [dist.barrier, lambda: dist.all_reduce(torch.ones({size}))]\n"
        "for step in reversed(steps) if odd else steps: step()"
    ),
    "shape in a subgroup": Kind("dist.all_reduce(torch.ones({size} + odd), group=half)", HALF),
    "reduction in a subgroup": Kind("dist.all_reduce(torch.ones(1), OP.MAX if odd else OP.MIN, group=half)", HALF),
    "size of a message": Kind(
        "if odd: dist.send(torch.ones({size}), {next})\nif rank == {next}: dist.recv(torch.ones({size} + 1), {odd})",
        SENDS,
    ),
    "room for a message": Kind(
        "if odd: dist.send(torch.ones({size}), {next})\nif rank == {next}: dist.recv(torch.ones({size} - 1), {odd})",
        SENDS,
    ),
    "dtype of a message": Kind(
        "if odd: dist.isend(torch.ones({size}), {next}).wait()\n"
        "if rank == {next}: dist.irecv(torch.ones({size}, dtype=torch.int32), {odd}).wait()",
        SENDS,
    ),
    "more in an all_to_all": Kind(
        "n = [{size}] * 4\nn[{next}] += odd\n"
        "dist.all_to_all_single(torch.zeros({size} * 4), torch.ones(sum(n)), [{size}] * 4, n)",
        GIVES,
    ),
    "less in an all_to_all": Kind(
        "n = [{size}] * 4\nn[{next}] -= odd\n"
        "dist.all_to_all_single(torch.zeros({size} * 4), torch.ones(sum(n)), [{size}] * 4, n)",
        GIVES,
    ),
}  # fmt: skip


class Program(Actor):
    """Runs code as a cell does."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"torch": torch, "dist": dist, "OP": dist.ReduceOp, "rank": dist.get_rank()}
        exec(BEGIN, self.names)

    @endpoint
    def run(self, code: str) -> Any:
        exec(code, self.names)
        return self.names.get("told")


def run_shapes(seed: int, count: int) -> Findings:
    """``count`` disagreements, a healthy round after each."""
    findings = Findings("shapes", f"{count} disagreements, seed {seed}")
    with findings.running(), this_host().spawn_procs({"gpus": RANKS}, name="shapes", device="cpu") as procs:
        _Shapes(procs, findings, seed).run(count)
    return findings


class _Shapes:
    def __init__(self, procs: ProcMesh, findings: Findings, seed: int) -> None:
        self.procs, self.findings, self.rng = procs, findings, random.Random(seed)
        procs.run(f"OP = dist.ReduceOp\n{BEGIN}").get(DEADLINE_S)
        self.programs: Any = procs.spawn("programs", Program)
        self.programs.initialized.get(DEADLINE_S)

    def run(self, count: int) -> None:
        for number in range(count):
            name = self.rng.choice(list(DISAGREEING))
            in_actors = self.rng.random() < 0.3
            self._disagree(f"{number}: {name}{' (actors)' if in_actors else ''}", DISAGREEING[name], in_actors)
            self.findings.count(name)
            if self.findings.hangs:
                break

    def _start(self, code: str, in_actors: bool) -> Any:
        return self.programs.run.call(code) if in_actors else self.procs.run(f"{code}\nglobals().get('told')")

    def _disagree(self, what: str, kind: Kind, in_actors: bool) -> None:
        odd, size = self.rng.randrange(RANKS), self.rng.randint(2, 3000)
        values = {"size": size, "root": self.rng.randrange(RANKS), "odd": odd, "next": (odd + 1) % RANKS}
        begun = time.monotonic()
        with self.findings.judging(what, self.procs):
            code = f"odd = int(rank == {odd})\n{kind.code.format(**values)}"
            error = self._start(code, in_actors).exception(DEADLINE_S)
            expected = _expected(kind, odd, size)
            if in_actors:
                expected.append("they disagree on a size")  # who is told first raises; the names follow in a notice
            assert any(each in str(error) for each in expected), f"rank {odd}: {error}"
        self.findings.time("told", time.monotonic() - begun)
        self._expect_health(what, values, self.rng.random() < 0.3)

    def _expect_health(self, what: str, values: dict[str, int], in_actors: bool) -> None:
        with self.findings.judging(f"{what}: the healthy round after it", self.procs):
            healthy = self._start(HEALTHY.format(**values), in_actors).get(DEADLINE_S).values()
            assert healthy == [[2.0 * RANKS]] * RANKS, healthy


def _expected(kind: Kind, odd: int, size: int) -> list[str]:
    """What the error has one of in it."""
    if kind.told == SENDS:
        return [f"rank {odd} sent {size} x float32 to rank {(odd + 1) % RANKS}"]
    if kind.told == GIVES:
        return [f"rank {odd} gives {size + more} x float32 to rank {(odd + 1) % RANKS}" for more in (-1, 1)]
    members = range(RANKS) if kind.told == ALL else range(odd // 2 * 2, odd // 2 * 2 + 2)
    others = format_ranks(rank for rank in members if rank != odd)
    return [f"ranks {others} and {odd} disagree in", f"ranks {odd} and {others} disagree in"]
