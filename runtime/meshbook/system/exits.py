"""The ends of processes: descriptors that tell of them, and why a worker ended, in words.

A pidfd becomes readable when its process ends. Where the kernel or its sandbox knows none (Linux before 5.3, some
versions of gVisor, old filters of system calls) one thread looks at all watched processes a few times a second and
writes to the pipes that stand for them.

The words come from the wait status, the OOM killer's counters and the last lines of the log. The kernel counts kills by
the OOM killer per cgroup and per machine. A process that SIGKILL ended while a counter moved was most likely killed by
it; each count is blamed for one death only. Cgroups are asked first: the machine's counter also counts the kills of
other containers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import select
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshbook.formatting import format_bytes
from meshbook.source.location import PACKAGE, name_line
from meshbook.system.processes import describe_exit, is_ending, is_same_process, kill_tree, start_time

LOOK_S = 0.05
"""The most by which the stand-in may be late."""


def open_end(pid: int) -> int:
    """A descriptor, to be closed, that is readable from the end of ``pid`` on. Raises: OSError if there is none."""
    return os.pidfd_open(pid) if has_pidfds() else _watcher.open(pid)


def end_process(pid: int, started: int, grace_s: float, *, below: bool = False) -> None:
    """Wait until the process that was recorded has ended; kill it after ``grace_s``. Never another one of its pid.

    below: and all that it has started.
    """
    try:
        fd = open_end(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not is_same_process(pid, started) or poll.poll(grace_s * 1000):
            return
        if below:
            kill_tree(pid)
        elif has_pidfds():
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        elif is_same_process(pid, started):  # as close to the kill as can be: no descriptor holds the pid
            os.kill(pid, signal.SIGKILL)
        poll.poll(5000)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


@functools.cache
def has_pidfds() -> bool:
    """Whether there are pidfds here."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, PermissionError):
        return False
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


class _Watched(NamedTuple):
    pid: int
    started: int


class _Watcher:
    """The stand-in of one process. Its thread lives as long as anything is watched."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        """The watched processes, by our end of the pipe."""

    def open(self, pid: int) -> int:
        if self._owner != os.getpid():  # a fork has neither the thread nor, for sure, the lock
            self.__init__()  # type: ignore[misc]
        started = start_time(pid)
        if started is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        theirs, ours = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with self._lock:
            self._watched[ours] = _Watched(pid, started)
            if len(self._watched) == 1:
                threading.Thread(target=self._look, name="meshbook.ends", daemon=True).start()
        return theirs

    def _look(self) -> None:
        while True:
            poll = select.poll()
            for fd in tuple(self._watched):
                poll.register(fd, 0)  # says when the other end was closed
            closed = {fd for fd, _ in poll.poll(LOOK_S * 1000)}
            with self._lock:
                for fd, (pid, started) in tuple(self._watched.items()):
                    if fd in closed or not is_same_process(pid, started):
                        del self._watched[fd]
                        with contextlib.suppress(OSError):  # nobody waits any more
                            os.write(fd, b"\0")
                        os.close(fd)
                if not self._watched:
                    return


_watcher = _Watcher()


CRASH_REPORT_LINES = 200
"""The limit is enough for the output of `faulthandler`, of which `meshbook.system.exits.last_words` keeps the gist."""


_FILE = '  File "'
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_INNERMOST, _CRASH_FRAMES = 2, 4
"""The innermost frames that are shown of a report, and with those of cells so many."""
_THREADING = "/threading.py"


class End(NamedTuple):
    """The end of a child process."""

    status: int | None
    """Exit code, or the negative number of a signal; None when it was not ours to learn."""
    peak_bytes: int
    """The largest resident memory that it had."""
    oom_killed: bool | None
    """Whether the OOM killer ended it; None when no counter of the kernel's can be read."""

    @property
    def was_killed(self) -> bool:
        """Whether another process ended it, rather than its own code."""
        return self.status == -signal.SIGKILL


class OomWatch:
    """Compares the kernel's counts of OOM kills; call `sample` regularly, `blames` for each process that was killed.

    proc, cgroups: where these file systems are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._counts: dict[Path, int] = {}
        self.sample(())

    def sample(self, pids: Iterable[int]) -> None:
        """Note the counts as they are, of the machine and of the cgroups of living processes.

        While one is ending they stay: it may have been counted already, and `blames` is still to come.
        """
        pids = list(pids)
        if any(is_ending(pid, self._proc) for pid in pids):
            return
        files = {self._proc / "vmstat", *(file for pid in pids if (file := self._file_of(pid)) is not None)}
        counts = {file: _read_count(file) for file in files}
        self._counts = {file: count for file, count in counts.items() if count is not None}

    def blames(self, pid: int) -> bool | None:
        """Whether the OOM killer most likely ended ``pid``, which SIGKILL ended and nobody has reaped yet."""
        file = self._file_of(pid)
        if file is None or file not in self._counts:
            file = self._proc / "vmstat"
        count = _read_count(file)
        if count is None or file not in self._counts:
            return None
        if count <= self._counts[file]:
            return False
        self._counts[file] += 1
        return True

    def _file_of(self, pid: int) -> Path | None:
        """Return the file in which the kernel counts for the cgroup of ``pid``; None without a memory cgroup."""
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                folder, name = self._cgroups, "memory.events"
            elif "memory" in controllers.split(","):
                folder, name = self._cgroups / "memory", "memory.oom_control"
            else:
                continue
            for place in (folder / path.lstrip("/") / name, folder / name):  # a container may see its own as the root
                if place.exists():
                    return place
        return None


def _read_count(file: Path) -> int | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    counts = [line.split()[1] for line in text.splitlines() if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def reap(pid: int, oom: OomWatch) -> End:
    """Take leave of a child that has ended."""
    try:
        killed = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # it ended before it was adopted
        return End(None, 0, False)
    suspicious = killed is not None and killed.si_code == os.CLD_KILLED and killed.si_status == signal.SIGKILL
    oom_killed = oom.blames(pid) if suspicious else False
    _, status, usage = os.wait4(pid, 0)
    return End(os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10, oom_killed)


def describe_end(end: End) -> str:
    """``killed by SIGKILL, most likely the OOM killer (peak RSS 21.9 GB)``"""
    if end.status is None:
        return "it ended while it was being started"
    if end.status >= 0:
        return f"{describe_exit(end.status)}, as by os._exit({end.status})"
    if end.status != -signal.SIGKILL or end.oom_killed is None:
        return describe_exit(end.status)
    if end.oom_killed:
        return f"killed by SIGKILL, most likely the OOM killer (peak RSS {format_bytes(end.peak_bytes)})"
    return "killed by SIGKILL, as by kill -9 (the OOM killer was not at work)"


def last_words(log: str, lines: int) -> str:
    """The last ``lines`` lines of a log; behind them, of a crash in native code, where Python was."""
    whole = log.removesuffix("\n") + "\n"
    kept = [_FRAME.sub(_name_frame, line) for line in CrashReportCut().cut(whole).splitlines()]
    fatal = [at for at in range(len(kept)) if kept[at].startswith(FATAL) and len(kept) - at <= _CRASH_FRAMES + 1]
    return "\n".join(kept[max(0, (fatal[-1] if fatal else len(kept)) - lines) :])


def _name_frame(frame: re.Match[str]) -> str:
    file, line, function = frame.groups()
    return f"  {name_line(file, int(line)) or f'{file}, line {line}'}, in {function}"


def _is_below_cells(file: str) -> bool:
    """Whether a file is ours or IPython's, or runs threads: such frames stand in every report."""
    return file.startswith((PACKAGE, "<frozen ")) or "/IPython/" in file or file.endswith(_THREADING)


FATAL = "Fatal Python error: "
"""The begin of a crash report; the stack of the thread follows."""

_REPORT = _FILE, "Current thread ", "Thread 0x", "Stack (most recent call first)", "  <", "  ...", "Extension modules: "
"""The beginnings of its lines. The last line names every module that is no Python, in some 3 kB."""


class CrashReportCut:
    """A filter that leaves of a crash report, in a rank's stderr, the lines that a person needs; the log keeps all."""

    def __init__(self) -> None:
        self._shown: int | None = None
        """The number of frames that were shown of the report that is being read; None outside of one."""
        self._held = ""
        """The beginning of a line of the report."""

    def cut(self, text: str) -> str:
        """Return the part of ``text``, the next piece, that is to be shown."""
        if self._shown is None and FATAL not in self._held + text:
            return text
        lines = (self._held + text).split("\n")
        self._held, last = "", lines.pop()
        shown = "".join(f"{line}\n" for line in lines if self._is_shown(line))
        if last and (self._shown is not None or last.startswith(FATAL)):
            if any(last.startswith(begin) or begin.startswith(last) for begin in (FATAL, *_REPORT)):
                self._held = last
                return shown
            self._shown = None
        return shown + last

    def _is_shown(self, line: str) -> bool:
        if line.startswith(FATAL):
            self._shown = 0
        elif self._shown is not None and (frame := _FRAME.fullmatch(line)) is not None:
            # the innermost frames, then those of cells; those of ours and of IPython stand in every report
            few = self._shown < _INNERMOST or (self._shown < _CRASH_FRAMES and name_line(frame["file"], 1) != "")
            is_needed = few and not _is_below_cells(frame["file"])
            self._shown += is_needed
            return is_needed
        elif self._shown is not None and (not line or line.startswith(_REPORT)):
            return False
        else:
            self._shown = None
        return True


TAIL_BYTES = 256 << 10
"""Last lines are looked for within this much of the end."""


def log_tail(path: Path, lines: int, begin: int = 0, containing: str = "") -> str:
    """The last ``lines`` lines of a log, within its last 256 kB and beyond ``begin``; empty when there is none.

    containing: only lines that have this text.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES, 0))
            return _last_lines(file.read(), lines, containing).decode(errors="backslashreplace")
    except OSError:  # there is none, or no descriptor is left to open it
        return ""


def _last_lines(data: bytes, lines: int, containing: str = "") -> bytes:
    # a progress bar comes back to the begin of its line
    written = data.removesuffix(b"\n").split(b"\n")
    found = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in written]
    if containing:
        wanted = containing.encode(errors="surrogateescape")
        found = [line for line in found if wanted in line]
    return b"\n".join(found[-lines:] if lines else ())
