"""Messages from the widget while a cell blocks the main thread.

ipykernel hands a comm message to the shell that last sent on its comm, so it waits until the cell has ended. The few
messages that are meant for our widgets are taken out before that:

    ipykernel 7    on the shell channel's thread, which reads the socket at all times
    ipykernel 6    by the main thread itself, from the wait loop of a magic; other messages are put into the queue in
                   which they would have ended up, in the order in which they came

Both need private parts of ipykernel. Where those look different nothing is done, and buttons act when the cell has
ended. No status is published for these messages: front ends take any ``idle`` for the end of the running cell.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from meshbook_extension.notebook.waiting import WHILE_WAITING
from meshbook_extension.output.publisher import JupyterMessage, frame_bytes, session_of

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel
    from zmq import Frame

_LOG = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[Mapping[str, object]], None]
"""A function that takes the content of a custom message, on any thread, and returns soon."""

Taker: TypeAlias = Callable[[JupyterMessage, list[bytes]], "Callable[[], None] | None"]
"""A function that looks at a message and its sender's identities; it returns what serves it, None if it is not ours."""

_MARK = "_meshbook_busy_comms"


class BusyComms:
    """The comms of one kernel whose messages are served while it is busy."""

    def __init__(self, kernel: IPythonKernel) -> None:
        self._kernel = kernel
        self._listeners: dict[str, Listener] = {}
        self._is_installed = False
        self._takers: dict[str, Taker] = {"comm_msg": self._take_comm}
        self._schedule: Callable[..., None] = lambda dispatch, message: None
        """The function that puts a message into ipykernel 6's queue."""

    @classmethod
    def of(cls, kernel: IPythonKernel) -> BusyComms:
        """Return the object of this kernel, made at the first call."""
        if not hasattr(kernel, _MARK):
            setattr(kernel, _MARK, cls(kernel))
        found: BusyComms = getattr(kernel, _MARK)
        return found

    def listen(self, comm_id: str, listener: Listener) -> None:
        """Give custom messages of this comm to ``listener`` alone."""
        self._listeners[comm_id] = listener
        self.install()

    def forget(self, comm_id: str) -> None:
        """Forget a comm that was closed."""
        self._listeners.pop(comm_id, None)

    def serve(self, kinds: Iterable[str], taker: Taker | None) -> None:
        """Show messages of these types to ``taker`` before the kernel has them; None: to the kernel alone."""
        for kind in kinds:
            if taker is None:
                self._takers.pop(kind, None)
            else:
                self._takers[kind] = taker

    def _drain(self) -> None:
        """Serve messages that wait in the shell socket; called on the main thread while it waits, under ipykernel 6."""
        import zmq

        if threading.current_thread() is not threading.main_thread():
            return
        assert self._kernel.shell_stream is not None
        socket, schedule = self._kernel.shell_stream.socket, self._schedule
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a message taken out must not be lost
        try:
            while int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                message = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                if not self._take(message):
                    schedule(self._kernel.dispatch_shell, message)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def install(self, *_: object) -> None:
        """Take messages from now on; not before the first cell: a kernel that is being made has no sockets yet."""
        if self._is_installed:
            return
        self._is_installed = True
        kernel = self._kernel
        thread = getattr(kernel, "shell_channel_thread", None)
        serve = getattr(kernel, "shell_channel_thread_main", None)
        stream = getattr(kernel, "shell_stream", None)
        if stream is None:
            return
        if thread is None and hasattr(kernel, "msg_queue") and hasattr(kernel, "schedule_dispatch"):
            self._schedule = kernel.schedule_dispatch
            WHILE_WAITING.append(self._drain)
        if thread is None or serve is None:
            return

        async def receive(message: list[Frame]) -> None:
            if not self._take(message):
                await serve(message)

        thread.io_loop.add_callback(lambda: stream.on_recv(receive, copy=False))

    def _take(self, message: list[Frame]) -> bool:
        """Serve ``message`` if it is ours; returns whether it was."""
        try:
            session = session_of(self._kernel)
            idents, frames = session.feed_identities(message, copy=False)
            header = frame_bytes(frames[1])
            if not any(kind.encode() in header for kind in tuple(self._takers)):
                return False
            peeked = session.deserialize(frames, content=False, copy=False)  # checks the signature, keeps no trace
            peeked["content"] = session.unpack(frame_bytes(frames[4]))
            taker = self._takers.get(peeked["msg_type"])
            serve = taker(peeked, idents) if taker is not None else None
            if serve is None:
                return False
            session.deserialize(frames, content=True, copy=False)  # now it counts as received, and cannot be sent again
        except Exception:  # whatever it is, the kernel itself says what is wrong with it
            return False
        try:
            serve()
        except Exception:
            _LOG.exception("a message of the front end could not be served")
        return True

    def _take_comm(self, message: JupyterMessage, idents: list[bytes]) -> Callable[[], None] | None:
        listener, data = self._listeners.get(message["content"].get("comm_id")), message["content"].get("data")
        if listener is None or data.get("method", "custom") != "custom":
            return None
        return lambda: listener(data.get("content", data))  # a widget's message, or that of a comm of our own
