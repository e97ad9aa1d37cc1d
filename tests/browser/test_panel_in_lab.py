"""The panel in JupyterLab and in Notebook 7 follows the mesh, also while a cell runs; marks, and buttons of a hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_lab import set_theme

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

SOON_MS = 60_000
"""Seconds on a quiet machine."""
HANG = """%%mesh
import time
weights = torch.ones(3)
if rank == 2:
    time.sleep(300)
dist.all_reduce(torch.zeros(3))"""


@pytest.fixture(scope="module", params=["lab/tree", "notebooks"], ids=["lab", "notebook7"])
def front(request: pytest.FixtureRequest) -> str:
    """The path of the page on which the server shows notebooks."""
    if request.param == "notebooks":
        pytest.importorskip("notebook", reason="no Notebook 7: pip install notebook")
    return str(request.param)


@pytest.fixture(scope="module")
def notebook(lab: Any, browser: Any, front: str) -> Iterator[Page]:
    """A notebook without a mesh, whose cells are run one by one, and the panel at its side."""
    name = f"panel-{front.partition('/')[0]}.ipynb"
    cells = [
        "%load_ext meshbook_extension",
        "%mesh spawn hosts=1 gpus=4 --device cpu",
        HANG,
        "%mesh auto on",
        "# every cell\nhere = rank",
        "%%local\nimport os; print('the process is', os.getpid())",
        "%mesh auto off",
        "%mesh stop",
    ]
    lab.write(name, cells)
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    lab.open(page, name, front)
    yield page
    page.close()


def panel(page: Page) -> Locator:
    return page.locator("#meshbook-panel .meshbook")


def output(page: Page, text: str) -> Locator:
    return page.locator(".jp-OutputArea-output", has_text=text).first


def test_one_keystroke_shows_and_hides_it_and_without_a_mesh_it_says_what_to_do(notebook: Page) -> None:
    assert panel(notebook).count() == 0 or not panel(notebook).is_visible()
    notebook.keyboard.press("Control+Alt+m")
    panel(notebook).wait_for(timeout=SOON_MS)
    assert panel(notebook).locator(".mb-say").inner_text() == "no mesh in this notebook"
    lines = panel(notebook).locator(".mb-empty li").all_inner_texts()
    assert [line.split()[1] for line in lines] == ["meshbook", "spawn", "attach", "help"]
    notebook.keyboard.press("Control+Alt+m")
    panel(notebook).wait_for(state="hidden", timeout=SOON_MS)
    notebook.keyboard.press("Control+Alt+m")
    panel(notebook).wait_for(timeout=SOON_MS)


def test_it_follows_the_mesh_of_the_notebook(notebook: Page, lab: Any, front: str) -> None:
    lab.run_cell(notebook, 0)
    panel(notebook).locator(".mb-empty li").nth(3).wait_for(state="detached", timeout=SOON_MS)
    lab.run_cell(notebook, 1)
    panel(notebook).locator(".mb-say", has_text="4 ranks idle").wait_for(timeout=3 * SOON_MS)
    assert "main · hosts=1 gpus=4 · cpu · 4 ranks on 1 host" in panel(notebook).locator(".mb-meta").inner_text()
    if front == "lab/tree":
        notebook.locator(".mb-status", has_text="mesh main: hosts=1, gpus=4").wait_for(timeout=SOON_MS)


def test_it_and_the_notice_of_a_hang_act_while_the_cell_is_busy(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 2)
    box = panel(notebook)
    box.locator(".mb-say", has_text="rank 2 holds the others up: in time.sleep").wait_for(timeout=SOON_MS)
    assert box.locator(".mb-line.mb-odd .mb-rank").inner_text() == "2"
    box.locator("summary", has_text="Variables").click()
    box.locator("details[data-action=variables] td", has_text="weights").wait_for(timeout=SOON_MS)
    row = box.locator("details[data-action=variables] tr", has_text="weights").inner_text().split("\t")
    assert row[1:4] == ["Tensor", "(3,)", "float32"] and row[-1] == "equal on 0-3"
    box.locator("summary", has_text="Jobs").click()
    box.locator("details[data-action=jobs]", has_text="no job yet").wait_for(timeout=SOON_MS)

    notice = notebook.locator(".jp-OutputArea .mb-notice")
    notice.wait_for(timeout=SOON_MS)
    assert "ranks 0,1,3 wait in all_reduce" in notice.locator(".mb-words").inner_text()
    assert notice.locator("button:visible").all_inner_texts() == ["Stacks", "pdb 2", "Interrupt"]
    notice.locator("button", has_text="Stacks").click()
    notice.locator(".mb-answer pre", has_text="[2] busy for").wait_for(timeout=SOON_MS)
    notice.locator("button", has_text="Interrupt").click()
    output(notebook, "ranks 0-3 stopped, all variables kept").wait_for(timeout=SOON_MS)
    notice.wait_for(state="detached", timeout=SOON_MS)
    assert "[2] busy for" in output(notebook, "wait in all_reduce").inner_text()
    box.locator(".mb-say", has_text="4 ranks idle").wait_for(timeout=SOON_MS)


def test_the_saved_notice_is_plain_html_and_text(notebook: Page, lab: Any, front: str) -> None:
    notebook.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    deadline = time.monotonic() + SOON_MS / 1000
    while not (outputs := lab.read(f"panel-{front.partition('/')[0]}.ipynb")[2]["outputs"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    data = next(each["data"] for each in outputs if "text/html" in each.get("data", {}))
    assert sorted(data) == ["text/html", "text/plain"]
    assert "rank 2 has issued" in "".join(data["text/plain"]) and "<script" not in "".join(data["text/html"])


def test_cells_that_run_on_the_ranks_are_marked_and_auto_is_said(notebook: Page, lab: Any, front: str) -> None:
    def marked() -> list[bool]:
        cells = notebook.locator(".jp-Notebook .jp-Cell")
        return [cells.nth(i).get_attribute("data-meshbook") is not None for i in range(8)]

    notebook.locator(".jp-Cell[data-meshbook]").first.wait_for(timeout=SOON_MS)
    assert marked() == [False, False, True, False, False, False, False, False]
    lab.run_cell(notebook, 3)
    output(notebook, "every cell runs on ranks 0-3").wait_for(timeout=SOON_MS)
    notebook.locator(".jp-Cell[data-meshbook]").nth(2).wait_for(timeout=SOON_MS)
    assert marked() == [True, False, True, False, True, False, False, False]  # %load_ext would run there too
    panel(notebook).locator(".mb-meta", has_text="auto: every cell runs here").wait_for(timeout=SOON_MS)
    if front == "lab/tree":
        notebook.locator(".mb-status[data-auto=true]", has_text="auto: every cell runs there").wait_for(timeout=SOON_MS)


def test_it_is_dark_in_a_dark_theme(notebook: Page) -> None:
    color = "() => getComputedStyle(document.querySelector('#meshbook-panel .mb-card')).backgroundColor"
    set_theme(notebook, "JupyterLab Light")
    light = notebook.evaluate(color)
    set_theme(notebook, "JupyterLab Dark")
    notebook.wait_for_function(f"light => ({color})() !== light", arg=light, timeout=SOON_MS)


NOTE_SENTENCES = """() => {
  window.sentences = [];
  new MutationObserver(() => {
    const panel = document.querySelector("#meshbook-panel .meshbook");
    const sentence = `${panel?.dataset.phase}: ${panel?.querySelector(".mb-say")?.textContent}`;
    if (!window.sentences.includes(sentence)) window.sentences.push(sentence);
  }).observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
}"""
"""The panel says for a moment only that the kernel has died, until the next one is there."""


def test_it_turns_grey_and_says_why_when_the_kernel_dies(notebook: Page, lab: Any) -> None:
    lab.run_cell(notebook, 5)
    told = output(notebook, "the process is")
    told.wait_for(timeout=SOON_MS)
    notebook.evaluate(NOTE_SENTENCES)
    os.kill(int(told.inner_text().split()[-1]), signal.SIGKILL)
    notebook.wait_for_function("window.sentences.some((each) => each.startsWith('gone: the kernel'))", timeout=SOON_MS)
    panel(notebook).locator(".mb-say", has_text="no mesh in this notebook").wait_for(timeout=SOON_MS)
