"""Memory of other processes that is mapped here: when it may be given back to its owner.

A private mapping shows later writes of the owner, on pages that were not written here. So a mapping is given back
when its last view has died here, and each child that was forked while it was there has ended. Whether such a child
lives is read off a page that only the descendants of the fork map: while any of them does, Linux refuses to seal it
against writes. Their death or exec ends that; nothing that they do to their files does.

The withheld memory is bounded: living children were given it at their fork.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from meshbook.concurrency import forks
from meshbook.system.descriptors import open_above

LOOK_S = 0.1
"""The time between two looks whether children live."""

_F_ADD_SEALS, _F_SEAL_WRITE = 1033, 8


class LentMapping:
    """A mapping. Call it when its last view has died, wherever that happens: it gives the memory back, if it may.

    A process that ends does not call it, and in a forked child it does nothing.
    """

    def __init__(self, give_back: Callable[[int], None], segment: int) -> None:
        self._give_back, self._segment = give_back, segment
        self._generation, self._age = forks.generation, _lent.age
        self._done = False
        self._seen_by: list[_ForkedChildren] = []
        _lent.open.add(id(self))

    def __call__(self) -> None:
        if self._done or self._generation != forks.generation:
            return
        self._done = True
        _lent.open.discard(id(self))
        self._seen_by = [children for children in tuple(_lent.forked) if children.until > self._age]
        if self._seen_by:
            _lent.kept.append(self)
            settle()
        else:
            self._give_back(self._segment)

    def retry(self) -> None:
        """Give back the withheld memory, unless a child still sees it."""
        if all(children.has_ended for children in self._seen_by):
            self._give_back(self._segment)
        else:
            _lent.kept.append(self)


class _ForkedChildren:
    """The descendants of one fork."""

    def __init__(self) -> None:
        self.until = math.inf
        """Mappings that are younger are not seen by them; infinite while the fork is under way."""
        self.has_ended = False
        self._fd = -1
        self._page: mmap.mmap | None = None
        try:
            self._fd = open_above(lambda: os.memfd_create("meshbook-fork", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(self._fd, mmap.PAGESIZE)
            self._page = mmap.mmap(self._fd, mmap.PAGESIZE)
        except (AttributeError, OSError):  # no such call, no descriptor left: it counts as living for ever
            self.close()

    def close(self) -> None:
        """Close the file; a child keeps the page."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def begin(self, age: int) -> None:
        """Note, in the parent, that the fork is over."""
        self.until = age
        if self._page is not None:
            self._page.close()

    def lives(self) -> bool:
        """Whether a descendant may still see the memory that was mapped at the fork."""
        if self.until == math.inf or self._fd < 0:
            return True
        try:
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_WRITE)
        except OSError as error:
            return error.errno == errno.EBUSY
        return False


class LentMemory:
    """The mappings of this process, and its forks that may see them."""

    def __init__(self) -> None:
        self.age = 0
        """The number of forks of this process that are over."""
        self.open: set[int] = set()
        """Mappings whose views live, by identity."""
        self.forked: list[_ForkedChildren] = []
        self._forking: dict[int, _ForkedChildren] = {}
        """Forks that are under way, by their threads."""
        self._inherited: list[_ForkedChildren] = []
        """The pages, in a child, that say it lives."""
        self.kept: deque[LentMapping] = deque()
        """Mappings that have died here, and are kept for the sake of children."""
        self._look_at = 0.0
        self._looking = threading.Lock()

    def withheld(self) -> int:
        """Return how many mappings have died here and are kept for the sake of children."""
        return len(self.kept)

    def settle(self) -> None:
        """Give back the memory that no child sees any more. Callable at any time, on any thread; never waits."""
        if not self.forked or time.monotonic() < self._look_at or not self._looking.acquire(blocking=False):
            return
        try:
            self._look_at = time.monotonic() + LOOK_S
            for children in [children for children in self.forked if not children.lives()]:
                children.has_ended = True
                children.close()
                self.forked.remove(children)
            for _ in range(len(self.kept)):
                self.kept.popleft().retry()
        finally:
            self._looking.release()

    def before_fork(self) -> None:
        self.settle()
        if self.open or self.kept:
            children = self._forking[threading.get_ident()] = _ForkedChildren()
            self.forked.append(children)

    def in_parent(self) -> None:
        self.age += 1
        if (children := self._forking.pop(threading.get_ident(), None)) is not None:
            children.begin(self.age)

    def in_child(self) -> None:
        self._looking = threading.Lock()
        for children in self.forked:
            children.close()
        if (mine := self._forking.pop(threading.get_ident(), None)) is not None:
            self._inherited.append(mine)
        self._forking.clear()
        self.forked.clear()
        self.kept.clear()
        self.open.clear()


_lent = LentMemory()
settle, withheld = _lent.settle, _lent.withheld
forks.at_fork(before=_lent.before_fork, in_parent=_lent.in_parent, in_child=_lent.in_child)
