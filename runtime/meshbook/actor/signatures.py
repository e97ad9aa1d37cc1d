"""What is known of a class of actors where it is called: names, signatures and kinds of its endpoints; not the class.

It travels with references, so that wrong arguments are told to the caller also where the class does not exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from meshbook.actor.decorators import Actor, EndpointMethod
from meshbook.actor.errors import ArgumentsError
from meshbook.errors import UsageError


class Param(NamedTuple):
    """One parameter. kind: as `inspect.Parameter` numbers them."""

    name: str
    kind: int
    has_default: bool


class EndpointInfo:
    """One endpoint. params: without ``self`` and the response port; None where they are not known."""

    def __init__(
        self, name: str, concurrent: bool, wants_port: bool, params: tuple[Param, ...] | None, doc: str
    ) -> None:
        self.name, self.concurrent, self.wants_port, self.params, self.doc = name, concurrent, wants_port, params, doc

    def __reduce__(self) -> tuple[object, ...]:
        return EndpointInfo, (self.name, self.concurrent, self.wants_port, self.params, self.doc)

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

    def check(self, actor: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Raises: ArgumentsError if they do not fit."""
        signature = self.signature
        if signature is None:
            return
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
    EndpointInfo("__init__", False, False, params_of(init, skip=1), "").check(cls.__qualname__, args, kwargs)
