"""Everything on one mesh at once, crossed with each kind of fault and of repair.

Training with a recorded step on a stream of batches, calls of actors, calls, cells, payloads and collectives are under
way when the fault comes. Then each of them has ended; the model is what plain torch makes of it after some number of
the steps that were asked for; and after the repair the next step is one step, the process group counts all ranks, and
actors count. Between two faults the mesh may become smaller and larger again, or be left and attached.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

import meshbook
from benchmarks.faults import on_rank
from benchmarks.faults.findings import Findings
from benchmarks.faults.load import Load, Watched, numbers
from benchmarks.faults.plan import SIGNALS as DEADLY
from meshbook import DeviceMeshError, ProcMesh, errors, heal_mesh, this_host
from meshbook.actor import Actor, ActorError, SupervisionError, endpoint
from meshbook.distributed import Mesh

RANKS = 3
DEADLINE_S = 30.0
STEPS = 12
LONGEST_DELAY_S = 0.12
STOPPED_S = 0.1

FAULTS = [*DEADLY, "stop", "raise", "interrupt", "wrong rows"]
REPAIRS = ("heal", "heal_mesh", "respawn", "shrink")
CHANGES = ("", "", "resize", "attach")  # what becomes of the mesh between two faults
ENDS = (errors.WorkerLost, SupervisionError, ActorError, errors.CallFailed)


class Counter(Actor):
    """Counts its messages."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count


class Model(nn.Module):
    """It looks rows up in a table, for a layer; doubles let the number of steps be read off the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, dtype=torch.float64)
        self.layer = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.table(rows)))


def _stepping(model: Model) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(rows: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(rows) - goal).pow(2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


class Training:
    """It trains a model on a mesh, and one in this process that takes as many steps as that has taken."""

    def __init__(self, procs: ProcMesh, earlier: Training | None = None) -> None:
        """earlier: one with whose plain model, and batch, it goes on."""
        torch.manual_seed(3)
        self.mesh, self.model = Mesh(procs), Model()
        self.plain: Model = earlier.plain if earlier else Model()
        self._batch: tuple[torch.Tensor, ...] = earlier._batch if earlier else ()
        self.model.load_state_dict(self.plain.state_dict())
        meshbook.module_to_mesh(self.model, self.mesh)
        self._step, self._plain_step = meshbook.compile(_stepping(self.model)), _stepping(self.plain)

    def draw_batch(self, seed: random.Random) -> None:
        """Take other rows and other goals, so that the next steps change the weights."""
        rows = torch.tensor([seed.randrange(7) for _ in range(2 * RANKS)])
        self._batch = rows, torch.tensor([[seed.uniform(-1, 1) for _ in range(3)] for _ in rows], dtype=torch.float64)

    def go(self, count: int, bad_at: int = -1) -> None:
        """Take so many steps, and wait for the last. bad_at: a step with a row that the table does not have."""
        rows, goal = self._batch
        batches = [(rows + 7 if at == bad_at else rows, goal) for at in range(count)]
        with meshbook.stream(batches, self.mesh, ["dp"]) as stream:
            for batch in stream:
                loss = self._step(*batch)
            loss.item()

    def follow(self, least: int, most: int) -> str:
        """Take the steps in this process that the mesh has taken; returns what is wrong.

        Raises: DeviceMeshError where ranks had begun to write what they did not finish.
        """
        found = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        for count in range(most + 1):
            same = all(
                torch.allclose(value, found[name], atol=1e-10) for name, value in self.plain.state_dict().items()
            )
            if same:
                return "" if count >= least else f"{count} steps were done, not {least} to {most}"
            self._plain_step(*self._batch)
        self.plain.load_state_dict(found)
        return f"the weights are not those after {least} to {most} steps"


class Crossing:
    """A mesh with all kinds of work, hurt and mended again and again."""

    def __init__(self, found: Findings) -> None:
        self.found = found
        self._names = itertools.count()
        self._spawn()

    def _spawn(self) -> None:
        self.procs = this_host().spawn_procs({"dp": RANKS}, name="crossed", device="cpu")
        self.training = Training(self.procs)
        self._spawn_actors()

    def _spawn_actors(self) -> None:
        self.actors = self.procs.spawn(f"counter{next(self._names)}", Counter)
        self.sent = 0

    def serve(self, seed: random.Random, name: str) -> None:
        """Serve one fault: start its load, hurt, look what came of the load, repair, and prove that all goes on."""
        fault, rank, repair = seed.choice(FAULTS), seed.randrange(RANKS), seed.choice(REPAIRS)
        name = f"{name}, {fault} of rank {rank}, {repair}"
        self.found.count(fault)
        self.procs.run("ledger = []").get(DEADLINE_S)
        self.training.draw_batch(seed)
        self.training.go(2)  # from here on it is repeated as one, which an interrupt leaves done or not
        if wrong := self.training.follow(2, 2):
            self.found.wrong.append(f"{name}, before it: {wrong}")
        load, sent_before = Load(self.procs), self.sent
        load.send(seed.randint(1, 3))
        calls = [self.actors.add.call() for _ in range(3)]
        self.sent += len(calls)
        raising = self.procs.run(on_rank.RAISE.format(rank=rank, number=0)) if fault == "raise" else None
        hurt = self._hurt(fault, rank, seed.uniform(0, LONGEST_DELAY_S))
        is_whole = True
        try:
            self.training.go(STEPS, seed.randrange(STEPS) if fault == "wrong rows" else -1)
        except (DeviceMeshError, KeyboardInterrupt) as error:
            is_whole = False
            if fault == "stop":
                self.found.wrong.append(f"{name}: training ended with {type(error).__name__}: {error}")
        with contextlib.suppress(KeyboardInterrupt):  # of a fault that comes when all steps are done
            hurt.join()
        if raising is not None and not isinstance(raising.exception(DEADLINE_S), errors.CallFailed):
            self.found.wrong.append(f"{name}: the cell that raises ended with {raising.exception(0)!r}")
        self._judge_load(load, fault, name)
        for at, call in enumerate(calls, 1):
            if (failed := call.exception(DEADLINE_S)) is None:
                if (values := call.get(0).values()) != [sent_before + at] * RANKS:
                    self.found.wrong.append(f"{name}: actors counted {values}, not {sent_before + at}")
            elif fault not in DEADLY or not isinstance(failed, ENDS):
                self.found.wrong.append(f"{name}: actors ended with {type(failed).__name__}: {failed}")
        self._mend(fault, rank, repair)
        has_model = is_whole and not (fault in DEADLY and repair == "shrink")
        self._prove(STEPS if has_model else 0, name)
        if (change := seed.choice(CHANGES)) == "resize":
            self._resize(f"{name}, then resized")
        elif change == "attach":
            self._attach(f"{name}, then attached")

    def _hurt(self, fault: str, rank: int, delay_s: float) -> threading.Timer:
        pid = self.procs.status()[rank].pid

        def hurt() -> None:
            if fault in DEADLY:
                os.kill(pid, DEADLY[fault])
            elif fault == "stop":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
            elif fault == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(delay_s, hurt)
        timer.start()
        return timer

    def _judge_load(self, load: Load, fault: str, name: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for watched in load.watched:
            self.found.count("calls")
            if not watched.wait(deadline):
                self.found.hangs.append(f"{name}: {watched.sort} {watched.number}")
            elif watched.error is not None and not _fits(fault, watched):
                self.found.wrong.append(f"{name}: {watched.sort} failed with {watched.error!r}")
            self.found.wrong += [f"{name}: {line}" for line in watched.wrong_results()]
        self.found.wrong += [f"{name}: {line}" for line in load.wrong_output()]

    def _mend(self, fault: str, rank: int, repair: str) -> None:
        if fault not in DEADLY:
            return
        until = time.monotonic() + DEADLINE_S
        while not self.procs.lost and time.monotonic() < until:
            time.sleep(0.01)
        started = time.monotonic()
        if repair == "respawn":
            self.procs.respawn([rank], force=True)
        elif repair == "shrink":
            self._grow(self.procs.shrink())
        elif repair == "heal_mesh":
            heal_mesh(self.training.mesh)
        else:
            self.procs.heal(force=True)
        self.found.time(f"mended by {repair}", time.monotonic() - started)
        self._spawn_actors()

    def _resize(self, name: str) -> None:
        self.procs = self.procs.shrink(dp=1)
        self._check_group(RANKS - 1, name)
        self._grow(self.procs)
        self._spawn_actors()
        self._prove(0, name)

    def _grow(self, fewer: ProcMesh) -> None:
        """Have all ranks again; what the mesh had of the model went with it as it was."""
        self.procs = fewer.grow(dp=1)
        self.training = Training(self.procs, self.training)

    def _attach(self, name: str) -> None:
        """Leave the mesh with calls under way, and attach it: they have run once, in their order."""
        self.procs.run("ledger = []").get(DEADLINE_S)
        sent = [next(numbers) for _ in range(4)]
        for number in sent:
            self.procs.execute(on_rank.note_slowly, number)
        meshbook.detach()
        attachment = meshbook.attach("crossed")
        self.procs = attachment.mesh("crossed")
        for call in attachment.calls:
            call.future.get(DEADLINE_S)
        if (ledgers := self.procs.run("ledger").get(DEADLINE_S).values()) != [sent] * RANKS:
            self.found.wrong.append(f"{name}: ran {ledgers}, not {sent}")
        self.training = Training(self.procs, self.training)
        self._spawn_actors()
        self._prove(0, name)

    def _check_group(self, count: int, name: str) -> None:
        if (proof := self.procs.run(on_rank.PROVE).get(DEADLINE_S).values()) != [count] * count:
            self.found.wrong.append(f"{name}: the group counts {proof}")

    def _prove(self, least: int, name: str) -> None:
        most = STEPS
        if not least:  # the next use of what was cut off tells so, once
            with contextlib.suppress(DeviceMeshError):
                most += 1
                self.training.go(1)
        try:
            wrong = self.training.follow(least, most)
        except DeviceMeshError:  # some ranks had begun to write
            heal_mesh(self.training.mesh)
            wrong = self.training.follow(least, most)
        self.training.go(1)
        wrong = " and then ".join(filter(None, (wrong, self.training.follow(1, 1))))
        if wrong:
            self.found.wrong.append(f"{name}: {wrong}")
        self._check_group(RANKS, name)
        self.sent += 1
        if (counts := self.actors.add.call().get(DEADLINE_S).values()) != [self.sent] * RANKS:
            self.found.wrong.append(f"{name}: actors counted {counts} at last, not {self.sent}")


def _fits(fault: str, watched: Watched) -> bool:
    """Whether this fault may end a call so."""
    if isinstance(watched.error, errors.CallFailed):
        return {failure.ename for failure in watched.error.failures} == {"GroupAborted"}
    return fault in DEADLY and isinstance(watched.error, errors.WorkerLost)


def run_crossed(seed: int, count: int) -> Findings:
    """Hurt the mesh so often."""
    found = Findings("crossed", f"{count:,} faults into {RANKS} ranks under all kinds of work, seed {seed}")
    with found.running():
        crossing = Crossing(found)
        for number in range(count):
            name, is_served = f"round {seed}-{number}", False
            with found.judging(name):
                crossing.serve(random.Random(f"{seed}-{number}"), name)
                is_served = True
            if not is_served:
                crossing.procs.stop()
                crossing = Crossing(found)
        crossing.procs.stop()
    return found
