"""Mesh tensors give what tensors of one process give, or say why not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshbook
from meshbook import DeviceMeshError, ProcMesh, errors, this_host
from meshbook.distributed import Mesh, TensorError

LAYOUTS = ([None, None], ["dp", None], [None, "tp"], ["dp", "tp"], [("dp", "tp"), None], ["tp", "dp"])


@pytest.fixture
def lone(clean_end: None) -> Iterator[Mesh]:
    with this_host().spawn_procs({"gpus": 2}, name="lone") as procs:
        yield Mesh(procs)


def equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    assert isinstance(got, meshbook.MeshTensor)
    found = got.full_tensor()
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.some()
@pytest.mark.quick("[None, 'tp']")
@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_operations_give_what_they_give_in_one_process(grid: Mesh, spec: list[object]) -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    x, y = meshbook.distribute(a, grid, spec), meshbook.distribute(b, grid, spec)
    assert equal(x @ y, a @ b)
    assert equal(x @ x.T, a @ a.T)
    assert equal(x.softmax(-1).sum(0), a.softmax(-1).sum(0))
    assert equal(x.mean(), a.mean())
    assert equal((x > 0).float() * x.exp(), (a > 0).float() * a.exp())
    assert equal(x[1:4, ::2].reshape(-1), a[1:4, ::2].reshape(-1))
    assert equal(torch.cat([x, x]).cumsum(0), torch.cat([a, a]).cumsum(0))
    assert x.tolist() == a.tolist()
    assert x.sum().item() == pytest.approx(a.sum().item(), abs=1e-4)
    assert x.argmax().item() == a.argmax().item()


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


@pytest.mark.some()
@pytest.mark.quick("5-soft_margin_loss")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [4, 5])
def test_losses_that_dtensor_gets_wrong_are_right(grid: Mesh, name: str, rows: int) -> None:
    loss = getattr(torch.nn.functional, name)
    a, t = torch.rand(rows).requires_grad_(), torch.rand(rows)
    loss(a, t).backward()
    x = meshbook.distribute(a.detach(), grid, ["dp"]).requires_grad_()
    got = loss(x, meshbook.distribute(t, grid, ["dp"]))
    got.backward()
    assert a.grad is not None
    assert x.grad is not None
    assert equal(got.detach(), loss(a, t).detach())
    assert equal(x.grad, a.grad)


def test_random_values_depend_on_the_seed_alone(grid: Mesh, lone: Mesh) -> None:
    drawn = []
    for mesh, spec in ((grid, ["dp", "tp"]), (grid, None), (lone, [None, "gpus"])):
        torch.manual_seed(5)
        noise = meshbook.randn(6, 5, mesh=mesh, sharding_spec=spec)
        drawn.append((noise.tolist(), torch.nn.functional.dropout(noise, 0.5).tolist()))
    assert drawn[0] == drawn[1] == drawn[2]
    values = [value for row in drawn[0][1] for value in row]
    assert 0 < sum(value == 0 for value in values) < len(values)


def test_factories(grid: Mesh) -> None:
    layout = {"mesh": grid, "sharding_spec": ["dp"]}
    assert equal(meshbook.zeros(3, 2, **layout), torch.zeros(3, 2))
    assert equal(meshbook.ones((3, 2), dtype=torch.int64, **layout), torch.ones(3, 2, dtype=torch.int64))
    assert equal(meshbook.full((4,), 7, **layout), torch.full((4,), 7))
    assert equal(meshbook.arange(2, 9, 2, **layout), torch.arange(2, 9, 2))
    assert meshbook.randint(3, 5, (100,), **layout).unique().tolist() == [3, 4]
    assert meshbook.randn(3, requires_grad=True, **layout).requires_grad
    assert 0 <= meshbook.rand(100, **layout).min().item() < meshbook.rand(100, **layout).max().item() < 1


@pytest.mark.some()
@pytest.mark.quick("spec6")
@pytest.mark.parametrize("spec", [*LAYOUTS, [("tp", "dp"), None]])
def test_tensors_of_equal_values_are_made_in_parts(grid: Mesh, spec: list[object]) -> None:
    for shape in ((5, 3), (3, 1), (0, 2)):
        made = meshbook.full(shape, 7, mesh=grid, sharding_spec=spec)
        assert equal(made, torch.full(shape, 7)) and equal(made.t() + 1, torch.full(shape, 8).t())
        laid = meshbook.distribute(torch.full(shape, 7), grid, spec)
        assert made.placements == laid.placements and local_shapes(made) == local_shapes(laid)
        assert equal(made.add_(laid), torch.full(shape, 14))
    assert meshbook.zeros((), mesh=grid).item() == 0


def local_shapes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    assert isinstance(tensor, meshbook.MeshTensor)
    return tensor.mesh.execute(lambda part: tuple(part.to_local().shape), tensor).values()  # type: ignore[no-any-return]


def test_a_rank_has_memory_for_its_part_of_zeros_alone(grid: Mesh) -> None:
    rows = meshbook.zeros(1 << 22, mesh=grid, sharding_spec=[("dp", "tp")])
    memory = grid.execute(lambda part: part.to_local().untyped_storage().nbytes(), rows)
    assert memory.values() == [(1 << 20) * 4] * 4


def test_both_sides_see_what_either_writes(grid: Mesh, square: ProcMesh) -> None:
    w = meshbook.distribute(torch.arange(12.0).view(6, 2), grid, ["dp", "tp"])
    square.push({"w": w}).get(20)
    square.run("w += 1").get(20)
    w.mul_(2)
    assert equal(w, (torch.arange(12.0).view(6, 2) + 1) * 2)
    assert square.pull("float(w.full_tensor().sum())").get(20).values() == [156.0] * 4
    square.run("own = torch.full((2, 3), float(rank))").get(20)
    made = grid.from_ranks("own", placements=[Shard(0), Replicate()])
    assert made.shape == (4, 3)
    assert made.sum().item() == 12.0  # of ranks 0 and 2: the others are taken for copies


PARTS = {
    "torch.full((3 if rank < 2 else 2, 2), float(rank // 2))": ([Shard(0), Replicate()], (5, 2)),
    "torch.full((2, 3), float(rank // 2)).t()": ([Shard(1), Replicate()], (3, 4)),
    "torch.full((1 if rank < 3 else 0, 2), float(rank))": ([Shard(0), Shard(0)], (3, 2)),
    "torch.full(((2, 1)[rank % 2], (2, 1)[rank // 2]), float(rank))": ([Shard(-1), Shard(0)], (3, 3)),
    "torch.zeros(0, 2)": ([Shard(0), Replicate()], (0, 2)),
    "torch.full((2,), float(rank))": ([Partial(), Shard(0)], (4,)),
}


@pytest.mark.parametrize("code", PARTS)
def test_parts_of_the_ranks_are_a_tensor_where_their_sizes_fit(grid: Mesh, square: ProcMesh, code: str) -> None:
    placements, shape = PARTS[code]
    square.run(f"part = {code}").get(20)
    parts = [part.clone() for part in square.pull("part").get(20).values()]
    made = grid.from_ranks("part", placements=placements)
    by_rows = torch.cat if placements[0] == Shard(0) else lambda some: torch.cat(some, 1)
    if isinstance(placements[1], Replicate):
        wanted = by_rows([parts[0], parts[2]])
    elif isinstance(placements[0], Partial):
        wanted = torch.cat([parts[0] + parts[2], parts[1] + parts[3]])
    else:
        wanted = by_rows([torch.cat(parts[:2]), torch.cat(parts[2:])])
    assert made.shape == shape and equal(made, wanted)
    assert equal(made.redistribute([None] * len(shape)) + 1, wanted + 1)
    assert equal(made.sum(0), wanted.sum(0))
    assert equal(made.to_mesh(square.flatten("gpus"), ["gpus"]), wanted)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("torch.ones(3 if rank < 2 else 1, 2)", r"\[4, 2\] as .*ranks 0,1: \[3, 2\], which should be \[2, 2\].*chunk"),
        ("torch.ones(0 if rank < 2 else 4, 2)", r"ranks 0,1: \[0, 2\], which should be \[2, 2\]"),
        ("torch.ones(2 + rank, 2)", r"\[6, 2\] as .*rank 0: \[2, 2\], which should be \[3, 2\]"),
        ("torch.ones(2, 2 + rank // 2)", r"ranks 2,3: \[2, 3\], which should be \[2, 2\]"),
        (
            "torch.ones(2, 2, dtype=torch.int64 if rank == 3 else None)",
            r"ranks 0-2: torch.float32; rank 3: torch.int64",
        ),
        ("torch.ones(2, *[1] * rank)", r"different numbers of dims: rank 0: shape \[2\]; rank 1: shape \[2, 1\]"),
        ("torch.eye(2).to_sparse()", "use to_dense"),
        ("None if rank == 2 else torch.ones(2)", "is no tensor on rank 2"),
    ],
)
def test_parts_of_the_ranks_that_do_not_fit_are_refused(grid: Mesh, square: ProcMesh, code: str, why: str) -> None:
    square.run(f"part = {code}").get(20)
    with pytest.raises(DeviceMeshError, match=why):
        grid.from_ranks("part", placements=[Shard(0), Replicate()])
    assert equal(meshbook.ones(3, mesh=grid), torch.ones(3))


def test_dtensors_that_are_not_one_are_refused(grid: Mesh, square: ProcMesh) -> None:
    square.push({"good": meshbook.ones(5, 2, mesh=grid, sharding_spec=["dp"])}).get(20)
    square.run(
        "from torch.distributed.tensor import DTensor, Replicate, Shard\n"
        "mesh, lies = good.device_mesh, [Shard(0), Replicate()]\n"
        "odd = DTensor.from_local(torch.ones(3 if rank < 2 else 1, 2), mesh, lies, run_check=False)\n"
        "cut = DTensor.from_local(torch.ones(3 if rank < 2 else 1, 2), mesh, lies, shape=(4, 2), stride=(2, 1))\n"
        "some = good if rank else torch.ones(3, 2)"
    ).get(20)
    assert equal(grid.from_ranks("good"), torch.ones(5, 2))
    assert equal(grid.from_ranks("good", placements=[Shard(-2), Replicate()]), torch.ones(5, 2))
    with pytest.raises(errors.UsageError, match="leave placements out"):
        grid.from_ranks("good", placements=[Shard(1), Replicate()])
    with pytest.raises(
        errors.UsageError, match=r"not one DTensor: ranks 0,1: shape \[6, 2\].*ranks 2,3: shape \[2, 2\]"
    ):
        grid.from_ranks("odd")
    with pytest.raises(errors.UsageError, match=r"ranks 0,1: \[3, 2\], which should be \[2, 2\]"):
        grid.from_ranks("cut")
    with pytest.raises(errors.UsageError, match="rank 0: no DTensor"):
        grid.from_ranks("some")
    with pytest.raises(errors.UsageError, match="by placements"):
        square.run("plain = torch.ones(2)").get(20)
        grid.from_ranks("plain")


def test_execute_takes_dtensors_to_the_ranks_and_back(grid: Mesh) -> None:
    def scale(tensor: DTensor, by: float) -> tuple[DTensor, str]:
        return tensor * by, type(tensor).__name__  # type: ignore[return-value]

    scaled, kind = grid.execute(scale, meshbook.ones(4, 4, mesh=grid, sharding_spec=["dp"]), 3.0)
    assert equal(scaled, torch.full((4, 4), 3.0))
    assert kind == "DTensor"
    assert grid.execute(lambda: 5).values() == [5] * 4


def test_layouts_change_and_are_told(grid: Mesh) -> None:
    x = meshbook.distribute(torch.arange(10.0), grid, ["dp"])
    assert x.placements == (Shard(0), Replicate())
    other = x.redistribute([("dp", "tp")])
    assert other.placements == (Shard(0), Shard(0))
    assert equal(other, torch.arange(10.0))
    shown = repr(x)
    assert "placements=(Shard(dim=0), Replicate())" in shown
    assert "dp=2, tp=2" in shown
    large = repr(meshbook.ones(100, 100, mesh=grid))
    assert "mean 1, std 0, min 1, max 1" in large
    assert len(large) < 1000


@pytest.mark.slow
def test_a_failure_comes_where_the_result_is_used_and_names_its_line(grid: Mesh) -> None:
    table = meshbook.distribute(torch.randn(4, 3), grid)
    bad = torch.nn.functional.embedding(meshbook.distribute(torch.tensor([1, 9]), grid), table)
    worse = bad + 1
    with pytest.raises(DeviceMeshError, match=r"aten\.embedding.*test_mesh_tensors\.py, line \d+.*out of range"):
        worse.sum().item()
    with pytest.raises(TensorError, match="out of range"):
        bad.tolist()
    assert equal(table * 2, table.full_tensor() * 2)


def test_a_nan_is_traced_to_the_operation_that_made_it(grid: Mesh) -> None:
    x = meshbook.distribute(torch.tensor([4.0, 1.0, 0.0, -1.0]), grid, ["dp"])
    before = x.sqrt() * 2
    wanted = r"aten.sqrt.default .*test_mesh_tensors.py.*NaN is on ranks? 2.*3"
    with pytest.raises(TensorError, match=wanted) as told, meshbook.detect_anomaly():
        assert (before + 1).isnan().any().item()  # it was there already
        bad = (x + 0).sqrt() + 1
        bad.sum().item()
    assert "rank 0" not in str(told.value)
    assert bad.isnan().tolist() == [False, False, False, True]  # and tensors stay what they are
    with pytest.raises(TensorError, match=r"aten.log.default .* not finite"), meshbook.detect_anomaly(infinities=True):
        x.abs().log()
    with meshbook.detect_anomaly():
        x.masked_fill(x < 1, -torch.inf).softmax(0).sum().item()
    parameter = x.abs().requires_grad_()
    with pytest.raises(TensorError, match="NaN"), meshbook.detect_anomaly():
        (parameter.sqrt() * 0).sum().backward()
    with pytest.raises(TensorError, match=r"div_.Tensor"), meshbook.detect_anomaly():
        x.sub(x).div_(0)
    assert (x + 1).tolist() == [5.0, 2.0, 1.0, 0.0]


def test_what_cannot_be_is_refused(grid: Mesh, lone: Mesh) -> None:
    x, make = meshbook.distribute(torch.randn(6, 4), grid, ["dp", "tp"]), meshbook.distribute
    refused: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        r'"dpp".*Did you mean "dp"': (errors.UnknownAxisError, lambda: make(torch.ones(4), grid, ["dpp"])),
        "3 entries, and the tensor 2 dims": (errors.UsageError, lambda: make(x, grid, ["dp", None, None])),
        '"dp" cannot cut two dims': (errors.UsageError, lambda: make(torch.ones(4, 4), grid, ["dp", "dp"])),
        "1 placements for a mesh of 2 axes": (errors.UsageError, lambda: make(x, grid, placements=[Shard(0)])),
        "on a mesh already": (errors.UsageError, lambda: make(x, grid)),
        "dense tensors": (errors.UsageError, lambda: make(torch.eye(3).to_sparse(), grid)),
        r"not a list: use torch.as_tensor": (errors.UsageError, lambda: make([1.0, 2.0], grid)),  # type: ignore[arg-type]
        r"zeros\(\.\.\., mesh=mesh\)": (errors.UsageError, lambda: meshbook.zeros(3)),  # type: ignore[call-arg]
        "knows no argument 'generator'": (TypeError, lambda: meshbook.randn(3, mesh=grid, generator=None)),  # type: ignore[call-arg]
        "zeros with a size below zero": (errors.UsageError, lambda: meshbook.zeros(-1, mesh=grid)),
        r"two meshes.*square.*lone": (errors.UsageError, lambda: x + meshbook.ones(4, mesh=lone)),
        r"pickle tensor\.full_tensor": (errors.UsageError, lambda: pickle.dumps(x)),
        "pickle": (errors.UsageError, lambda: torch.save({"x": x}, io.BytesIO())),
        "as_strided.*stft": (
            errors.UsageError,
            lambda: torch.stft(meshbook.ones(64, mesh=grid), 16, return_complex=True),
        ),
        "as_strided": (errors.UsageError, lambda: x.as_strided((2, 2), (1, 1))),
        "too large to be sent": (errors.UsageError, lambda: meshbook.ones(1 << 20, mesh=grid) + torch.ones(1 << 20)),
        "would write values": (errors.UsageError, lambda: torch.zeros(6, 4).copy_(x)),
        "values of .* to a tensor of": (errors.UsageError, lambda: torch._foreach_add_([torch.zeros(())], [x.sum()])),
        r"sparse.*(to_dense|full_tensor)": (errors.UsageError, lambda: torch.sparse.mm(torch.eye(6).to_sparse(), x)),
        "do not name the axes": (errors.LayoutError, lambda: Mesh(shape=(2, 2), mesh_dim_names=("dp",))),
        "same reduction dim": (RuntimeError, lambda: x @ x),
    }
    for why, (kind, ask) in refused.items():
        with pytest.raises(kind, match=why):
            ask()


@pytest.mark.quick("['dp', None]")
@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_views_and_what_they_are_of_see_each_others_writes(grid: Mesh, spec: list[object]) -> None:
    a = torch.arange(24.0).view(6, 4)
    x = meshbook.distribute(a, grid, spec)
    flat, row, column, block = x.view(24), x[1], x[:, 2], x[2:5].T  # across the parts, and within
    for tensor, views in ((a, (a.view(24), a[1], a[:, 2], a[2:5].T)), (x, (flat, row, column, block))):
        tensor[0] = 7
        views[0].add_(1)
        views[1].mul_(2)
        tensor.sub_(0.5)
        views[2][1:].neg_()
        views[3].zero_()
        tensor[5, 3] = views[1].sum()
    assert equal(x, a)
    for got, wanted in ((flat, a.view(24)), (row, a[1]), (column, a[:, 2]), (block, a[2:5].T)):
        assert equal(got, wanted)


@pytest.mark.quick("[None, 'tp']")
@pytest.mark.parametrize("spec", [*LAYOUTS, [None, None, "tp"], ["dp", None, "tp"]], ids=str)
def test_parts_in_another_order_of_memory_than_the_whole_are_flattened(grid: Mesh, spec: list[object]) -> None:
    """As gradients of transposed tensors are, that begin with the ones of a sum."""
    a = torch.randn(6, 5, 8)
    x = meshbook.distribute(a, grid, spec)
    made = [torch.ones(()).expand(5, 6, 8) * each.transpose(0, 1) for each in (a, x)]
    made[1] = meshbook.ones((), mesh=grid).expand(5, 6, 8) * x.transpose(0, 1)
    flat = [each.transpose(0, 1).contiguous().view(30, 8) for each in made]
    assert equal(flat[1], flat[0])


def test_small_tensors_of_this_process_take_part(grid: Mesh) -> None:
    a = torch.randn(6, 4)
    x = meshbook.distribute(a, grid, ["dp", "tp"])
    assert equal(x + torch.ones(4), a + 1)
    assert equal(x[torch.tensor([4, 0])], a[[4, 0]])
    assert equal(torch.tensor(2.0) * x, 2 * a)
    assert sorted(x[x > 0].tolist()) == sorted(a[a > 0].tolist())
    assert x.nonzero().shape == (24, 2)


def test_copies_are_copies(grid: Mesh) -> None:
    x = meshbook.ones(4, mesh=grid)
    copied = copy.deepcopy(x)
    x.add_(1)
    assert copied.tolist() == [1.0] * 4
    assert x.detach().numpy().tolist() == [2.0] * 4


def test_a_tensor_becomes_the_one_that_is_its_data(grid: Mesh) -> None:
    module = torch.nn.Linear(3, 2)
    expected = copy.deepcopy(module).double()
    meshbook.module_to_mesh(module, grid)
    module.double()
    module.bias.data = module.bias.data * 2
    assert module.bias.dtype == torch.float64
    assert equal(module.bias, expected.bias * 2) and equal(module.weight, expected.weight)
    other = copy.copy(module.weight)
    other.data.zero_()
    assert module.weight.abs().sum().item() == 0
    with pytest.raises(errors.UsageError, match="can only be a tensor there"):
        other.data = torch.zeros(2, 3)


def test_a_tensor_becomes_a_view_of_itself_in_place(grid: Mesh) -> None:
    a = torch.randn(6, 4)
    x = meshbook.distribute(a, grid, ["dp", "tp"])
    flipped = x.clone()
    assert flipped.transpose_(0, 1) is flipped
    assert flipped.shape == (4, 6) and flipped.stride() == (1, 4) and equal(flipped, a.T)
    flipped.mul_(2)
    assert equal(flipped.t_().unsqueeze_(1), 2 * a.unsqueeze(1))
    with pytest.raises(errors.UsageError, match=r"can only be a tensor there: use meshbook\.distribute"):
        flipped.set_(torch.zeros(3))  # type: ignore[call-overload]
    assert flipped.set_(x) is flipped and equal(flipped, a)  # type: ignore[call-overload]


def test_memory_that_is_not_there_is_not_touched(grid: Mesh) -> None:
    x = meshbook.ones(4, mesh=grid)
    for method in ("__dlpack__", "apply_", "data_ptr", "is_set_to", "pin_memory", "untyped_storage"):
        with pytest.raises(errors.UsageError, match="memory of this process, where a mesh tensor has none"):
            getattr(x, method)()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.to_dlpack(x)
    assert torch.from_dlpack(torch.to_dlpack(torch.ones(3))).tolist() == [1.0] * 3
    assert not x.is_pinned()


@pytest.mark.parametrize("method", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_a_tensor_that_would_not_be_dense_is_refused_by_the_name_of_what_makes_it(grid: Mesh, method: str) -> None:
    x = meshbook.ones(3, 2, mesh=grid)
    with pytest.raises(errors.UsageError, match=rf"aten\._?{method}.* makes a tensor that is not dense .*full_tensor"):
        getattr(x, method)()
    assert x.sum().item() == 6


def _attend(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).softmax(-1).sum(0)


def _write(x: torch.Tensor) -> torch.Tensor:
    return x.clone().mul_(x).exp_().view(-1)[3:]


@pytest.mark.some()
@pytest.mark.quick("[None, 'tp']-sin")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # which torch imports for it
@pytest.mark.parametrize("function", [torch.sin, _attend, _write])
@pytest.mark.parametrize("spec", [["dp", None], [None, "tp"]], ids=str)
def test_derivatives_go_forward(grid: Mesh, function: Any, spec: list[object]) -> None:
    value, tangent = torch.randn(5, 4), torch.randn(5, 4)
    wanted = torch.func.jvp(function, (value,), (tangent,))
    given = meshbook.distribute(value, grid, spec), meshbook.distribute(tangent, grid)
    found = torch.func.jvp(function, given[:1], given[1:])
    assert all(map(equal, found, wanted))


def test_a_tensor_says_where_another_is_split(grid: Mesh) -> None:
    x, at = torch.arange(6.0), torch.tensor([1, 4])
    parts = meshbook.distribute(x, grid, ["dp"]).tensor_split(meshbook.distribute(at, grid))
    assert [part.tolist() for part in parts] == [part.tolist() for part in x.tensor_split(at)]
    assert len(x.tensor_split(meshbook.distribute(torch.tensor(4), grid))) == 4


def test_tensors_nobody_refers_to_are_freed(grid: Mesh) -> None:
    def held() -> int:
        return len(next(iter(grid.stream.ask("parts").get(20).values()))[0])

    x = meshbook.ones(8, mesh=grid)
    x.sum().item()
    before = held()
    for _ in range(1000):
        x = x + 1
    assert x.sum().item() == 8008
    assert held() <= before + 2


@pytest.mark.some()
@pytest.mark.quick("ldl_factor")
@pytest.mark.parametrize("name", ["cholesky", "inv", "lu_factor", "ldl_factor", "tensorinv"])
def test_a_matrix_that_has_no_such_form_is_an_error(square: ProcMesh, name: str) -> None:
    function = getattr(torch.linalg, name)
    shape = (2, 2, 4) if name == "tensorinv" else (4, 4)
    x = meshbook.ones(4, 4, mesh=square).reshape(shape)
    with pytest.raises(RuntimeError):
        function(torch.ones(4, 4).reshape(shape))
    with pytest.raises((RuntimeError, DeviceMeshError), match=name.removesuffix("_factor").removeprefix("tensor")):
        made = function(x)
        (made if isinstance(made, torch.Tensor) else made[0]).tolist()
    assert x.sum().item() == 16.0
