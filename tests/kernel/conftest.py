"""Kernels for the tests: registered by our own command, in folders of their own, gone when a test ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_core.utils import ensure_event_loop

from benchmarks.running_kernel import RunningKernel

CELL_TIMEOUT_S = 60


@pytest.fixture(scope="session")
def jupyter_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Jupyter and IPython see none of the user's settings; returns the prefix for kernelspecs."""
    ensure_event_loop()  # jupyter_client's own, which lasts as long as this process
    root = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(root / name.lower()))
        patch.setenv("JUPYTER_PATH", str(root / "prefix" / "share" / "jupyter"))
        yield root / "prefix"


@pytest.fixture(scope="session")
def installed_kernelspec(jupyter_folders: Path) -> Path:
    """The folder of the kernelspec, as ``python -m meshbook_kernel install`` wrote it."""
    subprocess.run(
        [sys.executable, "-m", "meshbook_kernel", "install", "--prefix", str(jupyter_folders)],
        check=True,
        timeout=60,
    )
    return jupyter_folders / "share" / "jupyter" / "kernels" / "meshbook"


class Kernel(RunningKernel):
    """A running kernel and the client that talks to it."""

    @property
    def process(self) -> psutil.Process:
        """The kernel's own process."""
        return psutil.Process(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

    def family(self) -> list[psutil.Process]:
        """The kernel and everything it started, however deep."""
        return [self.process, *self.process.children(recursive=True)]

    def run(self, code: str, timeout_s: float = CELL_TIMEOUT_S, *, is_attended: bool = False) -> Cell:
        """Execute ``code``; a cell that fails returns as any other. is_attended: as by a front end with a person."""
        cell = Cell()
        cell.reply = self.client.execute_interactive(
            code, timeout=timeout_s, output_hook=cell.add, allow_stdin=is_attended, stop_on_error=False
        )["content"]
        return cell

    def value(self, expression: str) -> str:
        """The repr of ``expression`` in the kernel's namespace."""
        reply = self.client.execute_interactive(
            "",
            user_expressions={"value": expression},
            timeout=CELL_TIMEOUT_S,
            output_hook=lambda _message: None,
        )
        answer = reply["content"]["user_expressions"]["value"]
        assert answer["status"] == "ok", answer
        return str(answer["data"]["text/plain"])

    def start(self, code: str) -> str:
        """Send ``code`` and return at once, with the id of the request."""
        return self.execute(code)

    def wait_for_text(self, text: str, timeout_s: float = CELL_TIMEOUT_S) -> None:
        """Read output until ``text`` shows in a stream or a display."""
        shown = Cell()
        while text not in shown.text():
            message = self.client.get_iopub_msg(timeout=timeout_s)
            if message["msg_type"] in ("stream", "display_data"):
                shown.add(message)


def left_of(processes: list[psutil.Process], timeout_s: float = 15.0) -> list[psutil.Process]:
    """Return the processes that still run after ``timeout_s``."""
    return [process for process in psutil.wait_procs(processes, timeout=timeout_s)[1] if process.is_running()]


class Cell:
    """What one cell showed and how it ended."""

    def __init__(self) -> None:
        self.reply: dict[str, Any] = {}
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def add(self, message: dict[str, Any]) -> None:
        """Keep an output message."""
        self.messages.append((message["msg_type"], message["content"]))

    def text(self, stream: str | None = None) -> str:
        """The text of one stream; of both, and of displays."""
        return "".join(
            content["text"] if kind == "stream" else f"{content['data'].get('text/plain', '')}\n"
            for kind, content in self.messages
            if (kind == "stream" and stream in (None, content["name"])) or (kind == "display_data" and stream is None)
        )

    @property
    def ok(self) -> bool:
        """Whether the reply says that the cell succeeded."""
        return bool(self.reply["status"] == "ok")


@pytest.fixture(scope="session")
def kernel_type(installed_kernelspec: Path) -> type[Kernel]:
    """For kernels that several tests share."""
    return Kernel


@pytest.fixture(scope="module")
def shared_kernel(installed_kernelspec: Path) -> Iterator[Kernel]:
    """The kernel of a file's tests that leave it as it was."""
    kernel = Kernel("meshbook")
    kernel.wait_for_ready()
    yield kernel
    family = kernel.process.children(recursive=True)
    kernel.close()
    psutil.wait_procs(family, timeout=15)


@pytest.fixture
def start_kernel(
    installed_kernelspec: Path, watch: Callable[[list[psutil.Process]], None]
) -> Iterator[Callable[..., Kernel]]:
    """Start kernels that end with the test, and all of their processes too: ``start_kernel("meshbook", env=...)``."""
    kernels: list[Kernel] = []

    def start(name: str = "meshbook", **options: Any) -> Kernel:
        kernels.append(Kernel(name, **options))
        kernels[-1].wait_for_ready()
        return kernels[-1]

    yield start
    for kernel in kernels:
        if kernel.manager.is_alive():
            watch(kernel.family())
        kernel.close()


@pytest.fixture
def own_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sessions of other tests are not in sight; leases are short enough for a test that fails."""
    root = Path(tempfile.mkdtemp(prefix="mb"))  # short: the path of a socket has 107 characters
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    monkeypatch.setenv("MESHBOOK_LEASE_S", "120")
    (root / "run").mkdir(mode=0o700)
    yield root
    shutil.rmtree(root, ignore_errors=True)
