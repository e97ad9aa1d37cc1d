"""The kernel that Jupyter talks to; it adds start and end of the mesh to IPython's kernel.

Two threads matter here. Cells run on the main thread. ``do_shutdown`` runs on ipykernel's Control thread,
also while a cell blocks the main one, so that a shutdown or a restart never waits for a cell.

A kernel is told to shut down in the same words when a person ends it and when the Jupyter server itself ends. In the
second case the person closed the lab, not the work: the meshes should live on. By then the server has stopped to listen
and has removed the file that tells others of it, ``jpserver-PID.json``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ipykernel._version import __version__ as ipykernel_version
from ipykernel.ipkernel import IPythonKernel
from IPython.core import release

from meshbook import __version__
from meshbook.mesh import driven, states

CONNECT_TIMEOUT_S = 0.3


class JupyterServer:
    """The Jupyter server that started this process."""

    def __init__(self, info_file: Path, info: dict[str, Any]) -> None:
        self._info_file = info_file
        self._pid = info.get("pid")
        self._host, self._port = str(info.get("hostname") or "localhost"), int(info.get("port") or 0)

    @classmethod
    def find(cls) -> JupyterServer | None:
        """Return the server; None where another program has started this process."""
        from jupyter_core.paths import jupyter_runtime_dir

        pid = os.environ.get("JPY_PARENT_PID") or str(os.getppid())
        file = Path(jupyter_runtime_dir()) / f"jpserver-{pid}.json"
        try:
            return cls(file, json.loads(file.read_text()))
        except (OSError, ValueError):
            return None

    def is_going_down(self) -> bool:
        """Whether the server has stopped to serve."""
        if not self._info_file.exists():
            return True
        if not self._port or self._host in ("0.0.0.0", "::", "*", ""):
            return False
        try:
            socket.create_connection((self._host, self._port), CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


EXTENSION = "meshbook_extension"
SHUTDOWN_TIMEOUT_S = 1.5
"""The time that a shutdown has to stop the meshes; Jupyter kills a kernel that takes over 2.5 s to end."""

LEAVE_TIMEOUT_S = 1.0
"""The time that hosts have to acknowledge messages; unacknowledged messages are lost with this kernel."""

PREWARM_AFTER_S = 0.3
"""The time before the host is warmed up: the first prompt comes first, and may need no host."""

TORCH_AFTER_S = 3.0
"""The time after a cell at which torch is imported here too, where ranks have it, for its first use."""

SWITCH_INTERVAL_S = 1e-4
"""The time after which a busy cell hands Python's lock to the thread that serves the mesh.

With Python's own 5 ms, a busy thread in the kernel raises a broadcast to 8 ranks from 0.5 to 5.9 ms; with
0.1 ms, to 0.7 ms.
"""


class MeshbookKernel(IPythonKernel):
    """IPython's kernel, with ``%mesh`` and ``%%mesh`` at hand and no process left behind."""

    implementation = "meshbook"
    implementation_version = __version__

    @property
    def banner(self) -> str:  # type: ignore[override]
        """The text that a console shows first."""
        return (
            f"Meshbook {__version__} (Python {sys.version.split()[0]}, IPython {release.version}, "
            f"ipykernel {ipykernel_version})\n"
            "Start ranks with %mesh spawn gpus=4, run a cell on them with %%mesh; %mesh? tells the rest.\n"
        )

    def start(self) -> None:
        """Load the extension, begin to serve the front end, and warm the local host up behind its back."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._server = JupyterServer.find()
        self._load_extension()
        gc.enable()
        super().start()
        if os.environ.get("MESHBOOK_PREWARM", "1") != "0":
            timer = threading.Timer(PREWARM_AFTER_S, self._prewarm)
            timer.name, timer.daemon = "meshbook.prewarm", True  # a kernel that ends at once does not wait for it
            timer.start()  # and `_end_meshes` ends what it began
            self._idle: object = None
            assert self.shell is not None
            self.shell.events.register("pre_run_cell", self._end_idle)
            self.shell.events.register("post_run_cell", self._begin_idle)

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """Stop the meshes or leave them, then end the running cell, then IPython; on the Control thread.

        A restart leaves them to the next kernel, and so does the end of the Jupyter server itself.
        """
        self._end_meshes(leave=restart or (self._server is not None and self._server.is_going_down()))
        # Outside a cell ipykernel ignores SIGINT, so this ends what runs and nothing else.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        reply = super().do_shutdown(restart)
        if inspect.isawaitable(reply):
            reply = await reply
        return dict(reply)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """Wake the loop of a cell that awaits at an interrupt, which ipykernel's own handler does not."""
        loop = asyncio.get_running_loop()
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def cancel_and_wake(signum: int, frame: FrameType | None) -> None:
                cancel(signum, frame)
                loop.call_soon_threadsafe(lambda: None)

            signal.signal(signal.SIGINT, cancel_and_wake)
            yield

    def _load_extension(self) -> None:
        assert self.shell is not None
        try:
            self.shell.extension_manager.load_extension(EXTENSION)
        except Exception as error:
            self.log.exception("The Meshbook extension could not be loaded.")
            events = self.shell.events
            text = (
                "The Meshbook extension could not be loaded, so %mesh and %%mesh are missing.\n"
                f"{''.join(traceback.format_exception_only(error))}"
                f"Look for the cause with: import {EXTENSION}\n"
            )

            def show(*_info: object) -> None:  # at the first cell, since front ends drop earlier output
                events.unregister("pre_run_cell", show)
                print(text, file=sys.stderr)

            events.register("pre_run_cell", show)

    def _prewarm(self) -> None:
        session = getattr(self.shell, "_meshbook_session", None)
        if session is not None:
            from meshbook_extension.reattach.restore import AutoAttach

            session.part(AutoAttach).wait()  # a mesh that comes back brings its host
        try:
            driven.prewarm()
        except Exception:
            self.log.warning("The local host could not be warmed up; a spawn will tell why.", exc_info=True)

    def _begin_idle(self, *_info: object) -> None:
        self._end_idle()
        if "torch" not in sys.modules and threading.current_thread() is threading.main_thread():
            self._idle = self.io_loop.call_later(TORCH_AFTER_S, self._import_torch)

    def _end_idle(self, *_info: object) -> None:
        """Forget the import, as a cell begins; in a subshell the main thread stays idle."""
        if self._idle is not None and threading.current_thread() is threading.main_thread():
            self.io_loop.remove_timeout(self._idle)
            self._idle = None

    def _import_torch(self) -> None:
        """Import torch on the main thread, as a cell would: other threads never see a torch that is half imported."""
        session = getattr(self.shell, "_meshbook_session", None)
        if session is not None and any(mesh.alive and states.is_grouped(mesh) for mesh in session.meshes.values()):
            with contextlib.suppress(Exception):  # the cell that wants it says what is wrong
                importlib.import_module("torch")

    def _end_meshes(self, *, leave: bool) -> None:
        """Leave the meshes to the next kernel, or stop them."""
        try:
            if (session := getattr(self.shell, "_meshbook_session", None)) is not None:
                from meshbook_extension.reattach.notebook_state import StateWriter

                session.part(StateWriter).close(leave=leave)
            if leave:
                driven.detach(timeout_s=LEAVE_TIMEOUT_S)
            else:
                driven.shutdown(timeout_s=SHUTDOWN_TIMEOUT_S)
        except Exception:
            then = "the next kernel takes them over all the same" if leave else "their processes end after this one"
            self.log.exception(f"The meshes were not {'left' if leave else 'stopped'} in order; {then}.")
