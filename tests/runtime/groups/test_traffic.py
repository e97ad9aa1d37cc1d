"""What the process groups of a rank move is counted."""

from __future__ import annotations

import torch

from meshbook import ProcMesh
from meshbook.groups.operands import payload_bytes


def test_the_larger_of_what_goes_in_and_what_comes_out_counts() -> None:
    mb = torch.zeros(250_000)
    assert payload_bytes([[mb]]) == 1_000_000
    assert payload_bytes([[[torch.empty_like(mb) for _ in range(4)]], [mb]]) == 4_000_000
    assert payload_bytes([torch.zeros(3, dtype=torch.int8), [], None]) == 3
    assert payload_bytes([]) == 0


def test_ranks_tell_what_they_have_moved(mesh4: ProcMesh) -> None:
    before = [one.moved_bytes for one in mesh4.status()]
    mesh4.run("x = torch.zeros(250_000); dist.all_reduce(x)").get(30)
    mesh4.slice(gpus=slice(0, 2)).run("dist.send(x, 1) if rank == 0 else dist.recv(x, 0)").get(30)
    moved = [one.moved_bytes - was for one, was in zip(mesh4.status(), before, strict=True)]
    assert moved == [2_000_000, 2_000_000, 1_000_000, 1_000_000]
