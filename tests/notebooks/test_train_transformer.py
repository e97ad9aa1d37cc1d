"""The notebook that trains a transformer, executed headless: it learned as in one process, though a rank was killed."""

from __future__ import annotations

import pytest
from executed_notebooks import checks_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

SAID = {
    "plan": ["blocks.0.q.weight", "Replicate(), Shard(dim=0)", "bytes per rank"],
    "train": ["batch 15: WorkerLost", "rank 3 started again", "the loss fell from 4."],
    "alone": ["30 losses equal those of one process"],
    "write": ["The statement "],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("train_transformer.ipynb", SAID)
