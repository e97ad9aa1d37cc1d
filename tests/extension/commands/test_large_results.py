"""Large tensors, arrays and data frames as results of ranks."""

from __future__ import annotations

import re


def test_large_results_are_a_line_of_the_ranks_that_hold_equal_bits(notebook) -> None:
    ran = notebook.run("%%mesh\nx = torch.full((300, 300), 2.0)\nif rank == 2: x[150, 150] = float('nan')\nx")
    lines = ran.plain.strip().splitlines()
    assert len(lines) == 2, ran
    assert re.fullmatch(r"\[0,1,3\] tensor \(300, 300\) float32 cpu: min 2, mean 2, max 2; bits [0-9a-f]{8}", lines[0])
    assert re.fullmatch(r"\[2\] tensor \(300, 300\) float32 cpu: min 2, mean 2, max 2; 1 NaN; bits .{8}", lines[1])
    shown = notebook.run("%mesh eval {'x': x[:100]}").stdout
    assert shown.startswith("[0-3] {'x': tensor([[2., 2.")  # a container of the notebook's is shown as it is
    assert notebook.run("%mesh eval x[:100]").stdout.startswith("[0-3] tensor (100, 300) float32 cpu: min 2")


def test_small_results_are_as_torch_prints_them(notebook) -> None:
    assert notebook.run("%%mesh\ntorch.arange(3)").plain.strip() == "[0-3] tensor([0, 1, 2])"


def test_large_values_in_containers_and_displays_are_short_too(notebook) -> None:
    ran = notebook.run("%%mesh\nimport numpy as np\ndisplay(np.arange(5000))\n{'w': torch.zeros(2000), 'n': 3}")
    assert "[0-3] ndarray (5000,) int64: min 0, mean 2500, max 4999; bits " in ran.plain, ran
    assert "{'w': tensor (2000,) float32 cpu: min 0, mean 0, max 0; bits " in ran.plain, ran


def test_subclasses_of_tensors_are_a_line_too(notebook) -> None:
    told = notebook.run(
        "%%mesh\nfrom torch.distributed.tensor import Shard, distribute_tensor\ntorch.nn.Parameter(torch.ones(2000))"
    )
    assert told.plain.startswith("[0-3] Parameter (2000,) float32 cpu: min 1, mean 1, max 1; bits "), told
    told = notebook.run("%%mesh\ndistribute_tensor(torch.ones(80, 80), mesh, [Shard(0)])")
    assert told.plain.startswith("[0-3] DTensor (80, 80) float32 cpu [S(0)], this rank's part (20, 80): min 1"), told


def test_a_large_data_frame_is_a_line_for_each_column(notebook) -> None:
    ran = notebook.run("%%mesh\nimport polars as pl\npl.DataFrame({'step': range(500), 'name': ['a'] * 500})")
    assert "text/html" not in ran.displays[-1], ran
    assert "DataFrame (500, 2)" in ran.plain and "step  Int64   min 0, mean 249.5, max 499; bits " in ran.plain, ran
    small = notebook.run("%%mesh\npl.DataFrame({'step': range(3)})")
    assert "text/html" in small.displays[-1]
