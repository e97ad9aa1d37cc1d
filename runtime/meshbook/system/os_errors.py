"""What the system refused, in words, with the limit that was met and what helps."""

from __future__ import annotations

import errno
import os
import resource


def explain(error: OSError) -> str:
    """``no space left on device: /home/ann/x (free some space)``; one line, without a full stop at its end."""
    reason = error.strerror or str(error) or type(error).__name__
    named = isinstance(error.filename, str | bytes) and error.errno != errno.EMFILE
    place = f": {os.fsdecode(error.filename)}" if named else ""
    advice = _ADVICE.get(error.errno or 0, "")
    if error.errno == errno.EMFILE:
        advice = f"process {os.getpid()} may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; raise ulimit -n"
    return f"{reason[:1].lower()}{reason[1:]}{place}{f' ({advice})' if advice else ''}"


ENOUGH_FILES = 65_536
"""For a controller of 20,000 hosts. Code that uses select(2) has trouble from the 1,024th open file on, not before."""


def raise_file_limit() -> None:
    """Let this process open as many files as it may: most systems begin with 1,024 of half a million."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_descriptors(count: int) -> None:
    """For libraries that abort where they get none. Raises: OSError if this process may not open ``count`` more."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in opened:
            os.close(fd)


_ADVICE = {
    errno.EAGAIN: "the limit on processes was met: ulimit -u, or that of the container",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "the limit on the size of files was met: ulimit -f",
    errno.ENFILE: "the machine has no more open files to give: sysctl fs.file-max",
    errno.ENOMEM: "the machine or its container is out of memory",
    errno.ENOSPC: "free some space",
    errno.ETOOMANYREFS: "the limit on open files was met: raise ulimit -n",
}
