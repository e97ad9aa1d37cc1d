"""A class that was defined again takes the place of the old one in living actors, which keep their state.

The new class travels behind the messages that were sent before; each actor takes it between two
messages, or refuses.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable

from meshbook.actor.decorators import EndpointMethod
from meshbook.actor.errors import ActorError, ReloadError
from meshbook.errors import UsageError, group_failures
from meshbook.formatting import name_ranks

RELOAD = "__reload__"
"""The endpoint of every actor that takes a class."""


def newest_class(name: str) -> type:
    """The class of this name as the notebook has it now. Raises: UsageError."""
    found = vars(sys.modules["__main__"]).get(name)
    if not isinstance(found, type):
        raise UsageError(f"there is no class {name} in the notebook. Say which one to take: actors.reload(Class)")
    return found


def swap_class(actor: object, new: type, waiting: Iterable[str], *, has_loop: bool) -> None:
    """Make ``actor`` one of ``new``. waiting: the endpoints whose calls wait. has_loop: whether it may have async ones.

    Raises: ReloadError, and nothing has changed then.
    """
    old = type(actor)
    name = new.__qualname__
    if _bases(old) != _bases(new):
        raise ReloadError(f"{name} derives from {_named(new)} now, and the living actors from {_named(old)}")
    if not has_loop and has_async_endpoints(new):
        raise ReloadError(f"{name} has async endpoints now, and the living actors have no event loop")
    gone = sorted({each for each in waiting if hasattr(old, each) and not hasattr(new, each)})
    if gone:
        raise ReloadError(f"calls of {', '.join(gone)} wait, which {name} does not have any more; let them end first")
    if _slots(old) != _slots(new):
        raise ReloadError(f"{name} has other __slots__ now")
    actor.__class__ = new


def has_async_endpoints(cls: type) -> bool:
    """Whether any of its endpoints is ``async``: actors of such a class run in an event loop."""
    members = (inspect.getattr_static(cls, name, None) for name in dir(cls))
    return any(isinstance(m, EndpointMethod) and inspect.iscoroutinefunction(m.method) for m in members)


def refusal(error: ActorError, actors: str) -> Exception:
    """What the caller raises when actors have refused; ``error`` itself where something else was raised."""
    if any(failure.ename != ReloadError.__name__ for failure in error.failures):
        return error
    causes = [f"{name_ranks(f.rank for f in same)}: {same[0].evalue}" for same in group_failures(error.failures)]
    keep = f"They keep the class that they have. To have the new one: {actors}.stop(), and spawn them again."
    return ReloadError("\n".join([*causes, keep]))


def _bases(cls: type) -> list[tuple[str, str]]:
    return [(base.__module__, base.__qualname__) for base in cls.__mro__[1:]]


def _slots(cls: type) -> list[object]:
    return [vars(base).get("__slots__") for base in cls.__mro__]


def _named(cls: type) -> str:
    return ", ".join(base.__qualname__ for base in cls.__bases__)
