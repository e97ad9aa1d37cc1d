"""The one way to put something of ours in the place of an attribute of other people's code.

A table in docs/design.md lists the replaced names with the reasons and the places; a test holds the two together, and
checks that the originals are still as our code expects. Hooks that are there to be set (``sys.breakpointhook``, signal
handlers, traitlets, subclasses) are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_originals: dict[tuple[int, str], tuple[object, object]] = {}
"""The originals by owner and name, with the owner, which must live as long as its id is a key."""


def patch(owner: object, name: str, ours: object) -> None:
    """Replace ``owner.name``, a module's or a class's. Raises: AttributeError if it has no such name."""
    _originals.setdefault((id(owner), name), (owner, getattr(owner, name)))
    setattr(owner, name, ours)


@contextlib.contextmanager
def patches_undone() -> Iterator[None]:
    """Undo, at the end of the block, the patches that were first made inside it."""
    before = set(_originals)
    try:
        yield
    finally:
        for owner, name in [(_originals[key][0], key[1]) for key in _originals.keys() - before]:
            unpatch(owner, name)


def unpatch(owner: object, name: str) -> None:
    """Put back the original, if `patch` was called."""
    if (known := _originals.pop((id(owner), name), None)) is not None:
        setattr(owner, name, known[1])
