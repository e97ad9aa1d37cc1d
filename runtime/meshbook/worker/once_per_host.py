"""`meshbook.once_per_host`: on each host one rank runs a block, then the others do.

The ranks of a host that run the same call meet at a file. The first to lock it runs the block and writes how that went;
the kernel frees the lock of a rank that dies, and then the next one is the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from meshbook.actor.router import current_router, is_rank
from meshbook.errors import MeshError, UsageError
from meshbook.errors.advice import advice
from meshbook.system.processes import start_time
from meshbook.system.user_folders import private_folder

TIMEOUT_S = 1800.0
POLL_S = 0.05
KEPT_S = 86_400.0
"""The time after which a file is removed, when another one is made."""
_DONE = "done"
_used: Counter[int] = Counter()
"""The uses in each call: the n-th on one rank is the n-th on all."""


@contextlib.contextmanager
def once_per_host(timeout_s: float = TIMEOUT_S) -> Iterator[bool]:
    """Have one rank of each host run the block first, and the others when it is done: they find the files it made.

    with once_per_host():
        dataset = MNIST(root, download=True)

    It gives True on the rank that is first. All ranks of a call come to the same blocks in the same order. Outside of
    ranks the block just runs. timeout_s: the longest wait for the first one, which an interrupt ends too.
    Raises: MeshError on the others if the first one raised, or took longer; UsageError.
    """
    if not timeout_s > 0:
        raise UsageError(f"once_per_host waits a number of seconds above 0, not timeout_s={timeout_s!r}")
    if not is_rank():
        yield True
        return
    with _meeting_place().open("a+") as file:
        if not _is_first(file, timeout_s):
            yield False
            return
        try:
            yield True
            file.write(_DONE)
        except BaseException as error:
            file.write(f"{type(error).__name__}: {error}".strip() or "an error")
            raise
        finally:
            file.flush()
            fcntl.flock(file, fcntl.LOCK_UN)  # also for processes that the block has forked


def _meeting_place() -> Path:
    from meshbook.worker.process import WorkerRouter  # which stands above us

    router = current_router()
    assert isinstance(router, WorkerRouter)
    worker = router.worker
    running = worker.claims.running if threading.get_ident() == worker.main_thread else None
    call = running.id if running is not None else worker.shell.output_here
    _used[call] += 1
    folder = private_folder(Path(tempfile.gettempdir()) / f"meshbook-once-{os.getuid()}")
    for old in [each for each in folder.iterdir() if each.stat().st_mtime < time.time() - KEPT_S]:
        old.unlink(missing_ok=True)  # another rank may be quicker
    agent = os.getppid()  # which the ranks of a host have in common
    return folder / f"{agent}-{start_time(agent)}-{worker.identity.mesh}-{call}-{_used[call]}"


def _is_first(file: IO[str], timeout_s: float) -> bool:
    """Wait for the turn of this rank, and keep the file locked if it is the first. Raises: MeshError."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise MeshError(
                    f"once_per_host: the first rank of this host is still at its block after {timeout_s:g} s.\n"
                    f"  where it is: {advice().stacks}    wait longer: once_per_host(timeout_s=...)"
                ) from None
            time.sleep(POLL_S)
            continue
        file.seek(0)
        told = file.read()
        if not told:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        if told == _DONE:
            return False
        raise MeshError(f"once_per_host: the first rank of this host raised {told}")
