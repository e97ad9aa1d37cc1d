"""Mesh tensors as people see them: a picture of who holds which block, and a table of all that a notebook has."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import Placement, Shard

from meshbook.errors import MeshError
from meshbook.formatting import Table, format_bytes_per_rank, format_ranks, group_ranks, name_ranks
from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.messages.layouts import MeshEnd, are_in_blocks
from meshbook.tensors.messages.operations import Box, LocalPart, TensorId
from meshbook.tensors.ranks.rank_tensors import SHOWN_ELEMENTS, TensorDescription

WIDTH, HEIGHT, LEAST = 240, 140, 24
"""The most that a picture measures in pixels, and the least that its shorter side does."""

DRAWN_BLOCKS = 256
_CHAR = 8
"""The width of a character of a label, in pixels."""


def to_html(tensor: MeshTensor) -> str:
    """Return a tensor as HTML; the error stands in the place of values that could not be made."""
    title = f"<b>MeshTensor</b> {tuple(tensor.shape)} {html.escape(f'{tensor.dtype}, {tensor.mesh}')}"
    try:
        placements = tensor.placements
        found = tensor.mesh.stream.fetch("describe", tensor._handle.number)
    except MeshError as error:
        return f"<div>{title}<br><b>its values are not there:</b> {html.escape(str(error))}</div>"
    assert isinstance(found, TensorDescription)
    words = html.escape("; ".join(filter(None, [f"({found.placements})", found.statistics])))
    corner = "its corner:" if tensor.numel() > SHOWN_ELEMENTS else ""
    values = f"{corner}<pre>{html.escape(found.values(0))}</pre>"
    return f"<div>{title}<br>{words}<br>{_picture(tensor, placements)}{values}</div>"


def _picture(tensor: MeshTensor, placements: Sequence[Placement]) -> str:
    """Return the picture; it is empty for a number, for parts that are interleaved, and for parts of a sum."""
    mesh, shape = tensor.mesh, tuple(tensor.shape)
    if not are_in_blocks(placements) or not shape or not tensor.numel():
        return ""
    boxes = MeshEnd(mesh.stream.name, mesh.shape, mesh.procs.ranks).boxes(shape, placements)
    sharded = [each.dim for each in placements if isinstance(each, Shard)]
    drawn = sorted(list(dict.fromkeys([*sharded, *range(len(shape))]))[:2])
    held = format_bytes_per_rank([_elements(box) * tensor.element_size() for box in boxes.values()])
    told = [held, *([f"dims {drawn} of {len(shape)}"] if len(shape) > 2 else [])]
    caption = ", ".join([*told, *not_drawn(boxes, sharded, drawn)])
    return f"{draw(boxes, shape, drawn)}<br><small>{html.escape(caption)}</small><br>"


def not_drawn(boxes: Mapping[int, Box], sharded: Sequence[int], drawn: Sequence[int]) -> list[str]:
    """Return notes on the parts that the picture leaves out: dims that are cut as well, and blocks beyond the limit."""
    found = [f"cut along dim {dim} as well, which is not drawn" for dim in sorted({*sharded} - {*drawn})]
    blocks = len({tuple(box[dim] for dim in drawn) for box in boxes.values() if _elements(box)})
    if blocks > DRAWN_BLOCKS:
        found.append(f"the first {DRAWN_BLOCKS} of {blocks} blocks are drawn")
    return found


def _elements(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def draw(boxes: Mapping[int, Box], shape: Sequence[int], drawn: Sequence[int]) -> str:
    """Return an SVG picture with a rectangle for each block, named by the ranks that hold it.

    boxes: of each rank. drawn: the dims that go down and across; of a single dim, across.
    """
    down, across = (None, *drawn)[-2:] if drawn else (None, None)
    rows, columns = (1 if dim is None else shape[dim] for dim in (down, across))
    scale = min(WIDTH / columns, HEIGHT / rows)
    width, height = max(columns * scale, LEAST), max(rows * scale, LEAST)
    blocks = group_ranks(
        (rank, tuple((0, 1) if dim is None else box[dim] for dim in (down, across)))
        for rank, box in boxes.items()
        if _elements(box)
    )
    drawings, told = [], []
    for index, (((top, bottom), (left, right)), ranks) in enumerate(list(blocks.items())[:DRAWN_BLOCKS]):
        x, y = left / columns * width, top / rows * height
        wide, high = (right - left) / columns * width, (bottom - top) / rows * height
        said = f"{name_ranks(ranks)}: [{f'{top}:{bottom}, ' if down is not None else ''}{left}:{right}]"
        told.append(said)
        label, shown = format_ranks(ranks), ""
        if high >= 12 and wide >= _CHAR * len(label):
            shown = (
                f'<text x="{x + wide / 2:.1f}" y="{y + high / 2:.1f}" text-anchor="middle" '
                f'dominant-baseline="central" fill="#111" font-size="12" font-family="sans-serif">{label}</text>'
            )
        drawings.append(
            f'<g><title>{said}</title><rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
            f'fill="hsl({index * 137 % 360}, 60%, 74%)" stroke="#555"/>{shown}</g>'
        )
    return (
        f'<svg role="img" aria-label="{"; ".join(told)}" width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}">{"".join(drawings)}</svg>'
    )


def tensor_tables(names: Mapping[str, object]) -> list[Table]:
    """Return a table for each mesh with a tensor under one of these names, or in a module there.

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


def _table(mesh: Mesh, found: Mapping[str, Sequence[MeshTensor]]) -> Table:
    try:
        mesh.stream.settle()
        told = mesh.stream.ask("parts").get()
    except MeshError as error:
        return Table((), (), title=f"{mesh}: its ranks do not say what they hold: {error}")
    ranks = [parts for parts, _ in told.values()]
    names: dict[tuple[int, ...], list[str]] = {}
    for name, tensors in found.items():
        if numbers := tuple(dict.fromkeys(each._handle.number for each in tensors if each.mesh is mesh)):
            names.setdefault(numbers, []).append(name)
    rows = [(", ".join(named), *_row(numbers, ranks)) for numbers, named in names.items()]
    every = _held(sorted(set().union(*ranks)), ranks)
    return Table((), rows, title=f"{mesh}: {every} in all tensors, named or not")


def _row(numbers: Sequence[TensorId], ranks: Sequence[Mapping[TensorId, LocalPart]]) -> tuple[str, str, str]:
    parts = [next((held[number] for held in ranks if number in held), None) for number in numbers]
    if len(parts) > 1:
        return f"{len(parts)} tensors", "", _held(numbers, ranks)
    if (part := parts[0]) is None:
        return "", "", "its values are not there, or it is a view across parts"
    what = f"{part.shape} {str(part.dtype).removeprefix('torch.')}"
    return what, ", ".join(map(repr, part.placements)), _held(numbers, ranks)


def _held(numbers: Sequence[TensorId], ranks: Sequence[Mapping[TensorId, LocalPart]]) -> str:
    """Return the bytes that each rank holds of these tensors; memory that two of them share counts once."""

    def size_bytes(held: Mapping[TensorId, LocalPart]) -> int:
        parts = [(number, held[number]) for number in numbers if number in held]
        own = [part for _, part in parts if part.shares is None or part.shares[0] not in numbers]
        return sum(math.prod(part.local_shape) * part.dtype.itemsize for part in own)

    return format_bytes_per_rank([size_bytes(held) for held in ranks])
