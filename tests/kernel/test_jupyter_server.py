"""JupyterLab is closed, and opened again: its notebooks find their meshes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient

Watch = Callable[[Iterable[psutil.Process]], None]
TOKEN = "secret"


class Server:
    """A real Jupyter server, without a lab."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", "--ServerApp.port=0"]
        command += [f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={TOKEN}"]
        self.log = (root / "server.log").open("ab")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.info = self._wait_for_info()

    def ask(self, method: str, path: str, content: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.info['url']}{path}",
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={"Authorization": f"token {TOKEN}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def open(self, notebook: str) -> tuple[str, BlockingKernelClient]:
        """Open a notebook: the id of its session, and a client of its kernel."""
        content = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"name": "meshbook"}}
        session = self.ask("POST", "api/sessions", content)
        file = Path(self.info["runtime_dir"]) / f"kernel-{session['kernel']['id']}.json"
        client = BlockingKernelClient(connection_file=str(file))
        client.load_connection_file()
        client.start_channels()
        deadline = time.monotonic() + 60
        while True:
            try:
                client.wait_for_ready(timeout=60)
                return session["id"], client
            except RuntimeError:  # a kernel that is still starting passes for dead, since it has no heartbeat yet
                assert time.monotonic() < deadline

    def end(self, *signals: signal.Signals) -> None:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.2)
        self.process.wait(30)
        self.log.close()

    def _wait_for_info(self) -> dict[str, Any]:
        from jupyter_core.paths import jupyter_runtime_dir

        file = Path(jupyter_runtime_dir()) / f"jpserver-{self.process.pid}.json"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                info = json.loads(file.read_text())
                urllib.request.urlopen(f"{info['url']}api?token={TOKEN}", timeout=5).close()
                return {**info, "runtime_dir": jupyter_runtime_dir()}
            except (OSError, ValueError):
                time.sleep(0.1)
        raise AssertionError((self.root / "server.log").read_text())


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
