"""Tensors go from mesh to mesh, and from layout to layout, with their gradients."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import meshbook
from meshbook import DeviceMeshError, ProcMesh, errors, this_host
from meshbook.distributed import Mesh, TensorError
from meshbook.mesh.proc_view import arrange_ranks
from meshbook.tensors.messages.layouts import MeshEnd, pieces

EVERY = {"grid": ["dp", "tp"], "flat": ["all"], "left": ["dp"], "right": ["dp"], "row": ["tp"], "turned": ["tp", "dp"]}


@pytest.fixture(scope="module")
def meshes(square: ProcMesh) -> dict[str, Mesh]:
    grid = Mesh(square)
    turned = Mesh(arrange_ranks(square, {"tp": 2, "dp": 2}, [3, 1, 0, 2]))
    parts = {"left": grid.slice(tp=0), "right": grid.slice(tp=1), "row": grid.slice(dp=1)}
    return {"grid": grid, "flat": Mesh(square.flatten("all")), **parts, "turned": turned}


def layouts(axes: list[str], dims: int) -> Iterator[list[Placement]]:
    for chosen in itertools.product([Replicate(), *map(Shard, range(dims))], repeat=len(axes)):
        yield list(chosen)


def test_pieces_make_each_part_and_no_rank_is_sent_what_it_has() -> None:
    ends = [MeshEnd("", (2, 3), (5, 3, 1, 0, 2, 4)), MeshEnd("", (4,), (7, 1, 0, 9)), MeshEnd("", (2,), (4, 5))]
    for given, wanted in itertools.product(ends, ends):
        axes = [list("ab")[: len(each.sizes)] for each in (given, wanted)]
        for there, here in itertools.product(layouts(axes[0], 2), layouts(axes[1], 2)):
            shape = (5, 7)
            parts = given.boxes(shape, there)
            for target, part in wanted.boxes(shape, here).items():
                holes = torch.zeros(shape)
                found = [piece for piece in pieces(parts, {target: part}) if piece.target == target]
                for piece in found:
                    assert all(a <= c and d <= b for (a, b), (c, d) in zip(parts[piece.source], piece.box, strict=True))
                    holes[tuple(slice(*ends) for ends in piece.box)] += 1
                expected = torch.zeros(shape)
                expected[tuple(slice(*ends) for ends in part)] = 1
                assert torch.equal(holes, expected)
                assert len({piece.source for piece in found}) == len(found)
                if parts.get(target) == part and holes.any():
                    assert [piece.source for piece in found] == [target]


@pytest.mark.some()
@pytest.mark.quick("flat-row")
@pytest.mark.parametrize("to", EVERY)
@pytest.mark.parametrize("origin", EVERY)
def test_values_and_layout_arrive(meshes: dict[str, Mesh], origin: str, to: str) -> None:
    a = torch.arange(35.0).view(5, 7)
    for there, here in zip(layouts(EVERY[origin], 2), itertools.cycle(layouts(EVERY[to], 2)), strict=False):
        x = meshbook.distribute(a, meshes[origin], placements=there)
        moved = x.to_mesh(meshes[to], placements=here)
        assert moved.mesh is meshes[to]
        assert moved.placements == tuple(here)
        assert torch.equal((moved + 0).full_tensor(), a)


DTYPES = (torch.bool, torch.int16, torch.int64, torch.uint8, torch.bfloat16, torch.float64, torch.complex64)


@pytest.mark.quick("()")
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 2, 2)], ids=str)
def test_any_dtype_and_shape(meshes: dict[str, Mesh], shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        a = (torch.randn(shape) * 9).to(dtype)
        x = meshbook.distribute(a, meshes["left"], ["dp"] if shape else None)
        for name in ("right", "grid"):
            moved = x.to_mesh(meshes[name], ["dp"] if shape else None)
            assert moved.dtype == dtype
            assert torch.equal(moved.full_tensor(), a)


def test_sums_are_summed_and_what_was_sent_is_a_copy(meshes: dict[str, Mesh]) -> None:
    x = meshbook.distribute(torch.arange(12.0).view(4, 3), meshes["grid"], ["dp", "tp"])
    summed = x.sum(1)
    assert isinstance(summed.placements[1], Partial)
    assert summed.to_mesh(meshes["right"], ["dp"]).tolist() == x.full_tensor().sum(1).tolist()
    flat = x.to_mesh(meshes["flat"], ["all"])
    view = flat.T
    x.zero_()
    assert view.sum().item() == 66.0
    flat.mul_(2)
    assert (view.sum().item(), x.sum().item()) == (132.0, 0.0)


@pytest.mark.slow
def test_gradients_come_back_to_where_the_tensor_was(meshes: dict[str, Mesh]) -> None:
    a, w = torch.randn(5, 4), torch.randn(4, 3).requires_grad_()
    plain = a.clone().requires_grad_()
    ((plain.exp() @ w) ** 2).mean().backward()
    for origin, other in itertools.permutations(EVERY, 2):
        x = meshbook.distribute(a, meshes[origin], [EVERY[origin][0]]).requires_grad_()
        there = meshbook.distribute(w.detach(), meshes[other], [None, EVERY[other][-1]]).requires_grad_()
        middle = x.exp().to_mesh(meshes[other], [EVERY[other][0]])
        (((middle @ there).redistribute([None, EVERY[other][0]])) ** 2).mean().backward()
        for got, wanted in ((x, plain), (there, w)):
            assert isinstance(got.grad, meshbook.MeshTensor)
            assert wanted.grad is not None
            assert got.grad.mesh is got.mesh
            assert torch.allclose(got.grad.full_tensor(), wanted.grad, atol=1e-5)
        assert x.grad is not None
        assert x.grad.placements == x.placements


@pytest.mark.slow
def test_stages_of_a_pipeline_learn_as_one_module_does(meshes: dict[str, Mesh]) -> None:
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    staged = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    staged.load_state_dict(plain.state_dict())
    parts = ((staged[:2], "left"), (staged[2], "right"))
    stages = [meshbook.module_to_mesh(part, meshes[name]) for part, name in parts]
    losses: list[list[float]] = []
    for model in (plain, staged):
        optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.5), torch.arange(24.0).view(4, 6) / 24
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            if model is plain:
                out = plain(batch)
            else:
                hidden = stages[0](meshbook.distribute(batch, meshes["left"], ["dp"]))
                out = stages[1](hidden.to_mesh(meshes["right"], ["dp"]))
            loss = out.pow(2).mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.slow
def test_what_failed_before_is_told_where_it_is_to_go(meshes: dict[str, Mesh]) -> None:
    table = meshbook.distribute(torch.randn(4, 3), meshes["left"])
    bad = torch.nn.functional.embedding(meshbook.distribute(torch.tensor([1, 9]), meshes["left"]), table)
    with pytest.raises(TensorError, match=r"embedding.*test_resharding.py, line \d+.*out of range"):
        bad.to_mesh(meshes["right"])
    with pytest.raises(TensorError, match="out of range"):
        bad.redistribute(["dp"]).sum().item()
    assert table.to_mesh(meshes["right"]).sum().item() == pytest.approx(table.sum().item(), abs=1e-4)


def test_meshes_that_were_spawned_apart_share_no_group(meshes: dict[str, Mesh], mesh2: ProcMesh) -> None:
    x = meshbook.ones(4, mesh=meshes["grid"])
    with pytest.raises(errors.UsageError, match=r"no process group joins Mesh\(square.* and Mesh\(two.*take slices"):
        x.to_mesh(mesh2)
    with pytest.raises(errors.UnknownAxisError):
        x.to_mesh(meshes["left"], ["tp"])


@pytest.mark.slow
def test_a_rank_that_ends_meanwhile_hangs_nobody() -> None:
    with this_host().spawn_procs({"dp": 2, "tp": 2}, name="hurt") as procs:
        mesh = Mesh(procs)
        left, right = mesh.slice(tp=0), mesh.slice(tp=1)
        x = meshbook.randn(1 << 20, mesh=left)
        here = x.to_mesh(right, ["dp"])
        total = here.sum().item()
        os.kill(procs.status()[2].pid, signal.SIGKILL)
        with pytest.raises(DeviceMeshError):
            x.to_mesh(right, ["dp"]).sum().item()
        mesh.heal()
        assert x.to_mesh(right, ["dp"]).sum().item() == pytest.approx(total, rel=1e-4)
        assert here.sum().item() == total


def test_ranks_see_what_arrived(meshes: dict[str, Mesh]) -> None:
    def local(tensor: DTensor) -> list[float]:
        return tensor.to_local().tolist()  # type: ignore[no-any-return]

    x = meshbook.distribute(torch.arange(4.0), meshes["grid"], ["dp"])
    assert meshes["right"].execute(local, x.to_mesh(meshes["right"], ["dp"])).values() == [[0.0, 1.0], [2.0, 3.0]]
