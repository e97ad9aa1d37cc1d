"""PyTorch's own database of operators: on mesh tensors each is right, or refused, and none is silently wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.tensor_operators import RIGHT, WRONG, sweep
from meshbook import ProcMesh
from meshbook.distributed import Mesh

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
