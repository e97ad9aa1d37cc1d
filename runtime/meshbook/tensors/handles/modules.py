"""Modules of torch on a mesh: their parameters and buffers become mesh tensors, and the module stays what it was.

A plan says which parameters are cut, and along which axis; operations follow from that. Gradients are those of the
whole batch, however it lies on the ranks.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from meshbook.errors import UnknownAxisError, UsageError
from meshbook.formatting import format_bytes
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.distributed_mesh import Mesh, mesh_of
from meshbook.tensors.handles.factories import distribute
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.handles.parallel_styles import layouts_of, parameter_spec, read_style
from meshbook.tensors.messages.spec import ShardingSpec

TModule = TypeVar("TModule", bound=torch.nn.Module)

Style: TypeAlias = str | ShardingSpec | ParallelStyle
"""``column`` cuts the outputs of a linear layer, ``row`` its inputs, ``shard`` any parameter along its first dim; a
style of torch also says how a module's inputs and outputs lie; a sequence is the sharding spec of the parameter."""

_STYLES = ("column", "row", "shard")


def module_to_mesh(
    module: TModule, mesh: Mesh | ProcMesh, plan: Mapping[str, Style] | None = None, *, axis: str | None = None
) -> TModule:
    """Put a module on a mesh, in place, and return it; parameters and buffers are whole on every rank by default.

    plan: from patterns of names, of parameters or of the modules that have them, as in ``{"*.qkv": "column", "*.o":
    "row", "embed.weight": ["tensor", None]}``, to how they are cut; the first that fits counts. torch's styles, as in
    ``{"*.qkv": ColwiseParallel()}``, are for modules; tensors stay whole to a module, whatever ``use_local_output`` is.
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
        unused.discard(_put_style(part, path, plan, list(mesh.axes).index(axis)))
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


def _put_style(module: torch.nn.Module, path: str, plan: Mapping[str, Style], axis: int) -> str:
    """Have a module lay out what goes in and out as one of torch's styles says; the pattern under which it is."""
    pattern = _pattern_of(plan, path)
    style = plan[pattern] if pattern else None
    if not isinstance(style, ParallelStyle):
        return ""
    read_style(style, module, path, axis).put_on(module)
    return pattern


def _spec(style: Style, module: torch.nn.Module, path: str, name: str, axis: str) -> ShardingSpec | None:
    parameter = getattr(module, name)
    if isinstance(style, ParallelStyle):
        if not layouts_of(module):
            raise UsageError(f"{type(style).__name__} is for modules: its pattern fits {name} of {path}, not {path}")
        return parameter_spec(style, module, path, name, axis)
    if not isinstance(style, str):
        return style
    if style not in _STYLES:
        raise UsageError(
            f"{style!r} is no way to cut a parameter: {', '.join(_STYLES)}, a style of torch, or a sharding spec"
        )
    if not parameter.dim() or (style == "row" and name == "bias"):
        return None
    return (None, axis) if style == "row" and parameter.dim() > 1 else (axis,)


def show_plan(module: torch.nn.Module) -> str:
    """A table of a module's parameters: shape, placements, and how much of each a rank holds.

    Below it, how the inputs and outputs of modules with a style of torch are laid out along the axis of the styles.
    """
    rows = [("parameter", "shape", "placements", "bytes per rank")]
    total = 0
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, MeshTensor):
            raise UsageError(f"{name} is on no mesh: use module_to_mesh(module, mesh) first")
        placements = parameter.placements
        size_bytes = math.prod(_local_shape(parameter, placements)) * parameter.element_size()
        total += size_bytes
        rows.append((name, str(tuple(parameter.shape)), ", ".join(map(repr, placements)), format_bytes(size_bytes)))
    rows.append(("all", "", "", format_bytes(total)))
    styles = [(each.path, each.style, str(each)) for part in module.modules() for each in layouts_of(part)]
    return _in_columns(rows) + ("\n\n" + _in_columns([("module", "style", "layouts"), *styles]) if styles else "")


def _in_columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _local_shape(tensor: MeshTensor, placements: Sequence[Placement]) -> list[int]:
    """Of the first rank, whose part is the largest."""
    shape = list(tensor.shape)
    for placement, size in zip(placements, tensor.mesh.axes.values(), strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return shape
