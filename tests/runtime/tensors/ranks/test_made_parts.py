"""Parts of tensors that ranks make: the values of the whole as torch makes it, whatever is cut."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

import meshbook
from meshbook import ProcMesh
from meshbook.distributed import Mesh
from meshbook.tensors.messages.operations import Factory
from meshbook.tensors.ranks import rank_tensors
from meshbook.tensors.ranks.rank_tensors import make_part

SHAPES = [(100,), (81,), (35,), (17, 5), (33, 7, 2), (40, 16), (200, 31), (4, 100), (9, 0), ()]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def boxes(shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Sizes and beginnings of parts: all, a half, the last row, some rows and columns, and nothing."""
    if not shape:
        return [([], [])]
    rows, rest = shape[0], list(shape[1:])
    cut = [(rows, 0), (rows - rows // 2, rows // 2), (1, rows - 1), (rows // 3, rows // 3), (0, rows)]
    found = [([size, *rest], [begin, *[0] * len(rest)]) for size, begin in cut]
    if rest and rest[0] > 2:
        found += [([size, rest[0] - 2, *rest[1:]], [begin, 1, *[0] * (len(rest) - 1)]) for size, begin in cut]
    return found


@pytest.mark.parametrize(
    ("function", "before", "dtype"),
    [
        *[(function, (), dtype) for function in ("rand", "randn") for dtype in FLOATS],
        *[("randint", (0, 100), dtype) for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32)],
        ("randint", (-5, 1 << 40), torch.int64),
    ],
)
def test_random_parts(
    function: str, before: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_tensors, "PIECE_ELEMENTS", 64)
    in_pieces = 0
    for shape in SHAPES:
        factory = Factory(function, (*before, shape), dtype, 12345)
        for sizes, begin in boxes(shape):
            made = make_part(factory, sizes, begin)
            wanted = factory.make()[tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True))]
            in_pieces += made is not None and made.numel() > 0
            assert made is None or (made.dtype is dtype and torch.equal(made, wanted)), (shape, sizes, begin)
    assert in_pieces > 20


@pytest.mark.quick("placements2")
@pytest.mark.parametrize(
    "placements", [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Replicate()]]
)
def test_ranks_make_the_same_whole_in_all_layouts(square: ProcMesh, placements: list[Placement]) -> None:
    mesh, shape = Mesh(square), (1501, 1003)  # in two pieces
    for function, before in (("rand", ()), ("randn", ()), ("randint", (0, 1000))):
        torch.manual_seed(5)
        made = getattr(meshbook, function)(*before, shape, mesh=mesh, placements=placements)
        torch.manual_seed(5)
        seed = int(torch.randint(1, 1 << 52, ()))
        assert torch.equal(made.full_tensor(), Factory(function, (*before, shape), made.dtype, seed).make())
    if placements[0] != Shard(1):
        counted = meshbook.arange(
            1001, mesh=mesh, placements=[each if each == Shard(0) else Replicate() for each in placements]
        )
        assert torch.equal(counted.full_tensor(), torch.arange(1001))
