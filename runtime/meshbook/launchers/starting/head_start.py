"""How a host agent is started, and one that is before its controller has been imported: the two import side by side.

What it writes goes into a file that has no session yet; the ticket comes when there is one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from meshbook.errors import MeshError
from meshbook.system.user_folders import log_base

AGENT = "meshbook.agent.host_agent"

LASTING = "MESHBOOK_HOST_TEMPLATE"
"""The environment variable with the path of the socket of a template of hosts that serves every process of a user."""


class _Ahead(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path


_ahead: list[_Ahead] = []


@contextlib.contextmanager
def head_start() -> Iterator[None]:
    """The first agent that is started by itself on this machine within the block has been at it since its beginning."""
    if LASTING in os.environ:
        yield
        return
    with contextlib.suppress(OSError, MeshError):  # whoever starts it then says what is wrong
        log = log_base() / f".{os.urandom(8).hex()}.log"
        _ahead.append(_Ahead(exec_agent(log, {}), log))
    collects = gc.isenabled()
    gc.disable()  # importing makes little garbage
    try:
        yield
    finally:
        if collects:
            gc.enable()
        while _ahead:
            process, log = _ahead.pop()
            process.kill()
            process.communicate()
            log.unlink(missing_ok=True)


def exec_agent(log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start an agent in an interpreter of its own, or take the one that is ahead. Raises: OSError."""
    if _ahead and not environment:
        process, written = _ahead.pop()
        written.replace(log)
        return process
    with open_log(log) as output:
        return subprocess.Popen(
            [sys.executable, "-m", "meshbook.launchers.starting.templates", AGENT],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def open_log(path: Path) -> IO[bytes]:
    """Open a file that this user alone reads, to be appended to. Raises: OSError."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb")
