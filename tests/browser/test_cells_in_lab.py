"""Cells of ranks in JupyterLab: much output leaves the page alive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.nightly, pytest.mark.timeout(400)]

SOON_MS = 120_000
"""Seconds on a quiet machine."""
ANSWER_S = 20.0
"""A click was answered after more than 60 s when the page was given all of the output."""


@pytest.fixture(scope="module")
def notebook(lab: Any, browser: Any) -> Iterator[Page]:
    """A notebook with a mesh of 8 ranks."""
    page = lab.show(
        browser,
        "cells.ipynb",
        [
            "%load_ext meshbook_extension",
            "%mesh spawn gpus=8 --device cpu",
            "%%mesh\nfor i in range(20_000):\n    print(f'line {i} of rank {rank}')",
            "print('all', 'shown')",
        ],
        run=2,
        until="8 ranks on 1 host",
    )
    yield page
    page.close()


def test_many_lines_of_output_do_not_freeze_the_page(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 2)
    lab.run_cell(notebook, 3)
    notebook.locator(".jp-OutputArea-output", has_text="line 0 of rank").first.wait_for(timeout=SOON_MS)
    slowest, clicks = 0.0, 0
    done = notebook.locator(".jp-OutputArea-output", has_text="all shown")
    while clicks < 2 or not done.count():
        asked = time.monotonic()
        notebook.locator(".lm-MenuBar-itemLabel", has_text="File").click(timeout=SOON_MS)
        menu = notebook.locator(".lm-Menu", has_text="Save Notebook").first
        menu.wait_for(timeout=SOON_MS)
        slowest, clicks = max(slowest, time.monotonic() - asked), clicks + 1
        notebook.keyboard.press("Escape")
        menu.wait_for(state="hidden", timeout=SOON_MS)
    assert slowest < ANSWER_S
    text = notebook.locator(".jp-OutputArea").nth(2).inner_text()
    assert "line 0 of rank 0" in text and "line 19999 of rank" in text and "%mesh logs" in text
    assert 50_000 < len(text) < 1_000_000
