"""What `meshbook.tensors.steps.step_recorder` makes of a run: what ranks repeat, and what is done here each time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.messages.issued_lines import CodeLine
from meshbook.tensors.messages.operations import Recording, TensorId
from meshbook.tensors.sending.numbered_tensors import Handle


class Seed(NamedTuple):
    """A number that is drawn."""


class Given(NamedTuple):
    """The number of an argument, a tensor without dims; how many of those are before it."""

    at: int


NumberSource: TypeAlias = float | torch.Tensor | Seed | Given


class ReadNumbers(NamedTuple):
    """The numbers of a use: constants, tensors of this process that have them, seeds to draw."""

    use: int
    """Its index."""
    sources: Sequence[NumberSource]


class DoHere(NamedTuple):
    """An operation that writes to tensors of this process."""

    operator: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    written: Sequence[torch.Tensor]


Here: TypeAlias = ReadNumbers | DoHere
"""What is done in this process, in order, each time."""


class Recorded(NamedTuple):
    """A run that can be repeated."""

    mesh: Mesh
    key: object
    """Equal for runs that do the same."""
    lines: Sequence[tuple[str, CodeLine, object]]
    """Of each use: operator, line, and its part of the key."""
    recording: Recording
    issued: Sequence[tuple[Any, ...]]
    here: Sequence[Here]
    captured: Sequence[TensorId]
    left: Sequence[TensorId]
    held: Sequence[weakref.ref[Handle]]
    """Handles without which it is another step: of what is captured and what is left."""
    written: Sequence[weakref.ref[torch.Tensor]]
    """Captured tensors that it writes to."""
    kept: Sequence[object]
    """Lives as long as the recording does."""
