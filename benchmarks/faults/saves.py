"""Kills in the middle of saves, of ranks, agents and kernels; the folder has the save before or the new one.

After each kill the mesh is healed, or attached by the next kernel, and the last save of the folder is restored: each of
its values tells the step at which it was saved. Then a save that is not disturbed leaves nothing but saves.

`python -m benchmarks.faults.saves FOLDER [SESSION]` is a kernel that saves until it is killed.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import meshbook
from benchmarks.faults.findings import Findings
from benchmarks.faults.kernels import Kernel
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.errors import MeshError

HOSTS, RANKS_EACH = 2, 2
DEADLINE_S = 60.0
KEPT = 2
AGENTS, KERNELS = 0.1, 0.15
"""The parts of the kills that are of an agent and of the kernel; the others are of ranks."""
LONGEST_LIFE_S = 0.5
BEGIN = """
import meshbook, torch
from torch.distributed.tensor import Shard, zeros
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(torch.nn.Linear(256, 256))
opt = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 256)).sum().backward()
opt.step()
wide = zeros(1023, 256, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
own, history, step = torch.zeros(64, 1024), [], 0
names = "model opt wide own history step".split()

def tensors():
    yield from model.parameters()
    yield wide.to_local()
    for known in opt.state.values():
        yield from known.values()

def fill(new):
    global step
    step = new
    history[:] = [new] * (new % 7)
    own.fill_(10 * new + rank)
    with torch.no_grad():
        for each in tensors():
            each.fill_(new)

def save(folder, keep, wait):
    return meshbook.save(folder, {name: globals()[name] for name in names}, keep=keep, wait=wait)

def restore(folder):
    global step
    state = {name: globals()[name] for name in names}
    saved = meshbook.restore(folder, state)
    step = state["step"]
    is_right = [bool((each == step).all()) for each in tensors()]
    return saved.step, step, all(is_right), history == [step] * (step % 7), bool((own == 10 * step + rank).all())
"""


def spawn() -> ProcMesh:
    """Start ranks on hosts of their own, which can be killed."""
    hosts = start_hosts({"hosts": HOSTS}, LocalLauncher(separate_hosts=True))
    mesh = hosts.spawn_procs({"gpus": RANKS_EACH}, name="saving", device="cpu", owns_hosts=True)
    mesh.run(BEGIN).get(DEADLINE_S)
    return mesh


def restored_step(mesh: ProcMesh, folder: str) -> int:
    """Restore the last save on all ranks, and return its step. Raises: AssertionError for a value that is not of it."""
    told = mesh.run(f"restore({folder!r})").get(DEADLINE_S).values()
    step = told[0][1]
    assert all(each == (step, step, True, True, True) for each in told), f"restored {told}"
    return int(step)


def save_undisturbed(mesh: ProcMesh, folder: str, step: int) -> None:
    """Save, and look at what is in the folder then. Raises: AssertionError for anything but saves."""
    mesh.run(f"fill({step}); save({folder!r}, {KEPT}, True).step").get(DEADLINE_S)
    names = sorted(os.listdir(folder))
    assert len(names) <= KEPT and all(name.startswith("save-") for name in names), f"left over: {names}"


class SaveCampaign:
    """A mesh that is killed while it saves, and healed."""

    def __init__(self, findings: Findings, folder: str, draw: random.Random) -> None:
        self._findings, self._folder, self._draw = findings, folder, draw
        self._mesh = spawn()
        self._step = 1
        self._save_s = 0.0
        for _ in range(3):
            self._save_undisturbed()

    def run(self, kills: int) -> None:
        """Kill so often."""
        for number in range(kills):
            kind = "agent" if self._draw.random() < AGENTS else "rank"
            wait = self._draw.random() < 0.5
            what = f"kill {number} of {'an agent' if kind == 'agent' else 'a rank'}, {'' if wait else 'a'}synchronous"
            self._findings.count(f"kills of {kind}s")
            with self._findings.judging(what, self._mesh):
                self._strike(kind, wait)
            if self._findings.hangs:
                break
        self._mesh.stop()

    def _strike(self, kind: str, wait: bool) -> None:
        mesh, last, new = self._mesh, self._step, self._step + 1
        rank = self._draw.randrange(len(mesh))
        pid = self._agent_of(rank) if kind == "agent" else mesh.status()[rank].pid
        call = mesh.run(f"fill({new}); future = save({self._folder!r}, {KEPT}, {wait}); None")
        time.sleep(self._draw.uniform(0, 1.3 * self._save_s))
        os.kill(pid, signal.SIGKILL)
        is_told = False
        try:
            call.get(DEADLINE_S)
            is_told = wait
        except MeshError:
            self._findings.count("saves that failed")
        deadline = time.monotonic() + DEADLINE_S
        while not mesh.lost:
            assert time.monotonic() < deadline, "the kill was not noticed"
            time.sleep(0.005)
        began = time.monotonic()
        mesh.heal(force=True)
        mesh.run(BEGIN).get(DEADLINE_S)
        found = restored_step(mesh, self._folder)
        self._findings.time("healed and restored", time.monotonic() - began)
        assert found == new or (found == last and not is_told), f"step {found} came back, after {last} and {new}"
        self._findings.count("new saves that were whole" if found == new else "older saves that were whole")
        self._step = new
        self._save_undisturbed()

    def _save_undisturbed(self) -> None:
        self._step += 1
        began = time.monotonic()
        save_undisturbed(self._mesh, self._folder, self._step)
        took_s = time.monotonic() - began
        self._save_s = took_s
        self._findings.time("save", took_s)

    def _agent_of(self, rank: int) -> int:
        hello = self._mesh._mesh.host_of(rank).hello
        assert hello is not None
        return hello.pid


def kill_kernels(findings: Findings, folder: str, draw: random.Random, kills: int) -> None:
    """Kill kernels of one mesh, whose ranks end the saves that they have begun."""
    session, told = None, 0
    for number in range(kills + 1):
        kernel = Kernel(session, [folder], "benchmarks.faults.saves")
        is_ready = kernel.wait_for("ready", time.monotonic() + 2 * DEADLINE_S) is not None
        findings.wrong += [rest for begin, rest in kernel.lines if begin == "wrong"]
        if not is_ready:
            findings.hangs.append(f"kernel {number} was not ready: {kernel.lines[-3:]}")
            kernel.kill()
            return
        found = int(kernel.wait_for("found", time.monotonic()) or 0)
        if found < told:
            findings.wrong.append(f"kernel {number} found step {found}, after {told} was saved")
        session = session or kernel.wait_for("session", time.monotonic())
        if number == kills:
            if kernel.end() is None:
                findings.hangs.append("the last kernel did not end")
            return
        time.sleep(draw.uniform(0, LONGEST_LIFE_S))
        kernel.kill()
        findings.count("kills of kernels")
        told = max([found, *(int(rest) for begin, rest in kernel.lines if begin == "answer")])
        findings.wrong += [rest for begin, rest in kernel.lines if begin == "wrong"]


def run_saves(seed: int, count: int) -> Findings:
    """Kill so often while ranks save."""
    findings = Findings("saves", f"{count} kills in the middle of saves of {HOSTS * RANKS_EACH} ranks, seed {seed}")
    draw = random.Random(seed)
    of_kernels = max(1, round(KERNELS * count))
    with findings.running(), tempfile.TemporaryDirectory() as folder:
        for name in ("ranks", "kernels"):
            Path(folder, name).mkdir()
        SaveCampaign(findings, str(Path(folder, "ranks")), draw).run(count - of_kernels)
        kill_kernels(findings, str(Path(folder, "kernels")), draw, of_kernels)
    return findings


def main(folder: str, session: str | None) -> None:
    """Save until told to end, or killed."""
    step = 1
    if session is None:
        mesh = spawn()
        _tell("session", next(each.id for each in meshbook.sessions() if each.is_ours))
    else:
        attachment = meshbook.attach(session, timeout_s=DEADLINE_S)
        mesh = attachment.mesh("saving")
        for call in attachment.calls:
            call.future.get(DEADLINE_S)
        try:
            step = restored_step(mesh, folder) + 1
            _tell("found", step - 1)
        except AssertionError as error:
            _tell("wrong", error)
    try:
        save_undisturbed(mesh, folder, step)
    except AssertionError as error:
        _tell("wrong", error)
    _tell("answer", step)
    _tell("ready", 0)
    while not select.select([0], [], [], 0)[0]:
        step += 1
        if step % 3 == 0:  # of all variables, as the notebook does
            mesh.run(f"fill({step})").get(DEADLINE_S)
            meshbook.save(folder, procs=mesh, keep=KEPT)
        else:
            mesh.run(f"fill({step}); future = save({folder!r}, {KEPT}, {step % 3 == 1}); None").get(DEADLINE_S)
            mesh.run("future.path if hasattr(future, 'path') else future.get(60).path").get(DEADLINE_S)
        _tell("answer", step)
    _tell("ledgers", "")
    meshbook.shutdown()


def _tell(what: str, value: object) -> None:
    os.write(1, f"{what} {value}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
