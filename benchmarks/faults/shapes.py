"""Ranks that disagree in an operation: every one is told with its ranks, and healthy rounds in between never are."""

from __future__ import annotations

import random
import time

from benchmarks.faults.findings import Findings
from meshbook import ProcMesh, errors, this_host
from meshbook.wording import format_ranks

RANKS = 4
DEADLINE_S = 30.0
HEALTHY = "x = torch.ones({size})\ndist.all_reduce(x)\ndist.broadcast(x, src={root})\nx.tolist()"

DISAGREEING = {
    "shape": "dist.all_reduce(torch.ones({size} + odd))",
    "shape of a broadcast": "dist.broadcast(torch.ones({size} + odd), src={root})",
    "shape of parts": "dist.all_gather([torch.ones({size} + odd) for _ in range(4)], torch.ones({size} + odd))",
    "dtype": "dist.all_reduce(torch.ones({size}, dtype=torch.int32 if odd else torch.float32))",
    "reduction": "dist.all_reduce(torch.ones({size}), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)",
    "root": "dist.broadcast(torch.ones({size}), src=({root} + odd) % 4)",
    "asynchronous": "dist.all_reduce(torch.ones({size} + odd), async_op=True).wait()",
}


def run_shapes(seed: int, count: int) -> Findings:
    """``count`` disagreements, a healthy cell after each."""
    rng, findings, started = random.Random(seed), Findings("shapes", f"{count} disagreements"), time.monotonic()
    with this_host().spawn_procs({"gpus": RANKS}, name="shapes", device="cpu") as procs:
        for number in range(count):
            kind = rng.choice(list(DISAGREEING))
            _disagree(procs, findings, rng, f"{number}: {kind}", DISAGREEING[kind])
            findings.count(kind)
    findings.seconds = time.monotonic() - started
    return findings


def _disagree(procs: ProcMesh, findings: Findings, rng: random.Random, what: str, code: str) -> None:
    odd, values = rng.randrange(RANKS), {"size": rng.randint(2, 3000), "root": rng.randrange(RANKS)}
    begun = time.monotonic()
    try:
        returned = procs.run(f"odd = int(rank == {odd})\n{code.format(**values)}").get(DEADLINE_S)
        findings.wrong.append(f"{what}: nothing was told, {returned}")
    except errors.CallTimeout:
        findings.hangs.append(what)
        procs.interrupt()
    except errors.MeshError as error:
        others = format_ranks(rank for rank in range(RANKS) if rank != odd)
        parties = {f"ranks {others} and {odd} disagree in", f"ranks {odd} and {others} disagree in"}
        if not any(each in str(error) for each in parties):
            findings.wrong.append(f"{what}, rank {odd}: {error}")
    findings.time("told", time.monotonic() - begun)
    try:
        healthy = procs.run(HEALTHY.format(**values)).get(DEADLINE_S).values()
        if healthy != [[float(RANKS)] * values["size"]] * RANKS:
            findings.wrong.append(f"{what}: wrong numbers after it")
    except errors.MeshError as error:
        findings.wrong.append(f"{what}: the healthy cell after it: {error}")
