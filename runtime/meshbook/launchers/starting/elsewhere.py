"""What starts an agent on another machine, whoever runs it there, and what to do where that has failed."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Iterable

from meshbook.errors import UsageError
from meshbook.launchers.starting.head_start import AGENT
from meshbook.system.interfaces import family_of, own_address

NO_PYTHON = "meshbook: no Python"

PYTHON_HINTS = (
    (NO_PYTHON, "Name the interpreter that has meshbook there: --python PATH"),
    ("No module named 'meshbook", "Install meshbook for it there, or name another interpreter: --python PATH"),
)


def agent_script(python: str) -> str:
    """A script for sh that runs an agent. python: the interpreter; empty: the path of our own, else ``python3``."""
    pythons = [python] if python else [sys.executable, "python3"]
    words = " ".join(map(quoted_program, pythons))
    names = shlex.quote(f"{NO_PYTHON} at {' or '.join(pythons)}")
    return (
        f'for p in {words}; do command -v "$p" >/dev/null 2>&1 && '
        f'{{ "$p" -m meshbook.launchers.starting.templates {AGENT}; exit $?; }}; done; echo {names} >&2; exit 127'
    )


def with_hint(said: str, hints: Iterable[tuple[str, str]]) -> str:
    """What was said, and what to do about it: the first of ``hints`` whose words are in it."""
    hint = next((hint for words, hint in hints if words in said), "")
    return f"{said}. {hint}" if hint else said


def own_ip(address: str, as_in: str) -> str:
    """The address of this machine that a name or an address stands for. Raises: UsageError."""
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
    """As a shell takes it; ``~/`` stays the home over there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
