"""The way to the front end: a sink per cell, and the one thread that writes to the sinks.

Output of ranks may come at any time, also after its cell has ended, and Jupyter attributes a message to a cell by its
parent header. So a sink keeps the parent that was there when its cell began, and sends with it itself: a ``print`` from
a thread depends on the version of ipykernel and mostly hits another cell. In a terminal, and inside of ``%%capture``,
there is no parent, and a sink writes to sys.stdout.

Where no person is at the notebook (nbclient, papermill), output for a cell that has ended is dropped: there it goes to
the cell that runs, or to the next one.

The publisher's thread is the only one that writes to sinks. Any thread with something to show schedules the moment; the
runtime's I/O thread, which brings the output, never waits here.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel
    from IPython.core.interactiveshell import InteractiveShell
    from jupyter_client.session import Session
    from zmq import Frame

Content: TypeAlias = Mapping[str, object]
JupyterMessage: TypeAlias = dict[str, Any]
"""A message of Jupyter's protocol, or its content."""

BARS_WIDTH = 160
"""Columns for progress bars in a terminal, which share one line there."""


class CellSink(Protocol):
    """A sink, to which the output of one cell goes."""

    replaces: bool
    """Whether an update of rich output takes the place of the earlier one, and is not shown below it."""

    def stream(self, name: str, text: str) -> None:
        """Append to ``stdout`` or ``stderr``."""

    def display(self, data: Content, metadata: Content, display_id: str | None = None, update: bool = False) -> None:
        """Show rich output, or put other data in the place of an earlier one with this id."""

    def bars(self, lines: Sequence[str]) -> None:
        """Show progress bars in the place of those shown before; without lines, take those away."""


def is_attended(parent: JupyterMessage) -> bool:
    """Whether a person is at the front end that sent a request: only such a front end shows late output."""
    return bool((parent.get("content") or {}).get("allow_stdin", True))


class KernelSink:
    """A sink that sends to the front ends of an ipykernel (6.17 to 7) as output of the request ``parent``."""

    replaces = True

    def __init__(self, kernel: IPythonKernel, parent: JupyterMessage) -> None:
        self._kernel = kernel
        self._parent = dict(parent)
        self._is_attended = is_attended(parent)
        self._bars_id = ""

    def stream(self, name: str, text: str) -> None:
        self._send("stream", {"name": name, "text": text}, f"stream.{name}")

    def display(self, data: Content, metadata: Content, display_id: str | None = None, update: bool = False) -> None:
        transient = {"display_id": display_id} if display_id else {}
        content = {"data": dict(data), "metadata": dict(metadata), "transient": transient}
        self._send("update_display_data" if update else "display_data", content, "display_data")

    def bars(self, lines: Sequence[str]) -> None:
        has_bars, self._bars_id = bool(self._bars_id), self._bars_id or uuid.uuid4().hex
        self.display({"text/plain": "\n".join(lines)}, {}, self._bars_id, update=has_bars)

    def _send(self, message: str, content: JupyterMessage, topic: str) -> None:
        if self._is_attended:
            self._send_as(message, content, topic, self._parent)
        else:
            served_cell.send(functools.partial(self._send_as, message, content, topic))

    def _send_as(self, message: str, content: JupyterMessage, topic: str, parent: JupyterMessage) -> None:
        kernel = self._kernel
        session_of(kernel).send(kernel.iopub_socket, message, content, parent=parent, ident=topic.encode())


class ServedCell:
    """The request of the running cell, and the messages that wait for the next one."""

    def __init__(self) -> None:
        self.parent: JupyterMessage = {}
        """The request; empty when no cell runs."""
        self._held: list[Callable[[JupyterMessage], None]] = []
        self.lock = threading.Lock()
        """Held to change `parent`, and to publish what must come before the end of the cell."""

    def begin(self, shell: InteractiveShell) -> None:
        """Note that a cell of ``shell`` runs, and send what has waited for one."""
        parent = parent_of(shell)
        with self.lock:
            self.parent, held, self._held = parent, self._held, []
        for send in held:
            send(parent)

    def end(self, *_: object) -> None:
        """Note that the cell has ended."""
        with self.lock:
            self.parent = {}

    def send(self, send: Callable[[JupyterMessage], None]) -> None:
        """Send with the request of the running cell, or of the next; from any thread."""
        with self.lock:
            if not (parent := self.parent):
                self._held.append(send)
                return
        send(parent)


served_cell = ServedCell()


class StreamSink:
    """A sink that writes to the streams of the cell's beginning: a terminal's, or those of ``%%capture``."""

    replaces = False

    def __init__(self, publish_display: Callable[..., None]) -> None:
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._publish_display = publish_display
        self._has_bars = False

    def stream(self, name: str, text: str) -> None:
        self._clear_bars()
        self._streams[name].write(text)
        self._streams[name].flush()

    def display(self, data: Content, metadata: Content, display_id: str | None = None, update: bool = False) -> None:
        self._clear_bars()
        transient = {"display_id": display_id} if display_id else {}
        self._publish_display(dict(data), dict(metadata), transient=transient, update=update)

    def bars(self, lines: Sequence[str]) -> None:
        self._clear_bars()
        stream = self._streams["stdout"]
        if lines and stream.isatty():
            stream.write("  ".join(lines)[:BARS_WIDTH])
            stream.flush()
            self._has_bars = True

    def _clear_bars(self) -> None:
        if self._has_bars:
            self._streams["stdout"].write("\r\x1b[K")
            self._has_bars = False


def sink_for(shell: InteractiveShell) -> CellSink:
    """Return the sink for the cell that ``shell`` runs now; to be called on the thread that runs it."""
    kernel = kernel_of(shell)
    captured = getattr(sys.stdout, "pub_thread", None) is None
    if kernel is None or captured:
        return StreamSink(shell.display_pub.publish)
    return KernelSink(kernel, parent_of(shell))


class ProgressLine:
    """The line below the running cell on the progress of a start or a map, until that is done."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._sink: CellSink | None = None

    def show(self, text: str) -> None:
        """Replace the line; an empty text takes it away. Work that no cell waits for shows none."""
        if threading.current_thread() is not threading.main_thread():
            return
        if text and self._sink is None:
            self._sink = sink_for(self._shell)
        if self._sink is not None:
            self._sink.bars([text] if text else [])
        if not text:
            self._sink = None


def kernel_of(shell: InteractiveShell) -> IPythonKernel | None:
    """Return the kernel that ``shell`` runs in; None in a terminal."""
    kernel: IPythonKernel | None = getattr(shell, "kernel", None)
    return kernel


def session_of(kernel: IPythonKernel) -> Session:
    """Return the session that makes and reads a kernel's messages, which it has as soon as it serves."""
    assert kernel.session is not None
    return kernel.session


def parent_of(shell: InteractiveShell) -> JupyterMessage:
    """Return the request that ``shell`` serves now; empty without a kernel."""
    kernel = kernel_of(shell)
    return dict(kernel.get_parent("shell") or {}) if kernel is not None else {}


def frame_bytes(frame: bytes | Frame) -> bytes:
    """Return the bytes of a part of a message, whichever form the socket gave it."""
    return frame if isinstance(frame, bytes) else frame.bytes


class Scheduled:
    """An object that publishes something from time to time."""

    def pump(self, now: float) -> float | None:
        """Publish everything due by ``now``; returns when to call again, None: when it is scheduled again."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Take the error that `pump` raised, for callers that wait; mostly there are none."""


class Publisher:
    """The thread that publishes; starts with the first output, ends with `stop`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Scheduled, float] = {}
        self._thread: threading.Thread | None = None
        self.is_stopping = False
        """Whether the thread ends, so that everything is due now."""
        self._wakes_at = 0.0
        """The time until which the thread waits."""

    def schedule(self, output: Scheduled, at: float) -> None:
        """Call ``output.pump`` at ``at`` (monotonic clock), or sooner if that was asked for. From any thread."""
        with self._changed:
            if self._due.get(output, at + 1) <= at or self.is_stopping:
                return
            self._due[output] = at
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="meshbook.publish", daemon=True)
                self._thread.start()
            if at < self._wakes_at:
                self._changed.notify()

    def schedule_unless(self, output: Scheduled, at: float, is_over: Callable[[], bool]) -> None:
        """Schedule the next look at something that may have ended since this one began. From any thread."""
        self.schedule(output, at)
        if is_over():  # then nothing else takes it off any more
            self.forget(output)

    def forget(self, output: Scheduled) -> None:
        """Drop an output that has nothing to publish any more. From any thread."""
        with self._changed:
            self._due.pop(output, None)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Publish everything that is there and end the thread. Idempotent."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        while (ready := self._wait()) is not None:
            for output in ready:
                try:
                    again = output.pump(time.monotonic())
                except Exception as error:
                    traceback.print_exc()
                    output.fail(error)
                    continue
                if again is not None:
                    self.schedule(output, again)

    def _wait(self) -> list[Scheduled] | None:
        """Wait for the next outputs that are due; returns None when all is published and the end has come."""
        with self._changed:
            while True:
                now = time.monotonic()
                ready = [output for output, at in self._due.items() if at <= now or self.is_stopping]
                if ready or self.is_stopping:
                    for output in ready:
                        del self._due[output]
                    return ready or None
                self._wakes_at = min(self._due.values(), default=math.inf)
                self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
