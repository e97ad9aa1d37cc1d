"""Programs that show what a mesh does on a device: each is a step of `make verify-gpu`, and a test of tests/gpu.

A step yields what it has seen, in words, as it goes, and raises where a mesh does something else than it should. One
card is enough. NCCL refuses two ranks of one host on the same device, but takes them for two hosts when each has an
NCCL_HOSTID of its own, and lets them talk over sockets: so groups of several ranks can be aborted and formed again.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshbook
from benchmarks.tensors import training_step
from meshbook import LocalLauncher, Point, ProcMesh, errors, start_hosts, this_host
from meshbook.distributed import Mesh
from meshbook.monarch import BootstrapCommand, default_bootstrap_cmd

PATIENCE_AT = "MESHBOOK_VERIFY_PATIENCE"
PATIENCE = float(os.environ.get(PATIENCE_AT, 1))
"""All limits are multiplied by it, for a machine that is slow or busy: `--patience`."""
TIMEOUT_S = 30.0 * PATIENCE
"""A call that takes longer has failed. Steps may take more than that, so that they say so themselves."""
NOT_FREED_S = 8.0
"""After so long a rank that waits for a kernel of its own counts as not freed by the failure of another."""

SETUP = """
import ctypes, os, time
DEVICE = {device!r}
def wait_for_device():
    if DEVICE == "cuda": torch.cuda.synchronize()
def loop_on_device():
    "A minute's kernel; on the CPU a lock of C that is taken twice. Neither looks at interrupts."
    if DEVICE == "cuda": return torch.cuda._sleep(120_000_000_000)
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock); libc.pthread_mutex_lock(lock)
"""
"""What cells of the steps use."""


class CheckFailed(Exception):
    """A mesh did something else than it should; the text says what."""


def check(holds: bool, otherwise: object) -> None:
    """Raise CheckFailed with the text of ``otherwise`` unless it holds."""
    if not holds:
        raise CheckFailed(str(otherwise))


# ---- meshes on the device ------------------------------------------------------------------------------------------


def spawn_one(device: str, name: str = "card") -> ProcMesh:
    """Spawn one rank on the first device."""
    return _prepared(this_host().spawn_procs({"gpus": 1}, name=name, device=device), device)


def spawn_pair(device: str, name: str = "pair") -> ProcMesh:
    """Spawn two ranks that share the first device: by two agents of this machine, which act as two hosts."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher())
    mesh = hosts.spawn_procs({"gpus": 1}, name=name, device=device, bootstrap_command=_host_of_its_own, owns_hosts=True)
    return _prepared(mesh, device)


def _host_of_its_own(point: Point) -> BootstrapCommand:
    """For NCCL each rank is alone on its host."""
    return default_bootstrap_cmd().with_env({"NCCL_HOSTID": f"host{point.rank}", "NCCL_IB_DISABLE": "1"})


def _prepared(mesh: ProcMesh, device: str) -> ProcMesh:
    mesh.run(SETUP.format(device=device)).get(TIMEOUT_S)
    return mesh


def values(mesh: ProcMesh, code: str) -> list[Any]:
    """Run a cell and return the value of each rank."""
    return list(mesh.run(code).get(TIMEOUT_S).values())


def prove(mesh: ProcMesh) -> None:
    """Check that the ranks of a pair add up; leaves ``x`` on both."""
    got = values(mesh, "x = torch.ones(4, device=DEVICE)\ndist.all_reduce(x)\nx.tolist()")
    check(got == [[2.0] * 4] * 2, f"all_reduce of ones on two ranks gave {got}")


def _error_of(run: Any, mesh: ProcMesh, otherwise: str) -> object:
    """Return the error with which a cell ends; one that does not end fails the check."""
    try:
        return run.exception(TIMEOUT_S)
    except TimeoutError:
        raise CheckFailed(f"{otherwise} within {TIMEOUT_S:.0f} s: {mesh.stacks()}") from None


# ---- forming, and collectives --------------------------------------------------------------------------------------


def form(device: str) -> Iterator[str]:
    """One rank, then two, have groups of the device's backend."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    for spawn, ranks in ((spawn_one, 1), (spawn_pair, 2)):
        begun = time.monotonic()
        with spawn(device) as mesh:
            took_s = time.monotonic() - begun
            got = values(mesh, "dist.get_backend(), mesh.device_type, torch.zeros(1, device=DEVICE).device.type")
            check(got == [(backend, device, device)] * ranks, f"backend, mesh and tensors are of {got}")
        yield f"{ranks} {'rank' if ranks == 1 else 'ranks'} in {took_s:.1f} s"
    yield f"backend {backend}"


COLLECTIVES = """
n = dist.get_world_size()
x = torch.full((2,), float(rank + 1), device=DEVICE)
outs, part = [torch.zeros(2, device=DEVICE) for _ in range(n)], torch.zeros(2 // n, device=DEVICE)
dist.all_gather(outs, x)
dist.reduce_scatter_tensor(part, x)
dist.broadcast(x, n - 1)
dist.barrier()
received = torch.zeros(1, device=DEVICE)
if n > 1:
    if rank == 0: dist.send(torch.ones(1, device=DEVICE) * 7, 1)
    else: dist.recv(received, 0)
group = dist.new_group(list(range(n)))
work = dist.all_reduce(x, group=group, async_op=True); work.wait()
here = torch.ones(2); dist.all_reduce(here)
told = [None] * n; dist.all_gather_object(told, {"a": rank})
[t.tolist() for t in outs], part.tolist(), received.item(), x.tolist(), here.tolist(), [each["a"] for each in told]
"""


def collectives_of_one(device: str) -> Iterator[str]:
    """Collectives of one rank have its values, on the device and on the CPU."""
    with spawn_one(device) as mesh:
        got = values(mesh, COLLECTIVES)
    check(got == [([[1.0, 1.0]], [1.0, 1.0], 0.0, [1.0, 1.0], [1.0, 1.0], [0])], f"collectives gave {got}")
    yield "all_gather, reduce_scatter, broadcast, barrier, all_reduce in a new group, and on the CPU"


def collectives_of_two(device: str) -> Iterator[str]:
    """Collectives of two ranks have the values of both, and so have messages."""
    gathered, rest = [[1.0, 1.0], [2.0, 2.0]], ([4.0, 4.0], [2.0, 2.0], [0, 1])
    with spawn_pair(device) as mesh:
        got = values(mesh, COLLECTIVES)
        check(got == [(gathered, [3.0], sent, *rest) for sent in (0.0, 7.0)], f"collectives gave {got}")
        got = values(
            mesh, "dist.all_reduce(x := torch.ones(1, device=DEVICE), group=mesh['hosts'].get_group())\nx.item()"
        )
        check(got == [2.0, 2.0], f"an axis's all_reduce gave {got}")
    yield "the same, send and recv, and the group of an axis"


EXCHANGE = """
mine, theirs = torch.full((16 << 20,), float(rank), device=DEVICE), torch.empty(16 << 20, device=DEVICE)
both = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
for work in dist.batch_isend_irecv(both): work.wait()
theirs.mean().item()
"""


def exchanged(device: str) -> Iterator[str]:
    """Two ranks send each other 64 MB at once, which neither could begin with."""
    with spawn_pair(device) as mesh:
        for _ in range(3):
            got = values(mesh, EXCHANGE)
            check(got == [1.0, 0.0], f"ranks got tensors of {got}")
        prove(mesh)
    yield "64 MB each way by batch_isend_irecv"


# ---- failures ------------------------------------------------------------------------------------------------------


def freed_from_collectives(device: str) -> Iterator[str]:
    """A rank that waits in an all_reduce, or a barrier behind it, is freed when the other has raised."""
    with spawn_pair(device) as mesh:
        for what, wait in (("all_reduce", "wait_for_device()"), ("barrier", "dist.barrier()")):
            freed_s = _fail_behind(mesh, f"dist.all_reduce(x); {wait}").get()
            yield f"{what}: freed after {freed_s:.2f} s"


def freed_from_item(device: str) -> Iterator[str]:
    """A rank in `.item()` after an all_reduce that can never end is freed when the other has raised."""
    with spawn_pair(device) as mesh:
        freed_s = _fail_behind(mesh, "dist.all_reduce(x); x.sum().item()").get()
        yield f"freed after {freed_s:.2f} s"


class _FailedBehind:
    """A cell in which rank 0 waits and rank 1 has just raised. Made by `_fail_behind`."""

    def __init__(self, mesh: ProcMesh, run: Any) -> None:
        self.mesh, self.run, self.begun = mesh, run, time.monotonic()

    def get(self) -> float:
        """Return after how many seconds the cell had failed; both ranks then work together, with their variables."""
        error = _error_of(self.run, self.mesh, "the other rank was not freed")
        freed_s = time.monotonic() - self.begun
        check("ZeroDivisionError" in str(error), f"the cell ended with {error!r}")
        prove(self.mesh)
        got = values(self.mesh, "kept.tolist()")
        check(got == [[0, 1, 2]] * 2, f"variables did not stay: {got}")
        return freed_s


def _fail_behind(mesh: ProcMesh, wait: str) -> _FailedBehind:
    """Have rank 0 in the line ``wait``; once it stands there, let rank 1 raise."""
    prove(mesh)
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now"
        run = mesh.run(
            f"kept = torch.arange(3, device=DEVICE)\nx = torch.ones(5000, device=DEVICE)\ndef stand_and_wait():\n"
            f"    {wait}\nif rank == 1:\n    while not os.path.exists({str(now)!r}): time.sleep(0.01)\n    1 / 0\n"
            "stand_and_wait()"
        )
        _until_in(mesh, "stand_and_wait")
        now.touch()
        failed = _FailedBehind(mesh, run)
        _until(lambda: mesh.status()[1].state != "busy", lambda: f"rank 1 did not raise: {mesh.stacks()}")
    return failed


def _until_in(mesh: ProcMesh, function: str) -> None:
    """Wait until a rank stands in this function."""
    _until(lambda: function in str(mesh.stacks()), lambda: f"no rank came to {function}: {mesh.stacks()}")


def _until(holds: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise CheckFailed(otherwise())
        time.sleep(0.05)


def kernel_behind_failure(device: str) -> Iterator[str]:
    """A rank whose own kernel loops is freed when the other has raised, or named and replaced within seconds."""
    with spawn_pair(device) as mesh:
        failed = _fail_behind(mesh, "loop_on_device(); dist.all_reduce(x); x.sum().item()")
        try:
            failed.run.exception(NOT_FREED_S)
            yield f"freed after {time.monotonic() - failed.begun:.1f} s"
        except TimeoutError:
            yield f"not freed by the failure in {NOT_FREED_S:.0f} s"
            yield from _replace_the_stuck(mesh, failed.run)
        prove(mesh)
        got = mesh.slice(hosts=1).run("kept.tolist()").get(TIMEOUT_S).values()
        check(list(got) == [[0, 1, 2]], f"the variables of the rank that raised did not stay: {got}")
        yield "both add up again"


def _replace_the_stuck(mesh: ProcMesh, run: Any) -> Iterator[str]:
    """Interrupt twice, and where that is not enough start rank 0 again."""
    reports = [str(mesh.interrupt()) for _ in range(2)]
    try:
        run.exception(NOT_FREED_S)
        yield "freed by two interrupts"
    except TimeoutError:
        check("rank 0 still does not stop" in reports[1], f"two interrupts did not name rank 0: {reports}")
        begun = time.monotonic()
        mesh.respawn(0)
        yield f"named by two interrupts; respawned in {time.monotonic() - begun:.1f} s"
        _prepared(mesh, values(mesh.slice(hosts=1), "DEVICE")[0])


def interrupted(device: str) -> Iterator[str]:
    """A rank in an all_reduce to which the other never comes obeys an interrupt; so does the other."""
    with spawn_pair(device) as mesh:
        prove(mesh)
        run = mesh.run(
            "def stand_and_wait():\n    dist.all_reduce(x); wait_for_device()\nif rank == 0: stand_and_wait()\n"
            "while True: time.sleep(0.1)"
        )
        _until_in(mesh, "stand_and_wait")
        begun = time.monotonic()
        report = mesh.interrupt()
        error = _error_of(run, mesh, f"an interrupt did not end the cell: {report}")
        yield f"after {time.monotonic() - begun:.2f} s"
        check("KeyboardInterrupt" in str(error), f"the cell ended with {error!r}")
        prove(mesh)


def killed_and_healed(device: str) -> Iterator[str]:
    """When a rank is killed, the other is freed and keeps its variables; heal brings the first back."""
    with spawn_pair(device) as mesh:
        prove(mesh)
        run = mesh.run(
            "import signal\nkept = torch.full((3,), 5.0, device=DEVICE)\nwait_for_device()\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)\nx.sum().item()"
        )
        begun = time.monotonic()
        error = _error_of(run, mesh, "the other rank was not freed")
        yield f"known after {time.monotonic() - begun:.2f} s"
        check(isinstance(error, errors.CallFailed | errors.WorkerLost), f"the cell ended with {error!r}")
        begun = time.monotonic()
        mesh.heal([SETUP.format(device=device)])
        yield f"healed in {time.monotonic() - begun:.1f} s"
        prove(mesh)
        got = list(mesh.slice(hosts=0).run("kept.tolist()").get(TIMEOUT_S).values())
        check(got == [[5.0] * 3], f"the variables of the rank that lives did not stay: {got}")


TOO_MUCH = """
def fill():
    held = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    return torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE), held
fill()
"""


def out_of_memory(device: str) -> Iterator[str]:
    """Too large a tensor is an error with what to do, twice in a row; the rank keeps what it has."""
    with spawn_one(device) as mesh:
        values(mesh, "kept = torch.arange(3, device=DEVICE)")
        for _ in range(2):
            try:
                mesh.run(TOO_MUCH).get(TIMEOUT_S)
            except errors.CallFailed as error:
                shown = "\n".join(error.failures[0].traceback)
                check("memory" in str(error), f"another error: {error}")
                check("the frames of this error hold 268 MB" in shown, f"the error does not say what to do: {shown}")
            else:
                raise CheckFailed("a petabyte was given out")
        mesh.free().get(TIMEOUT_S)
        check(values(mesh, "kept.tolist()") == [[0, 1, 2]], "variables did not stay")
        if device == "cuda":
            held = values(mesh, "torch.cuda.memory_reserved() / 1e6")[0]
            check(held < 200, f"{held:.0f} MB are still reserved after free()")
    yield "told with what to do; the rank lives"


# ---- training ------------------------------------------------------------------------------------------------------

TRAINING = """
import copy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def ddp(model): return nn.parallel.DistributedDataParallel(model, device_ids=[0] if DEVICE == "cuda" else None)
def fsdp(model): return fully_shard(model, mesh=mesh["hosts"])
def in_parts(model):
    return parallelize_module(model, mesh["hosts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
def train(wrap, own_rows):
    "The largest difference of the weights from those of one process, and how far these have come."
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(DEVICE)
    x, begun, model = torch.randn(32, 8, device=DEVICE), copy.deepcopy(plain), wrap(copy.deepcopy(plain))
    for each, rows in (plain, x), (model, x.chunk(2)[rank] if own_rows else x):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad(); (each(rows) - rows[:, :4]).pow(2).mean().backward(); optimizer.step()
    def apart(some, others):
        return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return apart(whole, plain.parameters()), apart(begun.parameters(), plain.parameters())
"""


def trained(wrap: str, own_rows: bool) -> Callable[[str], Iterator[str]]:
    """Return the step that trains on two ranks by a function of `TRAINING`, and compares with one process.

    own_rows: each rank has half of the batch.
    """

    def run(device: str) -> Iterator[str]:
        with spawn_pair(device) as mesh:
            values(mesh, TRAINING)
            for apart, moved in values(mesh, f"train({wrap}, {own_rows})"):
                check(moved > 0.1, f"20 steps changed the weights by {moved} only")
                check(apart < 1e-4, f"weights differ from those of one process by {apart}")
        yield "20 steps; weights are those of one process"

    return run


def losses_of(
    mesh: Mesh | None, axis: str, wrap: Callable[[Any], Any] = lambda step: step, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train 12 steps with AdamW; returns the losses and the whole parameters.

    mesh: the tensors' mesh, along whose ``axis`` batch and first layer are cut; None for this process.
    wrap: takes the step and returns what is called in its place. options: of AdamW.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(32, 16)
    if mesh is not None:
        meshbook.module_to_mesh(model, mesh, {"0.weight": [axis, None]})
        x = meshbook.distribute(x, mesh, [axis, None])
    step = wrap(training_step(model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)))
    losses = [step(x) for _ in range(12)]
    whole = {name: t.full_tensor() if mesh is not None else t for name, t in model.state_dict().items()}
    return [loss.item() for loss in losses], copy.deepcopy(whole)


def check_losses(mesh: Mesh, axis: str, wrap: Callable[[Any], Any] = lambda step: step, **options: Any) -> float:
    """Return the largest relative difference of a loss from that of this process, which must be small."""
    (losses, state), (wanted, kept) = losses_of(mesh, axis, wrap, **options), losses_of(None, axis, **options)
    apart = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
    check(apart < 2e-3, f"losses {losses}, and of one process {wanted}")
    check(wanted[-1] < 0.9 * wanted[0], f"this process did not learn: {wanted}")
    for name in kept:
        check(torch.allclose(state[name], kept[name], rtol=5e-3, atol=2e-3), f"{name} differs from that of one process")
    return apart


def mesh_tensors(device: str) -> Iterator[str]:
    """Mesh tensors on one rank and on two have the losses of plain torch in this process."""
    for spawn, axis in ((spawn_one, "gpus"), (spawn_pair, "hosts")):
        with spawn(device) as procs:
            over = Mesh(procs)
            ways: tuple[dict[str, Any], ...] = ({}, {"foreach": True}, {"fused": True})
            apart = max(check_losses(over, axis, **options) for options in ways)
            yield f"{len(procs.ranks)} rank(s): AdamW single, foreach and fused; losses differ by {apart:.0e} at most"


def recorded_steps(device: str) -> Iterator[str]:
    """A step under `meshbook.compile` is recorded and repeated with the losses of plain torch."""
    for spawn, axis in ((spawn_one, "gpus"), (spawn_pair, "hosts")):
        with spawn(device) as procs:
            _check_recorded(Mesh(procs), axis)
            yield f"{len(procs.ranks)} rank(s): losses are those of one process"


def _check_recorded(over: Mesh, axis: str) -> None:
    steps: list[Any] = []

    def wrap(step: Any) -> Any:
        steps.append(meshbook.compile(step))
        return steps[0]

    check_losses(over, axis, wrap, fused=True)
    check(not steps[0].why_not, f"the step was not repeated: {steps[0].why_not}")


GRAPH = """
a = torch.randn(128, 128, device="cuda")
side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3): b = a @ a
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    b = a @ a
    dist.all_reduce(b)
"""


def graphs_beside_recorded_steps(device: str) -> Iterator[str]:
    """A CUDA graph with an all_reduce in it replays, and still does after recorded steps on the same rank."""
    with spawn_one(device) as procs:
        values(procs, GRAPH)
        for filled, when in ((1.0, "once captured"), (0.5, "after recorded steps")):
            got = values(procs, f"a.fill_({filled}); graph.replay(); torch.cuda.synchronize()\nb[0, 0].item()")
            check(got == [128 * filled**2], f"{when} the graph gave {got}")
            yield f"replays {when}"
            if when == "once captured":
                _check_recorded(Mesh(procs), "gpus")
