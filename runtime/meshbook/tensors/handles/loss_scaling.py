"""What `torch.amp.GradScaler` has done to gradients.

A module of its own because it needs a value in the middle of an operation, which others are done without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def check_and_unscale(gradients: Sequence[Any], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply gradients by a number, and tell by 1 in ``found_inf`` if one of them has a NaN or an infinity.

    It waits for the ranks: whether an optimizer steps depends on it.
    """
    finite: dict[object, list[torch.Tensor]] = {}
    for gradient in gradients:
        finite.setdefault(gradient.mesh, []).append(gradient.isfinite().all())
    torch.ops.aten._foreach_mul_.Scalar(list(gradients), float(inverse_scale))
    if not all(torch.stack(each).all().item() for each in finite.values()):
        found_inf.fill_(1.0)
