"""The Jupyter server that started this kernel, and whether it is going down.

A kernel is told to shut down in the same words when a person ends it and when the server itself ends. In the second
case the person closed the lab, not the work: the meshes should live on. By then the server has stopped to listen and
has removed the file that tells others of it, ``jpserver-PID.json``.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

CONNECT_TIMEOUT_S = 0.3


class JupyterServer:
    """The parent of this process, if that is a Jupyter server."""

    def __init__(self, info_file: Path, info: dict[str, Any]) -> None:
        self._info_file = info_file
        self._pid = info.get("pid")
        self._host, self._port = str(info.get("hostname") or "localhost"), int(info.get("port") or 0)

    @classmethod
    def find(cls) -> JupyterServer | None:
        """Return the server; None where another program has started this process."""
        from jupyter_core.paths import jupyter_runtime_dir

        pid = os.environ.get("JPY_PARENT_PID") or str(os.getppid())
        file = Path(jupyter_runtime_dir()) / f"jpserver-{pid}.json"
        try:
            return cls(file, json.loads(file.read_text()))
        except (OSError, ValueError):
            return None

    def is_going_down(self) -> bool:
        """Whether the server has stopped to serve."""
        if not self._info_file.exists():
            return True
        if not self._port or self._host in ("0.0.0.0", "::", "*", ""):
            return False
        try:
            socket.create_connection((self._host, self._port), CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
