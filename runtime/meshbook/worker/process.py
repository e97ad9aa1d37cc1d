"""The process of a rank: what it does around its `meshbook.worker.worker.Worker`, from its fork to its end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref

from meshbook.actor.router import set_own_router
from meshbook.shell.shell import RankShell
from meshbook.worker.open_files import write_buffers
from meshbook.worker.router import WorkerRouter
from meshbook.worker.worker import Worker


def run_worker(shell: RankShell, call_fd: int, urgent_fd: int, mail_fd: int, stdout_fd: int, stderr_fd: int) -> None:
    """Be a worker until the agent says otherwise; never returns. Called in a fresh fork of the template."""
    code = 1
    gc.enable()
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(source, target)
            os.close(source)
        worker = Worker(shell, call_fd, urgent_fd, mail_fd)
        router = WorkerRouter(worker)
        set_own_router(lambda: router, takes_all=True)
        worker.begin()
        worker.serve_calls()
        worker.registry.end_all()
        _keep_operators()
        atexit._run_exitfuncs()
        write_buffers()
        worker.shell.flush()
        code = 0
    except BrokenPipeError:
        pass  # the agent is gone, and we go with it
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(code)


def _keep_operators() -> None:
    """Have PyTorch not take back the operators that it has defined: 30 ms of each rank's end, for nobody."""
    registry: dict[weakref.finalize[..., object], object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        if (alive := finalizer.peek()) is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False
