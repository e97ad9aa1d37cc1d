"""The pipe behind a rank's stdout or stderr, whatever user code does to the descriptor.

    text ──> fd 1 or 2; to where user code has put it, if it has (dup2 of a file)
    marks ──> a duplicate that user code does not know: always to the agent

A descriptor that was closed, or leads to where nothing can be written (a full disk, a pipe without reader), is
led back to the agent's pipe, so printing fails only when the agent is gone. A child may have made the pipe, which it
shares, non-blocking: then we wait ourselves while it is full.
"""

from __future__ import annotations

import fcntl
import io
import os
import select

from meshbook.system import descriptors


class RankPipe:
    """One of them. Any thread may call any method."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, descriptors.FIRST)
        self._file = self._open()

    def write(self, data: bytes) -> None:
        """Write all of it as text. What an interrupt leaves over follows with the next write.

        Raises: BrokenPipeError when the agent is gone.
        """
        while True:
            try:
                if data:
                    self._file.write(data)
                    data = b""
                return self._file.flush()
            except BlockingIOError as full:
                data = data[full.characters_written :]
                _await_room(self._fd)
            except OSError:
                if not self._lead_back():
                    raise

    def mark(self, mark: bytes) -> None:
        """Write something for the agent, behind the text so far; at most PIPE_BUF bytes, which are never torn.

        Raises: BrokenPipeError when the agent is gone.
        """
        while True:
            try:
                os.write(self._kept, mark)
                return
            except BlockingIOError:
                _await_room(self._kept)

    def reopen(self) -> None:
        """Open the descriptor again if it was closed: else the next file gets its number, and the text."""
        descriptors.fill(self._fd, self._kept)

    def leads_to_agent(self) -> bool:
        """Whether text goes to the agent, and not to where user code has led it."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.fstat(self._kept))
        except OSError:  # it is closed
            return False

    def open_text(self) -> io.TextIOWrapper | None:
        """Return the agent's pipe as a file of text that writes each line at once; None when the agent is gone.

        By a file description of its own, so that nobody can make it non-blocking.
        """
        path, flags = f"/proc/self/fd/{self._kept}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK  # else it may wait
        try:
            fd = descriptors.open_above(lambda: os.open(path, flags))
        except OSError:
            return None
        os.set_blocking(fd, True)
        return open(fd, "w", 1, "utf-8", "backslashreplace", "\n", closefd=False)

    def after_fork(self) -> None:
        """In a forked child: another thread may hold the file's lock, and unwritten text is the parent's to write."""
        self._parents_file = self._file  # kept, since a file writes its buffer when it is collected
        self.reopen()
        self._file = self._open()

    def _open(self) -> io.BufferedWriter:
        return io.BufferedWriter(io.FileIO(self._fd, "wb", closefd=False))

    def _lead_back(self) -> bool:
        """Whether the descriptor led elsewhere, or nowhere; now it leads to the agent."""
        if descriptors.fill(self._fd, self._kept):
            return True
        try:
            if os.path.samestat(os.fstat(self._fd), os.fstat(self._kept)):
                return False
        except OSError:
            return True  # it was closed just now: the next try finds out
        descriptors.replace(self._fd, self._kept)
        return True


def _await_room(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()
