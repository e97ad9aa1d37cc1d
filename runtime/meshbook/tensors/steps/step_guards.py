"""The conditions of a recorded step, checked before each time it is repeated: a few microseconds for each kind.

They cover all of the arguments; of the function, the plain values that it names (not those of functions that it
calls); of modules, their parts and modes; of optimizers, their options and the tensors that they step.
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import CodeType, MethodType
from typing import Any, NamedTuple

import torch

from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.torch_internals import DisableTorchFunctionSubclass

PLAIN = (int, float, bool, str, type(None), torch.dtype)


_mode, _needs_gradient = operator.attrgetter("training"), operator.attrgetter("requires_grad")
_values: Callable[[Any], Iterable[object]] = dict.values
"""The values of a dict, for `map` over hundreds of dicts before each step."""

without_torch_functions: Callable[[], AbstractContextManager[None]] = DisableTorchFunctionSubclass
"""A block in which torch looks for no function of Python that would answer for a tensor."""


def _values_of_all(dicts: Iterable[Mapping[str, object]]) -> Iterator[object]:
    return itertools.chain.from_iterable(map(_values, dicts))


class KnownModules:
    """The modules of a recorded step, with all that they consist of."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self._modes = list(map(_mode, self._modules))
        held = [parts for each in self._modules for parts in (each._parameters, each._buffers, each._modules)]
        self._filled: list[Mapping[str, object]] = [each for each in held if each]
        self._empty: list[Mapping[str, object]] = [each for each in held if not each]
        self._parts = list(_values_of_all(self._filled))
        self._tensors = [part for part in self._parts if isinstance(part, MeshTensor)]
        self._needs = list(map(_needs_gradient, self._tensors))

    def is_as_it_was(self) -> bool:
        """Whether the modules have the same parts, no more, in the same modes; parameters may have other values."""
        return (
            all(map(operator.is_, map(_mode, self._modules), self._modes))
            and not any(self._empty)
            and sum(map(len, self._filled)) == len(self._parts)
            and all(map(operator.is_, _values_of_all(self._filled), self._parts))
            and all(map(operator.is_, map(_needs_gradient, self._tensors), self._needs))
        )


class KnownOptimizer:
    """An optimizer of a recorded step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._state, self._groups = optimizer, optimizer.state, optimizer.param_groups
        self._options = [_Options(group) for group in optimizer.param_groups]
        self._states: list[dict[str, Any]] = list(optimizer.state.values())
        """The states of the parameters, without these, which are hashed by functions of Python."""
        self._held: list[object] = list(_values_of_all(self._states))

    def is_as_it_was(self) -> bool:
        """Whether its options, its parameters and its state are the same objects; a tensor may have another value."""
        now = self._optimizer
        return (
            now.state is self._state
            and now.param_groups is self._groups
            and len(self._groups) == len(self._options)
            and all(map(_Options.are_those_of, self._options, self._groups))
            and len(self._state) == len(self._states)
            and all(map(operator.is_, self._state.values(), self._states))
            and sum(map(len, self._states)) == len(self._held)
            and all(map(operator.is_, _values_of_all(self._states), self._held))
        )


class _Options:
    """The options of one group of parameters."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._parameters = list(group["params"])
        self._values = {name: value for name, value in group.items() if name != "params"}

    def are_those_of(self, group: Mapping[str, Any]) -> bool:
        parameters = group["params"]
        if len(parameters) != len(self._parameters) or len(group) != len(self._values) + 1:
            return False
        if not all(map(operator.is_, parameters, self._parameters)):
            return False
        now = list(map(group.get, self._values))
        return all(map(operator.is_, now, self._values.values())) or all(map(_is_option, now, self._values.values()))


def _is_option(value: Any, before: Any) -> bool:
    return value is before or (not isinstance(value, torch.Tensor) and type(value) is type(before) and value == before)


class CannotRepeat(Exception):
    """Raised for a call that is run as it is; the text says why."""


def read_argument(value: Any, inputs: list[MeshTensor], scalars: list[torch.Tensor]) -> object:
    """Return the part of a signature for one argument; its tensors go into the lists."""
    kind = type(value)
    if isinstance(value, MeshTensor):
        if value.requires_grad and id(value) not in map(id, inputs):
            raise CannotRepeat("an argument needs its gradient: give it as tensor.detach()")
        inputs.append(value)
        return (value._handle.output, value.mesh)
    if isinstance(value, torch.Tensor):
        if value.dim() or value.requires_grad:
            raise CannotRepeat("a tensor of this process is an argument: give a mesh tensor, by meshbook.distribute")
        scalars.append(value)
        return (torch.Tensor, value.dtype)
    if kind is list or kind is tuple:
        return (kind, *map(functools.partial(read_argument, inputs=inputs, scalars=scalars), value))
    if kind is dict:
        return (dict, *[(name, read_argument(each, inputs, scalars)) for name, each in value.items()])
    hash(value)
    return (kind, value)


def modes_of_torch() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_default_dtype(),
    )


_NOTHING = object()


class _Path(NamedTuple):
    """A way from a variable to a value that code names."""

    is_global: bool
    root: str
    steps: tuple[tuple[bool, Any], ...] = ()
    """The names of attributes (False), and the keys of items in brackets (True)."""

    def follow(self, find: Callable[[], object]) -> object:
        """Return the present value. find: a function for that of the variable."""
        try:
            found: Any = find()
            for is_item, name in self.steps:
                if isinstance(found, torch.Tensor) or (is_item and not isinstance(found, (dict, list, tuple))):
                    return _NOTHING  # to ask it may be an operation, or take something out
                found = found[name] if is_item else getattr(found, name)
        except Exception:  # whatever theirs raise: the step will say so
            return _NOTHING
        return found


def values_referred_to(function: Callable[..., Any]) -> Callable[[], tuple[object, ...]]:
    """Return a function that reads the plain values that another refers to: globals, closures, and its object's.

    Of other objects it reads the attributes and items that the code names, ``config.scale`` and ``flags["f"]``, if they
    are plain values when they are first read.
    """
    inner = function.__func__ if isinstance(function, MethodType) else function
    owner = function.__self__ if isinstance(function, MethodType) else None
    code, defined_in = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    cells = getattr(inner, "__closure__", None) or ()
    itself: Mapping[str, object] = getattr(owner, "__dict__", {})
    roots: dict[str, Callable[[], object]] = {}
    paths: dict[_Path, None] = {}
    if code is not None:
        if owner is not None and code.co_argcount:
            roots[code.co_varnames[0]] = lambda: owner
        for name, cell in zip(code.co_freevars, cells, strict=False):
            roots[name] = functools.partial(getattr, cell, "cell_contents")
            paths[_Path(False, name)] = None
        _find_reads(code, paths)
    reads: list[tuple[_Path, Callable[[], object]]] = []
    for path in paths:
        find = functools.partial(defined_in.get, path.root) if path.is_global else roots.get(path.root)
        if find is not None:
            reads.append((path, functools.partial(path.follow, find) if path.steps else find))
    is_first = True

    def read() -> tuple[object, ...]:
        nonlocal is_first
        if is_first:
            reads[:] = [each for each in reads if not each[0].steps or isinstance(each[1](), PLAIN)]
            is_first = False
        plain: list[object] = []
        for path, follow in reads:
            try:
                value = follow()
            except ValueError:  # of a cell that is empty yet
                continue
            if isinstance(value, PLAIN):
                plain.append((path, type(value), value))
        for name, value in itself.items():
            if isinstance(value, PLAIN):
                plain.append((name, type(value), value))
        return tuple(plain)

    return read


def _find_reads(code: CodeType, paths: dict[_Path, None]) -> None:
    """Note the global variables that code, and code within it, reads, and the paths at variables."""
    path: _Path | None = None
    key: tuple[Any, ...] = ()
    for each in dis.get_instructions(code):
        name, held = each.opname, key
        key = ()
        if name.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST")):
            root = each.argval[-1] if isinstance(each.argval, tuple) else each.argval  # of two at once
            path = _Path(name.startswith(("LOAD_GLOBAL", "LOAD_NAME")), root)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT") and path is not None:
            key = (each.argval,)
            continue
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and path is not None:
            path = path._replace(steps=(*path.steps, (False, each.argval)))
        elif held and path is not None and (name == "BINARY_SUBSCR" or (name == "BINARY_OP" and each.argrepr == "[]")):
            path = path._replace(steps=(*path.steps, (True, held[0])))
        else:
            path = None
        if path is not None and (path.is_global or path.steps):
            paths[path] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _find_reads(inner, paths)
