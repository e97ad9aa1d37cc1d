"""Classes of actors: their endpoints, and the description for processes that lack the class.

A method with the decorator `endpoint` or `concurrent_endpoint` stays a plain method of the object, callable as
``self.step()``. On a mesh of actors it is an `Endpoint`, which is how type checkers and editors see it:

    class Trainer(Actor):
        @endpoint
        def step(self, batch: int) -> float: ...

    trainers = procs.spawn("trainers", Trainer)      # for a type checker: a Trainer
    trainers.step.call(3)                            # Future[ValueMesh[float]]

The description (`ActorClass`: names, signatures and kinds of endpoints) travels with references, so that the caller
learns of wrong arguments also where the class does not exist.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import msgspec

from meshbook.actor.errors import ActorError, ArgumentsError, ReloadError
from meshbook.concurrency.future import Future
from meshbook.errors import FailureKind, UsageError, group_failures
from meshbook.formatting import name_ranks
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.actor.ports import Port
    from meshbook.shape.members import Extent, Index


P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self")


class Endpoint(Protocol[P, R]):
    """An endpoint of a mesh of actors. Messages of one sender arrive in the order in which they were sent."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call it on every actor; the future gives the values of all."""

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on the only actor. Raises: LayoutError if there are several."""

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on one actor, chosen at random."""

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call it on every actor; futures of the values in the order in which they come."""

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it on every actor without waiting; failures go to the owner of the actors."""

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it on every actor, and leave the tensors that it returns on the ranks, as those of the local view."""


class EndpointMethod(Generic[P, R]):
    """A method that a decorator has made an endpoint."""

    def __init__(self, method: Callable[..., object], *, concurrent: bool, explicit_response_port: bool) -> None:
        if concurrent:
            _check_concurrent(method)
        self.method, self.concurrent, self.explicit_response_port = method, concurrent, explicit_response_port
        self.__doc__, self.__name__ = method.__doc__, getattr(method, "__name__", "endpoint")
        self.__wrapped__ = method

    @overload
    def __get__(self, instance: None, owner: type) -> EndpointMethod[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Endpoint[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> object:
        return self if instance is None else self.method.__get__(instance, owner)


class _Decorator(Protocol):
    @overload
    def __call__(self, method: Callable[Concatenate[Self, P], Awaitable[R]]) -> EndpointMethod[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Self, P], R]) -> EndpointMethod[P, R]: ...


class _PortDecorator(Protocol):
    def __call__(self, method: Callable[Concatenate[Self, Port[R], P], object]) -> EndpointMethod[P, R]: ...


if TYPE_CHECKING:
    from typing import Literal

    @overload
    def endpoint(method: Callable[Concatenate[Self, P], Awaitable[R]], /) -> EndpointMethod[P, R]: ...
    @overload
    def endpoint(method: Callable[Concatenate[Self, P], R], /) -> EndpointMethod[P, R]: ...
    @overload
    def endpoint(
        *, propagate: object = None, explicit_response_port: Literal[False] = False, instrument: bool = True
    ) -> _Decorator: ...
    @overload
    def endpoint(
        *, propagate: object = None, explicit_response_port: Literal[True], instrument: bool = True
    ) -> _PortDecorator: ...
    def endpoint(method: object = None, **options: object) -> object: ...
    @overload
    def concurrent_endpoint(method: Callable[Concatenate[Self, P], Awaitable[R]], /) -> EndpointMethod[P, R]: ...
    @overload
    def concurrent_endpoint(
        *, propagate: object = None, explicit_response_port: Literal[False] = False, instrument: bool = True
    ) -> _Decorator: ...
    @overload
    def concurrent_endpoint(
        *, propagate: object = None, explicit_response_port: Literal[True], instrument: bool = True
    ) -> _PortDecorator: ...
    def concurrent_endpoint(method: object = None, **options: object) -> object: ...

else:

    def endpoint(method=None, /, *, propagate=None, explicit_response_port=False, instrument=True):
        """Let a method be called from other processes; it may be ``async def``.

        explicit_response_port: its first argument is a `Port`, on which it answers, or another actor that it passes the
        port to.
        propagate, instrument: accepted, since Monarch has them; without effect.
        """

        make = partial(EndpointMethod, concurrent=False, explicit_response_port=explicit_response_port)
        return make if method is None else make(method)

    def concurrent_endpoint(method=None, /, *, propagate=None, explicit_response_port=False, instrument=True):
        """Let an ``async def`` be called while the actor takes other messages; otherwise as `endpoint`."""

        make = partial(EndpointMethod, concurrent=True, explicit_response_port=explicit_response_port)
        return make if method is None else make(method)


def _check_concurrent(method: object) -> None:
    """Raises: UsageError where the decorator is written."""
    name = getattr(method, "__qualname__", None) or getattr(method, "__name__", repr(method))
    if isinstance(method, EndpointMethod):
        raise UsageError(f"{name} has both decorators: @concurrent_endpoint does not wrap @endpoint, it replaces it.")
    if not inspect.iscoroutinefunction(method):
        raise UsageError(f"{name} must be declared `async def`: @concurrent_endpoint can only wrap async endpoints.")


class Actor:
    """Base of the classes that can be spawned. Each actor handles one message at a time, on a thread of its own.

    ``__supervise__(self, failure) -> bool`` is told of failures of meshes that it has spawned; True: it has dealt with
    it. ``__cleanup__(self, error)`` runs when the actor is stopped; either may be ``async``.
    """

    @property
    def logger(self) -> logging.Logger:
        """A logger with the name of the class."""
        return logging.getLogger(type(self).__qualname__)

    if TYPE_CHECKING:  # what the mesh has that `spawn` returns
        extent: Extent
        sizes: dict[str, int]
        name: str
        initialized: Future[None]

        def slice(self: Self, **axes: Index) -> Self: ...
        def split(self: Self, **axes: Sequence[str] | int) -> Self: ...
        def flatten(self: Self, name: str) -> Self: ...
        def rename(self: Self, **names: str) -> Self: ...
        def size(self, axes: str | Iterable[str] | None = None) -> int: ...
        def stop(self, reason: str = "stopped by client") -> Future[None]: ...
        def reload(self, cls: type | None = None, *, timeout: float | None = None) -> None: ...
        def __len__(self) -> int: ...
        async def __aenter__(self: Self) -> Self: ...
        async def __aexit__(self, *error: object) -> None: ...


class Param(NamedTuple):
    """A parameter of an endpoint. kind: as `inspect.Parameter` numbers them."""

    name: str
    kind: int
    has_default: bool


class EndpointInfo(msgspec.Struct, frozen=True, dict=True):
    """The description of an endpoint, as it travels."""

    name: str
    concurrent: bool = False
    wants_port: bool = False
    params: tuple[Param, ...] | None = None
    """The parameters without ``self`` and the response port; None if they are not known."""
    doc: str = ""

    @cached_property
    def signature(self) -> inspect.Signature | None:
        """The signature, for `inspect.signature` and for checks; values of defaults are not known here."""
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
        """The least and the greatest number of arguments that it takes when none has a name."""
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
    """Describe a class to its meshes. reserved: names that endpoints cannot have.

    Raises: UsageError if ``cls`` is no class of actors.
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
            doc = (member.method.__doc__ or "").strip().partition("\n")[0]
            has_port = member.explicit_response_port
            params = params_of(member.method, skip=2 if has_port else 1)
            endpoints[name] = EndpointInfo(name, member.concurrent, has_port, params, doc)
        elif not name.startswith("_") and inspect.isfunction(member):
            methods.append(name)
    return ActorClass(cls.__qualname__, endpoints, tuple(methods))


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
    """Return the error for a caller whose class the actors refused; ``error`` itself if they raised anything else."""
    if any(failure.kind is not FailureKind.REFUSED for failure in error.failures):
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
