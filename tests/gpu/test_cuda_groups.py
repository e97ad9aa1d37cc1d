"""Groups of NCCL with two ranks on one device: values, and what happens when one of them does not come."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from meshbook import ProcMesh, errors

REDUCE = "x = torch.ones(4, device='cuda')\ndist.all_reduce(x)\nx.tolist()"


def values(mesh: ProcMesh, code: str) -> list[Any]:
    return mesh.run(code).get(60).values()


def works(mesh: ProcMesh) -> bool:
    return values(mesh, REDUCE) == [[2.0] * 4] * 2


def test_collectives_have_the_values_of_both(pair: ProcMesh) -> None:
    code = """
rank = dist.get_rank()
x = torch.full((2,), float(rank + 1), device="cuda")
outs, part = [torch.zeros(2, device="cuda") for _ in range(2)], torch.zeros(1, device="cuda")
dist.all_gather(outs, x)
dist.reduce_scatter_tensor(part, x)
dist.broadcast(x, 1)
dist.barrier()
received = torch.zeros(1, device="cuda")
if rank == 0: dist.send(torch.ones(1, device="cuda") * 7, 1)
else: dist.recv(received, 0)
group = dist.new_group([0, 1])
dist.all_reduce(x, group=group)
[t.tolist() for t in outs], part.tolist(), received.tolist(), x.tolist()
"""
    first, second = values(pair, code)
    assert first == ([[1.0, 1.0], [2.0, 2.0]], [3.0], [0.0], [4.0, 4.0])
    assert second == ([[1.0, 1.0], [2.0, 2.0]], [3.0], [7.0], [4.0, 4.0])


def test_axes_have_groups(pair: ProcMesh) -> None:
    code = "dist.all_reduce(x := torch.ones(1, device='cuda'), group=mesh['hosts'].get_group())\nx.item()"
    assert values(pair, code) == [2.0, 2.0]


def test_ddp_and_fsdp_train(pair: ProcMesh) -> None:
    code = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    x, losses = torch.randn(64, 8, device="cuda"), []
    for _ in range(10):
        optimizer.zero_grad(); loss = model(x).pow(2).mean(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    return losses[0] > 1.5 * losses[-1]
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4).cuda(), device_ids=[0])
one = train(ddp)
one, train(fully_shard(torch.nn.Linear(8, 4).cuda()))
"""
    assert values(pair, code) == [(True, True)] * 2


@pytest.mark.parametrize("wait", ["x.sum().item()", "torch.cuda.synchronize()", "dist.barrier()"])
def test_a_failure_frees_the_rank_that_waits_for_the_device(pair: ProcMesh, wait: str) -> None:
    assert works(pair)
    pair.run("kept = torch.arange(3, device='cuda')").get(60)
    begun = time.monotonic()
    with pytest.raises(errors.CallFailed) as caught:
        pair.run(
            f"x = torch.ones(5000, device='cuda')\nif dist.get_rank() == 1: 1 / 0\ndist.all_reduce(x)\n{wait}"
        ).get(60)
    print(f"{time.monotonic() - begun:.2f} s: {caught.value}")
    assert "ZeroDivisionError" in str(caught.value)
    assert time.monotonic() - begun < 20
    assert works(pair)
    assert values(pair, "kept.tolist()") == [[0, 1, 2]] * 2


def test_an_interrupt_frees_ranks_that_wait_for_another(pair: ProcMesh) -> None:
    assert works(pair)
    run = pair.run(
        "import time\nx = torch.ones(3, device='cuda')\nif dist.get_rank() == 0:\n    dist.all_reduce(x)\n"
        "    torch.cuda.synchronize()\nelse:\n    while True: time.sleep(0.1)"
    )
    deadline = time.monotonic() + 30
    while "synchronize" not in str(pair.stacks()):
        assert time.monotonic() < deadline, pair.stacks()
        time.sleep(0.05)
    time.sleep(1.5)
    print(pair.stacks())
    begun = time.monotonic()
    report = pair.interrupt()
    with pytest.raises(errors.CallFailed, match="KeyboardInterrupt"):
        run.get(60)
    print(f"{time.monotonic() - begun:.2f} s: {report}")
    assert works(pair)


def test_operations_that_do_not_match_can_be_interrupted(pair: ProcMesh) -> None:
    assert works(pair)
    run = pair.run("for _ in range(3 + dist.get_rank()): dist.all_reduce(x)\nx.sum().item()")
    try:
        run.get(8)
        print("ended by itself")
    except TimeoutError:
        print(pair.interrupt())
    except errors.CallFailed as error:
        print(error)
    print(run.exception(60))
    assert works(pair)


def test_a_rank_is_killed_and_the_other_keeps_what_it_has(own_pair: ProcMesh) -> None:
    mesh = own_pair
    assert works(mesh)
    mesh.run("kept = torch.full((3,), 5.0, device='cuda')").get(60)
    run = mesh.run(
        "import os, signal, time\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(x)\nx.sum().item()"
    )
    begun = time.monotonic()
    with pytest.raises((errors.CallFailed, errors.WorkerLost)) as caught:
        run.get(60)
    print(f"{time.monotonic() - begun:.2f} s: {caught.value}")
    assert time.monotonic() - begun < 20
    begun = time.monotonic()
    mesh.heal()
    print(f"healed in {time.monotonic() - begun:.2f} s")
    assert works(mesh)
    assert mesh.slice(hosts=0).run("kept.tolist()").get(60).values() == [[5.0] * 3]


def test_a_rank_that_is_stopped_is_waited_for_and_can_be_interrupted(own_pair: ProcMesh) -> None:
    mesh = own_pair
    assert works(mesh)
    pid = mesh.status()[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        run = mesh.run("dist.all_reduce(x)\nx.sum().item()")
        with pytest.raises(TimeoutError):
            run.get(4)
        print(mesh.stacks())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert run.get(60).values() == [16.0, 16.0]
