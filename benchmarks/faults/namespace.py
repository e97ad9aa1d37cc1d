"""A host in a network namespace of its own, joined to ours by a cable that can be pulled."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """Needs root and iproute2; raises OSError or CalledProcessError where there are none."""

    def __init__(self) -> None:
        number = next(_numbers)  # what was in the one before may take a while to end
        self.name = f"meshbook{os.getpid()}.{number}"
        self._ours, theirs = f"mb{os.getpid()}.{number}a"[:15], f"mb{os.getpid()}.{number}b"[:15]
        octet = (os.getpid() + number) % 250 + 1
        self.address = f"10.213.{octet}.1"  # ours, as the namespace sees it
        self.their_address = f"10.213.{octet}.2"
        run_ip("netns", "add", self.name)
        try:
            self._join(self._ours, theirs)
            run_ip("addr", "add", f"{self.address}/24", "dev", self._ours)
            run_ip("link", "set", self._ours, "up")
            for words in (("addr", "add", f"{self.their_address}/24", "dev", theirs), ("link", "set", theirs, "up")):
                self.ip(*words)
            self.ip("link", "set", "lo", "up")
        except BaseException:
            with contextlib.suppress(subprocess.SubprocessError):  # the first error is the one to tell
                self.close()
            raise

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Processes that this thread starts in the block live in the namespace."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(Path("/run/netns") / self.name, os.O_RDONLY)
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(home)
        finally:
            os.close(home)
            os.close(there)

    def _join(self, ours: str, theirs: str) -> None:
        """Have a cable with these two ends, the second one within."""
        run_ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", self.name)

    def join(self, other: Namespace, network: str) -> str:
        """Have a cable to another namespace; returns this end. network: as in ``10.214.7``, where this one is .1."""
        number = next(_numbers)
        ends = [f"mb{os.getpid()}.{number}{end}"[:15] for end in "cd"]
        run_ip("link", "add", ends[0], "netns", self.name, "type", "veth", "peer", "name", ends[1], "netns", other.name)
        for place, end, last in ((self, ends[0], 1), (other, ends[1], 2)):
            place.ip("addr", "add", f"{network}.{last}/24", "dev", end)
            place.ip("link", "set", end, "up")
        return ends[0]

    def ip(self, *words: str) -> None:
        """Change the network within, as ``ip`` does."""
        run_ip("-n", self.name, *words)

    def pull(self) -> None:
        """Cut the cable: nothing arrives, and nobody is told."""
        run_ip("link", "set", self._ours, "down")

    def plug(self) -> None:
        """Join the two again."""
        run_ip("link", "set", self._ours, "up")

    def close(self) -> None:
        """Remove the namespace, and the cable with it."""
        run_ip("netns", "del", self.name)


def make_namespace() -> Namespace | None:
    """A namespace; None where we may not make one (no root, no iproute2, a container without the right)."""
    try:
        namespace = Namespace()
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        with namespace.inside():
            return namespace
    except OSError:
        namespace.close()
        return None


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def run_ip(*words: str) -> None:
    """Run ``ip``. Raises: OSError, CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)
