"""A real JupyterLab and Notebook 7 in headless Chromium.

Without a chromium these tests are skipped, and the reason says the command that installs one.

What each test saw last is kept as ``build/screenshots/<module>-<test>.png``.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jupyter_lab import PATIENCE_MS, Lab, NoBrowser, open_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sys.path.insert(0, str(Path(__file__).parent))  # for `conftest`

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, or a skip."""
    with contextlib.ExitStack() as opened:
        try:
            browser = opened.enter_context(open_chromium())
        except NoBrowser as missing:
            pytest.skip(str(missing))
        yield browser


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Keep a picture of what the test saw last; a page that cannot be drawn fails no test."""
    browser = getattr(item, "funcargs", {}).get("browser")
    for context in browser.contexts if browser is not None else ():
        for page in context.pages:
            name = re.sub(r"[^\w.-]+", "-", f"{item.path.stem}-{item.name}").strip("-")
            try:
                page.screenshot(path=SCREENSHOTS / f"{name}.png", timeout=10_000)
            except Exception as error:
                item.add_report_section("teardown", "screenshot", str(error))


@pytest.fixture(scope="module")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.wait_for_ready()
        yield lab
    finally:
        lab.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page; what goes wrong in it fails the test."""
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    page.close()
    ours = [problem for problem in problems if re.search("meshbook|HealthView|blob:", problem)]
    assert not ours, ours
