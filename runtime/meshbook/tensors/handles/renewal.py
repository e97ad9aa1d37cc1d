"""Mesh tensors in the state of a program: which there are, and new parts for those that were lost with ranks.

A tensor stays the same object, in its module and its optimizer; its values are to be restored.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import Placement, Replicate

from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor, make
from meshbook.tensors.messages.operations import Factory
from meshbook.tensors.sending.op_settling import Handle
from meshbook.torch_internals import tree_leaves


class StateTensors:
    """The mesh tensors of a state: those of modules and optimizers, and those in lists, tuples and mappings."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state
        self._layouts: weakref.WeakKeyDictionary[Handle, Sequence[Placement]] = weakref.WeakKeyDictionary()
        """The placements of each tensor, for the time when no rank can be asked."""

    def __iter__(self) -> Iterator[MeshTensor]:
        """Return the tensors that there are now, each once."""
        found = {id(each): each for part in self._state.values() for each in _tensors_of(part)}
        return iter(found.values())

    @property
    def meshes(self) -> list[Mesh]:
        return list(dict.fromkeys(each.mesh for each in self))

    def check(self) -> None:
        """Wait for all that was issued, and note the placements. Raises: the error of a tensor that was not made."""
        for mesh in self.meshes:
            handles = [each._handle for each in self if each.mesh is mesh]
            mesh.stream.settle()
            mesh.stream.check([each.number for each in handles])
            if new := [each for each in handles if each not in self._layouts]:
                numbers = [each.number for each in new]
                answers = mesh.stream.ask_with(mesh.stream.ask, numbers, "layouts", numbers)
                self._layouts.update(zip(new, next(iter(answers.values())), strict=True))

    def renew(self) -> None:
        """Give zeros to each tensor that is lost or torn, laid out as it was, and drop all gradients."""
        for part in self._state.values():
            if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
                part.zero_grad()
        for tensor in self:
            mesh = tensor.mesh
            if mesh.stream.is_sound(tensor._handle.number):
                continue
            layout = self._layouts.get(tensor._handle, (Replicate(),) * len(mesh.axes))
            zeros = Factory("zeros", (tuple(tensor.shape),), tensor.dtype, 0)
            tensor.data = made = make(zeros, tensor.shape, mesh, layout)
            self._layouts[made._handle] = layout


def _tensors_of(part: object) -> Iterator[MeshTensor]:
    if isinstance(part, torch.nn.Module):
        leaves: list[object] = [*part.parameters(), *part.buffers()]
    elif isinstance(part, torch.optim.Optimizer):
        leaves = tree_leaves([part.param_groups, list(part.state.values())])
    else:
        leaves = tree_leaves(part)
    return (each for each in leaves if isinstance(each, MeshTensor))
