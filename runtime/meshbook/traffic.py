"""How much the process groups of a rank move: the payload of each operation, counted when it begins."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def payload_bytes(arguments: Iterable[object]) -> int:
    """The size of an operation with these (nested) tensors: the larger of what goes in and what comes out.

    As NCCL's tests count: gathering 1 MB from each of 8 ranks is 8 MB on every rank, summing 1 MB is 1 MB.
    """
    return max(map(_bytes_of, arguments), default=0)


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0
