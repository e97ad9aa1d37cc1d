"""pdb of a rank in JupyterLab: the prompt stands in the running cell, and closes with its rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

SOON_MS = 120_000
"""Seconds on a quiet machine."""
INPUT = ".jp-Stdin-input"


@pytest.fixture(scope="module")
def notebook(lab: Any, browser: Any) -> Iterator[Page]:
    """A notebook with a mesh of 2 ranks."""
    page = lab.show(
        browser,
        "prompt.ipynb",
        [
            "%load_ext meshbook_extension",
            "%mesh spawn gpus=2 --device cpu",
            "%%mesh\nx = rank + 5\nbreakpoint()\nprint('went on with', x)",
            "%%mesh\nimport os, threading\nif rank == 1:\n"
            "    threading.Timer(3, os._exit, (3,)).start()\n    breakpoint()",
            "print('usable', 'again')",
            "%mesh heal",
            "%%mesh\nimport getpass\nname = input('name: ')\nkey = getpass.getpass('key: ')\nprint(name, len(key))",
            "import time\ndef square(x):\n    time.sleep(0.5)\n    return x * x\nprocs.map(square, range(24))",
        ],
        run=2,
        until="2 ranks on 1 host",
        height=1400,
    )
    yield page
    page.close()


def test_the_prompt_is_typed_at_in_the_running_cell(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 2)
    area = notebook.locator(".jp-OutputArea").nth(2)
    lab.answer_prompt(notebook, "[0] (Pdb)", "p x * 100")
    area.get_by_text("[0] 500").wait_for(timeout=SOON_MS)
    lab.answer_prompt(notebook, "[0] (Pdb)", "cast p x")
    area.get_by_text("[1] 6").wait_for(timeout=SOON_MS)
    lab.answer_prompt(notebook, "[0] (Pdb)", "rank 1")
    lab.answer_prompt(notebook, "[1] (Pdb)", "cast c")
    area.get_by_text("[1] went on with 6").wait_for(timeout=SOON_MS)
    assert "ranks 0,1 stopped at cell 3, line 3" in area.inner_text()


def test_the_prompt_closes_when_its_rank_dies(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 3)
    area = notebook.locator(".jp-OutputArea").nth(3)
    notebook.locator(".jp-Stdin-prompt", has_text="[1] (Pdb)").wait_for(timeout=SOON_MS)
    area.get_by_text("WorkerLost").first.wait_for(timeout=SOON_MS)
    assert "rank 1 has ended; its prompt is closed" in area.inner_text()
    notebook.locator(INPUT).press("Enter")
    lab.run_cell(notebook, 4)
    notebook.locator(".jp-OutputArea-output", has_text="usable again").first.wait_for(timeout=SOON_MS)


def test_questions_of_ranks_are_asked_once_and_a_secret_is_hidden(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 5)
    lab.run_cell(notebook, 6)
    lab.answer_prompt(notebook, "[0,1] name: ", "ada")
    notebook.locator(".jp-Stdin-prompt", has_text="[0,1] key: ").wait_for(timeout=SOON_MS)
    assert notebook.locator(INPUT).last.get_attribute("type") == "password"
    lab.answer_prompt(notebook, "[0,1] key: ", "s3cret")
    area = notebook.locator(".jp-OutputArea").nth(6)
    area.get_by_text("[0,1] ada 6").wait_for(timeout=SOON_MS)
    assert "s3cret" not in area.inner_text()


def test_a_map_shows_its_progress_below_the_cell_and_takes_it_away(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 7)
    area = notebook.locator(".jp-OutputArea").nth(7)
    area.get_by_text("square").first.wait_for(timeout=SOON_MS)
    area.get_by_text("529]").wait_for(timeout=SOON_MS)
    assert "square" not in area.inner_text() and "|" not in area.inner_text()
