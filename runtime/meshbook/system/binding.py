"""Where on its machine a process runs: the CPUs and the NUMA nodes that it is bound to.

    {"cpus": "0-3,8"}          as taskset -c
    {"physcpubind": "0-3"}     the same, as numactl calls it
    {"cpunodebind": "1"}       the CPUs of these nodes
    {"membind": "1"}           memory of these nodes, and of no other

A process binds itself, before it has threads: nothing has to be installed for it. The words are Monarch's.
"""

from __future__ import annotations

import ctypes
import difflib
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path

from meshbook.errors import UsageError

KEYS = ("cpunodebind", "membind", "physcpubind", "cpus")

_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "s390x": 270, "riscv64": 237}
_MPOL_BIND = 2
_NODES_MAX = 1024
_NUMBERS_MAX = 1 << 16


def check_binding(binding: object) -> dict[str, str]:
    """Refuse what no machine could do. Raises: UsageError."""
    if not isinstance(binding, Mapping):
        raise UsageError(f'a binding maps names to numbers, as in {{"cpus": "0-3"}}; got {binding!r}.')
    for key, numbers in binding.items():
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1)
            meant = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(KEYS)}."
            raise UsageError(f"a process is not bound by {key!r}; {meant}")
        if not isinstance(numbers, str) or not _parse(numbers):
            raise UsageError(f'{key} is a text that lists numbers, as in "0-3,8"; got {numbers!r}.')
    if len(cpus := [key for key in KEYS if key in binding and key != "membind"]) > 1:
        raise UsageError(f"{' and '.join(cpus)} all name CPUs; one of them is enough.")
    return dict(binding)


def bind(binding: Mapping[str, str]) -> None:
    """Bind this process; its threads to come inherit it. Raises: OSError, which says what is not there."""
    for key, numbers in binding.items():
        if key == "membind":
            _bind_memory(_parse(numbers))
        else:
            cpus = _parse(numbers) if key != "cpunodebind" else _cpus_of(_parse(numbers))
            allowed = os.sched_getaffinity(0)
            if missing := sorted(set(cpus) - allowed):
                raise OSError(
                    f"proc_bind {key}={numbers}: this process may not use CPU {_join(missing)}, but {_join(allowed)}"
                )
            os.sched_setaffinity(0, cpus)


def _cpus_of(nodes: Collection[int]) -> set[int]:
    """The CPUs of NUMA nodes. Raises: OSError."""
    cpus: set[int] = set()
    for node in nodes:
        try:
            cpus.update(_parse((_NODES / f"node{node}" / "cpulist").read_text().strip()))
        except OSError as error:
            raise OSError(f"proc_bind: this machine has no NUMA node {node}") from error
    return cpus


def _bind_memory(nodes: Collection[int]) -> None:
    """Raises: OSError."""
    if (number := _SET_MEMPOLICY.get(platform.machine())) is None or max(nodes) >= _NODES_MAX:
        raise OSError(f"proc_bind membind={_join(nodes)}: not on {platform.machine()}")
    mask = sum(1 << node for node in nodes).to_bytes(_NODES_MAX // 8, "little")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _MPOL_BIND, ctypes.c_char_p(mask), ctypes.c_ulong(_NODES_MAX)):
        why = os.strerror(ctypes.get_errno())
        raise OSError(f"proc_bind membind={_join(nodes)}: the system does not bind memory there ({why})")


def _parse(text: str) -> set[int]:
    """The numbers of a list as in ``0-3,8``; none where it is no such list."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not int(first) <= int(last) < _NUMBERS_MAX:
            return set()
        numbers.update(range(int(first), int(last) + 1))
    return numbers


def _join(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
