"""What torch does without asking a subclass, or by tracers and code of its own: right on mesh tensors, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize

import meshbook
from meshbook import ProcMesh, errors
from meshbook.distributed import Mesh
from meshbook.tensors.handles.local_view import local_mesh_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code, for itself


@pytest.fixture(scope="module")
def mesh(square: ProcMesh) -> Mesh:
    return Mesh(square)


@pytest.fixture
def x(mesh: Mesh) -> meshbook.MeshTensor:
    return meshbook.distribute(torch.arange(6.0).reshape(3, 2), mesh, ["dp", None])


A = torch.arange(6.0).reshape(3, 2)


# ---- tracers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_what_torch_compiles_is_right_behind_the_same_operations(mesh: Mesh, backend: str) -> None:
    first, second, third = torch.ones(5, 3), torch.ones(3, 4), torch.ones(4, 2)
    operands = [meshbook.distribute(each, mesh) for each in (first, second, third)]

    def product(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
        return one @ two @ three

    product(*operands)
    made = torch.compile(product, backend=backend)(*operands)
    assert made.shape == (5, 2) and made.full_tensor().tolist() == product(first, second, third).tolist()


def test_a_compiled_module_gives_the_gradients_of_one_that_is_not(mesh: Mesh) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    module = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    batch = torch.randn(5, 3)
    for run in (module, torch.compile(module)):
        module.zero_grad()
        plain.zero_grad()
        run(meshbook.distribute(batch, mesh, ["dp", None])).sum().backward()
        plain(batch).sum().backward()
        for got, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(got.grad.full_tensor(), wanted.grad, atol=1e-6)


def test_a_tracer_that_would_take_tensors_for_constants_is_refused(x: meshbook.MeshTensor) -> None:
    assert make_fx(lambda t: t.sin() * 2)(x)(x + 1).full_tensor().equal((A + 1).sin() * 2)
    other = x + 1
    with pytest.raises(errors.UsageError, match=r"aten.mul.Tensor of a mesh tensor cannot be traced .*torch.func.jvp"):
        make_fx(lambda t: t.sin() * other)(x)
    with pytest.raises(errors.UsageError, match=r"torch.func.linearize asks for \(torch.func.jvp does not\)"):
        torch.func.linearize(lambda t: t.sin() * 2, x)
    _, tangent = torch.func.jvp(lambda t: t.sin() * 2, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent.full_tensor(), 2 * A.cos())


def test_a_hessian_is_refused_by_name_and_the_way_round_is_right(x: meshbook.MeshTensor) -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        return (t**3).sum() * t.sin().mean()

    with pytest.raises(errors.UsageError, match=r"use torch.func.jacrev\(torch.func.jacrev\(f\)\) for hessian"):
        torch.func.hessian(function)(x)
    found = torch.func.jacrev(torch.func.jacrev(function))(x)
    assert torch.allclose(found.full_tensor(), torch.func.hessian(function)(A), atol=1e-4)


def test_a_value_decides_which_branch_is_taken(x: meshbook.MeshTensor) -> None:
    for pred, wanted in ((x.sum() > 0, A + 1), (x.sum() < 0, A - 1)):
        assert torch.cond(bool(pred), lambda t: t + 1, lambda t: t - 1, (x,)).full_tensor().equal(wanted)
    with pytest.raises(RuntimeError, match="Expected `pred` to be a bool"):  # torch's tracer would follow the tensor
        torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))


def test_the_traceback_of_shapes_that_do_not_fit_ends_in_one_frame_of_ours(x: meshbook.MeshTensor) -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim") as raised:
        x @ x
    assert len(raised.traceback) == 2


# ---- memory, and what is this process's -----------------------------------------------------------------------------


def test_a_plain_tensor_does_not_become_one_on_the_mesh_by_its_data(mesh: Mesh, x: meshbook.MeshTensor) -> None:
    plain = torch.zeros(3, 2)
    with pytest.raises(errors.UsageError, match=r"cannot become one of .* by its data"):
        plain.data = x
    assert plain.sum() == 0
    plain.data = torch.ones(4)
    assert plain.data.tolist() == [1.0] * 4 and type(plain.data) is torch.Tensor
    layer = nn.Linear(2, 2)
    layer.weight.data.zero_()
    layer.weight = nn.Parameter(meshbook.ones(2, 2, mesh=mesh))
    layer.bias = nn.Parameter(meshbook.zeros(2, mesh=mesh))
    assert layer(x).full_tensor().equal(A.sum(1, keepdim=True).expand(3, 2))


def test_the_gradient_of_what_was_brought_here_goes_back(mesh: Mesh) -> None:
    torch.manual_seed(0)
    plain, head = nn.Linear(2, 2), nn.Linear(2, 1)
    backbone = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    batch = torch.randn(4, 2)
    head(backbone(meshbook.distribute(batch, mesh, ["dp"])).full_tensor()).sum().backward()
    head(plain(batch)).sum().backward()
    assert torch.allclose(backbone.weight.grad.full_tensor(), plain.weight.grad, atol=1e-6)
    with torch.no_grad():
        assert not backbone.weight.full_tensor().requires_grad
    assert not backbone.weight.detach().full_tensor().requires_grad


@pytest.mark.parametrize("make", ["tensor", "as_tensor", "Tensor", "new_tensor"])
def test_tensors_are_made_of_lists_of_numbers_on_the_mesh(x: meshbook.MeshTensor, make: str) -> None:
    made = getattr(x if make == "new_tensor" else torch, make)([x[1, 0], x[1, 1]])
    assert made.tolist() == [2.0, 3.0]
    assert (int(x[1, 0]), complex(x[1, 0]), bool(x[0, 0]), [*range(4)][x[1, 0].long()]) == (2, 2 + 0j, False, 2)
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_refused_by_name(x: meshbook.MeshTensor, layout: torch.layout) -> None:
    with pytest.raises(errors.UsageError, match=r"a nested tensor .* use to_padded_tensor\(\)"):
        torch.nested.nested_tensor([x], layout=layout)


# ---- operators that no database calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, ["dp"]], ids=str)
def test_bits_are_shifted(mesh: Mesh, spec: list[str] | None) -> None:
    bits = torch.tensor([1, 2, 3])
    on_mesh = meshbook.distribute(bits, mesh, spec)
    for by in (2, torch.tensor(2), torch.tensor([1, 2, 0])):
        assert (on_mesh << by).tolist() == (bits << by).tolist()
        assert (on_mesh >> by).tolist() == (bits >> by).tolist()
    on_mesh <<= 3
    on_mesh >>= 1
    assert on_mesh.tolist() == [4, 8, 12]


@pytest.mark.parametrize(
    "code",
    [
        "x**2j",
        "torch.pow(2j, x)",
        "x.masked_fill(x.real > 0, 2j)",
        "x - 1 == 0j",
        "x.float_power(2j)",
        "torch.lerp(x, x, 2j)",
    ],
)
def test_numbers_may_be_complex(mesh: Mesh, code: str) -> None:
    values = torch.tensor([1 + 0j, 2j, 3])
    found, wanted = (eval(code, {"torch": torch, "x": x}) for x in (meshbook.distribute(values, mesh, ["dp"]), values))
    assert torch.allclose(found.full_tensor().cdouble(), wanted.cdouble()) and found.dtype == wanted.dtype


def test_pools_and_parametrizations_that_ask_for_places_in_memory(mesh: Mesh) -> None:
    images = torch.randn(2, 3, 4, 4)
    last = meshbook.distribute(images, mesh, ["dp"]).to(memory_format=torch.channels_last)
    assert torch.allclose(nn.AdaptiveAvgPool2d(1)(last).full_tensor(), nn.AdaptiveAvgPool2d(1)(images))
    rows = meshbook.distribute(images[0], mesh, ["dp"]).transpose(1, 2)
    assert torch.allclose(nn.AdaptiveAvgPool1d(1)(rows).full_tensor(), images[0].transpose(1, 2).mean(-1, keepdim=True))
    layer = meshbook.module_to_mesh(parametrizations.orthogonal(nn.Linear(2, 2)), mesh)
    before = layer.weight.full_tensor()
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear and torch.allclose(layer.weight.full_tensor(), before)


def test_products_of_groups_name_the_way_round(mesh: Mesh) -> None:
    groups = [meshbook.distribute(each, mesh) for each in (torch.randn(6, 8), torch.randn(2, 8, 4))]
    with pytest.raises(errors.UsageError, match=r"use a product per group, torch\.split and matmul"):
        torch._grouped_mm(*groups, offs=meshbook.distribute(torch.tensor([2, 6], dtype=torch.int32), mesh))


def test_sparse_gradients_of_embeddings_are_refused_by_name(mesh: Mesh) -> None:
    numbers = torch.tensor([[1, 2], [3, 4]])
    for kind in (nn.Embedding, nn.EmbeddingBag):
        plain = kind(10, 3, sparse=True)
        layer, there = meshbook.module_to_mesh(copy.deepcopy(plain), mesh), meshbook.distribute(numbers, mesh)
        assert torch.allclose(layer(there).full_tensor(), plain(numbers))
        with pytest.raises(errors.UsageError, match=r"gives a sparse tensor, .* sparse=False for the gradient"):
            layer(there).sum().backward()
        layer.sparse = False
        layer(there).sum().backward()
        plain(numbers).sum().backward()
        assert torch.allclose(layer.weight.grad.full_tensor(), plain.weight.grad.to_dense())


def test_a_generator_says_what_is_drawn_and_goes_on(mesh: Mesh) -> None:
    def draw(spec: list[str] | None) -> list[Any]:
        zeros, generator = meshbook.distribute(torch.zeros(4), mesh, spec), torch.Generator().manual_seed(3)
        drawn = [zeros.clone().uniform_(generator=generator).tolist() for _ in range(2)]
        drawn.append(zeros.clone().exponential_(generator=generator).tolist())
        drawn.append(zeros.clone().normal_(generator=generator.manual_seed(3)).tolist())
        return [*drawn, torch.rand(2, generator=generator).tolist()]

    first, second, third, fourth, here = draw(None)
    assert first != second and min(third) > 0 and fourth != first
    assert draw(["dp"]) == [first, second, third, fourth, here] and draw(None)[0] == first


# ---- checkpoints of any size ----------------------------------------------------------------------------------------


def test_large_tensors_of_this_process_are_loaded(mesh: Mesh) -> None:
    plain = nn.Linear(600, 600)
    module = meshbook.module_to_mesh(nn.Linear(600, 600), mesh, {"weight": ["dp", None]})
    module.load_state_dict(plain.state_dict())
    assert module.weight.full_tensor().equal(plain.weight)
    with pytest.raises(errors.UsageError, match="too large to be sent without being asked"):
        module.weight + plain.weight
    with mesh.procs.activate():
        own = nn.Linear(600, 600)
    own.load_state_dict(plain.state_dict())
    assert own.weight.mesh is local_mesh_of(mesh)
    assert meshbook.distributed.inspect(own.weight.detach(), dp=1, tp=1).equal(plain.weight)
