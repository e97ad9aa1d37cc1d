"""Random programs on mesh tensors: values and gradients are those of plain torch, whatever is cut."""

from __future__ import annotations

import pytest
import torch

import meshbook
from benchmarks.tensor_program_lines import Leaf, Program
from benchmarks.tensor_programs import difference, try_programs
from meshbook import ProcMesh
from meshbook.distributed import Mesh
from meshbook.errors import UsageError

pytestmark = pytest.mark.slow

FEW, MANY = 6, 60
"""Programs, the same however fast the machine is; who hunts has the command `python -m benchmarks.tensor_programs`."""


def check(mesh: Mesh, seed: int, count: int) -> None:
    found = list(try_programs(mesh, range(seed, seed + count)))
    assert not any(found), "\n\n".join(map(str, filter(None, found)))
    assert found


def test_programs_do_what_plain_torch_does(square: ProcMesh) -> None:
    check(Mesh(square), 0, FEW)
    check(Mesh(square).slice(dp=0), 1_000, FEW)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_many_programs_do_what_plain_torch_does(square: ProcMesh) -> None:
    check(Mesh(square), 10_000, MANY)
    check(Mesh(square).slice(dp=0), 20_000, MANY)


def cut(shape: tuple[int, ...], *dims: int | None) -> Leaf:
    return Leaf(shape, dims, seed=1, graded=True)


FOUND = {
    "views of a sum": Program(
        (cut((5, 6), 0, None),), ("t1 = t0.T @ t0", "t2 = t1[1:3]", "t3 = t1[:, 1:]", "t2.mul_(2)", "t4 = t3 * 2")
    ),
    "no elements": Program((cut((3, 0, 2), 0, 1),), ("t1 = t0.reshape(-1, 2)", "t2 = t0.flatten()")),
    "nothing on a rank": Program((cut((4, 1), None, 1),), ("t1 = t0.min()", "t2 = t0.max(0).values")),
    "no item on a rank": Program(
        (cut((1, 3, 6), 0, None),), ("t1 = torch.nn.functional.scaled_dot_product_attention(*[t0[None]] * 3)",)
    ),
    "negative dims": Program((cut((4, 7), 0, None),), ("t1 = t0.logcumsumexp(-2)",)),
    "sums in place": Program(
        (cut((6, 3, 1), 0, 1),), ("t1 = t0 * 2", "t1.index_add_(-3, torch.tensor([4]), t0.narrow(0, 4, 1))")
    ),
    "means of parts of parts": Program(
        (cut((6, 1), 0, 0),), ("t1 = F.binary_cross_entropy_with_logits(t0, t0.detach().sigmoid())",)
    ),
    "one of several views": Program(
        (cut((2, 7), 1, 0)._replace(graded=False),), ("t1 = t0.split(3, 1)[-1]", "t0.cumsum_(-1)")
    ),
    "slices": Program((cut((4,), 0, 0),), ("t1 = t0.diff(dim=-1)", "t2 = F.pad(t1, (0, -1))")),
    "masks": Program((cut((3, 3), None, None),), ("t1 = t0[t0 > 0]", "t2 = laid(t1, None, 0)", "t3 = t2 * t1")),
    "a largest value of nothing": Program((cut((1, 5, 1), 2, 0),), ("t1 = t0.logsumexp(0, keepdim=True)",)),
    "a dim that is kept": Program((cut((1, 7), 1, None),), ("t1 = t0.logsumexp(0, keepdim=True)",)),
    "all dims, by no name": Program((cut((5, 3), 0, 1),), ("t1 = t0.logsumexp((), keepdim=True)",)),
    "a mean of weighted items": Program(
        (cut((8, 4), 0, None),),
        (
            "t1 = torch.tensor([0, 1, 1, 1, 2, 0, 3, 0])",
            "t2 = F.cross_entropy(t0, t1, ignore_index=1)",
            "t3 = F.cross_entropy(t0, t1, weight=torch.tensor([0.1, 2, 0.5, 1], dtype=torch.float64))",
            "t4 = F.cross_entropy(t0.T[None], t1[None], ignore_index=0)",
        ),
    ),
    "NaN": Program(
        (cut((8, 6), 0, 1)._replace(graded=False),),
        (
            "t1 = torch.where(t0 > 1.2, float('nan'), t0)",
            "t2 = t1.amax(0)",
            "t3 = t1.min()",
            "t4 = t1.norm(torch.inf)",
        ),
    ),
    "the largest of nothing": Program(
        (cut((1, 5), 0, 1)._replace(graded=False),),
        ("t1 = torch.nn.utils.get_total_norm([t0, t0 * 2], torch.inf)", "t2 = torch._foreach_max([t0, t0])[1]"),
    ),
    "rows by how often they are used": Program(
        (cut((8, 6), 0, None),),
        (
            "t1 = laid(torch.tensor([0, 1, 1, 5, 7, 7, 7, 2]) + 0 * t0[:, 0].detach().long(), 0, 0)",
            "t2 = F.embedding(t1, t0, scale_grad_by_freq=True)",
        ),
    ),
    "rows and indices that are cut": Program(
        (cut((8, 6), 1, 0),),
        (
            "t1 = laid(torch.tensor([0, 1, 1, 5, 7, 7, 7, 2]) + 0 * t0[:, 0].detach().long(), 0, None)",
            "t2 = F.embedding(t1, t0)",
        ),
    ),
    "equal ends of a histogram": Program((cut((8, 6), 0, None),), ("t1 = t0.histc(5, 1, 1)",)),
    "any of bytes": Program((cut((8, 6), 0, None),), ("t1 = t0.to(torch.uint8).any()",)),
    "a dim that is split into few": Program((cut((8, 6), 0, 0),), ("t1 = t0.reshape(2, 4, 6)", "t2 = t0.view(-1, 24)")),
}
"""Programs that were done otherwise."""


@pytest.mark.some()
@pytest.mark.quick("equal ends of a histogram")
@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_once_was_wrong_is_right(square: ProcMesh, name: str) -> None:
    assert difference(FOUND[name], Mesh(square)) == ""


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_tensor_that_autograd_knows_views_of_becomes_no_view_in_place(square: ProcMesh, needs_gradient: bool) -> None:
    x = meshbook.ones(3, 3, mesh=square).requires_grad_(needs_gradient) * 2
    first = x[0]
    for tensor in (x, first):
        with pytest.raises(
            UsageError, match=r"that is a view, or has views, would spoil gradients: use aten.unsqueeze"
        ):
            tensor.unsqueeze_(0)
        with torch.no_grad():
            tensor.detach().unsqueeze_(0)
    assert (x * 2).unsqueeze_(0).sum().item() == 36


@pytest.mark.parametrize("dims", [(0, None), (None, 1)])
def test_views_of_a_gradient_see_what_optimizers_do_to_it(square: ProcMesh, dims: tuple[int | None, ...]) -> None:
    mesh = Mesh(square)
    x = cut((6, 4), *dims)._replace(graded=False)

    def run(parameter: torch.nn.Parameter, inputs: torch.Tensor) -> list[list[float]]:
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        (parameter * inputs).sum().backward()  # a sum of which each rank has a part
        gradient = parameter.grad
        assert gradient is not None
        rest, square_of_it = gradient[1:], gradient.view(2, 2)
        seen: list[torch.Tensor] = []
        optimizer.step()
        rest.mul_(3)
        seen += [gradient.clone(), square_of_it.clone()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seen += [rest.clone(), square_of_it.clone()]
        (parameter * inputs).sum().backward()
        square_of_it.add_(1)
        optimizer.step()
        return [each.flatten().tolist() for each in (*seen, rest, gradient, parameter.detach())]

    start = torch.arange(4, dtype=torch.float64)
    wanted = run(torch.nn.Parameter(start.clone()), x.make())
    got = run(torch.nn.Parameter(meshbook.distribute(start, mesh)), x.place(mesh))
    assert [pytest.approx(each) for each in wanted] == got


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this torch does not have it")
def test_an_operator_that_torch_defines_late_is_known_to_the_ranks(square: ProcMesh) -> None:
    lines = ("t2 = F.linear_cross_entropy(t0, t1, t0.detach().argmax(-1))",)
    assert difference(Program((cut((5, 4), 0, None), cut((7, 4), None, 1)), lines), Mesh(square)) == ""
