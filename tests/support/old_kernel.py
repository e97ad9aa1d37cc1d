"""Runs Python, and all that it starts, as on a kernel without some system calls: a seccomp filter refuses them.

    python tests/support/old_kernel.py ENOSYS memfd_create,pidfd_open [Python's arguments]

ENOSYS is what a kernel says that does not know a call, EPERM what older sandboxes say to those that they do not know.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

NUMBERS = {
    "x86_64": {"process_vm_readv": 310, "memfd_create": 319, "pidfd_send_signal": 424, "pidfd_open": 434},
    "aarch64": {"process_vm_readv": 270, "memfd_create": 279, "pidfd_send_signal": 424, "pidfd_open": 434},
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


def forbid(refusal: int, calls: list[str]) -> None:
    """From now on this process and its children get ``refusal`` for ``calls``. Raises: OSError."""
    numbers = [NUMBERS[platform.machine()][call] for call in calls]
    steps = [(_LOAD, 0, 0, 0)]  # the number of the call comes first in seccomp_data
    steps += [(_JUMP_IF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE | refusal)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, first, second in (_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _FILTER, program):
        if libc.prctl(option, ctypes.c_ulong(first), second, 0, 0):
            raise OSError(ctypes.get_errno(), "no seccomp filter can be set here")


def run_on_old_kernel(refusal: str, calls: str, code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run Python as on a kernel without ``calls``. Raises: KeyError where the numbers of system calls are not known."""
    NUMBERS[platform.machine()]
    command = [sys.executable, __file__, refusal, calls, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


if __name__ == "__main__":
    forbid(getattr(errno, sys.argv[1]), sys.argv[2].split(","))
    os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
