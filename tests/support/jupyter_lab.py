"""A JupyterLab server of the tests' own, and what drives it in a headless Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE_MS = 60_000  # for what takes a second on a quiet machine

BROWSER = Path(__file__).parents[2] / "extension" / "meshbook_extension" / "browser"
"""The panel's folder."""
START_TIMEOUT_S = 150
"""For a server, and for a kernel; seconds on a quiet machine, minutes on one that has much else to do."""
QUIETLY = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
IDLE = """() => {
  const session = window.jupyterapp?.shell?.currentWidget?.sessionContext;
  return session?.isReady && session.session?.kernel?.status === 'idle';
}"""


class NoBrowser(Exception):
    """Nothing here can show a page; the text says what to install."""


def find_chromium() -> str | None:
    """Return the first of the usual names that is installed; MESHBOOK_CHROMIUM names another."""
    names = [os.environ.get("MESHBOOK_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


@contextlib.contextmanager
def open_chromium() -> Iterator[Browser]:
    """Run a headless Chromium until the block ends.

    Raises: NoBrowser where there is none, or no playwright to drive it.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise NoBrowser("no playwright: pip install playwright") from None
    chromium = find_chromium()
    if chromium is None:
        raise NoBrowser("no chromium: apt-get install --no-install-recommends chromium fonts-dejavu-core")
    driver = sync_playwright().start()
    try:
        browser = driver.chromium.launch(executable_path=chromium, args=QUIETLY, timeout=1000 * START_TIMEOUT_S)
        yield browser
        browser.close()
    finally:
        driver.stop()


class Lab:
    """A Jupyter server with settings of its own, for JupyterLab and Notebook 7."""

    def __init__(self, root: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start it. environment: more of it, for the server and its kernels."""
        self.root = root
        self.url = ""
        names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        folders = {f"JUPYTER_{name}": str(root / f".{name.lower()}") for name in names}
        folders |= {f"JUPYTERLAB_{name}_DIR": str(root / f".{name.lower()}") for name in ("SETTINGS", "WORKSPACES")}
        panel = root / ".data_dir" / "labextensions" / "meshbook"  # as it lies here, whatever was installed
        panel.parent.mkdir(parents=True)
        panel.symlink_to(BROWSER)
        settings = root / ".settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
        with socket.socket() as probe:  # a port to begin with; if it is taken meanwhile, Jupyter takes another
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token="]
        options += [f"--ServerApp.root_dir={root}"]
        options += [f"--{app}.expose_app_in_browser=True" for app in ("LabApp", "JupyterNotebookApp")]
        defaults = {**os.environ, **folders, "IPYTHONDIR": str(root / ".ipython"), "MESHBOOK_PREWARM": "0"}
        environment = {**defaults, **(environment or {})}
        with (root / "lab.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_for_ready(self) -> None:
        """Wait until the server has said where it listens, and answers there."""
        said = self.root / ".runtime_dir" / f"jpserver-{self._process.pid}.json"
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.url = json.loads(said.read_text())["url"].rstrip("/")
                urllib.request.urlopen(f"{self.url}/api/status", timeout=5).close()
                return
            except (OSError, ValueError):
                log = (self.root / "lab.log").read_text()
                assert self._process.poll() is None and time.monotonic() < deadline, log
                time.sleep(0.1)

    def write(self, name: str, cells: list[str], kernel: str = "python3") -> None:
        """Write a notebook with code cells."""
        notebook = {
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"c{i}",
                    "source": cell,
                    "metadata": {},
                    "outputs": [],
                    "execution_count": None,
                }
                for i, cell in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.root / name).write_text(json.dumps(notebook))

    def read(self, name: str) -> list[dict[str, Any]]:
        """The cells of a notebook as it was saved."""
        return list(json.loads((self.root / name).read_text())["cells"])

    def open(self, page: Page, name: str, path: str = "lab/tree") -> None:
        """Show a notebook and wait for its kernel; a page that does not come up is loaded once more.

        path: ``lab/tree``, or ``notebooks`` for Notebook 7.
        """
        page.set_default_timeout(PATIENCE_MS)
        try:
            self._load(page, f"{self.url}/{path}/{name}?reset")
        except Exception:
            self._load(page, f"{self.url}/{path}/{name}?reset")

    def show(self, browser: Browser, name: str, cells: list[str], run: int, until: str, height: int = 1000) -> Page:
        """Write a notebook, open it on a page, run its first ``run`` cells, and wait for ``until`` in their output."""
        self.write(name, cells)
        page = browser.new_page(viewport={"width": 1280, "height": height})
        self.open(page, name)
        for index in range(run):
            self.run_cell(page, index)
        page.locator(".jp-OutputArea-output", has_text=until).wait_for(timeout=2 * PATIENCE_MS)
        return page

    def run_cell(self, page: Page, index: int) -> None:
        """Start a cell; the command itself would last as long as the cell."""
        page.evaluate(
            """index => {
              window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
              window.jupyterapp.commands.execute('notebook:run-cell-and-select-next');
            }""",
            index,
        )

    def answer_prompt(self, page: Page, prompt: str, line: str) -> None:
        """Type at the prompt that is open, or opens soon; an answered one stays on the page for a moment."""
        page.wait_for_function(
            """prompt => {
              const last = (name) => [...document.querySelectorAll(`.jp-Stdin-${name}`)].at(-1);
              return last('prompt')?.textContent.includes(prompt) && last('input')?.value === '';
            }""",
            arg=prompt,
            timeout=1000 * START_TIMEOUT_S,
        )
        page.locator(".jp-Stdin-input").last.fill(line)
        page.locator(".jp-Stdin-input").last.press("Enter")

    def _load(self, page: Page, url: str) -> None:
        page.goto(url, timeout=1000 * START_TIMEOUT_S)
        page.wait_for_function(IDLE, timeout=1000 * START_TIMEOUT_S)

    def close(self) -> None:
        """End the server, which ends its kernels, which end their meshes."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        psutil.wait_procs(family, timeout=15)


def set_theme(page: Page, theme: str) -> None:
    """Change JupyterLab's theme, ``JupyterLab Light`` or ``JupyterLab Dark``, and wait until the page has it."""
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    page.wait_for_function(
        "light => document.body.dataset.jpThemeLight === light",
        arg=str("Light" in theme).lower(),
        timeout=PATIENCE_MS,
    )
