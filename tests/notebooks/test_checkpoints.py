"""The notebook about saves, executed headless: the same losses after a death, on another size, in another program."""

from __future__ import annotations

import pytest
from executed_notebooks import checks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "folder": ["saved model, opt, schedule, step, losses at step 50: "],
    "heal": ["restored model, opt, schedule, step, losses on ranks 0-3 from save-1, step 50, "],
    "same": ["the same 50 losses, to the last bit"],
    "restore": ["on ranks 0,1 from save-1, step 50, ", "saved from 4 ranks"],
    "close": ["the same 50 losses, to 1e-05"],
    "read": ["step 50 in this process: loss 0.5"],
    "weights": ["model-00001-of-00001.safetensors"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("checkpoints.ipynb", SAID, faults=["kill"])
