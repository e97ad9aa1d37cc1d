"""The notebook about a web service, executed headless: batches of requests, and each answered past a lost rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "measure": ["1 clients: 10 answers", "100 clients: 1000 answers"],
    "kill": ["100 clients: 1200 answers", "rank 2 was lost with "],
    "heal": ["rank 2 started again", "100 clients: 1000 answers"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("service.ipynb", SAID)


def test_requests_are_batched_under_load_and_spread_over_the_ranks(cells: dict[str, Any]) -> None:
    assert re.findall(r"(\d+) in a batch", text_of(cells["measure"]))[0] == "1"
    assert int(re.findall(r"(\d+) in a batch", text_of(cells["measure"]))[1]) > 4
    counts = [int(count) for count in re.findall(r"\d+", text_of(cells["heal"]).rpartition("of each rank")[2])]
    assert sum(counts) == 1000 and min(counts) > 50


def test_a_rank_that_was_killed_answers_no_more(cells: dict[str, Any]) -> None:
    listed = text_of(cells["kill"]).partition("of each rank [")[2].partition("]")[0]
    counts = [int(count) for count in listed.split(",")]
    assert sum(counts) == 1200 and counts[2] < 0.6 * min(counts[:2] + counts[3:])
