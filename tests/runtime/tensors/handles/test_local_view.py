"""The local view: each rank its own tensor, and what makes one of them."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook import ProcMesh, errors, heal_mesh, this_host, this_proc
from meshbook.actor import Actor, endpoint
from meshbook.distributed import Mesh, TensorError, TensorLost, fetch_shard, inspect, remote
from meshbook.errors import WorkerLost
from meshbook.shape.members import members_of
from meshbook.tensors.handles.local_view import local_mesh_of


@pytest.fixture(scope="module")
def own(square: ProcMesh) -> meshbook.MeshTensor:
    """Rank r has [r, r + 1, r + 2, r + 3]."""
    square.run("own = torch.arange(4.0) + rank").get(20)
    return local_mesh_of(square).from_ranks("own")


def test_tensors_of_the_ranks_that_differ_in_shape_are_refused(square: ProcMesh) -> None:
    square.run("uneven = torch.ones(2 + rank // 3)").get(20)
    with pytest.raises(errors.UsageError, match=r"uneven differ: ranks 0-2: \[2\] float32; rank 3: \[3\] float32"):
        local_mesh_of(square).from_ranks("uneven")


def each(tensor: torch.Tensor) -> list[object]:
    assert isinstance(tensor, meshbook.MeshTensor)
    procs = tensor.mesh.procs
    return [inspect(tensor, **members_of(procs).point(rank)).tolist() for rank in procs.ranks]


def rows(*firsts: float, count: int = 4) -> list[list[float]]:
    return [[first + step for step in range(count)] for first in firsts]


def test_tensors_begin_on_each_rank(square: ProcMesh) -> None:
    with square.activate():
        zeros, drawn, counted = torch.zeros(2, 3), torch.randn(5), torch.arange(3)
        layer = nn.Linear(3, 2)
        assert inspect(torch.ones(300, 300)).sum().item() == 90_000.0  # what comes here is a tensor of this process
        assert meshbook.ones(4, mesh=square).sum().item() == 4.0
        both = layer(zeros + 1) + torch.full((2,), 2.0)
    assert each(zeros) == [[[0.0] * 3] * 2] * 4
    assert len({str(values) for values in each(drawn)}) == 4
    assert each(counted) == [[0, 1, 2]] * 4
    assert isinstance(torch.zeros(2), torch.Tensor) and not isinstance(torch.zeros(2), meshbook.MeshTensor)
    assert both.shape == (2, 2)
    assert "each rank its own" in repr(zeros)
    assert torch.equal(fetch_shard(zeros, dp=1).get(20), torch.zeros(2, 3))


def test_operations_are_each_ranks_own(own: meshbook.MeshTensor) -> None:
    assert each(own * 2 + torch.ones(4)) == [[2 * (rank + step) + 1 for step in range(4)] for rank in range(4)]
    copied = own.clone()
    copied[1:3].zero_()
    assert each(copied)[2] == [2.0, 0.0, 0.0, 5.0]
    assert each(own.view(2, 2).T)[1] == [[1.0, 3.0], [2.0, 4.0]]


def test_ranks_reduce_along_axes(own: meshbook.MeshTensor) -> None:
    assert each(own.reduce("dp")) == [[2 + 2 * step for step in range(4)], [4 + 2 * step for step in range(4)]] * 2
    assert each(own.reduce("dp", "max")) == rows(2, 3, 2, 3)
    assert each(own.reduce("tp", "min")) == rows(0, 0, 2, 2)
    assert each(own.reduce(reduction="avg")) == rows(1.5, 1.5, 1.5, 1.5)
    assert each(own.reduce(("dp", "tp"), "product"))[0][0] == 0.0
    assert each(own.reduce("tp", "stack")) == [rows(0, 1)] * 2 + [rows(2, 3)] * 2
    assert each(own.reduce(("dp", "tp"), "stack")) == [[rows(0, 1), rows(2, 3)]] * 4
    assert each(own.reduce("tp", "max", scatter=True)) == [*rows(1, 3, count=2), *rows(3, 5, count=2)]
    total = own.clone()
    assert total.reduce_("dp", "max") is total
    assert each(total) == rows(2, 3, 2, 3)


def test_gradients_pass_reductions_slices_and_meshes(square: ProcMesh, own: meshbook.MeshTensor) -> None:
    x = own.clone().requires_grad_()
    (x.reduce("dp", "avg") * own).sum().backward()
    assert x.grad is not None
    assert each(x.grad) == rows(1, 2, 1, 2)
    y = own.clone().requires_grad_()
    corner = y.slice_mesh(dp=1, tp=0)
    sent = corner.to_mesh(square.slice(dp=0))
    (sent * own.slice_mesh(dp=0)).sum().backward()
    assert y.grad is not None
    assert each(y.grad) == [[0.0] * 4, [0.0] * 4, [1.0, 3.0, 5.0, 7.0], [0.0] * 4]
    with pytest.raises(errors.UsageError, match=r"reduce\('max'\) has no gradient"):
        own.clone().requires_grad_().reduce("dp", "max").sum().backward()


def test_tensors_go_to_other_ranks(square: ProcMesh, own: meshbook.MeshTensor) -> None:
    column = own.slice_mesh(tp=1)
    assert each(column) == rows(1, 3)
    assert each(column.to_mesh(square.slice(tp=0))) == rows(1, 3)
    assert each(own.slice_mesh(dp=1, tp=1).to_mesh(square)) == rows(3, 3, 3, 3)
    assert each(column.to_mesh(square)) == rows(1, 1, 3, 3)
    with pytest.raises(errors.UsageError, match=r"does not have the axis dp.*slice_mesh\(dp=0\)"):
        column.to_mesh(square.slice(dp=0))


class Scaler(Actor):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @endpoint(propagate=lambda tensor: tensor)
    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor

    @endpoint
    def ones(self, count: int) -> torch.Tensor:
        return torch.ones(count)


def test_what_endpoints_of_actors_return_stays_on_the_ranks(square: ProcMesh, own: meshbook.MeshTensor) -> None:
    scalers = square.spawn("scalers", Scaler, 2.0)
    scaled = scalers.scale.rref(own)
    assert each(scaled) == [[2 * value for value in row] for row in rows(0, 1, 2, 3)]
    assert each(scaled + scalers.ones.rref(4)) == [[2 * value + 1 for value in row] for row in rows(0, 1, 2, 3)]
    with pytest.raises(errors.UsageError, match="Its signature is ones"):
        scalers.ones.rref()
    scalers.stop().get()


class Learner(Actor):
    """An actor of the program's process that drives tensors on processes of its own."""

    def __init__(self) -> None:
        self.procs: ProcMesh = this_host().spawn_procs({"learners": 2}, name="learners")
        with self.procs.activate():
            self.policy = torch.zeros(2, requires_grad=True)

    @endpoint
    def learn(self) -> list[float]:
        with self.procs.activate():
            for _ in range(3):
                rewards = self.procs.rank_tensor("learners") + torch.tensor([1.0, 3.0])
                self.policy.grad = None
                (self.policy * rewards).sum().backward()  # type: ignore[no-untyped-call]
                self.policy.grad.reduce_("learners", "avg")  # type: ignore[attr-defined]
                with torch.no_grad():
                    self.policy.sub_(self.policy.grad, alpha=2.0)
        learned: list[float] = inspect(self.policy.detach(), learners=1).tolist()
        return learned


def test_an_actor_of_this_process_drives_tensors(clean_end: None) -> None:
    learner = this_proc().spawn("learner", Learner)
    assert learner.learn.call_one().get(60) == [-9.0, -21.0]


@pytest.mark.slow
def test_remote_functions_run_on_ranks(own: meshbook.MeshTensor) -> None:
    def split(x: torch.Tensor, by: float) -> tuple[torch.Tensor, str]:
        return x[:2] * by, type(x).__name__

    halves, kind = remote(split)(own, 2.0)
    assert (each(halves)[1], kind) == ([2.0, 4.0], "Tensor")
    foreseen = remote(lambda x: x.unique() * 2, propagate=lambda x: x)(own)
    assert each(foreseen + 1) == [[2 * (rank + step) + 1 for step in range(4)] for rank in range(4)]
    wrong = remote(lambda x: (x, x), propagate=lambda x: x)(own)
    with pytest.raises(errors.MeshError, match="2 tensors were returned"):
        inspect(wrong)
    with pytest.raises(errors.MeshError, match=r"a tensor of \(2,\), .* has foreseen one of \(4,\)"):
        inspect(remote(lambda x: x[:2], propagate=lambda x: x)(own) + 1)
    with pytest.raises(errors.UsageError, match="is given a tensor of the local view"):
        remote(split)(3.0)


def test_training_with_averaged_gradients(square: ProcMesh) -> None:
    torch.manual_seed(4)
    plain, batches = nn.Linear(3, 1), torch.randn(4, 2, 3)
    square.run(f"batch = torch.tensor({batches.tolist()})[rank]").get(20)
    batch = local_mesh_of(square).from_ranks("batch")
    with square.activate():
        model = nn.Linear(3, 1)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        mine.data.copy_(its.detach())
    for module, data in ((model, batch), (plain, batches)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            module(data).pow(2).mean().backward()
            for parameter in module.parameters() if module is model else ():
                assert isinstance(parameter.grad, meshbook.MeshTensor)
                parameter.grad.reduce_(reduction="avg")
            optimizer.step()
    assert torch.allclose(inspect(model.weight, dp=1, tp=1), plain.weight, atol=1e-5)


@pytest.mark.slow
def test_what_has_no_one_value_is_refused(square: ProcMesh, own: meshbook.MeshTensor) -> None:
    parts = meshbook.ones(4, mesh=square)
    for bad in (own.sum().item, own.tolist, own.full_tensor):
        with pytest.raises(errors.UsageError, match=r"each rank has another tensor.*meshbook\.distributed\.inspect"):
            bad()
    with pytest.raises(errors.UsageError, match=r"of its own .* and one in parts .*from_ranks"):
        own + parts
    with pytest.raises(errors.UsageError, match=r"reduce is for the local view"):
        parts.reduce("dp")
    with pytest.raises(errors.UsageError, match="nothing is laid out"):
        own.redistribute(["dp"])
    with pytest.raises(errors.UsageError, match="'mean' is no reduction: stack, sum"):
        own.reduce("dp", "mean")
    with pytest.raises(errors.UnknownAxisError):
        own.reduce("gpus")
    bad = own[torch.tensor([9])]
    with pytest.raises(TensorError, match=r"out of (range|bounds)"):
        inspect(bad)


def test_local_and_in_parts_are_one_memory(square: ProcMesh, own: meshbook.MeshTensor) -> None:
    own.mesh.procs.push({"mine": own.clone()}).get(20)
    parts = Mesh(square).from_ranks("mine", placements=[Shard(0), Replicate()])
    assert parts.shape == (8,)
    assert parts.sum().item() == 6 + 14


def test_own_tensors_end_with_their_ranks() -> None:
    with this_host().spawn_procs({"gpus": 2}, name="hurt") as procs:
        with procs.activate():
            x = torch.ones(3)
        assert inspect(x.reduce()).tolist() == [2.0] * 3
        with procs.activate():
            procs.respawn(1)
        assert inspect(x, gpus=0).tolist() == [1.0] * 3
        with pytest.raises(TensorLost, match=r"each rank had its own.*that of rank 1 ended"):
            inspect(x, gpus=1)
        with procs.activate():
            assert inspect(torch.ones(3).reduce(), gpus=1).tolist() == [2.0] * 3


@pytest.mark.slow
def test_what_living_ranks_hold_survives_a_repair() -> None:
    with this_host().spawn_procs({"dp": 2, "tp": 2}, name="torn") as procs:
        mesh = Mesh(procs)
        with procs.activate():
            x = torch.randn(3)
        wanted = each(x)
        whole, rows, blocks = (
            meshbook.distribute(torch.arange(8.0).view(4, 2), mesh, spec) for spec in (None, ["dp"], ["dp", "tp"])
        )
        written = x * 1
        inspect(written)
        kill(procs, 3)
        assert whole.tolist() == rows.tolist() == torch.arange(8.0).view(4, 2).tolist()
        with pytest.raises(TensorLost, match=r"Shard.*the part of rank 3"):
            blocks.tolist()
        assert [inspect(x, dp=rank // 2, tp=rank % 2).tolist() for rank in range(3)] == wanted[:3]
        upper = x.slice_mesh(dp=0)
        assert each(upper) == wanted[:2]
        assert each(upper.reduce("tp", "max")) == [torch.tensor(wanted[:2]).amax(0).tolist()] * 2
        assert each(x.slice_mesh(dp=1, tp=0).to_mesh(procs)) == [wanted[2]] * 4
        said = r"that of rank 3 ended with the process; ranks 0-2 still have theirs.*slice_mesh"
        for use in (lambda: inspect(x, dp=1, tp=1), lambda: inspect(x * 2), lambda: each(x.slice_mesh(dp=1))):
            with pytest.raises(TensorLost, match=said):
                use()
        with pytest.raises(TensorLost, match=said):
            inspect(written.add_(1))
        upper.mul_(2)
        each(upper)  # now it is done
        kill(procs, 0)
        with pytest.raises(TensorLost, match=r"that of ranks 0,3 ended .* ranks 1,2 still have theirs"):
            inspect(x)
        assert inspect(x, dp=0, tp=1).tolist() == (torch.tensor(wanted[1]) * 2).tolist()  # written through the slice


def kill(procs: ProcMesh, rank: int) -> None:
    """End a process, and bring its mesh back."""
    os.kill(procs.status()[rank].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        procs.run("pass").get(30)
    heal_mesh(procs)


def test_ranks_know_their_place_along_axes(square: ProcMesh) -> None:
    assert each(square.rank_tensor("tp")) == [0, 1, 0, 1]
    assert each(square.rank_tensor(["tp", "dp"])) == [0, 2, 1, 3]
    assert {axis: each(tensor) for axis, tensor in square.rank_tensors().items()} == {
        "dp": [0, 0, 1, 1],
        "tp": [0, 1, 0, 1],
    }
    with square.activate():
        total = (square.rank_tensor("dp") + torch.ones((), dtype=torch.long)).reduce("dp", "sum")
    assert each(total) == [3, 3, 3, 3]
    assert each(square.slice(dp=1).rank_tensor("tp") * 10) == [0, 10]
    with pytest.raises(errors.UnknownAxisError, match="nothing"):
        square.rank_tensor("nothing")
