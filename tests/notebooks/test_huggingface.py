"""The notebook that fine-tunes a Hugging Face model, executed headless: it learns, and tells code from prose."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "data": ["9855 lines"],
    "told": ["code   return sorted(names)", "prose  If the name is not found, an error is raised."],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("huggingface.ipynb", SAID)


def test_the_loss_falls_and_most_lines_are_told_right(cells: dict[str, Any]) -> None:
    told = text_of(cells["train"])
    assert "60 steps, mean loss 0." in told and "at step 60" in told
    assert float(told.partition("loss ")[2].split()[0]) < 0.45
    assert float(text_of(cells["eval"]).partition("] ")[2].partition("%")[0]) > 85
