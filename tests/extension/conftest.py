"""A notebook's shell in this process, without a kernel, and a mesh for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from jupyter_core.utils import ensure_event_loop
from traitlets.config import Config

import meshbook
import meshbook_extension

sys.path.insert(0, str(Path(__file__).parent))  # for `fakes`


def strip_ansi(text: str) -> str:
    """The text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class Ran:
    """What a cell showed, and how it ended."""

    def __init__(self, result: Any, captured: Any, displays: list[dict[str, Any]]) -> None:
        self.error: BaseException | None = result.error_in_exec or result.error_before_exec
        self.stdout: str = strip_ansi(captured.stdout)
        self.stderr: str = strip_ansi(captured.stderr)
        self.displays: list[dict[str, Any]] = [display["data"] for display in displays]

    @property
    def plain(self) -> str:
        """The text of all displays."""
        return "".join(data.get("text/plain", "") + "\n" for data in self.displays)


class Notebook:
    """Runs cells as a person would."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]

    def try_to_run(self, cell: str) -> Ran:
        """Run a cell that may fail."""
        displays = CapturingDisplayPublisher()
        with pytest.MonkeyPatch.context() as patch, capture_output(display=False) as captured:
            patch.setattr(self.shell, "display_pub", displays)
            result = self.shell.run_cell(cell, store_history=True)
        return Ran(result, captured, displays.outputs)

    def run(self, cell: str) -> Ran:
        """Run a cell that must not fail."""
        ran = self.try_to_run(cell)
        assert ran.error is None, ran.error
        return ran

    def fail(self, cell: str) -> str:
        """Run a cell that must fail; returns what the person sees of it."""
        ran = self.try_to_run(cell)
        assert ran.error is not None, ran.stdout
        return ran.stdout


@pytest.fixture(scope="session")
def jupyter_loop() -> None:
    """jupyter_client's event loop, which lasts as long as this process."""
    ensure_event_loop()


@pytest.fixture(scope="module")
def empty_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A shell with the extension, and no mesh."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    meshbook_extension.load_ipython_extension(shell)
    yield Notebook(shell)
    meshbook_extension.unload_ipython_extension(shell)
    meshbook.shutdown()
    shell.cleanup()


@pytest.fixture(scope="module")
def notebook(empty_notebook: Notebook) -> Notebook:
    """The same with four ranks."""
    empty_notebook.run("%mesh spawn gpus=4 --device cpu")
    return empty_notebook
