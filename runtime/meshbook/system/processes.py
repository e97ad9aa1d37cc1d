"""The processes of this machine: parent-death signals, start times, states, trees, and how one ended in words."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from meshbook._version import __version__
from meshbook.system.descriptors import above_standard

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

MEMORY_VARIABLE = "MESHBOOK_MEMORY"
"""The variable that tells apart hosts which act as if they were alone on their machine."""

STAT_BYTES = 1024
"""A size beyond proc(5)'s stat, which is a name of at most 64 bytes and some fifty numbers."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if that has happened already.

    The signal fires when the parent *thread* that owns us ends, so parents must be single-threaded or fork from a
    permanent thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def may_be_traced() -> None:
    """Let the parent and its children read this process where Yama restricts that (PR_SET_PTRACER)."""
    _libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)


def let_peers_read() -> None:
    """Let every process of the same user look at this one, where Yama lets only ancestors."""
    with contextlib.suppress(OSError):  # there is no Yama
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def begin_as_host() -> None:
    """Set the signals of an agent or template, in place of those inherited from its parent.

    Interrupts are for ranks. With SIGCHLD ignored the kernel would reap our children before we know how they ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (PR_SET_CHILD_SUBREAPER)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_title(role: str) -> None:
    """Have ``ps`` and ``nvidia-smi`` show the role of this process, and its notebook where Jupyter's server has named
    it.

    role: as in ``main rank 3``. The title is written over the arguments, as far as there is room; proc(5) tells where
    they are (stat, fields 48 and 49). If the last byte is not zero, Linux shows the text before the first zero.
    """
    notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
    title = " ".join(filter(None, ("meshbook", role, notebook))).encode(errors="replace")
    fields = _stat(os.getpid())
    begin, end = (int(fields[45]), int(fields[46])) if len(fields) > 46 else (0, 0)
    shown, room = Path("/proc/self/cmdline").read_bytes(), end - begin - 2
    if room > 0 and shown and ctypes.string_at(begin, end - begin).startswith(shown):
        ctypes.memmove(begin, title[:room].ljust(room + 1, b"\0") + b".", room + 2)


def thread_count() -> int:
    """Threads of this process, C libraries' included."""
    return len(os.listdir("/proc/self/task"))


def _stat(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """The fields of proc(5)'s stat from the third on; none when there is no such process."""
    return _read_stat(f"{proc}/{pid}/stat").split()


def _read_stat(path: str) -> bytes:
    """Return the text that `_stat` splits; without `pathlib`, since a call's error waits for that of each thread."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        text = os.read(fd, STAT_BYTES)
    except ProcessLookupError:
        return b""
    finally:
        os.close(fd)
    return text[text.rfind(b")") + 2 :]


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of ``pid``; None when there is no such process.

    With the pid it names a process for ever: a recycled pid has another start time (proc(5), field 22).
    """
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def process_state(pid: int) -> str:
    """The state of the main thread of ``pid`` in one letter, as proc(5) has it; empty when it is gone.

    R runs, S sleeps, D sleeps in uninterruptible I/O, T was stopped by a signal, t by a debugger, Z has ended.
    """
    return _read_stat(f"/proc/{pid}/stat")[:1].decode()


def some_thread_runs(pid: int) -> bool:
    """Whether a thread of ``pid`` runs, or waits for a processor."""
    tasks = f"/proc/{pid}/task"
    try:
        return any(_read_stat(f"{tasks}/{tid}/stat").startswith(b"R") for tid in os.listdir(tasks))
    except OSError:
        return False


def processor_time(pid: int) -> float:
    """Seconds that the threads of ``pid`` have run; 0 where that is not told, or it is gone.

    The clock's number is made as clock_getcpuclockid(3) makes it.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


_MOVE_S = 0.05


def count_moves(pids: Iterable[int]) -> int:
    """Count how often these processes have computed for 50 ms: it rises while they make progress.

    A process that only looks at something from time to time does not move, and neither does one that waits for a disk
    for good. Pid 0 is a process that is not known yet.
    """
    return round(sum(processor_time(pid) for pid in pids if pid) / _MOVE_S)


def is_ending(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether ``pid`` has been killed, and not been reaped; where much memory is it takes a while to be torn down.

    proc(5): PF_EXITING in field 9, or SIGKILL pending in field 31.
    """
    try:
        fields = _stat(pid, proc)
    except OSError:
        return False
    return bool(fields) and bool(int(fields[6]) & 0x4 or int(fields[28]) & 1 << (signal.SIGKILL - 1))


def descendants(pid: int) -> list[int]:
    """List ``pid`` and all that it and its children have started and that lives: parents first, then the youngest.

    Signals in this order end a shell as Ctrl-C does: it knows of the signal before its child ends, and the last command
    of a pipeline gets its own before the end of the pipe, at which it would end well and let the shell go on.
    """
    pids = [pid]
    for parent in pids:
        pids += reversed(children(parent))
    return pids


def children(pid: int) -> list[int]:
    """Return the pids that ``pid`` has started or adopted, and not reaped."""
    pids: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, listed.read_text().split())
    return pids


def is_same_process(pid: int, started: int) -> bool:
    """Whether ``pid`` still is the process that was recorded with start time ``started``, and no zombie."""
    stat = _stat(pid)
    return bool(stat) and stat[0] != b"Z" and int(stat[19]) == started


def kill_session(pid: int) -> None:
    """SIGKILL to ``pid`` and to the process group that it leads; both may be gone already."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """SIGKILL to ``pid`` and to all below it. They are stopped first: none starts another while we look for them."""
    tree: list[int] = []
    while new := [each for each in descendants(pid) if each not in tree]:
        tree += new
        _signal(new, signal.SIGSTOP)
    _signal(tree, signal.SIGKILL)


def _signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_strays(known: Collection[int]) -> None:
    """Kill all descendants of this process, in any session, but ``known`` children and their descendants."""
    for child in children(os.getpid()):
        if child not in known:
            for pid in descendants(child):
                kill_session(pid)


def is_group(pid: int) -> bool:
    """Whether ``pid`` leads a process group with a living process."""
    try:
        os.killpg(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def reap_strangers(known: Collection[int]) -> None:
    """Take leave of adopted processes that have ended: children of workers that are gone. Leaves ``known`` alone."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in known:
            return  # whoever knows it takes its status; the rest is for the next time
        os.waitpid(ended.si_pid, 0)


def machine_id() -> str:
    """Equal on two processes exactly when they can open each other's ``/proc/<pid>/fd``."""
    return _namespace_id("pid")


def network_id() -> str:
    """Equal on two processes exactly when they have the same network interfaces, loopback among them."""
    return _namespace_id("net")


def _namespace_id(kind: str) -> str:
    return f"{boot_id()}/{os.stat(f'/proc/self/ns/{kind}').st_ino}"


@functools.cache
def boot_id() -> str:
    """Name this start of this machine. Raises: OSError where there is no Linux."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def python_version() -> str:
    """Return ``3.11``, say: between these bytecode differs."""
    return "{}.{}".format(*sys.version_info)


def versions() -> str:
    """Name the versions of Python and of us: processes of one host that differ here do not understand each other."""
    return f"Python {python_version()}, meshbook {__version__}"


def memory_name() -> str:
    """Equal on processes that may copy from and to each other's memory."""
    return os.environ.get(MEMORY_VARIABLE) or machine_id()


def describe_shell_exit(code: int) -> str:
    """Put an exit code into words as a shell tells of it: 128 and a signal's number; programs of their own have 255."""
    return describe_exit(128 - code if 128 < code < 128 + signal.NSIG else code)


def describe_exit(status: int) -> str:
    """Put a wait status (negative: signal, as in `subprocess`) into words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = {
        "SIGKILL": ", by kill -9 or the OOM killer",
        "SIGSEGV": ", a crash in native code",
        "SIGABRT": ", native code called abort()",
        "SIGBUS": ", memory that is not there: /dev/shm is full, or a mapped file was cut short",
        "SIGILL": ", native code that this CPU cannot run",
        "SIGFPE": ", a division by zero in native code",
        "SIGTERM": ", somebody asked it to end",
        "SIGXCPU": ", its limit on CPU time",
    }.get(name, "")
    return f"killed by {name}{hint}"


def resident_bytes(pid: int) -> int:
    """Resident memory of ``pid``, shared pages included; 0 when it is gone."""
    try:
        with above_standard():
            pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
