"""The values of a mesh tensor in this process: brought, shown, or refused with another way to do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from meshbook.errors import UsageError
from meshbook.formatting import format_bytes
from meshbook.tensors.messages.operations import TensorReference
from meshbook.tensors.ranks.known_meshes import resolve
from meshbook.tensors.ranks.rank_tensors import SHOWN_ELEMENTS, TensorDescription
from meshbook.tensors.sending.op_settling import Handle
from meshbook.torch_internals import count_dispatch_modes

if TYPE_CHECKING:
    from meshbook.tensors.handles.distributed_mesh import Mesh

LISTED_ELEMENTS = 10_000_000
"""The most elements that are brought here as a list or an array."""


class TensorOnRanks(torch.Tensor):
    """The methods of a mesh tensor for which it is no tensor of this process."""

    mesh: Mesh
    _handle: Handle

    def _whole(self) -> torch.Tensor:
        """Return the values without autograd's history. Raises: the error of an operation that this tensor needed."""
        found = self.mesh.stream.fetch("whole", self._handle.number)
        assert isinstance(found, torch.Tensor)
        return found

    def tolist(self) -> Any:
        """Return the values as nested lists. Raises: UsageError if they are very many."""
        return self._few().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array. Raises: UsageError if they are many; RuntimeError if it needs a gradient."""
        if self.requires_grad and not force:
            raise RuntimeError("a tensor that requires a gradient has no array: use tensor.detach().numpy()")
        return self._few().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        found = self.detach().numpy()
        return found if dtype is None else found.astype(dtype)

    def storage_offset(self) -> int:
        """Return 0, as whole tensors do. Raises: UsageError for a view, whose memory is on ranks."""
        if self._is_view():
            refuse_memory("storage_offset of a view, which torch.func.linearize asks for (torch.func.jvp does not),")(
                self
            )
        return 0

    def _few(self) -> torch.Tensor:
        if self.numel() > LISTED_ELEMENTS:
            raise UsageError(
                f"{self.numel():,} elements ({format_bytes(self.numel() * self.element_size())}) are too many for "
                "that: take a part of the tensor first, or tensor.full_tensor() if this process has room for it"
            )
        return self._whole()

    # ---- how it is shown ------------------------------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        found = self.mesh.stream.fetch("describe", self._handle.number)
        assert isinstance(found, TensorDescription)
        about = f"shape={tuple(self.shape)}, dtype={self.dtype}, placements=({found.placements}), mesh={self.mesh}"
        if self.numel() <= SHOWN_ELEMENTS:
            return f"MeshTensor({found.values(len('MeshTensor('))}, {about})"
        statistics = f", {found.statistics}" if found.statistics else ""
        return f"MeshTensor({about}{statistics}; its corner:\n{found.values(0)})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def _reduce_to_ranks(self) -> object:
        """Return the form in which it travels in a call: on the ranks it is their DTensor."""
        stream = self.mesh.stream
        stream.settle()  # else a rank that has halted would have it as it was before what it has laid aside
        stream.check([self._handle.number])
        return resolve, (TensorReference(stream.name, str(self.mesh), self._handle.number),)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError("a mesh tensor cannot be pickled, its values are on the ranks: pickle tensor.full_tensor()")


def _number_by(name: str) -> Callable[[TensorOnRanks], Any]:
    """Return the method that asks for one element at once: ``torch.tensor([x[0]])`` asks no subclass before it."""
    of_torch = getattr(torch.Tensor, name)

    def number(self: TensorOnRanks) -> Any:
        if self.numel() != 1 or count_dispatch_modes():  # who watches operators sees this one too
            return of_torch(self)
        return of_torch(self._whole())

    return number


for _name in ("__bool__", "__complex__", "__float__", "__index__", "__int__"):
    setattr(TensorOnRanks, _name, _number_by(_name))


def refuse_memory(name: str) -> Callable[..., NoReturn]:
    def refuse(self: TensorOnRanks, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(f"{name} is about memory of this process, where a mesh tensor has none: use full_tensor()")

    return refuse


for _name in (
    "__dlpack__", "apply_", "data_ptr", "is_set_to", "map_", "map2_", "pin_memory", "share_memory_", "storage",
    "untyped_storage",
):  # fmt: skip
    setattr(TensorOnRanks, _name, refuse_memory(_name))
