"""The worker that this process is: for what arrives here by pickle and has nobody to ask, such as a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshbook.worker import Worker

_worker: Worker | None = None


def this_worker() -> Worker | None:
    """None where the process is no rank of a mesh."""
    return _worker


def set_worker(worker: Worker) -> None:
    """Called once, by a worker that begins."""
    global _worker
    _worker = worker
