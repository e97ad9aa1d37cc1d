"""What a repair of a mesh has done: what `ProcMesh.heal` returns, and what the mesh remembers of the last one."""

from __future__ import annotations

from typing import NamedTuple

from meshbook.formatting import name_ranks

FORMED_AGAIN = "its process groups were broken and are formed again"


class Repaired(NamedTuple):
    """What a repair has done."""

    mesh: str
    ranks: tuple[int, ...]
    """Started again, without their former state."""
    hosts: tuple[str, ...]
    """Whose agents were started again."""
    joined: bool
    """Whether the groups were formed anew, with all ranks."""
    world_size: int
    proof: str
    """What became of the process groups of a mesh that was whole; empty where they are sound."""
    setup_cells: int
    """Cells that the new ranks have run."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What was brought back besides, as the tensors of a `meshbook.distributed.Mesh`."""

    def __str__(self) -> str:
        if not self.ranks and not self.joined:
            whole = f'mesh "{self.mesh}" is whole'
            if self.proof == FORMED_AGAIN:
                return f"{whole}; {self.proof} in {self.seconds:.2f} s"
            return f"{whole}: nothing to heal{f'; {self.proof}' if self.proof else ''}"
        did = []
        if self.hosts:
            did.append(f"host {', '.join(self.hosts)} started again")
        if self.ranks:
            did.append(f"{name_ranks(self.ranks)} started again")
        if self.joined:
            did.append(f"all {self.world_size} ranks joined")
        lines = [f'mesh "{self.mesh}": {", ".join(did)} in {self.seconds:.2f} s', *self.notes]
        return "\n  ".join(lines)

    def __repr__(self) -> str:
        return str(self)  # a cell that ends with a repair shows it
