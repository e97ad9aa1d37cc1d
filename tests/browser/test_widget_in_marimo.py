"""The health widget in marimo, which has no magics: by `health_widget`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

SOON_S = 120
"""Seconds on a quiet machine."""

NOTEBOOK = """import marimo

app = marimo.App()


@app.cell
def _():
    import marimo as mo
    import meshbook
    from meshbook_extension import health_widget

    mesh = meshbook.this_host().spawn_procs({"gpus": 2}, name="two")
    mo.ui.anywidget(health_widget(mesh))
    return
"""


@pytest.fixture(scope="module")
def url(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A marimo server that shows the notebook."""
    pytest.importorskip("marimo", reason="no marimo: pip install marimo")
    root = tmp_path_factory.mktemp("marimo")
    (root / "health.py").write_text(NOTEBOOK)
    command = [sys.executable, "-m", "marimo", "run", "health.py", "--headless", "--no-token", "--host=127.0.0.1"]
    homes = {name: str(root) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, **homes, "MESHBOOK_PREWARM": "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield said_url(server, root / "log")
    finally:
        family = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(5)
        psutil.wait_procs(family, timeout=15)
        print("marimo said:", (root / "log").read_text())


def said_url(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server says that it listens."""
    deadline = time.monotonic() + SOON_S
    while (found := re.search(r"http://\S+:(\d+)", log.read_text())) is None:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return f"http://127.0.0.1:{found[1]}"


def test_it_is_live_in_marimo_and_its_buttons_act(page: Page, url: str) -> None:
    page.goto(url, timeout=1000 * SOON_S)
    row = page.locator(".meshbook .mb-line").nth(1)
    try:
        row.wait_for(timeout=1000 * SOON_S)
    except Exception:
        print("the page shows:", page.locator("body").inner_text())
        raise
    assert "two" in page.locator(".mb-head").inner_text()
    page.locator(".meshbook[data-phase=live]").wait_for(timeout=1000 * SOON_S)
    page.locator("button", has_text="Stacks").click()
    page.locator(".mb-answer pre", has_text="[0,1] idle").wait_for(timeout=1000 * SOON_S)
