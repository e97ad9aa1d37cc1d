"""What is known of a class of actors where it is called: names, signatures and kinds of its endpoints; not the class.

It travels with references, so that wrong arguments are told to the caller also where the class does not exist.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec

from meshbook.actor.decorators import Actor, EndpointMethod
from meshbook.actor.errors import ActorError, ArgumentsError, ReloadError
from meshbook.errors import UsageError, group_failures
from meshbook.formatting import name_ranks


class Param(NamedTuple):
    """One parameter. kind: as `inspect.Parameter` numbers them."""

    name: str
    kind: int
    has_default: bool


class EndpointInfo(msgspec.Struct, frozen=True, dict=True):
    """One endpoint, as it travels."""

    name: str
    concurrent: bool = False
    wants_port: bool = False
    params: tuple[Param, ...] | None = None
    """Without ``self`` and the response port; None where they are not known."""
    doc: str = ""

    @cached_property
    def signature(self) -> inspect.Signature | None:
        """For `inspect.signature` and for checks; values of defaults are not known here."""
        if self.params is None:
            return None
        kinds = list(inspect._ParameterKind)
        return inspect.Signature(
            [
                inspect.Parameter(name, kinds[kind], default=_Given() if has_default else inspect.Parameter.empty)
                for name, kind, has_default in self.params
            ]
        )

    @cached_property
    def _bare(self) -> tuple[int, float]:
        """How many arguments it takes at least and at most when none has a name."""
        kinds = inspect._ParameterKind
        params = self.params or ()
        if any(param.kind == kinds.KEYWORD_ONLY and not param.has_default for param in params):
            return 1, 0  # it takes no such call
        named = [param for param in params if param.kind <= kinds.POSITIONAL_OR_KEYWORD]
        rest = any(param.kind == kinds.VAR_POSITIONAL for param in params)
        return sum(not param.has_default for param in named), float("inf") if rest else len(named)

    def check(self, actor: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Raises: ArgumentsError if they do not fit."""
        if self.params is None:
            return
        if not kwargs:
            least, most = self._bare
            if least <= len(args) <= most:
                return  # `bind` takes longer than all else that a caller does
        signature = self.signature
        assert signature is not None
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentsError(f"{actor}.{self.name}: {error}. Its signature is {self.name}{signature}") from None


class _Given:
    """Stands for a default in a signature."""

    def __repr__(self) -> str:
        return "..."


class ActorClass(NamedTuple):
    """A class of actors, described."""

    name: str
    endpoints: dict[str, EndpointInfo]
    methods: tuple[str, ...]
    """Public methods that are no endpoints."""


def describe_class(cls: object, reserved: frozenset[str]) -> ActorClass:
    """What its meshes need to know. reserved: names that endpoints cannot have.

    Raises: UsageError for what is no class of actors.
    """
    if not isinstance(cls, type) or not issubclass(cls, Actor):
        name = getattr(cls, "__qualname__", repr(cls))
        raise UsageError(f"{name} cannot be spawned: it takes a class that derives from meshbook.actor.Actor.")
    endpoints: dict[str, EndpointInfo] = {}
    methods = []
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, EndpointMethod):
            if name in reserved:
                raise UsageError(
                    f'{cls.__qualname__} has an endpoint "{name}", but that is an attribute of every mesh of actors. '
                    "Give the endpoint another name."
                )
            endpoints[name] = _describe_endpoint(cls, name, member)
        elif not name.startswith("_") and inspect.isfunction(member):
            methods.append(name)
    return ActorClass(cls.__qualname__, endpoints, tuple(methods))


def _describe_endpoint(cls: type, name: str, declared: EndpointMethod[..., object]) -> EndpointInfo:
    method = declared.method
    doc = (method.__doc__ or "").strip().partition("\n")[0]
    params = params_of(method, skip=2 if declared.explicit_response_port else 1)
    return EndpointInfo(name, declared.concurrent, declared.explicit_response_port, params, doc)


def params_of(function: Callable[..., object], *, skip: int) -> tuple[Param, ...] | None:
    """Its parameters without the first ``skip``; None where Python does not know them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    while skip and parameters and parameters[0].kind in positional:
        del parameters[0]
        skip -= 1
    return tuple(Param(p.name, int(p.kind), p.default is not p.empty) for p in parameters)


def check_construction(cls: type, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Whether ``__init__`` takes these arguments. Raises: ArgumentsError."""
    init = inspect.getattr_static(cls, "__init__")
    if init is object.__init__:
        if args or kwargs:
            raise ArgumentsError(f'{cls.__qualname__} ("{name}") takes no arguments: it has no __init__.')
        return
    EndpointInfo("__init__", params=params_of(init, skip=1)).check(cls.__qualname__, args, kwargs)


# ---- reload: a class that was defined again takes the place of the old one in living actors, which keep their state.
# The new class travels behind the messages that were sent before; each actor takes it between two messages, or refuses.

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
