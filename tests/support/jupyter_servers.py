"""A real Jupyter server, which tests start and end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

TOKEN = "secret"


class Server:
    """A real Jupyter server, without a lab."""

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", "--ServerApp.port=0"]
        command += [f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={TOKEN}", *options]
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
