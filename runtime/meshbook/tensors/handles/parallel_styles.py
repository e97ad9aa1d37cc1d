"""torch's ParallelStyles on modules of a mesh: how parameters are cut, and how inputs and outputs are laid out for it.

In torch a style makes DTensors of each rank's own tensors and, with ``use_local_output``, own tensors of them. Here a
tensor is one tensor to everybody, so what is left of a style are the layouts that it wants, along one axis of the mesh:
hooks lay tensors out so before and after ``forward``. The layouts that a style says tensors come in are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from meshbook.errors import UsageError
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.messages.operations import LAY_OUT
from meshbook.torch_internals import Operator, TorchDispatchMode

WantedLayouts = Sequence[Placement | None]
"""One for each tensor; None for one that is left as it is."""


class ModuleLayouts(NamedTuple):
    """How a module's inputs and outputs are laid out along an axis of the mesh. Its methods are hooks of the module."""

    style: str
    path: str
    axis: int
    inputs: WantedLayouts = ()
    named: Mapping[str, Placement] = {}
    outputs: WantedLayouts = ()
    counted: bool = False
    """Whether there are to be as many inputs, and outputs, as layouts; else those are about the first ones."""

    def put_on(self, module: torch.nn.Module) -> None:
        """Have the module's calls look here."""
        if self.inputs or self.named:
            module.register_forward_pre_hook(self.before, with_kwargs=True)
        if self.outputs:
            module.register_forward_hook(self.after)

    def before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = {name: self._laid(value, self.named.get(name)) for name, value in kwargs.items()}
        return self._each(args, self.inputs, "inputs"), named

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], made: Any) -> Any:
        if isinstance(made, tuple):
            return self._each(made, self.outputs, "outputs")
        return self._each((made,), self.outputs, "outputs")[0]

    def _each(self, values: tuple[Any, ...], layouts: WantedLayouts, which: str) -> tuple[Any, ...]:
        if self.counted and layouts and len(values) != len(layouts):
            raise UsageError(
                f"{self.style} of {self.path} is about {len(layouts)} {which}, and there are {len(values)}"
            )
        laid = [self._laid(value, layout) for value, layout in zip(values, layouts, strict=False)]
        return (*laid, *values[len(laid) :])

    def _laid(self, value: Any, layout: Placement | None) -> Any:
        if layout is None or not isinstance(value, MeshTensor):
            return value
        dim = layout.dim if isinstance(layout, Shard) else None
        if dim is not None and not -value.dim() <= dim < value.dim():
            raise UsageError(f"{self.style} of {self.path} wants {layout!r} of a tensor of shape {tuple(value.shape)}")
        return lay_along(value, self.axis, dim if dim is None else dim % value.dim())

    def __str__(self) -> str:
        named = {name: repr(each) for name, each in self.named.items()}
        told = {"inputs": ", ".join(map(repr, self.inputs)), **named, "outputs": ", ".join(map(repr, self.outputs))}
        return "; ".join(f"{name} {layouts}" for name, layouts in told.items() if layouts)


def layouts_of(module: torch.nn.Module) -> list[ModuleLayouts]:
    """Those of a module's hooks; empty for one without a style."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    found = {id(owner): owner for owner in owners if isinstance(owner, ModuleLayouts)}
    return list(found.values())


class _LayOutAliases(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes of an alias, of which autograd knows that it is one, a tensor that is laid out in another way."""

    def __init__(self, axis: int, dim: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis, self._dim = axis, dim

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.alias.default:
            return LAY_OUT(args[0], self._axis, self._dim)
        return func(*args, **(kwargs or {}))


def lay_along(tensor: MeshTensor, axis: int, dim: int | None) -> MeshTensor:
    """The same tensor, cut along one axis of its mesh in a dim, or whole there; on other axes it stays as it is.

    What is written to one is written to the other, as a module would write to its input.
    """
    with _LayOutAliases(axis, dim):
        return cast("MeshTensor", torch.ops.aten.alias.default(tensor))


def parameter_spec(
    style: ParallelStyle, module: torch.nn.Module, path: str, name: str, axis: str
) -> tuple[str | None, ...] | None:
    """How a style cuts a parameter of a module, as torch does. Raises: UsageError for a module that it cannot cut."""
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return None
    if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
        raise UsageError(
            f"{type(style).__name__} cuts nn.Linear and nn.Embedding, and {path or 'the module'} is "
            f"{type(module).__name__}: give it another pattern"
        )
    if name == "bias":
        return (axis,) if isinstance(style, ColwiseParallel) else None
    cuts_first = isinstance(style, ColwiseParallel) is isinstance(module, torch.nn.Linear)  # (out, in); (number, dim)
    return (axis,) if cuts_first else (None, axis)


def read_style(style: ParallelStyle, module: torch.nn.Module, path: str, axis: int) -> ModuleLayouts:
    """What a style says about a module's inputs and outputs.

    Raises: UsageError for what has no meaning on a mesh: a style of a class of its own, each rank's own tensors, sums
    that are not done.
    """
    name = type(style).__name__
    found = ModuleLayouts(name, path or "the module", axis)
    if type(style) is ColwiseParallel:
        found = found._replace(inputs=(Replicate(),), outputs=style.output_layouts)
    elif type(style) is RowwiseParallel:
        wanted = Replicate() if isinstance(module, torch.nn.Embedding) else Shard(-1)
        found = found._replace(inputs=(wanted,), outputs=style.output_layouts)
    elif type(style) is SequenceParallel:
        _refuse_own_tensors(style.use_local_output, name, path)
        found = found._replace(inputs=style.sequence_sharding, outputs=style.sequence_sharding)
    elif type(style) is PrepareModuleInput:
        found = found._replace(**_inputs(style, path), counted=True)
    elif type(style) is PrepareModuleOutput:
        found = found._replace(outputs=_outputs(style), counted=True)
    elif type(style) is PrepareModuleInputOutput:
        inputs, outputs = _inputs(style.prepare_module_input, path), _outputs(style.prepare_module_output)
        found = found._replace(**inputs, outputs=outputs, counted=True)
    else:
        raise UsageError(
            f"{name}, the plan of {path or 'the module'}, is no style that is known here: ColwiseParallel, "
            "RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput or PrepareModuleInputOutput"
        )
    for placement in (*found.inputs, *found.named.values(), *found.outputs):
        if placement is not None and type(placement) not in (Shard, Replicate):
            raise UsageError(f"{name} of {found.path} wants {placement!r}: a module is given, and gives, whole values "
                             "as Shard(dim) or Replicate()")  # fmt: skip
    return found


def _inputs(style: PrepareModuleInput, path: str) -> dict[str, Any]:
    _refuse_own_tensors(style.use_local_output, type(style).__name__, path)
    wanted = style.desired_input_layouts or ()
    kept = [None if comes is None else layout for comes, layout in zip(style.input_layouts or (), wanted, strict=True)]
    named = {name: style.desired_input_kwarg_layouts.get(name) for name in style.input_kwarg_layouts}
    return {"inputs": tuple(kept), "named": {name: layout for name, layout in named.items() if layout is not None}}


def _outputs(style: PrepareModuleOutput) -> WantedLayouts:
    pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
    return tuple(None if comes is None else layout for comes, layout in pairs)


def _refuse_own_tensors(asked: bool, name: str, path: str) -> None:
    if asked:
        raise UsageError(
            f"{name} of {path or 'the module'} with use_local_output is to give it each rank's own tensors, and on a "
            "mesh a tensor is one: leave that out, and sizes are those of the whole"
        )
