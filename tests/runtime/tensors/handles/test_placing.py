"""Tensors of this process on the ranks: each keeps its own block, and each machine is sent those of its ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import meshbook
from meshbook import ProcMesh
from meshbook.distributed import Mesh
from meshbook.tensors.handles.factories import CUT_BYTES, Placing, for_ranks
from meshbook.tensors.messages.layouts import MeshEnd
from meshbook.tensors.messages.operations import SentTensor

SPECS = ([], ["dp"], [None, "tp"], ["dp", "tp"], [("dp", "tp")], [("tp", "dp")], ["tp", "dp"])


def held(x: DTensor) -> tuple[torch.Tensor, int]:
    local = x.to_local()
    return local.clone(), local.untyped_storage().nbytes() // max(local.element_size(), 1)


def layouts(dims: int, axes: int) -> list[list[Placement]]:
    choices: list[Placement] = [Replicate(), *map(Shard, range(dims))]
    return [list(chosen) for chosen in itertools.product(choices, repeat=axes)]


@pytest.mark.quick("(0, 4)-[]")
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (301, 130), (1, 2), (0, 4)], ids=str)
def test_a_rank_keeps_its_block_and_no_more(grid: Mesh, shape: tuple[int, ...], spec: list[str]) -> None:
    whole = torch.randn(*reversed(shape)).T
    x = meshbook.distribute(whole, grid, spec)
    assert torch.equal(x.full_tensor(), whole)
    boxes = MeshEnd("", grid.shape, grid.procs.ranks).boxes(shape, x.placements)
    for rank, (local, elements) in enumerate(grid.execute(held, x).values()):
        assert torch.equal(local, whole[tuple(slice(*ends) for ends in boxes[rank])])
        assert elements == local.numel()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int16, torch.float64], ids=str)
def test_any_dtype_and_no_dims(grid: Mesh, dtype: torch.dtype) -> None:
    for shape in ((), (3,), (200, 201)):
        whole = (torch.randn(shape) * 3).to(dtype)
        spec = ["dp", "tp"][: len(shape)]
        for tensor in (whole, whole.conj()) if dtype.is_complex else (whole,):
            x = meshbook.distribute(tensor, grid, spec)
            assert x.dtype == dtype
            assert torch.equal(x.full_tensor(), tensor.resolve_conj())


def test_what_is_not_in_blocks_is_placed_as_well(grid: Mesh) -> None:
    x = meshbook.distribute(torch.ones(4, 2), grid, placements=[Partial(), Shard(1)])
    assert x.tolist() == [[1.0] * 2] * 4


def test_it_is_a_copy_at_the_moment_of_the_call(grid: Mesh) -> None:
    whole = torch.zeros(400, 400)
    x = meshbook.distribute(whole, grid, ["dp"])
    y = meshbook.distribute(whole, grid)
    whole += 1
    y += 2
    assert x.sum().item() == 0
    assert y.mean().item() == 2


@pytest.mark.slow
def test_machines_are_sent_the_blocks_of_their_ranks_once(mesh2x2: ProcMesh) -> None:
    mesh = Mesh(mesh2x2)
    whole = torch.randn(301, 303)
    for placements in layouts(2, 2):
        x = meshbook.distribute(whole, mesh, placements=placements)
        assert torch.equal(x.full_tensor(), whole)
        assert x.placements == tuple(placements)
    assert whole.nbytes > CUT_BYTES
    for batch in meshbook.stream([whole] * 4, mesh, ["hosts", "gpus"]):
        assert torch.equal(batch.full_tensor(), whole)

    def sent(*placements: Placement, ranks: tuple[int, ...]) -> SentTensor:
        boxes = MeshEnd("", mesh.shape, mesh.procs.ranks).boxes(whole.shape, placements)
        return for_ranks(Placing(1, whole, placements), boxes, ranks, whole=False)

    def elements(parts: SentTensor) -> int:
        return sum(map(torch.numel, parts.pieces))

    assert elements(sent(Shard(0), Shard(1), ranks=(0, 1))) == 151 * 303
    assert elements(sent(Shard(0), Shard(1), ranks=(2, 3))) == 150 * 303
    assert elements(sent(Shard(0), Replicate(), ranks=(2, 3))) == 150 * 303
    assert elements(sent(Replicate(), Shard(1), ranks=(2, 3))) == math.prod(whole.shape)
    assert elements(sent(Replicate(), Replicate(), ranks=(0, 1))) == math.prod(whole.shape)
