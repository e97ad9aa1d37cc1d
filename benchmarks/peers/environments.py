"""One virtual environment per peer under ``.bench/``, made on first use.

Torch goes in first and pinned: a peer that pulls it in by itself may fetch gigabytes of CUDA with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".bench"


class Peer(NamedTuple):
    """``requirement`` is what pip installs beside torch; empty for meshbook, which runs where we run."""

    name: str
    requirement: str
    module: str


PEERS = (
    Peer("meshbook", "", "benchmarks.peers.on_meshbook"),
    Peer("monarch", "torchmonarch", "benchmarks.peers.on_monarch"),
    Peer("ray", "ray", "benchmarks.peers.on_ray"),
)


class InstallError(Exception):
    """A peer's environment could not be made; the message ends with pip's own last lines."""


def python_of(peer: Peer, *, timeout_s: float = 1800) -> Path:
    """Return the interpreter that has the peer, making its environment when there is none.

    Raises: InstallError when pip fails or takes longer than ``timeout_s``.
    """
    if not peer.requirement:
        return Path(sys.executable)
    folder = FOLDER / peer.name
    python, done = folder / "bin" / "python", folder / ".installed"
    wanted = f"{TORCH}\n{peer.requirement}\n"
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"{peer.name}: making {folder.relative_to(ROOT)} (some minutes, once)", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], timeout_s)
    for requirements in ([TORCH], ["numpy", "psutil", "pytest", peer.requirement, TORCH]):
        _run([str(python), "-m", "pip", "install", "--quiet", *requirements], timeout_s)
    done.write_text(wanted)
    return python


def version_of(peer: Peer, python: Path) -> str:
    """Return the installed version of the peer, "unknown" when its metadata does not say."""
    code = f"import importlib.metadata as m; print(m.version({peer.requirement or peer.name!r}))"
    answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
    return answer.stdout.strip() or "unknown"


def _run(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{' '.join(command)} took over {timeout_s:.0f} s") from error
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise InstallError(f"{' '.join(command)} failed:\n{tail}")
