"""JupyterLab is closed, and opened again: its notebooks find their meshes."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_servers import Server

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("no_lasting_template")]

Watch = Callable[[Iterable[psutil.Process]], None]


@pytest.fixture
def root(installed_kernelspec: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="mb"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    monkeypatch.setenv("MESHBOOK_LEASE_S", "300")
    (root / "run").mkdir(mode=0o700)
    yield root
    shutil.rmtree(root, ignore_errors=True)


def run(client: BlockingKernelClient, code: str) -> str:
    """The text that a cell shows; it must succeed."""
    texts: list[str] = []

    def take(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])
        elif message["msg_type"] == "display_data":
            texts.append(message["content"]["data"]["text/plain"])

    reply = client.execute_interactive(code, timeout=60, output_hook=take, allow_stdin=False)["content"]
    assert reply["status"] == "ok", reply
    return "".join(texts)


@pytest.mark.some("Ctrl-C")
@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)], ids=["SIGTERM", "Ctrl-C"])
def test_a_mesh_outlives_the_server(root: Path, watch: Watch, signals: tuple[signal.Signals, ...]) -> None:
    server = Server(root)
    try:
        _, client = server.open("train.ipynb")
        run(client, "%mesh spawn gpus=2 --device cpu")
        run(client, "%%mesh\nkept = rank + 40")
        kernel = psutil.Process(int(run(client, "import os; print(os.getpid())")))
        family = kernel.children(recursive=True)
        watch(family)
        client.stop_channels()
    finally:
        server.end(*signals)
    assert not [p for p in psutil.wait_procs([kernel], timeout=15)[1] if p.status() != psutil.STATUS_ZOMBIE]
    assert all(process.is_running() for process in family)

    server = Server(root)
    try:
        session, client = server.open("train.ipynb")
        assert 'attached to mesh "main" again: gpus=2, cpu\n' in run(client, "1")
        assert "[0] 40" in run(client, "%%mesh\nkept")
        server.ask("DELETE", f"api/sessions/{session}")
        client.stop_channels()
        assert not [p for p in psutil.wait_procs(family, timeout=20)[1] if p.is_running()]
    finally:
        server.end(signal.SIGTERM)
