"""The tensors that a notebook has on meshes, as a table: their names, how they lie, and what a rank holds of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from meshbook.errors import MeshError
from meshbook.formatting import format_bytes_per_rank
from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.messages.operations import LocalPart, TensorId


def tensor_tables(names: Mapping[str, object]) -> list[str]:
    """One table for each mesh with a tensor under one of these names, or in a module there.

    Values that share memory count once; a tensor that could not be made has no bytes.
    """
    found: dict[str, list[MeshTensor]] = {}
    for name, value in names.items():
        if isinstance(value, MeshTensor):
            found[name] = [value]
        elif isinstance(value, torch.nn.Module):
            tensors = [each for each in (*value.parameters(), *value.buffers()) if isinstance(each, MeshTensor)]
            found.update({f"{name} ({type(value).__name__})": tensors} if tensors else {})
    meshes = dict.fromkeys(tensor.mesh for tensors in found.values() for tensor in tensors)
    return [_table(mesh, found) for mesh in meshes]


def _table(mesh: Mesh, found: Mapping[str, Sequence[MeshTensor]]) -> str:
    try:
        mesh.stream.settle()
        told = mesh.stream.ask("parts").get()
    except MeshError as error:
        return f"{mesh}: its ranks do not say what they hold: {error}"
    ranks = [parts for parts, _ in told.values()]
    names: dict[tuple[int, ...], list[str]] = {}
    for name, tensors in found.items():
        if numbers := tuple(dict.fromkeys(each._handle.number for each in tensors if each.mesh is mesh)):
            names.setdefault(numbers, []).append(name)
    rows = [(", ".join(named), *_row(numbers, ranks)) for numbers, named in names.items()]
    every = _held(sorted(set().union(*ranks)), ranks)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(["", *map(str.ljust, row[:3], widths), row[3]]) for row in rows]
    return "\n".join([f"{mesh}: {every} in all tensors, named or not", *lines])


def _row(numbers: Sequence[TensorId], ranks: Sequence[Mapping[TensorId, LocalPart]]) -> tuple[str, str, str]:
    parts = [next((held[number] for held in ranks if number in held), None) for number in numbers]
    if len(parts) > 1:
        return f"{len(parts)} tensors", "", _held(numbers, ranks)
    if (part := parts[0]) is None:
        return "", "", "its values are not there, or it is a view across parts"
    what = f"{part.shape} {str(part.dtype).removeprefix('torch.')}"
    return what, ", ".join(map(repr, part.placements)), _held(numbers, ranks)


def _held(numbers: Sequence[TensorId], ranks: Sequence[Mapping[TensorId, LocalPart]]) -> str:
    """What each rank holds of these tensors; memory that two of them share counts once."""

    def size_bytes(held: Mapping[TensorId, LocalPart]) -> int:
        parts = [(number, held[number]) for number in numbers if number in held]
        own = [part for _, part in parts if part.shares is None or part.shares[0] not in numbers]
        return sum(math.prod(part.local_shape) * part.dtype.itemsize for part in own)

    return format_bytes_per_rank([size_bytes(held) for held in ranks])
