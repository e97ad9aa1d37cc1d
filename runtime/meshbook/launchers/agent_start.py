"""The start of a host agent, here or on another machine, and advice where that has failed.

`head_start` starts one before its controller has been imported: the two import side by side. It writes to a file that
has no session yet, and gets its ticket when there is one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from meshbook.errors import MeshError, UsageError
from meshbook.system.interfaces import address_towards, family_of, own_address
from meshbook.system.user_folders import log_base

AGENT = "meshbook.agent.host_agent"
TEMPLATES = "meshbook.launchers.templates"
"""The module that an agent's interpreter runs; its argument is `AGENT`."""

LASTING = "MESHBOOK_HOST_TEMPLATE"
"""The environment variable with the path of the socket of a template of hosts that serves every process of a user."""

SAID_LINES, SAID_CHARS = 3, 400
"""The number of last lines of a log that a message has, and of their last characters."""
NO_PYTHON = "meshbook: no Python"

PYTHON_HINTS = (
    (NO_PYTHON, "Name the interpreter that has meshbook there: --python PATH"),
    ("No module named 'meshbook", "Install meshbook for it there, or name another interpreter: --python PATH"),
)


class _Ahead(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path


_ahead: list[_Ahead] = []


@contextlib.contextmanager
def head_start() -> Iterator[None]:
    """Start an agent ahead: the first launch of a single one on this machine within the block takes it."""
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
            [sys.executable, "-m", TEMPLATES, AGENT],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def open_log(path: Path) -> IO[bytes]:
    """Open a file that this user alone reads, to be appended to. Raises: OSError."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb")


def agent_script(python: str) -> str:
    """Return a script for sh that runs an agent. python: the interpreter; empty: our own path, else ``python3``."""
    pythons = [python] if python else [sys.executable, "python3"]
    words = " ".join(map(quoted_program, pythons))
    names = shlex.quote(f"{NO_PYTHON} at {' or '.join(pythons)}")
    return (
        f'for p in {words}; do command -v "$p" >/dev/null 2>&1 && '
        f'{{ "$p" -m {TEMPLATES} {AGENT}; exit $?; }}; done; echo {names} >&2; exit 127'
    )


def with_words(what: str, lines: Sequence[str] = (), hints: Iterable[tuple[str, str]] = ()) -> str:
    """Return a message with the last of some lines, and advice: the first of ``hints`` whose words are in it."""
    said = "; ".join(line.strip().rstrip(".") for line in lines[-SAID_LINES:])[-SAID_CHARS:]
    text = ": ".join(filter(None, (what, said)))
    hint = next((hint for words, hint in hints if words in text), "")
    return f"{text}. {hint}" if hint else text


def address_reaching(hosts: Iterable[str]) -> str:
    """Return the address of this machine from which the first of ``hosts`` on another machine is reached.

    Where there is none it is that of the default route.
    """
    for host in hosts:
        with contextlib.suppress(OSError):
            address = address_towards(host)
            if not address.startswith("127.") and address != "::1":
                return address
    return own_address()


def own_ip(address: str, as_in: str) -> str:
    """Return the address of this machine that a name or an address stands for. Raises: UsageError."""
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        found = []
    for ip in found:
        try:
            with socket.socket(family_of(ip), socket.SOCK_STREAM) as probe:
                probe.bind((ip, 0))
            return ip
        except OSError:
            continue
    means = f"means {', '.join(dict.fromkeys(found))}, which are others'" if found else "is unknown here"
    raise UsageError(
        f'hosts dial an address of this machine, as in {as_in}, but "{address}" {means}; '
        f"without one it is {own_address()}."
    )


def quoted_program(path: str) -> str:
    """Quote a program for a shell; ``~/`` stays the home folder over there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
