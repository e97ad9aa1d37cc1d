"""`meshbook.save` and `meshbook.restore`: what ranks hold, and what the notebook holds on a mesh.

In the notebook, values of ranks never come here: ranks write the tensors of a mesh from where they lie, and read them
into place. Plain values of the notebook, such as an optimizer's hyperparameters, travel with the call.
"""

from __future__ import annotations

import importlib
import time
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed.tensor import Placement, Replicate

from meshbook.actor.router import is_rank
from meshbook.checkpoint.folder import DCP, FORMATS, Saved, SavingState
from meshbook.concurrency.future import Future, in_background
from meshbook.controller.queries import ask_rank
from meshbook.errors import CallFailed, SaveFailed, UsageError
from meshbook.formatting import did_you_mean
from meshbook.mesh.driven import current_procs
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.rank_calls import execute_as
from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor, make
from meshbook.tensors.messages.operations import Factory
from meshbook.tensors.sending.op_settling import Handle
from meshbook.torch_internals import tree_leaves

if TYPE_CHECKING:
    from meshbook.checkpoint.restoring import SaveDescription

OF_NOTEBOOK = "_random_of_notebook"
"""The name under which the notebook's random states are saved."""
ANSWER_S, POLL_S, POLL_MAX_S = 5.0, 0.02, 0.5
"""The time that a rank has to say how far a save is, and the first and the longest pause between two questions."""
_SILENT_MAX = 60
"""The number of questions without an answer, one after the other, that ends the wait for a save."""


class BegunSave(NamedTuple):
    """A save that the ranks write aside."""

    written: Future[Saved]
    held_s: float
    """The time that it held the rank that was held longest."""
    copied_bytes: int


def save(
    folder: str | Path,
    state: MutableMapping[str, Any] | None = None,
    *,
    procs: ProcMesh | None = None,
    step: float | None = None,
    keep: int | None = None,
    every: int | timedelta | None = None,
    wait: bool = True,
    format: str = DCP,
) -> Saved | Future[Saved] | None:
    """Save objects to a folder that all hosts share, in the format of torch.distributed.checkpoint.

    Each save is a folder of its own inside, which is there whole or not at all. The ranks are held while each copies
    its share; they write it aside.
    state: objects by name, as in ``{"model": model, "opt": opt, "step": step}``: modules, optimizers, tensors, objects
    with ``state_dict``, plain values; random states are saved as well. On a rank it is a call of all ranks. In the
    notebook the objects are those of mesh tensors; without ``state`` all variables of the ranks of ``procs`` are
    saved, by default those of the current mesh.
    step: for people, and for `restore`; by default the value called ``step``, or the last step that `log` was told.
    keep: so many saves stay in the folder. every: on ranks, save at each so many calls only, or after this time.
    wait: wait until it is written, and return the `Saved`; else return a future. None for a call that was not due.
    format: ``dcp``, or ``safetensors`` for modules and tensors alone.
    Raises: UsageError, SaveFailed: the folder has the saves that it had.
    """
    path = str(Path(folder).expanduser().absolute())
    if format not in FORMATS:
        raise UsageError(
            f"format {format!r} is not known.{did_you_mean(format, FORMATS)} Formats: {', '.join(FORMATS)}"
        )
    if keep is not None and keep < 1:
        raise UsageError(f"keep={keep}: at least the new save stays")
    if is_rank():
        if state is None:
            raise UsageError('say what to save: meshbook.save(folder, {"model": model, "opt": opt})')
        from meshbook.checkpoint.saving import save_here

        return save_here(path, state, step=step, keep=keep, every=every, wait=wait, format=format)
    if every is not None:
        raise UsageError("every is for calls on ranks; a program in the notebook counts its steps itself")
    written = begin_save(path, None if state else (), state, procs=procs, step=step, keep=keep, format=format).written
    return written.get() if wait else written


def begin_save(
    folder: str,
    only: Sequence[str] | None,
    state: MutableMapping[str, Any] | None,
    *,
    procs: ProcMesh | None = None,
    step: float | None = None,
    keep: int | None = None,
    format: str = DCP,
) -> BegunSave:
    """Have the ranks copy what is to be saved; return when they are free.

    only: these variables of the ranks; empty: all of the person's; None: none. state: objects of the notebook.
    Raises: UsageError.
    """
    sent, mesh = None, None
    if state is not None:
        from meshbook.checkpoint.saving import collect

        sent = collect(state, strict=True, format=format, random=OF_NOTEBOOK)
        mesh = _mesh_of(sent.entries)
        procs = mesh.procs if mesh else procs
    procs = (procs or current_procs()).base()
    arguments = folder, only, sent, step, keep, format
    told = _on_ranks(procs, mesh, "save", "saving", "save_ranks", arguments)
    names, held, copied = zip(*told, strict=True)
    return BegunSave(in_background(lambda: _await_end(procs, names[0])), max(held), sum(copied))


def restore(
    folder: str | Path,
    state: MutableMapping[str, Any] | None = None,
    *,
    procs: ProcMesh | None = None,
    step: float | None = None,
) -> Saved:
    """Restore the last save of a folder, or the save itself that the folder is, on a mesh of any size.

    state: objects by name as for `save`, which are filled in place; plain values are put into ``state``, and are in
    ``values`` of what is returned. In the notebook without ``state``: the variables of the ranks.
    step: the last save of this step. Everything is checked before anything changes.
    Raises: UsageError if there is no such save, or it is not whole, or of another model.
    """
    path = str(Path(folder).expanduser().absolute())
    if not is_rank():
        mesh = _mesh_of(_tensors_in(state)) if state else None
        procs = mesh.procs if mesh else procs or current_procs()
        return restore_from(describe(path, procs, step, list(state or ())), None if state else (), state, procs=procs)
    if state is None:
        raise UsageError('say what to restore: meshbook.restore(folder, {"model": model, "opt": opt})')
    from meshbook.checkpoint.restoring import restore_objects

    return restore_objects(path, state, step=step)


def restore_from(
    told: SaveDescription, only: Sequence[str] | None, state: MutableMapping[str, Any] | None, *, procs: ProcMesh
) -> Saved:
    """Restore variables of the ranks, and objects of the notebook, after all of them are checked.

    only: these variables; empty: all that were saved; None: none. Raises: UsageError.
    """
    procs, saved, path = procs.base(), told.saved, str(told.saved.path)
    plan, mesh, there = None, None, {}
    if state:
        from meshbook.checkpoint.restoring import Restoring

        place = procs.ranks[0], len(procs)
        plan = Restoring(told, state, {}, only=list(state), random=OF_NOTEBOOK, place=place)
        there = {key: each for key, each in plan.sources.items() if isinstance(each, MeshTensor)}
        mesh = _mesh_of(there)
    if only is not None:
        saved = _on_ranks(procs, None, "restore", "restoring", "restore_ranks", (path, only, None))[0]
    if plan is None:
        return saved
    _on_ranks(procs, mesh, "restore", "restoring", "load_tensors", (path, there))
    if here := [key for key in plan.sources if key not in there]:
        read = _on_ranks(procs.select([0]), None, "restore", "restoring", "read_tensors", (path, here))[0]
        for key, tensor in read.items():
            plan.sources[key].copy_(tensor)
    plan.give()
    return Saved(saved.path, saved.manifest, plan.values, (*plan.notes, *saved.notes))


def describe(folder: str, procs: ProcMesh, step: float | None = None, names: Sequence[str] = ()) -> SaveDescription:
    """Return what rank 0 finds in a save of these names and of the notebook's. Raises: UsageError."""
    asked = folder, step, names
    told = _on_ranks(procs.base().select([0]), None, "restore", "restoring", "describe_save", asked)
    return cast("SaveDescription", told[0])


def _on_ranks(procs: ProcMesh, mesh: Mesh | None, what: str, module: str, function: str, arguments: Any) -> list[Any]:
    """Call a function of `meshbook.checkpoint` on all ranks; return their answers.

    Raises: UsageError if all have refused it for the same reason; CallFailed, WorkerLost.
    """
    called = getattr(importlib.import_module(f"meshbook.checkpoint.{module}"), function)
    try:
        if mesh is not None:
            return list(mesh.execute(called, *arguments).values())
        return execute_as(procs, what, called, *arguments).get().values()
    except CallFailed as error:
        first = error.failures[0]
        if isinstance(refused := first.load(), UsageError) and all(
            each.cause == first.cause for each in error.failures
        ):
            raise refused from None
        raise


def _mesh_of(tensors: Mapping[str, object]) -> Mesh | None:
    """Return the mesh of the mesh tensors among these. Raises: UsageError unless it is one, and whole."""
    meshes = {id(each.mesh): each.mesh for each in tensors.values() if isinstance(each, MeshTensor)}
    if len(meshes) > 1:
        raise UsageError("these tensors are on several meshes: save those of each mesh to a folder of their own")
    for mesh in meshes.values():
        whole = mesh.procs.base()
        if len(mesh.procs) < len(whole):
            raise UsageError("these tensors are on a part of a mesh: bring them to the whole of it, by tensor.to_mesh")
        return mesh
    return None


def _tensors_in(state: MutableMapping[str, Any]) -> dict[str, object]:
    from meshbook.checkpoint.state import hold

    return {key: each for held in hold(dict(state)).held.values() for key, each in held.tensors().items()}


def _await_end(procs: ProcMesh, name: str) -> Saved:
    """Wait until rank 0 has written a save. Raises: SaveFailed."""
    pause_s, silent = POLL_S, 0
    while True:
        question = ask_rank("saving", name)
        told = procs._controller.questions.gather(procs._mesh, [0], question, SavingState, ANSWER_S)
        state = told.get(0)
        silent = 0 if state else silent + 1
        if state is not None and state.is_over:
            if state.manifest is None:
                raise SaveFailed(state.error)
            return Saved(Path(state.path), state.manifest)
        if 0 in procs._mesh.lost or silent > _SILENT_MAX or not procs.alive:
            raise SaveFailed("rank 0, which writes it, has ended or does not answer")
        time.sleep(pause_s)
        pause_s = min(POLL_MAX_S, pause_s * 1.5)


class StateTensors:
    """The mesh tensors of a state: those of modules and optimizers, and those in lists, tuples and mappings.

    A tensor stays the same object when its parts are renewed; its values are to be restored.
    """

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
