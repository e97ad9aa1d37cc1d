"""PyTorch's own database of operators: on mesh tensors each is right, or refused, and none is silently wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import meshbook
from benchmarks.tensor_operators import RIGHT, WRONG, sweep
from meshbook import ProcMesh
from meshbook.distributed import Mesh
from meshbook.tensors.messages.operations import is_random, written_arguments

OFTEN_USED = (
    "add", "addmm", "amax", "argmax", "bmm", "cat", "clamp", "cumsum", "div", "einsum", "exp", "expand", "flatten",
    "gather", "index_select", "log_softmax", "masked_fill", "matmul", "max", "mean", "mul", "nn.functional.conv2d",
    "nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.linear", "nn.functional.mse_loss", "nn.functional.relu", "norm", "permute", "pow", "reshape",
    "roll", "scatter", "softmax", "sort", "split", "squeeze", "stack", "std", "sub", "sum", "topk", "transpose",
    "tril", "unbind", "unsqueeze", "var", "where",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_operators_of_everyday_are_right(mesh2: ProcMesh) -> None:
    found = sweep(Mesh(mesh2), OFTEN_USED, samples=1, times=3)
    assert {name: outcome.why for name, outcome in found.items() if outcome.verdict != RIGHT} == {}
    assert len(found) > len(OFTEN_USED) - 3


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_operators_of_everyday_are_right_on_two_axes(square: ProcMesh) -> None:
    found = sweep(Mesh(square), OFTEN_USED, samples=1)
    assert {name: outcome.why for name, outcome in found.items() if outcome.verdict != RIGHT} == {}
    assert len(found) > len(OFTEN_USED) - 3


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_operator_is_silently_wrong(mesh2: ProcMesh) -> None:
    found = sweep(Mesh(mesh2), samples=1)
    counts = Counter(outcome.verdict for outcome in found.values())
    assert [name for name, outcome in found.items() if outcome.verdict == WRONG] == []
    assert counts[RIGHT] >= 450, counts


MADE_OF_NOTHING = ("empty_like", "new_empty", "empty_permuted", "_debug_has_internal_overlap")
"""What they give is not a matter of their arguments."""
VALUES = (torch.tensor([[0.5, -1.5], [2.0, 3.0]]), torch.tensor([[1, 2], [3, 0]]), torch.tensor([[True, False]] * 2))


def _overloads() -> Iterator[tuple[torch._ops.OpOverload, list[str]]]:
    """Yield overloads of aten that take tensors and numbers and write to none, with the kinds of their arguments."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            operator = getattr(packet, overload)
            arguments = [each for each in operator._schema.arguments if not each.has_default_value()]
            kinds = [str(each.type) for each in arguments if not each.kwarg_only]
            simple = len(kinds) == len(arguments) and 0 < len(kinds) < 4 and kinds[0] == "Tensor"
            simple = simple and {*kinds} <= {"Tensor", "number", "int", "float"} and name not in MADE_OF_NOTHING
            if simple and not written_arguments(operator) and not is_random(operator):
                yield operator, kinds


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_overload_is_silently_wrong(mesh2: ProcMesh) -> None:
    """The database calls what people call; of an operator it knows some overloads have other kernels."""
    mesh, wrong, right = Mesh(mesh2), [], 0
    for operator, kinds in _overloads():
        for values in VALUES:
            plain = [values.clone() if kind == "Tensor" else 1 for kind in kinds]
            try:
                wanted = operator(*plain)
            except Exception:  # not for these values
                continue
            if not isinstance(wanted, torch.Tensor) or wanted.layout is not torch.strided or wanted.is_quantized:
                continue
            parts = [
                meshbook.distribute(each, mesh, ["gpus"]) if isinstance(each, torch.Tensor) else 1 for each in plain
            ]
            try:
                found = operator(*parts)
                found = found.full_tensor() if isinstance(found, meshbook.MeshTensor) else found
            except Exception:  # refused
                continue
            right += 1
            if found.shape != wanted.shape or not torch.allclose(found.cdouble(), wanted.cdouble(), equal_nan=True):
                wrong.append(f"{operator} of {values.dtype}")
    assert wrong == []
    assert right > 600
