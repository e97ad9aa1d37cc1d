"""Collectives that were given up, and ranks that entered different ones."""

from __future__ import annotations

from collections.abc import Iterable

from meshbook.errors.base import MeshError
from meshbook.errors.failures import Failure

GRADIENTS = "gradients of backward()"
"""What a text on torn tensors begins with where they are a bucket of DDP, or whatever else backward() reduces."""


class GroupAborted(MeshError):
    """A rank's collective was given up, or not begun, since the process groups were aborted.

    reason: why, on its first line; what helps on the others, where running it again is not enough.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.torn = ""
        """What the operation may have left half done."""

    def __str__(self) -> str:
        why, _, advice = self.reason.partition("\n")
        why += f"; {self.torn}" if self.torn else ""
        advice = advice.strip() or "they are formed again when the cell has ended on all ranks: run it again"
        return f"the process groups were aborted: {why}\n  {advice}"


class RanksDisagree(MeshError):
    """Ranks entered different operations of a process group as one: the numbers that came of it mean nothing.

    It is the failure of each of these ranks, in the `CallFailed` of their call. ranks: those that disagree.
    """

    def __init__(self, ranks: Iterable[int], text: str) -> None:
        super().__init__(tuple(ranks), text)
        self.ranks, self.text = tuple(ranks), text

    def __str__(self) -> str:
        return self.text


def disagreeing(ranks: Iterable[int], text: str) -> list[Failure]:
    """The failures of ranks that disagree."""
    error = RanksDisagree(ranks, text)
    name = type(error).__name__
    return [Failure(rank, "", name, text, (f"{name}: {text}",), "", error) for rank in error.ranks]
