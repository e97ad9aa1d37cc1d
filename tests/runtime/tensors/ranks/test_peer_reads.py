"""Ranks of one machine read each other's parts of large tensors; where they may not, they send them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from old_kernel import run_on_old_kernel
from patience import wait_until
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import meshbook
from meshbook import DeviceMeshError, this_host
from meshbook.distributed import Mesh
from meshbook.groups.rank_groups import own_groups
from meshbook.system.memory_copies import SLICE_BYTES
from meshbook.system.memory_files import HUGE_PAGE_BYTES
from meshbook.tensors.ranks import peer_reads
from meshbook.tensors.ranks.peer_reads import LEAST_BYTES, _first_in_runs, _offsets

pytestmark = pytest.mark.slow

TIMEOUT_S = 180.0
CHOICES: list[Placement] = [Replicate(), Shard(0), Shard(1)]
LAYOUTS = list(itertools.product(CHOICES, repeat=2))


def sent_bytes(tensor: DTensor) -> int:
    """By this rank so far, through process groups."""
    return own_groups().moved_bytes


@pytest.mark.some()
@pytest.mark.quick("(Shard(dim=1), Replicate())")
@pytest.mark.parametrize("given", LAYOUTS, ids=str)
def test_values_arrive_in_every_layout_and_none_are_sent(grid: Mesh, given: tuple[Placement, ...]) -> None:
    a = torch.randn(523, 541)  # uneven, and in short runs where columns are cut
    x = meshbook.distribute(a, grid, placements=given)
    assert torch.equal(x.full_tensor(), a)
    for wanted in LAYOUTS:
        before = grid.execute(sent_bytes, x).values()
        laid = x.redistribute(placements=wanted)
        after = grid.execute(sent_bytes, laid).values()
        assert max(b - a for a, b in zip(before, after, strict=True)) < LEAST_BYTES / 8
        assert torch.equal(laid.full_tensor(), a)
        assert laid.placements == wanted
        laid.zero_()
    assert torch.equal(x.full_tensor(), a)


@pytest.mark.quick("dtype2")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_other_types_and_dims_arrive(grid: Mesh, dtype: torch.dtype) -> None:
    a = (torch.randn(7, 129, 3, 511) * 3).to(dtype)
    x = meshbook.distribute(a, grid, [None, "dp", None, "tp"])
    assert torch.equal(x.redistribute(["tp", None, "dp"]).full_tensor(), a)
    assert torch.equal(x.permute(3, 1, 0, 2).redistribute(["dp"]).full_tensor(), a.permute(3, 1, 0, 2))


def test_runs_longer_than_a_slice_arrive(grid: Mesh) -> None:
    a = torch.arange(3 * SLICE_BYTES // 4, dtype=torch.float32)
    x = meshbook.distribute(a, grid, ["dp"])
    assert torch.equal(x.redistribute([None]).redistribute([("dp", "tp")]).full_tensor(), a)


def test_a_box_is_cut_into_the_longest_runs() -> None:
    part = ((2, 6), (0, 5), (10, 13))
    whole = np.arange(4 * 5 * 3).reshape(4, 5, 3)
    for box, first in ((part, 0), (((3, 5), *part[1:]), 0), (((3, 5), (1, 4), part[2]), 1), ((*part[:2], (11, 12)), 2)):
        assert _first_in_runs(part, box) == first
        cut = whole[tuple(slice(a - p, b - p) for (a, b), (p, _) in zip(box, part, strict=True))]
        runs = [b - a for a, b in box[first:]]
        found = [int(begin) + at for begin in _offsets(part, box, first) for at in range(int(np.prod(runs)))]
        assert found == cut.reshape(-1).tolist()


def test_a_rank_that_ends_meanwhile_costs_the_tensor_and_hangs_nobody() -> None:
    with this_host().spawn_procs({"dp": 3}, name="hurt") as procs:
        mesh = Mesh(procs)
        a = torch.randn(600, 700)
        x = meshbook.distribute(a, mesh)
        cut = x.redistribute(["dp"])
        mesh.stream.settle()
        pid = procs.status()[1].pid
        os.kill(pid, signal.SIGSTOP)
        lost = cut.redistribute([None, "dp"])
        mesh.stream.flush()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceMeshError):
            lost.sum().item()
        mesh.heal()
        again = x.redistribute(["dp"]).redistribute([None, "dp"])
        assert torch.equal(again.full_tensor(), a)


def hold_reads(path: str, *, obeys: bool) -> None:
    """This rank waits before it reads, once, until there is a file. obeys: it can be interrupted there."""
    read = peer_reads._read_piece

    def held(*args: Any) -> None:
        peer_reads._read_piece = read
        Path(path, "reads").touch()
        while not Path(path, "go").exists():
            with contextlib.nullcontext() if obeys else contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.01)
        read(*args)

    peer_reads._read_piece = held


@pytest.fixture
def hurt() -> Iterator[Mesh]:
    with this_host().spawn_procs({"dp": 3}, name="hurt") as procs:
        yield Mesh(procs)


@contextlib.contextmanager
def while_one_reads(mesh: Mesh, path: Path, *, obeys: bool = True) -> Iterator[None]:
    """The first rank knows where the parts of the others are, and has read none, until the end of the block."""
    mesh.stream.settle()
    mesh.procs.select([0]).execute(hold_reads, str(path), obeys=obeys).get()
    try:
        yield
    finally:
        (path / "go").touch()


def assert_reads(mesh: Mesh, x: torch.Tensor, a: torch.Tensor) -> None:
    """Ranks lay it out by reading, each way, and the values are right."""
    cut = x.redistribute(["dp"])
    before = mesh.execute(sent_bytes, cut).values()
    laid = cut.redistribute([None, "dp"])
    after = mesh.execute(sent_bytes, laid).values()
    assert max(b - a for a, b in zip(before, after, strict=True)) < LEAST_BYTES / 8
    assert torch.equal(laid.full_tensor(), a)


@pytest.mark.some("1")
@pytest.mark.parametrize("ended", [0, 1])
def test_a_rank_that_ends_in_the_middle_of_a_read_costs_the_tensor_and_hangs_nobody(
    hurt: Mesh, tmp_path: Path, ended: int
) -> None:
    a = torch.randn(600, 700)
    x = meshbook.distribute(a, hurt)
    cut = x.redistribute(["dp"])
    pid = hurt.procs.status()[ended].pid
    with while_one_reads(hurt, tmp_path):
        laid = cut.redistribute([None, "dp"])
        hurt.stream.flush()
        wait_until((tmp_path / "reads").exists)
        os.kill(pid, signal.SIGKILL)  # the rank that reads, or one that is read
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(DeviceMeshError):
        laid.sum().item()
    hurt.heal()
    for lost in (laid, cut):
        with pytest.raises(DeviceMeshError):
            lost.sum().item()
    assert_reads(hurt, x, a)


@pytest.mark.some("True")
@pytest.mark.parametrize("obeys", [True, False])
def test_an_interrupt_in_the_middle_of_a_read_costs_its_result_alone(hurt: Mesh, tmp_path: Path, obeys: bool) -> None:
    a = torch.randn(600, 700)
    x = meshbook.distribute(a, hurt)
    cut = x.redistribute(["dp"])
    with while_one_reads(hurt, tmp_path, obeys=obeys):
        laid = cut.redistribute([None, "dp"])
        hurt.stream.flush()
        wait_until((tmp_path / "reads").exists)
        hurt.procs.interrupt()
        hurt.procs.interrupt()  # who insists frees those that wait for the one that reads on
        if not obeys:  # what it is about to read is other memory by then
            del cut
            on_the_others = hurt.procs.select([1, 2]).execute(torch.full, (300, 700), 9.0)
    with pytest.raises(DeviceMeshError):
        laid.sum().item()
    if not obeys:
        on_the_others.get(60)
    assert_reads(hurt, x, a)


def huge_bytes(tensor: DTensor) -> int:
    """How much of this rank's part the kernel was asked to give in huge pages."""
    local, found, begin, end = tensor.to_local(), 0, 0, 0
    first, behind = local.data_ptr(), local.data_ptr() + local.nbytes
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (ends := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            begin, end = (int(each, 16) for each in ends.groups())
        elif line.startswith("VmFlags:") and "hg" in line.split():
            found += max(0, min(end, behind) - max(begin, first))
    return found


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_large_parts_lie_in_huge_pages(grid: Mesh) -> None:
    a = torch.randn(4 * HUGE_PAGE_BYTES, 2)
    x = meshbook.distribute(a, grid, ["dp"])
    for laid in (x, x.redistribute([None, "dp"])):
        part_bytes = a.nbytes // 2
        found = grid.execute(huge_bytes, laid).values()
        assert all(part_bytes - 2 * HUGE_PAGE_BYTES < each <= part_bytes for each in found), (found, part_bytes)
    assert torch.equal(x.redistribute([None, "dp"]).full_tensor(), a)


def test_conjugates_of_the_ranks_arrive(grid: Mesh) -> None:
    grid.procs.execute(make_conjugates).get()
    for name in ("conjugate", "negative"):
        x = grid.from_ranks(name, placements=[Shard(0), Replicate()])
        wanted = torch.arange(400.0 * 700).view(400, 700)
        whole = x.redistribute([None, "dp"]).full_tensor()
        assert torch.equal(-whole.imag if name == "conjugate" else -whole, wanted)


def make_conjugates() -> None:
    import __main__

    part = torch.arange(400.0 * 700).view(400, 700).chunk(2)[dist.get_rank() // 2]
    __main__.conjugate = torch.complex(torch.zeros_like(part), part).conj()  # type: ignore[attr-defined]
    __main__.negative = torch._neg_view(part)  # type: ignore[attr-defined]


FORBIDDEN = """
    import torch, meshbook
    from meshbook import this_host
    from meshbook.distributed import Mesh
    with this_host().spawn_procs({"dp": 2, "tp": 2}) as procs:
        mesh = Mesh(procs)
        a = torch.randn(523, 541)
        x = meshbook.distribute(a, mesh, ["dp"])
        for spec in ([None, "tp"], ["tp", "dp"], []):
            print(torch.equal(x.redistribute(spec).full_tensor(), a))
"""


@pytest.mark.some("EPERM")
@pytest.mark.parametrize("refusal", ["EPERM", "ENOSYS"])
def test_where_the_kernel_forbids_it_they_send_what_others_lack(refusal: str) -> None:
    ran = run_on_old_kernel(refusal, "process_vm_readv", FORBIDDEN, TIMEOUT_S)
    assert ran.stdout.splitlines() == ["True"] * 3, ran.stdout + ran.stderr
