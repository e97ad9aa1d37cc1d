"""JupyterLab's debugger panel stops in a rank, shows its variables, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from conftest import SCREENSHOTS

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

CELL = "%%mesh\ntotal = rank * 10\nfor step in range(3):\n    total += step\nprint('total', total)"


@pytest.fixture
def notebook(lab: Any, page: Page) -> Iterator[Page]:
    """A notebook whose rank 1 is to be debugged, with the panel on."""
    lab.write("debug.ipynb", ["%load_ext meshbook", "%mesh spawn gpus=2 --device cpu", "%mesh debug 1", CELL])
    lab.open(page, "debug.ipynb")
    for index in range(3):
        run(page, index)
    page.get_by_text("VS Code: attach at 127.0.0.1").wait_for()
    page.locator(".jp-DebuggerBugButton").click()
    page.wait_for_function(
        "() => document.querySelector('.jp-DebuggerBugButton')?.getAttribute('aria-pressed') === 'true'"
    )
    yield page


def run(page: Page, index: int) -> None:
    """Start a cell."""
    page.evaluate(
        """index => {
          window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
          window.jupyterapp.commands.execute('notebook:run-cell');
        }""",
        index,
    )


def test_the_panel_stops_in_a_rank(notebook: Page) -> None:
    page = notebook
    cell = page.locator(".jp-CodeCell").nth(3)
    cell.locator(".cm-lineNumbers .cm-gutterElement").get_by_text("5", exact=True).wait_for()
    cell.locator(".cm-breakpoint-gutter .cm-gutterElement").nth(5).click()  # the first one is a spacer
    page.locator(".jp-DebuggerBreakpoints").get_by_text("Cell [ ]").wait_for()
    run(page, 3)
    page.locator(".jp-DebuggerCallstack").get_by_text("<module>").first.wait_for()
    page.locator(".jp-DebuggerVariables-name").get_by_text("total", exact=True).first.wait_for()
    page.screenshot(path=SCREENSHOTS / "debugger-panel-stopped-in-rank-1.png")
    page.evaluate("window.jupyterapp.commands.execute('debugger:continue')")
    page.get_by_text("[1] total 13").wait_for()
