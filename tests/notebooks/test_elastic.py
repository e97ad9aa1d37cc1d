"""The notebook about elastic training, executed headless: ranks end, and each batch counts once."""

from __future__ import annotations

import pytest
from executed_notebooks import checks_of

pytestmark = pytest.mark.slow

SAID = {
    "quiet": ["40 batches, loss "],
    "killed": [
        "rank 2 ended (killed by SIGKILL) at batch 17; healed in",
        "back to the save of batch 10, repeating 7 batches",
        "rank 0 ended (killed by SIGKILL) at batch 31",
    ],
    "killed-check": ["40 losses equal those of the quiet training"],
    "smaller": ["rank 3 ended (killed by SIGKILL) at batch 24; not healed (", "goes on with gpus=3"],
    "smaller-check": ["Mesh(main, gpus=3): 40 losses equal"],
    "script": ["rank 1 ended (killed by SIGKILL); healed in", "restart 1 of 3 from save-2, step 20"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("elastic.ipynb", SAID)
