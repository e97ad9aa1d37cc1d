"""The notebook about debugging, executed with somebody who types at its prompts: each planted fault is found."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import checks_of

pytestmark = pytest.mark.slow

SAID = {
    "nan-run": ["[0-7] epoch 2: weights nan"],
    "nan-eval": ["[5] True"],
    "nan-found": ["the bad shard is on rank [5]"],
    "nan-pdb": ["rank 5 stopped at cell ", "(Pdb) ranks", "<- this prompt", "tensor([[17,  3]])"],
    "nan-raise": ["rank 5 raised FloatingPointError: loss is nan", "ranks 0-4,6,7 were waiting in"],
    "errors": ["[5]  cell ", "FloatingPointError: loss is nan"],
    "postmortem": ["rank 5 post-mortem of FloatingPointError", "[5] [17]", "torch.Size([224, 64])"],
    "hang": ["ranks 0-5,7 and 6 disagree in operation ", "all_reduce against barrier", "freed after"],
    "stacks": ["ranks 0-5,7 wait in all_reduce", "rank 6 ", "time.sleep", "dist.all_reduce(right)"],
    "hang-found": ["the odd one is rank 6"],
    "hang-cancel": ["job 1 interrupted: ranks 0-7 stopped"],
    "hang-mended": ["right, on all ranks"],
    "time": ["(slowest rank 3: ", "of own work", "waiting in collectives"],
    "profile-run": ["waiting in collectives", "rank 3 least: ", "Python, no operation", "ui.perfetto.dev"],
    "profile-check": ["most often waited for: rank 3"],
    "follow": ["following rank 3: for 1 s", "not in the cache, decoding 225 images"],
    "grep": ["step 14: not in the cache"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("debugging.ipynb", SAID, ("nan-raise", "hang"))


def test_the_times_are_a_chart_in_the_notebook(cells: dict[str, Any]) -> None:
    (chart,) = [output["data"] for output in cells["time"]["outputs"] if "data" in output]
    assert "rank 3" in chart["text/html"] and "slowest" in chart["text/plain"]
