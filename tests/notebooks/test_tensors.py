"""The notebook about tensors, executed headless: what it asserts of itself held, and a killed rank was healed."""

from __future__ import annotations

import pytest
from executed_notebooks import checks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "distribute": ["MeshTensor(shape=(64, 32)", "placements=(Shard(dim=0), Replicate())", "mean "],
    "seen-here": ["[0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]"],
    "from-ranks": ["48.0"],
    "resilient": ["batch 2: WorkerLost", "rank 3 started again", "the same losses as in one process"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("tensors.ipynb", SAID)
