"""A part of the processes is a mesh like any other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import meshbook
from meshbook import DeviceMeshError, ProcMesh, errors, this_host
from meshbook.distributed import Mesh, TensorLost
from meshbook.tensors.ranks import known_meshes

PARTS = ({"tp": 1}, {"dp": 0}, {"dp": slice(None), "tp": slice(0, 1)}, {"dp": slice(None, None, -1)})


@pytest.fixture
def hurt(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"dp": 2, "tp": 2}, name="hurt") as procs:
        yield procs


def test_a_mesh_of_a_mesh_is_of_its_processes(square: ProcMesh) -> None:
    assert Mesh(Mesh(square)).procs is square


@pytest.mark.quick("{'dp': 0}")
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_does_what_a_mesh_does(square: ProcMesh, part: dict[str, int | slice]) -> None:
    mesh = Mesh(square).slice(**part)
    axes = list(mesh.axes)
    a, b = torch.randn(5, 6), torch.randn(6, 3)
    x = meshbook.distribute(a, square.slice(**part), [axes[0], *axes[1:]])
    w = meshbook.distribute(b, mesh, [None, axes[-1]]).requires_grad_()
    assert x.mesh is mesh
    made = (x @ w).exp()
    assert torch.allclose(made.full_tensor(), (a @ b).exp(), rtol=1e-4)
    made.sum().backward()
    assert w.grad is not None
    assert torch.allclose(w.grad.full_tensor(), a.T @ (a @ b).exp(), rtol=1e-4)
    turned = x.redistribute([None, axes[0]])
    assert turned.placements[0] == Shard(1)
    assert turned.tolist() == a.tolist()
    torch.manual_seed(3)
    drawn = meshbook.rand(4, 4, mesh=mesh, sharding_spec=axes).tolist()
    torch.manual_seed(3)
    assert drawn == meshbook.rand(4, 4, mesh=square).tolist()
    square.slice(**part).push({"x": x}).get(20)
    assert square.slice(**part).pull("x.device_mesh.size()").get(20).values() == [mesh.size()] * mesh.size()
    if mesh.size() < 4:
        with pytest.raises(errors.MeshError, match=r"is not in this process: send tensor\.full_tensor"):
            square.push({"x": x}).get(20)


@pytest.mark.slow
def test_parts_work_at_the_same_time_and_are_not_mixed(square: ProcMesh) -> None:
    batches = [torch.randn(4, 3), torch.randn(4, 3)]
    meshes = [Mesh(square).slice(dp=index) for index in range(2)]
    plain = nn.Linear(3, 3)
    models = []
    for mesh in meshes:
        model = nn.Linear(3, 3)
        model.load_state_dict(plain.state_dict())
        models.append(meshbook.module_to_mesh(model, mesh, {"*": "shard"}))
    for _ in range(50):
        for model, mesh, batch in zip(models, meshes, batches, strict=True):
            model(meshbook.distribute(batch, mesh, ["tp"])).pow(2).sum().backward()
    for model, batch in zip(models, batches, strict=True):
        plain.zero_grad()
        plain(batch).pow(2).sum().backward()
        assert plain.weight.grad is not None
        assert torch.allclose(model.weight.grad.full_tensor() / 50, plain.weight.grad, atol=1e-4)
    first, second = (meshbook.ones(4, mesh=mesh) for mesh in meshes)
    with pytest.raises(errors.UsageError, match=r"two meshes.*square.*square"):
        first + second
    with pytest.raises(errors.UsageError, match=r"two meshes"):
        first + meshbook.ones(4, mesh=square)


@pytest.mark.quick("1")
@pytest.mark.parametrize("rank", range(4))
def test_a_part_is_repaired_whichever_rank_ended(hurt: ProcMesh, rank: int) -> None:
    whole = Mesh(hurt)
    column, corner = whole.slice(tp=1), whole.slice(dp=slice(0, 1))  # ranks 1 and 3; 0 and 1
    everywhere, kept = meshbook.randn(6, mesh=column), meshbook.randn(6, mesh=whole, sharding_spec=["dp"])
    cut = meshbook.distribute(torch.arange(6.0), column, ["dp"])
    there = meshbook.distribute(torch.arange(4.0), corner, [("dp", "tp")])
    values = everywhere.tolist(), kept.tolist()
    hurt.respawn(rank)
    assert (everywhere.tolist(), kept.tolist()) == values
    assert (everywhere.redistribute(["dp"]) + 1).sum().item() == pytest.approx(everywhere.sum().item() + 6)
    assert meshbook.ones(4, mesh=corner, sharding_spec=["dp", "tp"][1:]).sum().item() == 4
    for tensor, holders, total in ((cut, (1, 3), 15), (there, (0, 1), 6)):
        if rank in holders:
            with pytest.raises(TensorLost, match=f"the part of rank {rank} ended"):
                tensor.sum().item()
        else:
            assert tensor.sum().item() == total


def test_a_slice_is_returned_when_the_whole_was_healed(capsys: pytest.CaptureFixture[str]) -> None:
    with meshbook.Mesh(shape=(2, 2), mesh_dim_names=("rows", "columns")) as mesh:
        part = mesh.slice(rows=0)
        everywhere = meshbook.ones(4, mesh=mesh)
        assert everywhere.sum().item() == mesh.size() == 4 and part.last_repair is None
        os.kill(mesh.procs.status()[2].pid, signal.SIGKILL)  # not in the slice
        with pytest.raises(DeviceMeshError, match=r"rank 2 on .* killed by SIGKILL"):
            mesh.execute(os.getpid)
        capsys.readouterr()
        assert meshbook.heal_mesh(part) is part
        said = capsys.readouterr().err
        assert said.startswith('mesh "procs": rank 2 started again, all 4 ranks joined in ')
        repaired = mesh.last_repair
        assert repaired is not None and repaired.ranks == (2,)
        assert part.last_repair is mesh.procs.last_repair is repaired
        assert (everywhere + 1).tolist() == [2.0] * 4
        assert mesh.execute(lambda x: x.sum(), torch.full((3,), 2.0)).values() == [6.0] * 4
    with pytest.raises(DeviceMeshError, match="was stopped"):
        meshbook.heal_mesh(mesh)


def test_a_mesh_that_has_grown_or_shrunk_can_be_called_when_tensors_of_before_are_freed() -> None:
    with this_host().spawn_procs({"dp": 3}, name="resized") as procs:
        mesh = Mesh(procs)
        tensors = [meshbook.ones(4, mesh=mesh) for _ in range(2)]
        whole = meshbook.arange(4, mesh=mesh)
        assert (tensors[0] + tensors[1]).sum().item() == 8

        def held() -> list[int]:
            return [len(each._tensors) for each in known_meshes.meshes.values()]

        for change in (lambda: procs.base().shrink(dp=1), lambda: procs.base().grow(dp=1)):
            now = change()
            before = sum(map(sum, now.execute(held).get().values()))
            tensors.pop()
            assert sum(map(sum, now.execute(held).get().values())) < before
        with pytest.raises(errors.LayoutError, match="since this view of it was made"):
            (whole + 1).sum().item()
        assert meshbook.ones(6, mesh=Mesh(now), sharding_spec=["dp"]).sum().item() == 6


@pytest.mark.slow
def test_tensors_go_from_a_mesh_as_it_was_to_what_it_has_become() -> None:
    with this_host().spawn_procs({"dp": 2, "tp": 2}, name="grown") as procs:
        a, mesh = torch.randn(6, 4), Mesh(procs)
        x, whole = meshbook.distribute(a, mesh, ["dp", "tp"]), meshbook.distribute(a, mesh)
        summed = x.T @ x
        mesh.stream.settle()
        grown = Mesh(procs.grow(tp=1))  # ranks 2 and 3 are 3 and 4 now
        for tensor in (x, whole):
            assert torch.equal(tensor.to_mesh(grown, ["dp"]).full_tensor(), a)
        with pytest.raises(DeviceMeshError, match="its parts are sums, which ranks can no longer end"):
            summed.to_mesh(grown).sum().item()
        with pytest.raises(errors.LayoutError, match="grew to dp=2, tp=3"):
            meshbook.ones(4, mesh=grown).to_mesh(mesh)
        kept = x.to_mesh(grown, ["dp"])
        grown.stream.settle()  # what is on its way when a rank ends is lost
        os.kill(grown.procs.status()[5].pid, signal.SIGKILL)
        grown.heal()  # though there is a mesh that cannot be: the one it has grown from
        assert torch.equal(whole.to_mesh(grown, ["dp"]).full_tensor(), a)
        grown.stream.settle()
        small = Mesh(grown.procs.base().shrink(dp=1))
        with pytest.raises(errors.UsageError, match="have left with their parts since it shrank"):
            kept.to_mesh(small)
        assert meshbook.ones(6, mesh=small, sharding_spec=["tp"]).sum().item() == 6


@pytest.mark.slow
def test_one_tensor_after_the_other_is_taken_over_in_place_of_itself() -> None:
    """The one that was freed on the mesh as it was is no reason not to take the next one."""
    with this_host().spawn_procs({"dp": 2}, name="freed") as procs:
        mesh, a = Mesh(procs), torch.arange(5.0)
        tensors = [meshbook.distribute(a + each, mesh, ["dp"]) for each in range(3)]
        mesh.stream.settle()
        grown = Mesh(procs.grow(dp=1))
        for at in range(3):
            tensors[at] = tensors[at].to_mesh(grown, ["dp"])
        assert [each.tolist() for each in tensors] == [(a + each).tolist() for each in range(3)]
