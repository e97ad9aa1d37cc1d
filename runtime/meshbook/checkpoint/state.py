"""The state of objects as tensors and plain values under keys, taken for a save and given back after it.

    name -> HeldState ── tensors() ──> {"model.0.weight": tensor, ...}     loaded in place
                 ── rest()    ──> a plain value under the name        given back by give()

A module has the keys of its ``state_dict``, without the prefixes of DDP and ``torch.compile``. An optimizer's are
``NAME.state.PARAMETER.exp_avg``, by the names of its parameters in their module, so that a mesh of another size and
another program find them.
"""

from __future__ import annotations

import abc
import datetime
import random
import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from meshbook.errors import UsageError
from meshbook.formatting import name_some

RANDOM = "_random"
"""The name of the random states."""
VALUE, OBJECT, RANDOM_KIND = "value", "object", "random"
TENSOR, DTENSOR = TENSORS = "tensor", "DTensor"
"""The kinds of `HeldValue`."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, range,
          datetime.datetime, datetime.date, datetime.timedelta)  # fmt: skip
_CODE = (ModuleType, type, property, staticmethod, classmethod)
_DEEPEST = 20
SHOWN = 3
"""The most keys that an error lists."""

Tensors = dict[str, torch.Tensor]


class HeldState(abc.ABC):
    """The state of one named object."""

    kind: str
    is_strict = False
    """Whether a save has to have just the tensors that the object has now."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def tensors(self) -> Tensors:
        """Return its tensors by key, sharing their memory."""

    def rest(self) -> object:
        """Return all else, as a plain value; None if there is nothing else."""
        return None

    @abc.abstractmethod
    def give(self, tensors: Tensors, rest: Any) -> None:
        """Take a state. tensors: those of `tensors` have the new values already."""

    def check(self, keys: Collection[str], rest: Any) -> str:
        """Return why a saved state is not of this object; empty if it is. keys: those of the saved tensors."""
        return ""

    def like(self, key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor to be loaded, for a key that the object does not have yet."""
        return torch.empty(size, dtype=dtype, device="cpu")


class HeldModule(HeldState):
    kind = "module"
    is_strict = True

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name)
        self.module = unwrapped(module)

    def tensors(self) -> Tensors:
        state = self.module.state_dict()
        return {f"{self.name}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def rest(self) -> object:
        state = self.module.state_dict()
        return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)} or None

    def check(self, keys: Collection[str], rest: Any) -> str:
        here = self.tensors()
        if lacking := [key for key in here if key not in keys]:
            text = f"the save does not have {name_some(lacking, SHOWN)}"
        elif foreign := [key for key in keys if key not in here]:
            text = f"only the save has {name_some(foreign, SHOWN)}"
        else:
            return ""
        return f"{self.name} is another model than was saved: {text}"

    def give(self, tensors: Tensors, rest: Any) -> None:
        if rest:
            self.module.load_state_dict(rest, strict=False)


class HeldOptimizer(HeldState):
    kind = "optimizer"
    is_strict = True

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, known: Mapping[int, _Known]) -> None:
        """known: the names of parameters, by their identities."""
        super().__init__(name)
        self.optimizer = optimizer
        self.parameters: dict[str, torch.Tensor] = {}
        self.groups: list[list[str]] = []
        places = [
            [known.get(id(each), _Known("", f"{at}.{number}")) for number, each in enumerate(group["params"])]
            for at, group in enumerate(optimizer.param_groups)
        ]
        parts = [place.part for group in places for place in group]
        is_clear = len(set(parts)) == len(parts)  # not so for two modules with equal layers
        for group, params in zip(places, optimizer.param_groups, strict=True):
            names = [place.part if is_clear or not place.owner else f"{place.owner}.{place.part}" for place in group]
            self.groups.append(names)
            self.parameters.update(zip(names, params["params"], strict=True))

    def tensors(self) -> Tensors:
        return {
            f"{self.name}.state.{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def rest(self) -> object:
        state = {
            name: {key: value for key, value in known.items() if not isinstance(value, torch.Tensor)}
            for name, parameter in self.parameters.items()
            if (known := self.optimizer.state.get(parameter))
        }
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]
        return {"class": type(self.optimizer).__name__, "state": state, "groups": groups}

    def give(self, tensors: Tensors, rest: Any) -> None:
        prefix = f"{self.name}.state."
        state: dict[str, dict[str, Any]] = {name: dict(known) for name, known in rest["state"].items()}
        for key, value in tensors.items():
            name, _, entry = key.removeprefix(prefix).rpartition(".")
            state.setdefault(name, {})[entry] = value
        self.optimizer.state.clear()
        for name, known in state.items():
            self.optimizer.state[self.parameters[name]] = known
        for group, saved in zip(self.optimizer.param_groups, rest["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def check(self, keys: Collection[str], rest: Any) -> str:
        kind = type(self.optimizer).__name__
        if rest["class"] != kind:
            return f"{self.name} is {kind}, and the save has {rest['class']}"
        if [group["params"] for group in rest["groups"]] != self.groups:
            return f"{self.name} has other parameters than in the save"
        return ""

    def like(self, key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        name = key.removeprefix(f"{self.name}.state.").rpartition(".")[0]
        parameter = self.parameters.get(name)
        if parameter is not None and parameter.size() == size:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return super().like(key, size, dtype)  # a step counter, which lies on the CPU


Bind = Callable[[str, object], object]


class HeldValue(HeldState):
    """A tensor, a plain value, or containers of these; or what an object says of its state."""

    def __init__(self, name: str, value: object, take: Callable[[Any], object], kind: str) -> None:
        """take: takes the new value, in which tensors that were read into place are the same as before."""
        super().__init__(name)
        self.kind = kind
        self._take = take
        self._tensors: Tensors = {}
        self._rest = _split(name, value, self._tensors)
        self._here = {key: each.detach() for key, each in self._tensors.items()}

    def tensors(self) -> Tensors:
        return self._here

    def rest(self) -> object:
        return None if self.kind in TENSORS else {"value": self._rest}

    def give(self, tensors: Tensors, rest: Any) -> None:
        given = {
            key: self._tensors[key] if each is self._here.get(key) else each  # which parameters may be
            for key, each in tensors.items()
        }
        self._take(_join(rest["value"], given))


def tensor_rest(name: str) -> dict[str, Any]:
    """Return the value of `HeldState.rest` for a tensor, which is saved without one."""
    return {"value": {_TENSOR: name}}


def hold_value(name: str, value: object, bind: Bind) -> HeldValue:
    """Return the state of a tensor or a plain value; lists and dicts are filled again in place."""

    def take(given: Any) -> None:
        target = given
        if isinstance(value, list) and isinstance(given, list):
            value[:], target = given, value
        elif isinstance(value, dict) and isinstance(given, dict):
            value.clear()
            value.update(given)
            target = value
        if not (given is value and isinstance(given, torch.Tensor)):
            bind(name, target)

    kind = DTENSOR if isinstance(value, DTensor) else TENSOR if isinstance(value, torch.Tensor) else VALUE
    return HeldValue(name, value, take, kind)


def hold_random(name: str = RANDOM) -> HeldValue:
    """Return the random states of this process: of torch, of its device, of numpy, of Python."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()

    def take(given: Any) -> None:
        torch.set_rng_state(given["torch"])
        random.setstate(given["python"])
        if "cuda" in given and "cuda" in states:
            torch.cuda.set_rng_state(given["cuda"])
        if "numpy" in given and "numpy" in states:
            sys.modules["numpy"].random.set_state(given["numpy"])

    return HeldValue(name, states, take, RANDOM_KIND)


def _hold_generator(name: str, generator: Any) -> HeldValue:
    """Return the state of a generator of random numbers: of torch, or of numpy."""
    if isinstance(generator, torch.Generator):
        state = {"state": generator.get_state()}  # a tensor alone has no value beside it
        return HeldValue(name, state, lambda given: generator.set_state(given["state"]), OBJECT)
    bits = generator.bit_generator
    return HeldValue(name, bits.state, partial(setattr, bits, "state"), OBJECT)


class _Known(NamedTuple):
    """The place of a tensor: its module's name, and its name there."""

    owner: str
    part: str


class Found(NamedTuple):
    """The content of a namespace."""

    held: dict[str, HeldState]
    skipped: dict[str, str]
    """Other names, and why they cannot be saved."""


def hold(
    names: MutableMapping[str, Any], *, strict: bool = False, kinds: Collection[str] = (), bind: Bind | None = None
) -> Found:
    """Return the state of named objects. A name for a part of another name's object is left out.

    strict: all names are meant. kinds: these are wanted; empty: all. bind: takes new values of names, which are bound
    in ``names`` by default.
    Raises: UsageError for a name that cannot be saved, with ``strict``.
    """
    bind = bind or names.__setitem__
    for name in names if strict else ():
        if not isinstance(name, str) or not name or set("./@") & set(name):
            raise UsageError(f"{name!r} is no name for a save: a text without . / @, such as model")
    held: dict[str, HeldState] = {}
    skipped: dict[str, str] = {}
    known: dict[int, _Known] = {}
    modules = {name: unwrapped(value) for name, value in names.items() if isinstance(value, torch.nn.Module)}
    parts = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    for name, module in modules.items():
        if id(module) in parts or id(module) in known:
            continue
        if type(module).__name__ == "FullyShardedDataParallel":
            skipped[name] = "FSDP1 is not saved; fully_shard (FSDP2) is"
            continue
        known[id(module)] = _Known("", name)
        for part, tensor in [*module.named_parameters(), *module.named_buffers()]:
            known.setdefault(id(tensor), _Known(name, part))
        held[name] = HeldModule(name, module)
    for name, value in names.items():
        if not isinstance(value, torch.Tensor) or id(value) in known:
            continue
        known[id(value)] = _Known("", name)
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            skipped[name] = f"a tensor without dense values ({value.type()})"
        elif isinstance(value, DTensor) and any(each.is_partial() for each in value.placements):
            skipped[name] = "a DTensor with partial sums: redistribute it first"
        else:
            held[name] = hold_value(name, value, bind)
    for name, value in names.items():
        if name in held or name in skipped or id(value) in known or name in modules:
            continue
        if isinstance(value, torch.optim.Optimizer):
            held[name] = HeldOptimizer(name, value, known)
        elif isinstance(value, _CODE):
            if strict:
                skipped[name] = "it is code"
        elif isinstance(value, torch.Generator) or hasattr(value, "bit_generator"):
            held[name] = _hold_generator(name, value)
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            try:
                held[name] = HeldValue(name, value.state_dict(), value.load_state_dict, OBJECT)
            except Exception as error:  # of a user's class
                skipped[name] = f"{type(value).__name__}.state_dict() failed: {error}"
        elif _is_plain(value, _DEEPEST):
            held[name] = hold_value(name, value, bind)
        elif strict or not callable(value):
            skipped[name] = f"{type(value).__name__} has no state_dict"
    for name in [name for name, each in held.items() if kinds and each.kind not in kinds]:
        skipped[name] = f"it is of the kind {held.pop(name).kind}, for which this format has no place"
    if strict and skipped:
        name, why = next(iter(skipped.items()))
        raise UsageError(f"{name} cannot be saved: {why}")
    return Found({name: held[name] for name in names if name in held}, skipped)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of DDP's and ``torch.compile``'s wrappers."""
    while type(module).__name__ in ("DistributedDataParallel", "OptimizedModule"):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module  # type: ignore[assignment]
    return module


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, (*_PLAIN, torch.Tensor)):
        return True
    if type(value).__module__ == "numpy":
        return not getattr(getattr(value, "dtype", None), "hasobject", True)
    if not depth or not isinstance(value, list | tuple | set | frozenset | dict):
        return False
    parts: Sequence[object] = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    return all(_is_plain(part, depth - 1) for part in parts)


_TENSOR = "__tensor__"


def _split(path: str, value: Any, tensors: Tensors) -> Any:
    """Return a value with the keys of its tensors in their places, which are put into ``tensors``.

    Containers without tensors stay as they are, with their types.
    """
    if isinstance(value, torch.Tensor):
        while path in tensors:  # {1: a, "1": b}
            path += "_"
        tensors[path] = value
        return {_TENSOR: path}
    before = len(tensors)
    parts: Any = value
    if isinstance(value, dict):
        parts = {key: _split(f"{path}.{key}", each, tensors) for key, each in value.items()}
    elif type(value) in (list, tuple):
        parts = type(value)(_split(f"{path}.{at}", each, tensors) for at, each in enumerate(value))
    return parts if len(tensors) > before else value


def keys_of(rest: Any) -> set[str]:
    """Return the keys of the tensors that a value is put together with."""
    if isinstance(rest, dict):
        if rest.keys() == {_TENSOR}:
            return {rest[_TENSOR]}
        rest = list(rest.values())
    return {key for each in rest for key in keys_of(each)} if type(rest) in (list, tuple) else set()


def _join(value: Any, tensors: Tensors) -> Any:
    """Return a value with its tensors in their places again."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _join(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_join(each, tensors) for each in value)
    return value
