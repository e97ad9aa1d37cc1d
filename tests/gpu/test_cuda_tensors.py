"""Tensors of a mesh on a GPU: the values of plain torch on the CPU, on one rank and on two that share a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshbook
from meshbook import DeviceMeshError, ProcMesh
from meshbook.distributed import Mesh, inspect
from meshbook.shape.members import members_of


@pytest.fixture(scope="module", params=["rank", "pair"])
def procs(request: pytest.FixtureRequest) -> ProcMesh:
    found: ProcMesh = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Mesh:
    return Mesh(procs)


def along(mesh: Mesh) -> str:
    return "hosts" if "hosts" in mesh.mesh_dim_names else "gpus"


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(got.full_tensor() if hasattr(got, "full_tensor") else got, wanted, rtol=1e-3, atol=1e-4)


def test_values_are_those_of_plain_torch(mesh: Mesh) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 32), torch.randn(32, 48)
    x, y = meshbook.distribute(a, mesh, [along(mesh), None]), meshbook.distribute(b, mesh)
    assert torch.equal(x.full_tensor(), a)
    assert close(x @ y, a @ b) and close((x * 2 + 1).relu().sum(0), (a * 2 + 1).relu().sum(0))
    assert abs((x @ y).sum().item() - (a @ b).sum().item()) < 0.05
    assert close(x.redistribute([None, along(mesh)]).softmax(0), a.softmax(0))
    assert close(x[3:17, ::2].t(), a[3:17, ::2].t()) and x.argmax().item() == a.argmax().item()
    assert close(torch.cat([x, x]).cumsum(0), torch.cat([a, a]).cumsum(0))
    assert "tensor" in repr(x).lower() or "Mesh" in repr(x)
    made = meshbook.zeros(4, 4, mesh=mesh)
    made[1] = 3.0
    made.add_(1)
    assert made.sum().item() == 28.0


def test_parts_lie_on_the_device(mesh: Mesh, procs: ProcMesh) -> None:
    x = meshbook.distribute(torch.ones(4, 4), mesh, [along(mesh), None])
    assert {*procs.execute(lambda t: (str(t.device), t.to_local().device.type), x).get(60).values()} == {
        ("cuda:0", "cuda")
    }


def test_large_tensors_are_laid_out_anew(mesh: Mesh) -> None:
    a = torch.randn(1024, 2048)
    x = meshbook.distribute(a, mesh, [along(mesh), None])
    y = x.redistribute([None, along(mesh)])
    assert torch.equal(y.full_tensor(), a) and torch.equal(y.redistribute([None, None]).full_tensor(), a)


def test_random_numbers_follow_the_seed(mesh: Mesh) -> None:
    torch.manual_seed(3)
    first = meshbook.randn(100, 10, mesh=mesh, sharding_spec=[along(mesh), None]).full_tensor()
    torch.manual_seed(3)
    again = meshbook.randn(100, 10, mesh=mesh).full_tensor()
    assert torch.equal(first, again) and abs(first.mean().item()) < 0.2
    x = meshbook.ones(1000, mesh=mesh)
    dropped = nn.functional.dropout(x, 0.5).full_tensor()
    assert {*dropped.unique().tolist()} == {0.0, 2.0} and 350 < int((dropped > 0).sum()) < 650


def test_attention_convolution_and_autocast(mesh: Mesh) -> None:
    torch.manual_seed(0)
    q = torch.randn(4, 2, 8, 16)
    x = meshbook.distribute(q, mesh, [along(mesh), None, None, None])
    attention = nn.functional.scaled_dot_product_attention
    assert close(attention(x, x, x, is_causal=True), attention(q, q, q, is_causal=True))
    conv = nn.Conv2d(2, 3, 2, stride=2)  # DTensor of torch 2.11 knows no windows that overlap
    wanted = conv(q)
    assert torch.allclose(meshbook.module_to_mesh(conv, mesh)(x).full_tensor(), wanted, rtol=1e-2, atol=1e-2)
    half = (x.bfloat16() @ x.bfloat16().transpose(-1, -2)).full_tensor()
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), q @ q.transpose(-1, -2), rtol=0.05, atol=0.3)


def test_what_does_not_fit_is_told_where_its_result_is_used(mesh: Mesh) -> None:
    x = meshbook.distribute(torch.ones(3, 3), mesh)
    large = meshbook.zeros(1 << 40, 16, mesh=mesh)
    with pytest.raises(DeviceMeshError, match="out of memory"):
        large.sum().item()
    assert x.sum().item() == 9.0


def test_each_rank_has_its_own_in_the_local_view(mesh: Mesh, procs: ProcMesh) -> None:
    axis = along(mesh)
    with procs.activate():
        x = torch.ones(4) * 2
        drawn = torch.randn(4)
    x = x + procs.rank_tensor(axis)
    assert {*procs.execute(lambda *each: [t.device.type for t in each] == ["cuda"] * 2, x, drawn).get(60).values()} == {
        True
    }
    total = x.reduce(axis, "sum")
    size = len(procs.ranks)
    first = inspect(total, **members_of(procs).point(0))
    assert first.tolist() == [float(2 * size + sum(range(size)))] * 4 and first.device.type == "cpu"
    moved = x.slice_mesh(**{axis: 0}).to_mesh(procs)
    assert inspect(moved, **members_of(procs).point(size - 1)).tolist() == [2.0] * 4


def test_cells_and_the_notebook_share_tensors(mesh: Mesh, procs: ProcMesh) -> None:
    x = meshbook.distribute(torch.zeros(4, 4), mesh, [along(mesh), None])
    procs.push({"w": x}).get(60)
    procs.run("w.add_(1); kept = w.to_local().device.type").get(60)
    assert x.sum().item() == 16.0
    assert torch.equal(mesh.from_ranks("w").full_tensor(), torch.ones(4, 4))


def test_data_is_streamed(mesh: Mesh) -> None:
    batches = [torch.full((8, 2), float(n)) for n in range(4)]
    sums = [batch.sum().item() for batch in meshbook.stream(batches, mesh)]
    assert sums == [0.0, 16.0, 32.0, 48.0]
