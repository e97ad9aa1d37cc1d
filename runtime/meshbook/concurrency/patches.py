"""The one way to put something of ours in the place of an attribute of other people's code.

What is replaced, why and where, is a table in docs/design.md; a test holds the two together, and looks whether what is
replaced is still what our code takes it for. Hooks that are there to be set (``sys.breakpointhook``, signal handlers,
traitlets, subclasses) are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_originals: dict[tuple[int, str], tuple[object, object]] = {}
"""By owner and name; with the owner, which must live as long as its number counts."""


def patch(owner: object, name: str, ours: object) -> None:
    """Replace ``owner.name``, a module's or a class's. Raises: AttributeError if it has no such name."""
    _originals.setdefault((id(owner), name), (owner, getattr(owner, name)))
    setattr(owner, name, ours)


@contextlib.contextmanager
def patches_undone() -> Iterator[None]:
    """What is replaced inside the block for the first time is as it was at its end."""
    before = set(_originals)
    try:
        yield
    finally:
        for owner, name in [(_originals[key][0], key[1]) for key in _originals.keys() - before]:
            unpatch(owner, name)


def unpatch(owner: object, name: str) -> None:
    """Put back what was there before `patch`, if it was called."""
    if (known := _originals.pop((id(owner), name), None)) is not None:
        setattr(owner, name, known[1])
