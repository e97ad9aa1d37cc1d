"""Modules of torch on a mesh: their parameters and buffers become mesh tensors, and the module stays the same object.

A plan says which parameters are cut, and along which axis; operations follow from that. Gradients are those of the
whole batch, however it lies on the ranks.

In torch a ParallelStyle makes DTensors of each rank's own tensors and, with ``use_local_output``, own tensors of them.
Here a tensor is one tensor to everybody, so a style is reduced to the layouts that it wants along one axis of the mesh:
hooks lay tensors out so before and after ``forward``. The layouts that a style expects tensors in are not needed.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

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

from meshbook.errors import UnknownAxisError, UsageError
from meshbook.formatting import Table, format_bytes
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.distributed_mesh import Mesh, mesh_of
from meshbook.tensors.handles.factories import distribute
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.messages.layouts import MeshEnd, ShardingSpec
from meshbook.tensors.messages.operations import LAY_OUT
from meshbook.torch_internals import Operator, TorchDispatchMode

TModule = TypeVar("TModule", bound=torch.nn.Module)

Style: TypeAlias = str | ShardingSpec | ParallelStyle
"""``column`` cuts the outputs of a linear layer, ``row`` its inputs, ``shard`` any parameter along its first dim; a
style of torch also says how a module's inputs and outputs lie; a sequence is the sharding spec of the parameter."""

_STYLES = ("column", "row", "shard")


def module_to_mesh(
    module: TModule, mesh: Mesh | ProcMesh, plan: Mapping[str, Style] | None = None, *, axis: str | None = None
) -> TModule:
    """Put a module on a mesh, in place, and return it; parameters and buffers are whole on every rank by default.

    plan: patterns of names, of parameters or of the modules that have them, and how these are cut, as in ``{"*.qkv":
    "column", "*.o": "row", "embed.weight": ["tensor", None]}``; the first that fits counts. torch's styles, as in
    ``{"*.qkv": ColwiseParallel()}``, are for modules, to which tensors stay whole, also with ``use_local_output``.
    axis: along which the styles cut, the last one by default. Tied parameters stay tied.
    Raises: UsageError for a style that is none, or a pattern that fits nothing; UnknownAxisError.
    """
    mesh = mesh_of(mesh)
    axis = list(mesh.axes)[-1] if axis is None else axis
    if axis not in mesh.axes:
        raise UnknownAxisError(axis, mesh.axes)
    plan = plan or {}
    unused = set(plan)
    placed: dict[torch.Tensor, torch.nn.Parameter] = {}
    for path, part in module.named_modules():
        style = plan.get(pattern := _pattern_of(plan, path))
        if isinstance(style, ParallelStyle):
            read_style(style, part, path, list(mesh.axes).index(axis)).put_on(part)
            unused.discard(pattern)
        for name, parameter in part.named_parameters(recurse=False):
            pattern = _pattern_of(plan, f"{path}.{name}".removeprefix("."), path)
            unused.discard(pattern)
            if parameter not in placed:
                spec = _spec(plan[pattern], part, path, name, axis) if pattern else None
                value = distribute(parameter.detach(), mesh, spec)
                placed[parameter] = torch.nn.Parameter(value, parameter.requires_grad)
            part.register_parameter(name, placed[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, distribute(buffer, mesh), name not in part._non_persistent_buffers_set)
    if unused:
        raise UsageError(f"no parameter or module is called {', '.join(sorted(unused))}; see module.named_parameters()")
    return module


def _pattern_of(plan: Mapping[str, Style], *names: str) -> str:
    return next((each for each in plan if any(fnmatch.fnmatch(name, each) for name in names)), "")


def _spec(style: Style, module: torch.nn.Module, path: str, name: str, axis: str) -> ShardingSpec | None:
    parameter = getattr(module, name)
    if isinstance(style, ParallelStyle):
        if not layouts_of(module):
            raise UsageError(f"{type(style).__name__} is for modules: its pattern fits {name} of {path}, not {path}")
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            return None
        if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            raise UsageError(
                f"{type(style).__name__} cuts nn.Linear and nn.Embedding, and {path or 'the module'} is "
                f"{type(module).__name__}: give it another pattern"
            )
        by_column = isinstance(style, ColwiseParallel)
        if name == "bias":
            return (axis,) if by_column else None
        return (axis,) if by_column is isinstance(module, torch.nn.Linear) else (None, axis)  # (out, in); (number, dim)
    if not isinstance(style, str):
        return style
    if style not in _STYLES:
        raise UsageError(
            f"{style!r} is no way to cut a parameter: {', '.join(_STYLES)}, a style of torch, or a sharding spec"
        )
    if not parameter.dim() or (style == "row" and name == "bias"):
        return None
    return (None, axis) if style == "row" and parameter.dim() > 1 else (axis,)


def show_plan(module: torch.nn.Module) -> Table:
    """Return a table of a module's parameters: shape, placements, and how much of each a rank holds.

    Below it, how the inputs and outputs of modules with a style of torch are laid out along the axis of the styles.
    """
    rows: list[tuple[str, str, str, str]] = []
    total = 0
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, MeshTensor):
            raise UsageError(f"{name} is on no mesh: use module_to_mesh(module, mesh) first")
        on, placements = parameter.mesh, parameter.placements
        boxes = MeshEnd(on.stream.name, on.shape, on.procs.ranks).boxes(parameter.shape, placements)
        largest = math.prod(end - begin for begin, end in boxes[on.procs.ranks[0]])
        size_bytes = largest * parameter.element_size()
        total += size_bytes
        rows.append((name, str(tuple(parameter.shape)), ", ".join(map(repr, placements)), format_bytes(size_bytes)))
    rows.append(("all", "", "", format_bytes(total)))
    layouts = [f"{each.path} ({each.style}): {each}" for part in module.modules() for each in layouts_of(part)]
    return Table(("parameter", "shape", "placements", "bytes per rank"), rows, notes=layouts)


WantedLayouts = Sequence[Placement | None]
"""A layout for each tensor; None for a tensor that is left as it is."""


class ModuleLayouts(NamedTuple):
    """The layouts of a module's inputs and outputs along an axis of the mesh. Its methods are hooks of the module."""

    style: str
    path: str
    axis: int
    inputs: WantedLayouts = ()
    named: Mapping[str, Placement] = {}
    outputs: WantedLayouts = ()
    counted: bool = False
    """Whether there have to be as many inputs, and outputs, as layouts; else layouts are for the first ones."""

    def put_on(self, module: torch.nn.Module) -> None:
        """Register the hooks with the module."""
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
    """Return the layouts among a module's hooks; empty for a module without a style."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    found = {id(owner): owner for owner in owners if isinstance(owner, ModuleLayouts)}
    return list(found.values())


class _LayOutAliases(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that lays out an alias in another way, which autograd knows as an alias."""

    def __init__(self, axis: int, dim: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis, self._dim = axis, dim

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.alias.default:
            return LAY_OUT(args[0], self._axis, self._dim)
        return func(*args, **(kwargs or {}))


def lay_along(tensor: MeshTensor, axis: int, dim: int | None) -> MeshTensor:
    """Return the same tensor, cut along one axis of its mesh in a dim, or whole there; other axes stay as they are.

    A write to either is a write to both, as a module would write to its input.
    """
    with _LayOutAliases(axis, dim):
        return cast("MeshTensor", torch.ops.aten.alias.default(tensor))


def read_style(style: ParallelStyle, module: torch.nn.Module, path: str, axis: int) -> ModuleLayouts:
    """Return the layouts that a style wants of a module's inputs and outputs.

    Raises: UsageError for a style without meaning on a mesh: of a class of its own, each rank's own tensors, sums that
    are not done.
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
