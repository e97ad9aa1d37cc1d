"""What ranks display, tables and messages in JupyterLab: grids and cards, in a trusted and in an untrusted notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jupyter_lab import Lab
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

SOON_MS = 200_000
"""Seconds on a quiet machine."""
FIGURES = """%%mesh
%matplotlib inline
import time
import matplotlib.pyplot as plt
time.sleep(0.1 * (7 - rank))
plt.plot([0, 1, 2], [rank, 1, 2 * rank])
plt.show()
print("shown")"""
FRAMES = """%%mesh
class Frame:
    def _repr_html_(self):
        return f"<table><tr><td>loss</td><td>{'nan' if rank == 5 else 0.5}</td></tr></table>"
Frame()"""
NEWS = """%%mesh --async
import time
time.sleep(0.5)
if rank == 1: raise ValueError("bad shard")"""
CELLS = [
    "%load_ext meshbook_extension",
    "%mesh spawn gpus=8 --device cpu",
    FIGURES,
    FRAMES,
    NEWS,
    "%mesh wait",
    "%mesh help",
]
CAPTION = "summary span"


@pytest.fixture(scope="module")
def shown(lab: Lab, browser: Browser) -> Iterator[Page]:
    """The page of a notebook that has run and was saved."""
    page = lab.show(browser, "grid.ipynb", CELLS, run=2, until="8 ranks on 1 host", height=2000)
    try:
        for index in range(2, len(CELLS)):
            lab.run_cell(page, index)
            prompt = "at => /\\d/.test(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[at].textContent)"
            page.wait_for_function(prompt, arg=index, timeout=SOON_MS)
        page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        yield page
    finally:
        page.close()


def cell(page: Page, index: int) -> Any:
    return page.locator(".jp-CodeCell").nth(index).locator(".jp-OutputArea-output")


def test_figures_of_eight_ranks_are_one_grid_in_their_order(shown: Page) -> None:
    outputs = cell(shown, 2)
    captions = [text.strip() for text in outputs.locator(CAPTION).all_inner_texts()]
    assert captions == [f"[{rank}] gpus={rank}" for rank in range(8)]
    assert outputs.locator("img").count() == 8
    boxes = [each.bounding_box() for each in outputs.locator("img").all()]
    assert len({round(box["x"]) for box in boxes}) in (2, 3, 4), "as many columns"
    assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)
    grid = outputs.filter(has=shown.locator("img")).bounding_box()
    assert grid is not None and grid["height"] < 1400
    assert "] shown" in outputs.last.inner_text()
    labels = outputs.count() - 2  # one above the grid where its first rank was alone for a while
    assert labels == 0 or (labels == 1 and re.fullmatch(r"\[[\d,-]+\]", outputs.first.inner_text().strip()))


def test_a_click_gives_a_figure_a_row_of_its_own(shown: Page) -> None:
    picture = cell(shown, 2).locator("img").nth(3)
    small = picture.bounding_box()
    picture.click()
    wide = picture.bounding_box()
    picture.click()
    assert small is not None and wide is not None and wide["width"] > 1.4 * small["width"]
    assert picture.bounding_box() == small


def test_equal_tables_are_one_card_and_the_odd_rank_is_amber(shown: Page) -> None:
    usual, odd = cell(shown, 3).locator(CAPTION).all()
    assert (usual.inner_text(), odd.inner_text()) == ("[0-4,6,7] same", "[5] gpus=5")
    colours = [each.evaluate("one => getComputedStyle(one).color") for each in (usual, odd)]
    assert colours[0] != colours[1]


def test_messages_are_no_error_output(shown: Page) -> None:
    message = cell(shown, 4).filter(has_text="job 1 failed after")
    assert message.get_attribute("data-mime-type") == "text/html"
    assert message.locator("div").last.evaluate("one => getComputedStyle(one).borderLeftWidth") == "3px"


def test_a_table_fits_a_narrow_pane(shown: Page) -> None:
    shown.set_viewport_size({"width": 600, "height": 2000})
    box = cell(shown, 6).locator("td", has_text="%mesh spawn").first.bounding_box()
    shown.set_viewport_size({"width": 1280, "height": 2000})
    assert box is not None and box["x"] + box["width"] < 600


def test_an_untrusted_notebook_shows_the_same(shown: Page, lab: Lab, browser: Browser) -> None:
    shown.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=SOON_MS)
    notebook = json.loads((lab.root / "grid.ipynb").read_text())
    for each in notebook["cells"]:
        each["source"] = "".join(each["source"]) + "\n"  # so that its signature is unknown
    (lab.root / "strange.ipynb").write_text(json.dumps(notebook))
    markup = "".join(str(output.get("data", {}).get("text/html", "")) for output in notebook["cells"][2]["outputs"])
    assert "<script" not in markup and len(re.findall("<img", "".join(markup))) == 8
    page = browser.new_page(viewport={"width": 1600, "height": 2000})
    try:
        lab.open(page, "strange.ipynb")
        outputs = cell(page, 2)
        outputs.locator("img").nth(7).wait_for(timeout=SOON_MS)
        boxes = [each.bounding_box() for each in outputs.locator("img").all()]
        assert len({round(box["x"]) for box in boxes}) in (2, 3, 4)
        assert (
            cell(page, 3).locator(CAPTION).nth(1).evaluate("one => getComputedStyle(one).color") == "rgb(239, 108, 0)"
        )
        card = cell(page, 4).filter(has_text="job 1 failed after").locator("div").last
        assert card.evaluate("one => getComputedStyle(one).borderLeftWidth") == "3px"
    finally:
        page.close()
