"""Failures beside work that goes well, and the call after a failure.

`run_beside`: cells and calls fail in every way while actors train, and a thread of the user's works, in process groups
of their own. Neither may be aborted, stand still or count wrongly, and the next cell must be right.

`run_retries`: a call to actors fails, and the same actors are called again after any pause: it must be right.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.faults.findings import Findings
from meshbook import ProcMesh, errors, this_host
from meshbook.actor import Actor, ActorError, endpoint
from meshbook.calls.output import OutputTarget
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import new_output_id

RANKS = 4
DEADLINE_S = 30.0
PROOF = "proof = torch.ones(3)\ndist.all_reduce(proof)\nint(proof.sum())"
MAX_PAUSE_S = 1.0

CELLS = {
    "typo": "undefined_name",
    "one raises, others compute": "import time\nif rank == {rank}: raise ValueError\ntime.sleep({pause:.3f})",
    "one raises, others wait": "if rank == {rank}: raise ValueError\ndist.all_reduce(torch.ones(3))",
    "one raises in the middle": (
        "for step in range(20):\n    if rank == {rank} and step == {step}: raise ValueError\n"
        "    dist.all_reduce(torch.ones(3))"
    ),
    "one raises, others receive": (
        "if rank == {rank}: raise ValueError\ndist.recv(torch.zeros(2), {rank})\ndist.barrier()"
    ),
    "one raises, one receives": (
        "if rank == {rank}: raise ValueError\nif rank == ({rank} + 1) % 4: dist.recv(torch.zeros(2), {rank})"
    ),
    "a list too short": "dist.all_gather([torch.zeros(3)] * (1 if rank == {rank} else 4), torch.ones(3))",
    "wrong splits": (
        "dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1] * 4, [1, 1, 1, 2 if rank == {rank} else 1])"
    ),
    "shapes differ": "dist.all_reduce(torch.ones(4 if rank == {rank} else 3))",
    "operations differ": "dist.barrier() if rank == {rank} else dist.all_reduce(torch.ones(3))",
    "not waited for": (
        "if rank == {rank}: raise ValueError\nwork = dist.all_reduce(torch.ones(3), async_op=True)\nraise KeyError"
    ),
    "a group of its own": "group = dist.new_group()\nif rank == {rank}: raise ValueError\ndist.barrier(group)",
}

trouble: list[str] = []  # on a rank: what went wrong with the work beside
steps = {"actor": 0, "thread": 0}  # on a rank: how often it went well
stopping = threading.Event()


def work(kind: str, group: dist.ProcessGroup, pause_s: float) -> None:
    """All-reduce known numbers until all ranks are to stop."""
    rank, step = dist.get_rank(), 0
    stop = torch.zeros(1)
    while not stop.item():
        time.sleep(pause_s * (1 + rank))
        x = torch.full((100,), float(step + rank))
        dist.all_reduce(x, group=group)
        if x.tolist() != [RANKS * step + RANKS * (RANKS - 1) / 2] * 100:
            trouble.append(f"rank {rank}, {kind}, step {step}: {x[0]}")
        stop.fill_(float(stopping.is_set()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=group)
        step += 1
        steps[kind] += 1


def start_thread() -> None:
    """On a rank."""
    group = dist.new_group()

    def run() -> None:
        try:
            work("thread", group, 0.003)
        except BaseException as error:
            trouble.append(f"rank {dist.get_rank()}, thread: {type(error).__name__}: {error}")

    threading.Thread(target=run, name="beside", daemon=True).start()


def stop_work() -> None:
    """On a rank."""
    stopping.set()


def told() -> tuple[dict[str, int], list[str]]:
    """On a rank."""
    return dict(steps), list(trouble)


class Trainer(Actor):
    """Works until it is stopped."""

    def __init__(self) -> None:
        self.group = dist.new_group()

    @endpoint
    def train(self) -> int:
        work("actor", self.group, 0.002)
        return steps["actor"]


class Learner(Actor):
    """Takes steps in the default group, and fails in some."""

    @endpoint
    def step(self, value: float, fails: str, rank: int, pause_s: float) -> float:
        """fails: how ``rank`` fails; others take ``pause_s`` before they go on."""
        mine = dist.get_rank() == rank
        if fails == "before" and mine:
            raise ValueError(fails)
        if not mine:
            time.sleep(pause_s)
        x = torch.full((5,), value)
        dist.all_reduce(x)
        if fails == "middle" and mine:
            raise ValueError(fails)
        if fails == "list":
            dist.all_gather([torch.zeros(5)] * (1 if mine else dist.get_world_size()), x)
        if fails == "splits":
            size = dist.get_world_size()
            dist.all_to_all_single(torch.zeros(size), torch.ones(size), [1] * size, [2 if mine else 1] * size)
        if fails:
            dist.all_reduce(torch.ones(5))
        return float(x[-1])


def run_beside(seed: int, count: int) -> Findings:
    """``count`` failures."""
    size = f"{count:,} failing cells and calls beside actors and threads that train, seed {seed}"
    findings = Findings("beside", size)
    rng = random.Random(seed)
    with _running(findings) as mesh:
        trainers, learners = mesh.spawn("trainers", Trainer), mesh.spawn("learners", Learner)
        trainers.initialized.get(DEADLINE_S)
        training = trainers.train.call()
        mesh.execute(start_thread).get(DEADLINE_S)
        before: dict[str, int] = {}
        for number in range(1, count + 1):
            kind = _fail(mesh, learners, rng, findings, number)
            _expect_proof(mesh, f"{number} {kind}", findings)
            before = _look(mesh, before, f"{number} {kind}", findings)
        mesh.execute(stop_work).get(DEADLINE_S)
        training.get(DEADLINE_S)
        findings.notes.append(f"steps beside: {before}")
    return findings


@contextlib.contextmanager
def _running(findings: Findings) -> Iterator[ProcMesh]:
    """A mesh for a campaign, whose output is dropped."""
    set_front_end(output_source=lambda procs: OutputTarget(new_output_id(procs), lambda event: None))
    try:
        with (
            findings.running(),
            this_host().spawn_procs({"gpus": RANKS}, name=findings.name, device="cpu") as mesh,
        ):
            yield mesh
    finally:
        set_front_end()


def _fail(mesh: ProcMesh, learners: Learner, rng: random.Random, findings: Findings, number: int) -> str:
    kind = rng.choice([*CELLS, "interrupt", "interrupt of who waits", "actors", "actors"])
    findings.count(kind)
    rank, pause_s, step = rng.randrange(RANKS), rng.random() * 0.3, rng.randrange(20)
    started = time.monotonic()
    try:
        if kind == "actors":
            learners.step.call(1.0, rng.choice(FAILURES), rank, pause_s / 3).get(DEADLINE_S)
        elif kind.startswith("interrupt"):
            code = "dist.all_reduce(torch.ones(3))\n" if kind != "interrupt" else ""
            waiting = mesh.run(f"import time\nif rank != {rank}:\n    {code or 'pass'}\ntime.sleep(30)")
            time.sleep(0.05 + pause_s)
            waiting.cancel()
            waiting.get(DEADLINE_S)
        else:
            mesh.run(CELLS[kind].format(rank=rank, pause=pause_s, step=step)).get(DEADLINE_S)
    except errors.CallTimeout as error:
        findings.hangs.append(f"{number} {kind}: {error}")
        mesh.interrupt()
    except (errors.CallError, ActorError):
        findings.time(kind, time.monotonic() - started)
        return kind
    findings.wrong.append(f"{number} {kind}: nothing was raised")
    return kind


def _expect_proof(mesh: ProcMesh, after: str, findings: Findings) -> None:
    with findings.judging(f"after {after}", mesh):
        values = mesh.run(PROOF).get(DEADLINE_S).values()
        assert values == [3 * RANKS] * RANKS, values


def _look(mesh: ProcMesh, before: dict[str, int], after: str, findings: Findings) -> dict[str, int]:
    """The work beside goes on, and went well."""
    until = time.monotonic() + DEADLINE_S
    while True:
        answers = mesh.execute(told).get(DEADLINE_S).values()
        if found := [text for _, texts in answers for text in texts]:
            findings.wrong += [f"after {after}: {text}" for text in found]
            raise TimeoutError(f"after {after}")
        now = {kind: min(counts[kind] for counts, _ in answers) for kind in steps}
        if all(now[kind] > before.get(kind, 0) for kind in now):
            return now
        if time.monotonic() > until:
            raise TimeoutError(f"after {after} the work beside stands still: {now}")


FAILURES = ("before", "middle", "list", "splits")


def run_retries(seed: int, count: int) -> Findings:
    """``count`` failures, each with a call after it."""
    findings = Findings("retries", f"{count:,} calls after a failure, up to {MAX_PAUSE_S:g} s later, seed {seed}")
    rng = random.Random(seed)
    with _running(findings) as mesh:
        learners = mesh.spawn("learners", Learner)
        for number in range(1, count + 1):
            _retry(mesh, learners, rng, findings, number)
    return findings


def _retry(mesh: ProcMesh, learners: Learner, rng: random.Random, findings: Findings, number: int) -> None:
    fails, pause_s, late_s = rng.choice(FAILURES), rng.random() * MAX_PAUSE_S * rng.choice((0.1, 1)), rng.random() * 0.1
    what = f"{number}, {fails}, again after {pause_s:.3f} s"
    findings.count(fails)
    with findings.judging(what, mesh), contextlib.suppress(ActorError):
        learners.step.call(-1.0, fails, rng.randrange(RANKS), rng.choice((0.0, late_s))).get(DEADLINE_S)
        findings.wrong.append(f"{what}: nothing was raised")
    time.sleep(pause_s)
    started = time.monotonic()
    with findings.judging(what, mesh):
        values = learners.step.call(float(number), "", 0, 0.0).get(DEADLINE_S).values()
        findings.time("a call after a failure", time.monotonic() - started)
        assert values == [float(RANKS * number)] * RANKS, values
