"""The process groups of a mesh: axes, proofs, aborts, and what goes by them."""

from __future__ import annotations

from meshbook.concurrency.future import Future
from meshbook.errors import (
    LayoutError,
    UsageError,
)
from meshbook.groups.collectives_off import WITHOUT_TORCH
from meshbook.mesh.host_versions import ways_of
from meshbook.mesh.proc_view import ProcView
from meshbook.shape.value_mesh import ValueMesh


class GroupCalls(ProcView):
    """Base of ProcMesh: what concerns the process groups of its ranks."""

    def broadcast(self, name: str, src: int = 0) -> Future[ValueMesh[None]]:
        """Bind ``name`` on every member to its value on base rank ``src``, by the process group.

        The group spans the whole mesh, so that is who takes part. Raises: RankError, LayoutError on a partial view.
        """
        if len(self) != self._mesh.extent.nelements:
            raise LayoutError("broadcast runs in the mesh's process group: call it on the whole mesh, not on a slice.")
        self._members.point(src)
        return self._call("broadcast", (name, src), what=f"broadcast of {name}")

    def set_axes(self) -> Future[ValueMesh[None]]:
        """Rebind ``mesh`` and ``point`` on the ranks to the axes of this view, which must cover the whole mesh."""
        if self.ranks != tuple(range(self._mesh.extent.nelements)):
            raise LayoutError("only a view of the whole mesh, in rank order, can become the ranks' axes.")
        self._mesh.axes = self.sizes
        return self._call("set_axes", (tuple(self.sizes), tuple(self.sizes.values())), what="the axes")

    def abort_groups(self, reason: str) -> None:
        """Free all ranks of the mesh that wait in collectives: they raise GroupAborted. Does not wait.

        The groups are formed again when the calls that run now have ended. reason: what the ranks' errors say.
        """
        self._controller.abort_groups(self._mesh, reason)

    def prove_group(self) -> Future[ValueMesh[None]]:
        """Prove the default process group with a collective, behind the calls that ranks run."""
        return self._call("prove_group", (), what="the proof of the process groups")

    def rebuild_groups(self) -> Future[ValueMesh[None]]:
        """Form the default process group of the whole mesh and prove it with a collective.

        Groups that are there are formed again, in place: DeviceMeshes, DTensors and modules made before work on.
        Raises: UsageError if the mesh has no torch.
        """
        if not self._mesh.recipe.torch:
            raise UsageError(WITHOUT_TORCH)
        self._mesh.await_arrival()
        return self._controller.form_groups(self._mesh)

    def prepare_group(self) -> Future[ValueMesh[None]]:
        """Set torchrun's variables on the ranks without forming a group: cells may then make their own."""
        return self._call("prepare_group", (self._controller.next_id(),), what="the ranks' variables")

    def ways(self) -> list[tuple[str, str]]:
        """Each host and the address at which others reach it for collectives: ``("nodeA", "10.0.0.5 (eth0)")``."""
        return ways_of(self._controller, self._mesh)
