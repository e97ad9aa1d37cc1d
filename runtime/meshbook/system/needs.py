"""What meshes need of the operating system and cannot do without.

A module of its own because what it looks for is used all over this room.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys

from meshbook.errors import SpawnError


def check_system() -> None:
    """Raises: SpawnError with one sentence where meshes cannot run, such as on macOS."""
    there = {
        "epoll": hasattr(select, "epoll"),
        "eventfd": hasattr(os, "eventfd"),
        "prctl": hasattr(ctypes.CDLL(None), "prctl"),
        "/proc": os.path.exists("/proc/self/fd"),
    }
    if sys.platform == "linux" and not there["epoll"]:
        raise SpawnError(
            "Something has taken select.epoll away, as gevent and eventlet do. Spawn the mesh before that, or leave "
            "select out: monkey.patch_all(select=False)."
        )
    if missing := ", ".join(name for name, is_there in there.items() if not is_there):
        raise SpawnError(
            f"Meshes run on Linux: this system ({sys.platform}) lacks {missing}. Run the notebook's kernel in a Linux "
            "container or virtual machine."
        )
