"""debugpy's tracer (pydevd) in a rank: how it is loaded, begun, ended, and kept out of what is not the person's code.

It has no public face for this: written against debugpy 1.8, its inner names included.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType

from meshbook.concurrency.forks import at_fork
from meshbook.concurrency.patches import patch, unpatch
from meshbook.source.location import PACKAGE

END_TIMEOUT_S = 3.0
_RUNNING, _SUSPENDED = 1, 2  # pydevd's STATE_RUN, STATE_SUSPEND
_AT_BREAKPOINT = 111  # pydevd's CMD_SET_BREAK

_SETTINGS = {
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # no advice on options of Python in a rank's output
    "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1",  # a step goes from one statement of a cell to the next
}
"""What pydevd reads from the environment when it is imported, beside `_context`."""

_watches_forks = threading.Event()


def load_pydevd() -> ModuleType:
    """Import debugpy's tracer. Raises: ImportError."""
    hook = sys.breakpointhook
    settings = {**_SETTINGS, "PYDEVD_IPYTHON_CONTEXT": _context()}
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        importlib.import_module("debugpy.server.api")  # puts its own pydevd in place
        pydevd = importlib.import_module("pydevd")
    finally:
        sys.breakpointhook = hook
        for name in ours:
            del os.environ[name]
    if not _watches_forks.is_set():
        _watches_forks.set()
        at_fork(in_child=lambda: _leave_child(pydevd))
    return pydevd


def _context() -> str:
    """The file and functions that run the statements of a cell, as pydevd wants them; a step ends where they begin."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    file = Path(shell.run_code.__code__.co_filename).name if shell else "interactiveshell.py"
    return f"{file}, run_code, run_ast_nodes"


def _leave_child(pydevd: ModuleType) -> None:
    """A process that the rank has forked (a DataLoader's worker) has no debugger: nobody could let it go on."""
    tracer = pydevd.get_global_debugger()
    if tracer is not None:
        tracer.pydb_disposed = True
        tracer.disable_tracing()
        pydevd.set_global_debugger(None)


def hidden_folders() -> tuple[str, ...]:
    """Folders of code that a person who steps through a cell does not want to see."""
    shell = getattr(sys.modules.get("IPython"), "__file__", None)
    between = (contextlib.__file__, str(Path(asyncio.__file__).parent))
    return (PACKAGE.rstrip("/"), *between, *((str(Path(shell).parent),) if shell else ()))


def start_tracing(pydevd: ModuleType, sock: socket.socket) -> None:
    """Have pydevd speak over ``sock``, in place of a TCP connection that it would make."""
    import debugpy

    patch(pydevd, "start_client", lambda host, port: sock)
    try:
        pydevd.settrace(
            host="127.0.0.1",
            port=0,
            suspend=False,
            wait_for_ready_to_run=False,
            patch_multiprocessing=False,
            notify_stdin=False,
            dont_trace_start_patterns=(str(Path(debugpy.__file__).parent), PACKAGE),
        )
        pydevd.get_global_debugger().disable_tracing()  # of this thread
    finally:
        unpatch(pydevd, "start_client")


def stop_tracing(pydevd: ModuleType, visit_main: Callable[[Callable[[FrameType | None], object]], None]) -> None:
    """End pydevd, so that a next session may begin, and free the main thread of the tracing at once.

    Other threads that ran meanwhile keep a trace function that does nothing, as long as they live.
    """
    tracer = pydevd.get_global_debugger()
    pydevd.stoptrace()
    deadline = time.monotonic() + END_TIMEOUT_S
    while pydevd.get_global_debugger() is tracer is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # its own threads end it too, and only then may the next one begin
    if pydevd.get_global_debugger() is tracer:
        pydevd.set_global_debugger(None)
    for thread in threading.enumerate():
        forget_step(thread)
    if tracer is not None:
        visit_main(lambda _frame: tracer.disable_tracing())


def forget_step(thread: threading.Thread) -> None:
    """A thread that was stopped, or about to, when the tracing ended, is not when it begins again."""
    info = getattr(thread, "additional_info", None)
    if info is not None:
        info.pydev_state, info.pydev_step_cmd, info.pydev_step_stop = _RUNNING, -1, None


def stop_at(pydevd: ModuleType, frame: FrameType) -> None:
    """Stop the running thread in ``frame``, until the person lets it go on."""
    tracer, thread = pydevd.get_global_debugger(), threading.current_thread()
    info = pydevd.set_additional_thread_info(thread)
    info.is_tracing += 1  # as in a trace function: what runs in here is nobody's to step through
    try:
        tracer.set_suspend(thread, _AT_BREAKPOINT)
        tracer.do_wait_suspend(thread, frame, "line", None)
    finally:
        info.is_tracing -= 1


def is_suspended(thread: threading.Thread) -> bool:
    """Whether the thread stands at a breakpoint, or after a step."""
    info = getattr(thread, "additional_info", None)
    if info is None or getattr(info, "pydev_state", None) != _SUSPENDED:
        return False
    return bool(getattr(info, "is_in_wait_loop", True))  # older ones do not say
