"""Large tensors, arrays and data frames in a line each."""

from __future__ import annotations

import math
import re

import numpy as np
import polars as pl
import pytest
import torch

from meshbook.shape import value_tables
from meshbook.shape.members import Region
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shape.value_tables import describe_large


def bits(text: str | None) -> str:
    found = re.search(r"bits ([0-9a-f]{8})$", text or "")
    assert found, text
    return found[1]


def test_small_values_and_others_have_no_description() -> None:
    for value in (torch.ones(1000), np.ones(1000), pl.DataFrame({"a": range(60)}), "x" * 5000, [1] * 5000):
        assert describe_large(value) is None
    assert describe_large(torch.ones(2000, device="meta")) is None
    assert describe_large(torch.eye(100).to_sparse()) is None
    assert describe_large(np.array([object()] * 2000)) is None


def test_a_person_who_wants_all_numbers_gets_them() -> None:
    torch.set_printoptions(profile="full")
    try:
        assert describe_large(torch.ones(2000)) is None
    finally:
        torch.set_printoptions(profile="default")


def test_a_tensor_is_described_by_shape_range_and_what_is_not_finite() -> None:
    x = torch.zeros(50, 40)
    x[0, 0], x[0, 1], x[1, 0], x[1, 1], x[1, 2] = -2.0, 6.0, math.nan, math.nan, -math.inf
    text = describe_large(x)
    assert text is not None
    assert text.startswith("tensor (50, 40) float32 cpu: min -2, mean 0.002003, max 6; 2 NaN, 1 inf; bits ")
    assert str(describe_large(torch.full((2000,), math.nan))).startswith(
        "tensor (2000,) float32 cpu: no finite number; 2,000 NaN; bits "
    )
    assert str(describe_large(torch.nn.Parameter(torch.ones(2000)))).startswith("Parameter (2000,) float32 cpu: min 1")
    assert str(describe_large(np.arange(2000))).startswith("ndarray (2000,) int64: min 0, mean 999.5, max 1999; bits ")
    assert str(describe_large(torch.ones(2000) > 0)).startswith("tensor (2000,) bool cpu: min 1, mean 1, max 1; bits ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.complex64])
def test_equal_bits_have_equal_fingerprints_and_others_do_not(dtype: torch.dtype) -> None:
    x = torch.randn(60, 50).to(dtype)
    swapped = x.clone()
    swapped[0], swapped[1] = x[1], x[0]
    assert bits(describe_large(x)) == bits(describe_large(x.clone())) != bits(describe_large(swapped))
    assert bits(describe_large(x.t().contiguous().t())) == bits(describe_large(x))


def test_the_look_at_a_huge_value_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_tables, "LOOKED_AT", 1500)
    assert "max 1499; of the first 1,500; bits " in str(describe_large(np.arange(2000)))


def test_a_data_frame_is_described_by_its_columns() -> None:
    frame = pl.DataFrame({"step": range(100), "loss": [0.5] * 99 + [None], "name": ["a"] * 100})
    lines = str(describe_large(frame)).splitlines()
    assert lines[0] == "DataFrame (100, 3)"
    assert re.fullmatch(r"  step  Int64    min 0, mean 49\.5, max 99; bits [0-9a-f]{8}", lines[1])
    assert re.fullmatch(r"  loss  Float64  min 0\.5, mean 0\.5, max 0\.5; 1 NaN; bits [0-9a-f]{8}", lines[2])
    assert lines[3] == "  name  String"


def test_a_value_mesh_shows_large_values_in_a_row_each_and_equal_ones_once() -> None:
    x = torch.arange(2000.0)
    shown = repr(ValueMesh(Region.of({"gpus": 3}), [x, x.clone(), x + 1]))
    assert len(shown.splitlines()) == 3
    assert "[0,1]  tensor (2000,) float32 cpu: min 0, mean 999.5, max 1999; bits " in shown
    assert "[2]    tensor (2000,) float32 cpu: min 1, mean 1000, max 2000; bits " in shown
