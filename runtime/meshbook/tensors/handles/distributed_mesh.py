"""`Mesh`: processes as tensors see them, arranged by named axes."""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch.distributed.tensor import Placement

from meshbook.controller.mesh_state import Repaired
from meshbook.errors import LayoutError, UsageError
from meshbook.formatting import format_sizes
from meshbook.mesh.driven import current_procs, procs_of_sizes
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import call_after_repairs, is_renumbered
from meshbook.shape.extent import Index
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.handles.resharding import join, move
from meshbook.tensors.messages.layouts import ShardingSpec, to_placements
from meshbook.tensors.messages.operations import Adopted, LocalPart, TensorId
from meshbook.tensors.ranks import known_meshes, rank_tensors
from meshbook.tensors.sending.op_stream import OpStream
from meshbook.tensors.sending.recovery import TensorLeft, restore
from meshbook.torch_internals import tree_map

_names = itertools.count(1)
_OF_THIS_PROCESS = secrets.token_hex(4)
"""Tells the meshes of a kernel from those of the one before it, which drove the same processes."""

ADOPTED_NUMBERS = 1000
"""The most DTensors that one call may return."""


class Mesh:
    """Processes arranged by named axes, over which tensors are laid out."""

    held_by: type[rank_tensors.RankTensors] = rank_tensors.RankTensors
    """The class whose objects hold the ranks' parts of the tensors."""
    stream_of: type[OpStream] = OpStream

    def __init__(
        self,
        procs: ProcMesh | Mesh | None = None,
        *,
        shape: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> None:
        """procs: a mesh of processes, a part of one, or a `Mesh` of these.

        Without it, a notebook's processes in this ``shape``: its current mesh if that has as many ranks, else one with
        these axes, else new ones, which it lists. A script gets new ones on this machine.
        Raises: LayoutError if the names do not fit the shape; SpawnError.
        """
        if procs is None:
            procs = _spawn(shape, mesh_dim_names)
        elif shape is not None or mesh_dim_names is not None:
            raise UsageError("processes have their axes already: give either them, or shape and mesh_dim_names")
        elif isinstance(procs, Mesh):
            procs = procs.procs
        self.procs: ProcMesh = procs
        self.axes: Mapping[str, int] = _axes_of(procs)
        self.stream = self.stream_of(procs, _new_name(procs))
        self._open()
        call_after_repairs(procs, self._go_on)
        for key in [key for key, mesh in _made.items() if not mesh.procs.alive]:
            del _made[key]
        _made[(type(self), *_key_of(procs))] = self

    def _open(self) -> None:
        about = self.stream.name, dict(self.axes), self.procs.ranks, self.held_by, self.stream.decided
        self.procs.execute(known_meshes.open_mesh, *about).get()

    def _go_on(self) -> str:
        """Bring the tensors to repaired ranks; return how many are whole again, and how many lost, in words.

        Tensors of a mesh that has grown or shrunk since can only be taken away.
        """
        if is_renumbered(self.procs):
            return ""
        self.stream.begin_repair()
        self._open()
        whole, lost = restore(self.stream, self.axes)
        self.stream.end_repair()
        counts = [f"{whole} whole again"] * (whole > 0) + [f"{len(lost)} lost{self._name(lost)}"] * (len(lost) > 0)
        return f"mesh tensors: {', '.join(counts)}" if counts else ""

    def follow(self, procs: ProcMesh) -> None:
        """Go on with the processes as they are numbered after the mesh has grown or shrunk.

        Every tensor made before is lost: `StateTensors.renew` gives a tensor a new part on each rank.
        """
        former = self.stream.name
        self.stream.begin_repair()
        _made.pop((type(self), *_key_of(self.procs)), None)
        self.procs = self.stream.procs = procs
        self.axes = _axes_of(procs)
        self.stream.name = _new_name(procs)
        procs.execute(known_meshes.forget, former).get()
        self._open()
        self.stream.renew((), dict.fromkeys(self.stream.sound_tensors(), TensorLeft((), "")), {}, ())
        self.stream.end_repair()
        _made[(type(self), *_key_of(procs))] = self

    def _name(self, numbers: Collection[TensorId]) -> str:
        """Return the person's variables with these tensors: `` (weight, x)``; nothing where there are none."""
        known = {name: each for name, each in list(vars(sys.modules["__main__"]).items()) if type(each) is MeshTensor}
        found = [name for name, each in known.items() if each.mesh is self and each._handle.number in numbers]
        names = ", ".join(sorted(name for name in found if not name.startswith("_")))
        return f" ({names})" if names else ""

    def size(self, axis: str | None = None) -> int:
        """Return the number of processes, or of those along one axis."""
        return len(self.procs) if axis is None else self.axes[axis]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.axes)

    def slice(self, **axes: Index) -> Mesh:
        """Return a part of the mesh as a mesh of its own, as `ProcMesh.slice` cuts; equal parts are one mesh.

        Tensors go from one to the other by ``tensor.to_mesh``. Raises: UnknownAxisError, RankError.
        """
        return mesh_of(self.procs.slice(**axes))

    def move(
        self,
        tensor: MeshTensor,
        to: Mesh | ProcMesh,
        sharding_spec: ShardingSpec | None,
        placements: Sequence[Placement] | None,
    ) -> MeshTensor:
        """Do `MeshTensor.to_mesh`, or `MeshTensor.redistribute`, for a tensor of this mesh."""
        mesh = mesh_of(to)
        return move(tensor, mesh, to_placements(mesh, tensor.shape, sharding_spec, placements))

    def reduce(self, tensor: MeshTensor, axes: str | Sequence[str] | None, reduction: str, scatter: bool) -> MeshTensor:
        """Do `MeshTensor.reduce`. Raises: UsageError for a tensor in parts."""
        raise _of_each_rank("reduce")

    def part(self, tensor: MeshTensor, **axes: Index) -> MeshTensor:
        """Do `MeshTensor.slice_mesh`. Raises: UsageError for a tensor in parts."""
        raise _of_each_rank("slice_mesh")

    def execute(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call a function on every rank, and wait: mesh tensors arrive as the rank's DTensors.

        Returns: the first rank's answer with mesh tensors for its DTensors; without any, a `ValueMesh` of all answers.
        """
        numbers = self.stream.new_numbers(ADOPTED_NUMBERS)
        self.stream.settle()  # a rank that has halted would refuse it
        stream = self.stream
        call = self.procs.execute(
            known_meshes.ask, stream.name, stream.decided, "call", numbers, function, args, kwargs
        )
        values = call.get()
        value = next(iter(values.values()))
        adopted: list[Adopted] = []

        def adopt(each: object) -> object:
            if not isinstance(each, Adopted):
                return each
            adopted.append(each)
            return self._adopt(each)

        made = tree_map(adopt, value, is_leaf=lambda each: isinstance(each, Adopted))
        return made if adopted else values

    def _adopt(self, adopted: Adopted) -> MeshTensor:
        return MeshTensor._of(self, adopted.output, adopted.number)

    def from_ranks(self, name: str, *, placements: Sequence[Placement] | None = None) -> MeshTensor:
        """Return the tensor that cells on the ranks call ``name``, in the same memory: each side sees the other write.

        placements: how the ranks' own tensors make one; not needed for DTensors.
        Raises: UsageError if they make none: their sizes are not those of `torch.chunk`, or they differ in more.
        """
        number = self.stream.new_number()
        about = self.stream.name, self.stream.decided
        told = self.procs.execute(known_meshes.ask, *about, "look", name).get().values()
        part = self.join(name, dict(zip(self.procs.ranks, told, strict=True)), placements)
        found = self.procs.execute(known_meshes.ask, *about, "adopt_name", number, name, part).get()
        return self._adopt(next(iter(found.values())))

    def join(self, name: str, parts: Mapping[int, LocalPart], placements: Sequence[Placement] | None) -> LocalPart:
        """Return the one tensor that the ranks' tensors called ``name`` make together."""
        return join(name, parts, self, placements)

    def heal(self, setup: Sequence[str] = (), *, force: bool = False) -> Repaired:
        """Bring ranks that ended back, as `ProcMesh.heal` does.

        They are given the parts that other ranks hold as well; a tensor that is lost raises an error when it is used.
        """
        return self.procs.base().heal(setup, force=force)

    @property
    def last_repair(self) -> Repaired | None:
        """The report of the last repair of the processes; see `ProcMesh.last_repair`."""
        return self.procs.last_repair

    def stop(self) -> None:
        """End the processes."""
        self.procs.stop().get()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Mesh({self.procs.name}, {format_sizes(self.axes)})"


_made: dict[tuple[object, ...], Mesh] = {}
"""The meshes of living processes. A mesh that ended with its tensors would leave the last of them on the ranks."""


TMesh = TypeVar("TMesh", bound=Mesh)


def mesh_of(procs: ProcMesh | Mesh) -> Mesh:
    """Return the `Mesh` of these processes, made when there is none: tensors of one can take part in one operation."""
    return procs if isinstance(procs, Mesh) else one_mesh_of(procs, Mesh)


def one_mesh_of(procs: ProcMesh | Mesh, kind: type[TMesh]) -> TMesh:
    """Return the mesh of these processes and this class, made when there is none."""
    if isinstance(procs, kind):
        return procs
    procs = procs.procs if isinstance(procs, Mesh) else procs
    return cast("TMesh | None", _made.get((kind, *_key_of(procs)))) or kind(procs)


def _of_each_rank(name: str) -> UsageError:
    return UsageError(
        f"{name} is for the local view, of tensors that each rank has of its own (procs.activate()), and this one is "
        "in parts of one tensor: use the operations of torch, or redistribute"
    )


def _axes_of(procs: ProcMesh) -> dict[str, int]:
    return dict(procs.extent.items()) or {"rank": 1}


def _new_name(procs: ProcMesh) -> str:
    return f"{procs.session}/{procs.id}/{_OF_THIS_PROCESS}/{next(_names)}"


def _key_of(procs: ProcMesh) -> tuple[object, ...]:
    return procs.session, procs.id, procs.ranks, tuple(procs.extent.items())


def current_mesh() -> Mesh:
    """Return the notebook's current mesh. Raises: UsageError where there is none."""
    return mesh_of(current_procs())


def from_ranks(name: str, *, placements: Sequence[Placement] | None = None) -> MeshTensor:
    """Call `Mesh.from_ranks` of the notebook's current mesh."""
    return current_mesh().from_ranks(name, placements=placements)


def _spawn(shape: Sequence[int] | None, names: Sequence[str] | None) -> ProcMesh:
    shape = tuple(shape or ())
    names = tuple(f"dim_{dim}" for dim in range(len(shape))) if names is None else tuple(names)
    if not shape or len(names) != len(shape) or len(set(names)) != len(names):
        raise LayoutError(f"mesh_dim_names {list(names)} do not name the axes of the shape {list(shape)}")
    return procs_of_sizes(dict(zip(names, shape, strict=True)))
