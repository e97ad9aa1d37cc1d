"""The one way to put something of ours in the place of an attribute of other people's code.

What is replaced, why and where, is a table in docs/design.md; a test holds the two together, and looks whether what is
replaced is still what our code takes it for. Hooks that are there to be set (``sys.breakpointhook``, signal handlers,
traitlets, subclasses) are none.
"""

from __future__ import annotations

from typing import Any

_originals: dict[tuple[int, str], tuple[Any, Any]] = {}
"""By owner and name; with the owner, which must live as long as its number counts."""


def patch(owner: Any, name: str, ours: Any) -> Any:
    """Replace ``owner.name``, a module's or a class's; returns what it was before anything of ours.

    Raises: AttributeError if it has no such name.
    """
    _, original = _originals.setdefault((id(owner), name), (owner, getattr(owner, name)))
    setattr(owner, name, ours)
    return original


def unpatch(owner: Any, name: str) -> None:
    """Put back what was there before `patch`, if it was called."""
    if (known := _originals.pop((id(owner), name), None)) is not None:
        setattr(owner, name, known[1])
