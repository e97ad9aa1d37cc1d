"""A rank's part of a tensor that the ranks make, without memory for the whole where that can be.

Values are those of the whole as torch makes it in one piece, whatever the mesh and the layout. Random numbers come of
one sequence, so those before a part have to be drawn as well: they are, piece by piece, and thrown away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from meshbook.tensors.messages.operations import Factory

UNIFORM = ("zeros", "ones", "full")
DRAWN = {"rand": 0, "randn": 0, "randint": 2}
"""Functions that draw numbers, and which of their arguments is the shape."""
PIECE_ELEMENTS = 1 << 20
"""Of random numbers, about so many are drawn at a time."""
DRAWN_TOGETHER = 16
"""`torch.randn` makes so many numbers of as many, and the last of a tensor anew."""


def shape_of(factory: Factory) -> tuple[int, ...]:
    """Of the whole."""
    if factory.function == "arange":
        return tuple(torch.arange(*factory.args, dtype=factory.dtype, device="meta").shape)
    return tuple(factory.args[DRAWN.get(factory.function, 0)])


def make_part(factory: Factory, sizes: Sequence[int], begin: Sequence[int], device: str = "cpu") -> torch.Tensor | None:
    """The part of these sizes that begins there; None if the whole has to be made for it.

    device: where to make it. What draws numbers does so on the CPU, for the same everywhere.
    """
    if factory.function in UNIFORM:
        return factory._replace(args=(tuple(sizes), *factory.args[1:])).make(device)
    if factory.function == "arange":
        return _arange(factory, sizes[0], begin[0])
    return _draw(factory, sizes, begin) if factory.function in DRAWN else None


def _arange(factory: Factory, count: int, begin: int) -> torch.Tensor | None:
    """None for numbers that are rounded: how depends on where they stand in the whole."""
    given = (0, *factory.args) if len(factory.args) == 1 else factory.args
    if any(each != int(each) for each in given if math.isfinite(each)) or not all(map(math.isfinite, given)):
        return None
    start, end, step = map(int, (*given, 1)[:3])
    most = (
        int(2 / torch.finfo(factory.dtype).eps) if factory.dtype.is_floating_point else torch.iinfo(factory.dtype).max
    )
    least = -most if factory.dtype.is_floating_point else torch.iinfo(factory.dtype).min
    if not all(least <= each <= most for each in (start, end, start + begin * step, start + (begin + count) * step)):
        return None
    bounds = (start + begin * step, start + (begin + count) * step, step)
    return factory._replace(args=bounds).make()


def _draw(factory: Factory, sizes: Sequence[int], begin: Sequence[int]) -> torch.Tensor | None:
    """Rows of the whole, some at a time; None where a few rows are much already, or there are no more."""
    shape, at = shape_of(factory), DRAWN[factory.function]
    if not math.prod(sizes):
        return torch.empty(tuple(sizes), dtype=factory.dtype, device="cpu")
    each = math.prod(shape[1:])
    together = DRAWN_TOGETHER // math.gcd(each, DRAWN_TOGETHER)
    rows = max(PIECE_ELEMENTS // max(each * together, 1), 1) * together
    if not shape or rows >= shape[0]:
        return None
    ends = [*range(rows, shape[0], rows), shape[0]]
    if (ends[-1] - ends[-2]) * each < DRAWN_TOGETHER:
        del ends[-2]
    draw = _source(factory, at)
    made = torch.empty(tuple(sizes), dtype=factory.dtype, device="cpu")
    inner = tuple(slice(first, first + size) for first, size in zip(begin[1:], sizes[1:], strict=True))
    first, last = begin[0], begin[0] + sizes[0]
    for start, end in itertools.pairwise([0, *ends]):
        if start >= last:
            break
        piece = draw((end - start, *shape[1:]))
        low, high = max(start, first), min(end, last)
        if low < high:
            made[low - first : high - first] = piece[(slice(low - start, high - start), *inner)]
    return made


def _source(factory: Factory, at: int) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Draws one shape after the other."""
    function, generator = getattr(torch, factory.function), torch.Generator().manual_seed(factory.seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        args = (*factory.args[:at], shape, *factory.args[at + 1 :])
        made: torch.Tensor = function(*args, dtype=factory.dtype, generator=generator, device="cpu")
        return made

    return draw
