"""One rank on a GPU: cells, errors, interrupts, what is told of its memory, profiles, and its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from collector import Collector

from meshbook import ProcMesh, errors, this_host
from meshbook.actor import Actor, BufferKindError, endpoint
from meshbook.curves.series import Series
from meshbook.mesh import states
from meshbook.mesh.profiles import collect
from meshbook.mesh.rank_calls import start_cell

GB = 1 << 30
KERNEL_OF_A_SECOND = "torch.cuda._sleep(2_000_000_000)"  # in cycles of a device: a second or so


def only(mesh: ProcMesh, code: str) -> Any:
    """What the one rank says."""
    (value,) = mesh.run(code).get(60).values()
    return value


def test_a_rank_is_on_the_device_by_default_and_its_group_is_of_nccl(rank: ProcMesh) -> None:
    assert states.device_of(rank) == "cuda" and [status.device for status in rank.status()] == ["cuda:0"]
    assert only(rank, "torch.cuda.current_device(), torch.cuda.device_count()") == (0, 1)
    assert only(rank, "dist.get_backend()") == "cpu:gloo,cuda:nccl"
    assert only(rank, "mesh.device_type") == "cuda"


def test_more_ranks_than_devices_are_refused_with_what_to_do() -> None:
    with pytest.raises(errors.DeviceError, match=r"which has \d+ CUDA devices?\. Ask for at most \d+, or add"):
        this_host().spawn_procs({"gpus": 99})


def test_ranks_on_the_cpu_live_beside_it(rank: ProcMesh) -> None:
    with this_host().spawn_procs({"x": 2}, device="cpu") as others:
        assert others.run("x = torch.ones(2)\ndist.all_reduce(x)\nx.tolist()").get(60).values() == [[2.0, 2.0]] * 2
        assert others.run("torch.cuda.is_initialized()").get(60).values() == [False, False]
        assert only(rank, "torch.ones(2, device='cuda').sum().item()") == 2.0


def test_tensors_are_sent_and_fetched(rank: ProcMesh) -> None:
    large = torch.randn(1 << 20)
    rank.push({"large": large}).get(60)
    rank.run("there = large.cuda() * 2\nmodel = torch.nn.Linear(3, 3).cuda()").get(60)
    (fetched,) = rank.pull("there").get(60).values()
    assert fetched.device.type == "cpu" and torch.equal(fetched, large * 2)
    (model,) = rank.pull("model").get(60).values()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    rank.broadcast("there").get(60)
    assert only(rank, "there.device.type") == "cuda"


def test_ddp_trains(rank: ProcMesh) -> None:
    code = """
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).cuda(), device_ids=[0])
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
x = torch.randn(64, 8, device="cuda")
losses = []
for _ in range(20):
    optimizer.zero_grad(); loss = ddp(x).pow(2).mean(); loss.backward(); optimizer.step(); losses.append(loss.item())
losses[0] > 2 * losses[-1]
"""
    assert only(rank, code) is True


def test_what_a_failed_cell_holds_of_the_device_is_freed_on_request(rank: ProcMesh) -> None:
    code = "def fail():\n    held = torch.empty(2 << 30, dtype=torch.uint8, device='cuda')\n    1 / 0\nfail()"
    with pytest.raises(errors.CallFailed, match="ZeroDivisionError"):
        rank.run(code).get(60)
    assert only(rank, "torch.cuda.memory_allocated()") >= 2 * GB
    freed = rank.free().get(60).values()[0]
    print(freed)
    assert only(rank, "torch.cuda.memory_allocated()") < GB


def test_an_interrupt_ends_a_loop_of_kernels_and_keeps_variables(rank: ProcMesh) -> None:
    rank.run("kept = torch.arange(3, device='cuda')").get(60)
    run = rank.run(f"while True:\n    {KERNEL_OF_A_SECOND}\n    torch.cuda.synchronize()")
    _until_busy(rank)
    begun = time.monotonic()
    report = rank.interrupt()
    with pytest.raises(errors.CallFailed, match="KeyboardInterrupt"):
        run.get(60)
    print(f"interrupted after {time.monotonic() - begun:.2f} s: {report}")
    assert time.monotonic() - begun < 15
    assert only(rank, "kept.tolist()") == [0, 1, 2]


def test_a_rank_that_waits_for_the_device_can_be_looked_at(rank: ProcMesh) -> None:
    run = rank.run(f"for _ in range(5): {KERNEL_OF_A_SECOND}\ntorch.cuda.synchronize()")
    _until_busy(rank)
    assert "synchronize" in str(rank.stacks())
    assert rank.status()[0].state == "busy"
    run.get(60)


def _until_busy(mesh: ProcMesh) -> None:
    deadline = time.monotonic() + 30
    while "synchronize" not in str(mesh.stacks()):
        assert time.monotonic() < deadline, mesh.stacks()
        time.sleep(0.02)


def test_the_gauge_tells_what_the_driver_and_torch_say(rank: ProcMesh) -> None:
    rank.run("held = torch.ones(1 << 28, device='cuda')").get(60)
    deadline = time.monotonic() + 20
    while (gpu := rank.status()[0].gpu) is None or gpu.own_bytes < GB:
        assert time.monotonic() < deadline, gpu
        time.sleep(0.1)
    print(gpu)
    total = only(rank, "torch.cuda.mem_get_info()[1]")
    assert 0 <= gpu.busy_percent <= 100, "NVML was not asked"
    assert GB <= gpu.own_bytes <= gpu.used_bytes <= gpu.total_bytes and abs(gpu.total_bytes - total) < 2 * GB
    rank.run("del held; torch.cuda.empty_cache()").get(60)


def test_kernels_are_in_the_profile(rank: ProcMesh) -> None:
    cell = (
        "x = torch.randn(4096, 4096, device='cuda')\nfor _ in range(20): y = x @ x\ndist.all_reduce(y)\ny.sum().item()"
    )
    rank.run(cell).get(60)
    begun_s = time.time()
    run = start_cell(rank, cell, on_output=Collector(), profile="cell 7")
    run.future.exception(60)
    profile = collect(rank, "cell 7", run.durations_s, begun_s)
    assert not profile.problems
    trace = profile.traces[0]
    print({name: op for name, op in trace.ops.items() if op.gpu_s}, trace.gpu_s, trace.gpu_collectives_s)
    assert trace.gpu_s > 0.001 and "aten::mm" in trace.ops
    assert any(op.gpu_s > 0 and ("gemm" in name or "nvjet" in name) for name, op in trace.ops.items())


class Holder(Actor):
    """Has memory of a device."""

    @endpoint
    def share(self) -> str:
        from meshbook.monarch import RDMABuffer

        try:
            RDMABuffer(torch.ones(4, device="cuda"))
        except BufferKindError as error:
            return str(error)
        return "no error"

    @endpoint
    def square(self, x: torch.Tensor) -> torch.Tensor:
        return x.cuda() ** 2


def test_actors_compute_there_and_buffers_of_a_device_are_refused(rank: ProcMesh) -> None:
    holder = rank.spawn("holder", Holder)
    assert "lies on cuda:0" in holder.share.call_one().get(timeout=60)
    result = holder.square.call_one(torch.arange(3)).get(timeout=60)
    assert result.tolist() == [0, 1, 4] and result.device.type == "cpu"


def test_a_new_rank_has_the_memory_of_the_one_before() -> None:
    with this_host().spawn_procs({"gpus": 1}, name="again") as mesh:
        fill = "x = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.8), dtype=torch.uint8, device='cuda')"
        for _ in range(2):
            mesh.run(fill).get(60)
            mesh.respawn([0])
            assert only(mesh, "x = torch.ones(2, device='cuda')\ndist.all_reduce(x)\nx.tolist()") == [1.0, 1.0]
        assert only(mesh, "dist.get_backend()") == "cpu:gloo,cuda:nccl"


def test_a_preload_that_initialises_cuda_is_imported_by_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eager_module.py").write_text(
        "import os, torch\nowner = os.getpid()\nx = torch.ones(1, device='cuda')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with this_host().spawn_procs({"gpus": 1}, preload=("eager_module",)) as mesh:
        assert only(mesh, "import os, eager_module\neager_module.owner == os.getpid(), eager_module.x.item()") == (
            True,
            1.0,
        )


def test_a_scalar_on_the_device_is_logged_without_a_wait_for_it(rank: ProcMesh) -> None:
    code = f"""
import meshbook, time
x = torch.zeros((), device="cuda")
began = time.monotonic()
{KERNEL_OF_A_SECOND}
for step in range(100):
    meshbook.log(of_device=x + step, step=step)
waited = time.monotonic() - began
torch.cuda.synchronize()
waited
"""
    assert only(rank, code) < 0.5
    deadline = time.monotonic() + 20
    while len(states.metrics(rank).series("of_device").get(0, Series()).points().values) < 100:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert states.metrics(rank).latest("of_device")[0].values.tolist() == list(range(100))
