"""Tab and Shift-Tab in JupyterLab, while a cell keeps the kernel and the ranks busy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

SOON_MS = 120_000
STATUS = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"


@pytest.fixture(scope="module")
def notebook(lab: Any, browser: Any) -> Iterator[Page]:
    """A notebook with a mesh whose ranks are in a loop, and a cell to type into."""
    page = lab.show(
        browser,
        "completion.ipynb",
        [
            "%load_ext meshbook_extension",
            "%mesh spawn gpus=2 --device cpu",
            "%%mesh\ndef average_of(values):\n    'The mean of values.'\naverage_weight = 1\nprint('defined')",
            "%%mesh\nprint('begun', flush=True)\nwhile True: pass",
            "%%mesh\naverage",
        ],
        run=4,
        until="begun",
    )
    editor = page.locator(".jp-CodeCell .cm-content").nth(4)
    editor.click()
    page.keyboard.press("Control+End")
    yield page
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    page.close()


def test_tab_lists_names_of_the_busy_ranks(notebook: Page) -> None:
    completer = notebook.locator(".jp-Completer-item", has_text="average_weight")
    for _ in range(10):
        notebook.keyboard.press("Tab")
        try:
            completer.wait_for(timeout=SOON_MS // 10)
            break
        except Exception:  # a page that was not yet ready has indented the line, and Escape leaves the editor
            notebook.locator(".jp-CodeCell .cm-content").nth(4).click()
            notebook.keyboard.press("Control+A")
            notebook.keyboard.type("%%mesh\naverage")
    assert completer.count() and notebook.locator(".jp-Completer-item", has_text="average_of").count()
    notebook.keyboard.press("Escape")
    notebook.wait_for_function(f"({STATUS})() === 'busy'", timeout=SOON_MS)


def test_shift_tab_shows_the_signature(notebook: Page) -> None:
    notebook.locator(".jp-CodeCell .cm-content").nth(4).click()
    notebook.keyboard.press("Control+End")
    notebook.keyboard.type("_of(")
    notebook.keyboard.press("Shift+Tab")
    notebook.locator(".jp-Tooltip", has_text="The mean of values.").wait_for(timeout=SOON_MS)
    notebook.wait_for_function(f"({STATUS})() === 'busy'", timeout=SOON_MS)
