"""Expressions of the shape algebra, drawn at random but alike under both packages. Run by `programs`."""

from __future__ import annotations

import math
import random
from typing import Any

CASES = 1000
SEED = 7


def expressions() -> list[str]:
    """Different ones, in an order that depends on `SEED` alone."""
    draw = random.Random(SEED)
    found: dict[str, None] = {}
    while len(found) < CASES:
        found[draw.choice(_KINDS)(draw)] = None
    return list(found)


def _axes(draw: random.Random) -> tuple[list[str], list[int]]:
    """Without axes of size 1, whose strides are no matter, and which both tell in their own way."""
    count = draw.randint(0, 3)
    return draw.sample(["a", "b", "c", "dp"], count), [draw.randint(2, 4) for _ in range(count)]


def _piece(draw: random.Random, sizes: list[int]) -> str:
    """A slice whose axes do not overlap, with gaps."""
    strides: list[int] = []
    stride = draw.randint(1, 2)
    for size in reversed(sizes):
        strides.insert(0, stride)
        stride *= size * draw.randint(1, 2)
    return f"NDSlice(offset={draw.randint(0, 4)}, sizes={sizes}, strides={strides})"


def _shape(draw: random.Random) -> tuple[str, list[str], list[int]]:
    labels, sizes = _axes(draw)
    return f"Shape({labels}, {_piece(draw, sizes)})", labels, sizes


def _label(draw: random.Random, labels: list[str]) -> str:
    return draw.choice([*labels, *labels, *labels, "z"])


def _of_slices(draw: random.Random) -> str:
    sizes = _axes(draw)[1]
    piece = _piece(draw, sizes)
    number = draw.randint(0, 12)
    tail = draw.choice([
        "", ".offset", ".sizes", ".strides", ".ndim", f".get({number})", f"[{number}]", f".index({number})",
        f".coordinates({number})", f".nditem({[draw.randint(0, 1) for _ in sizes]})",
        f" == {piece}", f" != {piece}",
    ])  # fmt: skip
    return draw.choice([f"{piece}{tail}", f"list({piece})", f"len({piece})", f"{number} in {piece}", f"str({piece})"])


def _of_lists(draw: random.Random) -> str:
    ranks = sorted(draw.sample(range(20), draw.randint(0, 6)))
    return f"sorted(rank for piece in NDSlice.from_list({ranks}) for rank in piece)"


def _of_shapes(draw: random.Random) -> str:
    shape, labels, _ = _shape(draw)
    label, number = _label(draw, labels), draw.randint(0, 4)
    return draw.choice([
        f"{shape}.at({label!r}, {number})", f"{shape}.index({label}={number})", f"{shape}.ranks()", f"len({shape})",
        f"{shape}.coordinates({draw.randint(0, 20)})", f"{shape}.extent", f"{shape}.ndslice", f"{shape}.labels",
        f"{shape}.select({label!r}, slice(0, {draw.randint(2, 3)}))", f"str({shape})",
        f"{shape}.region.point_of_base_rank({draw.randint(0, 20)})", f"{shape}.region.slice()",
        f"{shape}.at({label!r}, -1)", f"{shape}.region.as_shape() == {shape}", f"{shape} == {shape}",
        f"pickle.loads(pickle.dumps({shape})) == {shape}",
    ])  # fmt: skip


def _of_extents(draw: random.Random) -> str:
    labels, sizes = _axes(draw)
    extent = f"Extent({labels}, {sizes})"
    label = _label(draw, labels)
    point = f"Point({draw.randrange(math.prod(sizes))}, {extent})"
    return draw.choice([
        extent, f"{extent}[{label!r}]", f"{extent}.nelements", f"dict({extent})", f"{label!r} in {extent}",
        f"list({extent})", f"{extent}.region.as_shape()", f"len({extent})", point, f"{point}[{label!r}]",
        f"{point}.size({label!r})", f"dict({point})", f"{point}.rank", f"list({point}.values())",
        f"pickle.loads(pickle.dumps({point})) == {point}", f"{extent} == Extent({labels[::-1]}, {sizes[::-1]})",
    ])  # fmt: skip


def _of_values(draw: random.Random) -> str:
    labels, sizes = _axes(draw)
    count = math.prod(sizes)
    shape = f"Shape({labels}, NDSlice.new_row_major({sizes}))"
    values = f"ValueMesh({shape}, list(range({count})))"
    label = _label(draw, labels)
    first = draw.randint(0, 1)
    some: dict[str, Any] = {name: draw.randint(0, size - 1) for name, size in zip(labels, sizes, strict=True)}
    item = ", ".join(f"{name}={index}" for name, index in some.items())
    return draw.choice([
        f"{values}.item({item})", f"{values}.values()", f"list({values}.items())", f"{values}.extent",
        f"{values}.size({label!r})",
        f"{values}.slice({label}={first}).values()", f"{values}.slice({label}=slice({first}, {first + 1})).values()",
        f"{values}.flatten('x').values()", f"{values}.flatten('x').extent", f"{values}.rename({label}='n').extent",
        f"{values}.get({draw.randint(0, 12)})", f"len({values})", f"{values}.slice({label}={first}).extent",
        f"{values}.split({label}=('p', 'q'), p={draw.randint(1, 3)}).extent", f"{values}.sizes", f"{values}.size()",
        f"ValueMesh.from_indexed({shape}, [(i, i * i) for i in range({count})][::-1]).values()",
        f"ValueMesh({shape}, list(range({count + draw.randint(-1, 1)}))).values()",
        f"pickle.loads(pickle.dumps({values})).values()",
    ])  # fmt: skip


_KINDS = (_of_slices, _of_lists, _of_shapes, _of_shapes, _of_extents, _of_extents, _of_values, _of_values)
