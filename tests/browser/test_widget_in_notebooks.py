"""The health widget in JupyterLab and in Notebook 7: it renders, is live while a cell runs, and so are its buttons."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_lab import set_theme

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

SOON_MS = 60_000
"""A second or two on a quiet machine; the cell that is interrupted would run for five minutes."""


@pytest.fixture(scope="module", params=["lab/tree", "notebooks"], ids=["lab", "notebook7"])
def front(request: pytest.FixtureRequest) -> str:
    """The path of the page on which the server shows notebooks."""
    if request.param == "notebooks":
        pytest.importorskip("notebook", reason="no Notebook 7: pip install notebook")
    return str(request.param)


@pytest.fixture(scope="module")
def saved(front: str) -> str:
    """The name of the notebook."""
    return f"{front.partition('/')[0]}.ipynb"


@pytest.fixture(scope="module")
def notebook(lab: Any, browser: Any, front: str, saved: str) -> Iterator[Page]:
    """A notebook with a mesh of 4 ranks and the widget; cells are run one by one."""
    lab.write(
        saved,
        [
            "%load_ext meshbook_extension",
            "%mesh spawn gpus=4 --device cpu",
            "%mesh",
            "%%mesh\nfrom tqdm_like import bar\nbar(3000)",
            "%%mesh\nif rank == 2:\n    raise ValueError('<img src=x onerror=window.broken=1>')",
        ],
    )
    (lab.root / "tqdm_like.py").write_text(
        "import sys, time\n\n"
        "def bar(steps):\n"
        "    for i in range(steps):\n"
        "        text = f'\\repoch 1: {100 * i // steps:3d}%|###       | {i}/{steps} [00:01<00:09,  9.1it/s]'\n"
        "        print(text, end='', file=sys.stderr, flush=True)\n"
        "        time.sleep(0.1)\n"
    )
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    lab.open(page, saved, front)
    yield page
    page.close()


def widget(page: Page) -> Locator:
    return page.locator(".jp-OutputArea .meshbook").first


def test_it_renders_with_a_row_per_rank(notebook: Page, lab: Any) -> None:
    for cell in range(3):
        lab.run_cell(notebook, cell)
    widget(notebook).wait_for(timeout=150_000)
    assert widget(notebook).locator(".mb-line").count() == 4
    assert widget(notebook).locator(".mb-say").inner_text() == "4 ranks idle"
    assert "gpus=4 · cpu · 4 ranks on 1 host" in widget(notebook).locator(".mb-head").inner_text()
    assert widget(notebook).locator("button", has_text="Interrupt").count() == 0
    box = widget(notebook).bounding_box()
    assert box is not None and box["height"] < 150


def test_it_updates_and_its_buttons_act_while_a_cell_runs(notebook: Page, lab: Any) -> None:
    box = widget(notebook)
    lab.run_cell(notebook, 3)
    box.locator(".mb-line.mb-is-B").nth(3).wait_for(timeout=SOON_MS)
    box.locator(".mb-say", has_text="epoch 1").wait_for(timeout=SOON_MS)
    first = box.locator(".mb-say").inner_text()
    notebook.wait_for_function(
        "before => document.querySelector('.jp-OutputArea .mb-say')?.innerText !== before", arg=first, timeout=SOON_MS
    )
    assert "/3000" in box.locator(".mb-line .mb-of-step").first.inner_text()

    box.locator(".mb-line").nth(1).click()
    box.locator("button", has_text="Stacks 1").click()
    answer = box.locator(".mb-answer pre")
    answer.wait_for(timeout=SOON_MS)
    assert answer.inner_text().startswith("[1] busy for ") and "tqdm_like.py" in answer.inner_text()
    assert "tqdm_like.py" in box.locator(".mb-more:visible").inner_text()
    box.locator("button", has_text="Variables").click()
    box.locator(".mb-list td", has_text="function").wait_for(timeout=SOON_MS)

    pressed = time.monotonic()
    box.locator("button", has_text="Interrupt").click()
    notebook.locator(".jp-OutputArea-output", has_text="ranks 0-3 stopped, all variables kept").wait_for(
        timeout=SOON_MS
    )
    box.locator(".mb-line.mb-is-I").nth(3).wait_for(timeout=SOON_MS)
    assert time.monotonic() - pressed < 60
    box.locator(".mb-track").wait_for(state="detached", timeout=SOON_MS)


def test_text_of_ranks_is_shown_as_text(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 4)
    error = widget(notebook).locator(".mb-errors li")
    error.wait_for(timeout=SOON_MS)
    assert "ValueError: <img src=x onerror=window.broken=1>" in error.inner_text()
    assert widget(notebook).locator("img").count() == 0
    assert not notebook.evaluate("() => window.broken")
    error.get_by_label("Dismiss").click()
    error.wait_for(state="hidden", timeout=SOON_MS)


def test_the_saved_notebook_shows_the_ranks(notebook: Page, lab: Any, saved: str) -> None:
    notebook.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    deadline = time.monotonic() + SOON_MS / 1000
    while not (outputs := lab.read(saved)[2]["outputs"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (output,) = outputs
    assert "4 ranks on 1 host" in "".join(output["data"]["text/plain"])
    assert "<table" in "".join(output["data"]["text/html"])
    convert = [sys.executable, "-m", "nbconvert", "--to=html", "--stdout", "--log-level=ERROR", str(lab.root / saved)]
    page = subprocess.run(convert, capture_output=True, text=True, check=True, timeout=SOON_MS / 1000).stdout
    assert "main: gpus=4, cpu; 4 idle</div><table" in page


def test_it_is_dark_in_a_dark_theme(notebook: Page) -> None:
    color = "() => getComputedStyle(document.querySelector('.jp-OutputArea .mb-card')).backgroundColor"
    set_theme(notebook, "JupyterLab Light")
    light = notebook.evaluate(color)
    set_theme(notebook, "JupyterLab Dark")
    notebook.wait_for_function(f"light => ({color})() !== light", arg=light, timeout=SOON_MS)


def test_a_notebook_opened_again_shows_the_table_of_its_widget(
    notebook: Page, lab: Any, front: str, saved: str
) -> None:
    notebook.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    notebook.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    lab.open(notebook, saved, front)
    notebook.locator(".jp-OutputArea table", has_text="idle").wait_for(timeout=SOON_MS)
    assert notebook.locator("text=model not found").count() == 0
