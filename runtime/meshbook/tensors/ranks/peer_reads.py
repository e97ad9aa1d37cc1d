"""Ranks of one machine lay a large tensor out anew by reading each other's parts, where they lie.

    where is yours?  ──all ranks──>  each reads the pieces that it lacks  ──all ranks──>  did all of them?

No rank goes on before all have read, so the parts stay as they are meanwhile; a rank that ends, or is interrupted,
never says that it has read, and the operation fails on the others as one that waits for it. Between machines, and where
the kernel forbids reads, `PeerReads.lay_out` returns None on all ranks alike, and they send each other the pieces. A
rank tells the others each time whether it may read: an interrupt may have kept them from learning it.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshbook.system.memory_copies import MOST_RUNS, SLICE_BYTES, ProcessMemoryError, read_process_runs
from meshbook.system.processes import let_peers_read, memory_name
from meshbook.tensors.messages.layouts import MeshEnd, TensorPiece, are_in_blocks, from_part, new_memory, pieces, within
from meshbook.tensors.messages.operations import Box, contiguous_strides

LEAST_BYTES = 1 << 20
"""The least size of tensors that are read: for smaller ones to agree takes as long as to send them."""

SHORT_BYTES = 512
"""The least length of runs that are read one by one; of shorter ones all from the first byte to the last is read."""


class PeerReads:
    """Reads between the ranks of one device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._sizes = tuple(mesh.mesh.shape)
        self._has_peers = mesh.size() > 1 and mesh.device_type == "cpu"
        self._position = int((mesh.mesh.flatten() == dist.get_rank()).nonzero()[0]) if self._has_peers else 0
        self._may_read = self._has_peers
        """Whether this rank has not been forbidden by the kernel to read."""
        self._is_open = False

    def lay_out(
        self, tensor: DTensor, placements: Sequence[Placement], only: Collection[int] | None = None
    ) -> DTensor | None:
        """Return the tensor in another layout, in memory of its own; None where it has to be sent; a collective.

        only: the positions on the mesh that want their parts; other ranks are given any tensor of that shape.
        """
        if not self._has_peers or not _is_for_reading(tensor, placements):
            return None
        shape = tuple(tensor.shape)
        end = MeshEnd("", self._sizes, tuple(range(self._mesh.size())))
        given, wanted = end.boxes(shape, tensor.placements), end.boxes(shape, placements)
        if all(_is_within(wanted[at], given[at]) for at in given):
            return None
        local, part = tensor.to_local().resolve_conj().resolve_neg().contiguous(), wanted[self._position]
        fits = tuple(local.shape) == tuple(end - begin for begin, end in given[self._position])
        table = self._gather([_machine(), os.getpid() if fits and self._may_read else 0, local.data_ptr()])
        if len({machine for machine, _, _ in table}) > 1 or any(not pid for _, pid, _ in table):
            return None
        made = new_memory([end - begin for begin, end in part], local.dtype, local.device)
        if self._agree(
            (only is not None and self._position not in only)
            or self._read(list(pieces(given, {self._position: part})), table, given, local, made, part)
        ):
            return from_part(made, self._mesh, placements, shape, contiguous_strides(shape))
        return None

    def _gather(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, by its position."""
        if not self._is_open:
            let_peers_read()  # before any of them knows where
            self._is_open = True
        table = torch.tensor([mine], device="cpu")
        for axis in reversed(range(self._mesh.ndim)):
            parts = [torch.empty_like(table) for _ in range(self._sizes[axis])]
            dist.all_gather(parts, table, group=self._mesh.get_group(axis))
            table = torch.cat(parts)
        return table.tolist()

    def _agree(self, has_read: bool) -> bool:
        """Whether all ranks have read the pieces that they lack."""
        done = torch.tensor([has_read], dtype=torch.int32, device="cpu")
        for axis in range(self._mesh.ndim):
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._mesh.get_group(axis))
        return bool(done.item())

    def _read(
        self,
        mine: Sequence[TensorPiece],
        table: Sequence[Sequence[int]],
        given: dict[int, Box],
        local: torch.Tensor,
        made: torch.Tensor,
        part: Box,
    ) -> bool:
        """Put this rank's part together; return whether the kernel allows it."""
        for source, _, box in mine:
            if source == self._position:
                within(made, part, box).copy_(within(local, given[source], box))
        try:
            for source, _, box in mine:
                if source != self._position:
                    _, pid, address = table[source]
                    _read_piece(pid, address, given[source], made, part, box)
        except ProcessMemoryError as error:
            self._may_read = error.code not in (errno.EPERM, errno.ENOSYS)
            return False
        return True


def _is_for_reading(tensor: DTensor, placements: Sequence[Placement]) -> bool:
    """Whether a tensor is large, dense, and in blocks before and after. Alike on all ranks."""
    both = (*tensor.placements, *placements)
    return (
        tensor.numel() * tensor.element_size() >= LEAST_BYTES
        and are_in_blocks(both)
        and tuple(tensor.stride()) == contiguous_strides(tensor.shape)
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def _is_within(box: Box, other: Box) -> bool:
    """Whether a rank that has the other layout has all of its part."""
    return all(begin >= b and end <= e for (begin, end), (b, e) in zip(box, other, strict=True)) or any(
        begin >= end for begin, end in box
    )


@functools.cache
def _machine() -> int:
    """Return a key that is equal on ranks that may read each other's memory, and on no others."""
    return int.from_bytes(hashlib.blake2b(memory_name().encode(), digest_size=7).digest(), "big")


def _read_piece(pid: int, address: int, held: Box, made: torch.Tensor, part: Box, box: Box) -> None:
    """Read the piece in ``box``, which is in the part ``held`` of a rank, to its place in ``made``.

    Raises: ProcessMemoryError.
    """
    item_bytes = made.element_size()
    first = max(_first_in_runs(held, box), _first_in_runs(part, box))
    run_bytes = math.prod(end - begin for begin, end in box[first:]) * item_bytes
    there = _offsets(held, box, first) * item_bytes + address
    if run_bytes >= SHORT_BYTES:
        _read_runs(pid, _offsets(part, box, first) * item_bytes + made.data_ptr(), there, run_bytes)
        return
    size_bytes = int(there[-1] - there[0]) + run_bytes
    span = torch.empty(size_bytes // item_bytes, dtype=made.dtype, device="cpu")
    _read_runs(pid, np.array([span.data_ptr()]), there[:1], size_bytes)
    shape = [end - begin for begin, end in box]
    within(made, part, box).copy_(span.as_strided(shape, contiguous_strides([b - a for a, b in held])))


def _first_in_runs(part: Box, box: Box) -> int:
    """Return the first dim from which on the box lies in one run in the memory of the part."""
    first = len(box)
    while first and (first == len(box) or box[first] == part[first]):
        first -= 1
    return first


def _offsets(part: Box, box: Box, first: int) -> np.ndarray:
    """Return the beginnings of the runs of the box in the memory of the part, in elements."""
    strides = contiguous_strides([end - begin for begin, end in part])
    found = np.array([sum((b[0] - p[0]) * stride for p, b, stride in zip(part, box, strides, strict=True))])
    for (begin, end), stride in itertools.islice(zip(box, strides, strict=True), first):
        found = (found[:, None] + np.arange(end - begin) * stride).reshape(-1)
    return found


def _read_runs(pid: int, here: np.ndarray, there: np.ndarray, run_bytes: int) -> None:
    """Read runs of so many bytes. Raises: ProcessMemoryError."""
    at_once = max(1, min(MOST_RUNS, SLICE_BYTES // max(run_bytes, 1)))
    piece_bytes = min(run_bytes, SLICE_BYTES)
    for begin in range(0, len(here), at_once):
        count = min(at_once, len(here) - begin)
        for done in range(0, run_bytes, piece_bytes):
            size_bytes = min(piece_bytes, run_bytes - done)
            runs = np.empty((2, count, 2), np.int64)
            runs[0, :, 0], runs[1, :, 0] = here[begin : begin + count] + done, there[begin : begin + count] + done
            runs[:, :, 1] = size_bytes
            read_process_runs(pid, runs[1].ctypes.data, runs[0].ctypes.data, count, count * size_bytes)
