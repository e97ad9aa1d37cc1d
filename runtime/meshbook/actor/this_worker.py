"""The worker that this process is: for what arrives here by pickle and has nobody to ask, such as a reference."""

from __future__ import annotations

from typing import Any

_worker: Any = None


def this_worker() -> Any:
    """Its `meshbook.worker.worker.Worker`; None where the process is no rank of a mesh."""
    return _worker


def set_worker(worker: object) -> None:
    """Called once, by a worker that begins."""
    global _worker
    _worker = worker
