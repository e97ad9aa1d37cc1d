"""Named views of the current mesh: slice, split, rename, flatten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshbook.errors import UsageError
from meshbook.formatting import format_sizes, name_ranks
from meshbook_extension.commands import Command
from meshbook_extension.notebook.grammar import Arguments
from meshbook_extension.notebook.session import NamedSlice, Session, check_identifier
from meshbook_extension.notebook.targets import FORMS, RANK

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh


@Command(
    name="%mesh slice",
    summary="Give a part of the mesh a name, to be used as a target.",
    words="NAME",
    pairs="AXIS=.. [AXIS=.. ...]",
    examples=("%mesh slice left gpus=0:2", "%mesh slice evens rank=0,2", "%%mesh left"),
    notes=FORMS,
)
def name_slice(session: Session, arguments: Arguments) -> None:
    """Keep a view under a name."""
    (name,) = arguments.words
    check_identifier(name, "%mesh slice")
    procs = session.mesh()
    if name in session.meshes or name in procs.sizes or name == RANK:
        kind = "a mesh" if name in session.meshes else "an axis"
        raise UsageError(f'"{name}" is {kind} already; choose another name for the slice.')
    if not arguments.pairs:
        example = f"{next(iter(procs.sizes), RANK)}=0"
        raise UsageError(f"say which part.\n  for example: %mesh slice {name} {example}")
    view = session.target((), arguments.pairs)
    session.slices[name] = NamedSlice(procs.name, view, dict(arguments.pairs))
    print(f'slice "{name}": {name_ranks(view.ranks)} ({format_sizes(view.sizes)}); use it: %%mesh {name}')


@Command(
    name="%mesh split",
    summary="Make several axes of one; the mesh has them from now on, on the ranks too.",
    pairs="AXIS=NEW,NEW NEW=N",
    examples=("%mesh split gpus=dp,tp tp=2",),
    notes="The size of one new axis may be left out. Slices that have a name stay as they are.",
)
def split(session: Session, arguments: Arguments) -> None:
    """Give the mesh the axes that the pairs make of one."""
    axes: dict[str, Sequence[str] | int] = {
        axis: int(text) if text.isdigit() else tuple(text.split(",")) for axis, text in arguments.pairs.items()
    }
    if not any(isinstance(value, tuple) for value in axes.values()):
        raise arguments.grammar.refuse("say which axis becomes which.")
    _arrange(session, session.mesh().split(**axes))


@Command(
    name="%mesh rename",
    summary="Give axes other names.",
    pairs="AXIS=NEW [AXIS=NEW ...]",
    examples=("%mesh rename hosts=dp", "%mesh rename hosts=dp gpus=tp"),
)
def rename(session: Session, arguments: Arguments) -> None:
    """Give the mesh the new names of its axes."""
    if not arguments.pairs:
        raise arguments.grammar.refuse("say which axis, and its new name.")
    if RANK in arguments.pairs.values():
        raise arguments.grammar.refuse(f'"{RANK}" means the number of a rank everywhere; name the axis otherwise.')
    _arrange(session, session.mesh().rename(**arguments.pairs))


@Command(
    name="%mesh flatten",
    summary="Lay all axes end to end, as one axis of this name.",
    words="NAME",
    examples=("%mesh flatten dp",),
)
def flatten(session: Session, arguments: Arguments) -> None:
    """Make one axis of all axes."""
    _arrange(session, session.mesh().flatten(arguments.words[0]))


def _arrange(session: Session, view: ProcMesh) -> None:
    """The mesh has the axes of ``view`` from now on."""
    view.set_axes().get()
    session.meshes[view.name] = view
    print(f'mesh "{view.name}": {format_sizes(view.sizes)}')
