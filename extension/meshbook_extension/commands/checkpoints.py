"""Commands that save what the ranks of a mesh hold, and restore it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshbook.checkpoint.folder import DCP, FORMATS, Saved
from meshbook.concurrency.future import Future
from meshbook.errors import MeshError, UsageError
from meshbook.formatting import format_bytes, format_duration, name_ranks, name_some
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook_extension.cells.running import interrupted
from meshbook_extension.commands import Command
from meshbook_extension.notebook.grammar import Arguments, Option, check_identifier
from meshbook_extension.notebook.saves import LastSave, MeshSaves, RegularSave
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import WARN, show_message
from meshbook_extension.output.publisher import sink_for

FORMAT = Option("--format", "dcp, which keeps all; safetensors, for modules and tensors alone", str, choices=FORMATS)
NAMED = 8
"""The most names that a line has."""
STEP = Option("--step", "the training step", float, "N")


@Command(
    name="%mesh save",
    summary="Save the variables of all ranks, and what the notebook holds on the mesh, to a folder that hosts share.",
    words="[DIR] [NAME ...]",
    options=(
        Option("--step", "the training step; by default the variable step, or that of meshbook.log", float, "N"),
        Option("--keep", "so many saves stay in the folder", int, "N"),
        Option("--every", "save again between cells, after this time", float, "TIME"),
        Option("--stop", "end --every"),
        FORMAT,
        Option("--async", "go on while the ranks write; a failure is told"),
    ),
    examples=(
        "%mesh save ckpt",
        "%mesh save ckpt model opt step",
        "%mesh save ckpt --every 5m --keep 3",
        "%mesh save weights model --format safetensors",
        "%mesh save --stop",
    ),
    notes="""
Modules, optimizers, tensors, schedulers and all else with a state_dict, numbers, texts and containers of these, random
states. What differs between ranks is saved for each of them. Each save is a folder of its own in DIR, in the format of
torch.distributed.checkpoint, and is there whole or not at all. Ranks are held while they copy, and write aside.
Back: %mesh restore DIR, on a mesh of any size; after a rank was lost: %mesh heal --restore.""",
)
def save(session: Session, arguments: Arguments) -> object:
    procs, saves = session.mesh().base(), session.part(MeshSaves)
    if arguments.flag("--stop"):
        if saves.regular.pop(procs.name, None) is None:
            print("nothing is saved from time to time")
        return None
    if not arguments.words:
        raise arguments.grammar.refuse("say to which folder.")
    folder, names = arguments.words[0], [check_identifier(name, "%mesh save") for name in arguments.words[1:]]
    keep, format = arguments.whole("--keep"), arguments.text("--format") or DCP
    if keep == 0:
        raise arguments.grammar.refuse("--keep 0: at least the new save stays.", "--keep")
    every_s = arguments.number("--every")
    path = str(Path(folder).expanduser().absolute())
    plan = RegularSave(every_s or 0.0, path, tuple(names), keep, format)
    with _waiting_told(procs):
        begun = _begin(session, procs, plan, arguments.number("--step"))
        if every_s is not None:
            saves.regular[procs.name] = plan
            saves.begun[procs.name] = time.monotonic()
        if arguments.flag("--async"):
            tell = partial(show_message, sink_for(session.shell), WARN)
            begun.written.add_done_callback(partial(_tell_failure, tell, ""))
            print(
                f"saving {format_bytes(begun.copied_bytes)} to {folder}; the ranks were held for {begun.held_s:.2f} s"
            )
            return None
        saved = begun.written.get()
    print(f"saved {_described(saved)} to {saved.path}")
    if saved.skipped:
        print(f"  not saved: {name_some([f'{name} ({why})' for name, why in saved.skipped.items()], NAMED)}")
    if every_s is not None:
        print(f"  again every {format_duration(every_s)}, between cells; end that: %mesh save --stop")
    return saved


@contextlib.contextmanager
def _waiting_told(procs: ProcMesh) -> Iterator[None]:
    """Say which cells the ranks run before, and after an interrupt what goes on."""
    if ahead := [f"{what} on {name_ranks(ranks)}" for what, ranks in states.ahead(procs, is_sent=False).items()]:
        print(f"waits behind {', '.join(ahead)}; an interrupt drops it", flush=True)
    try:
        yield
    except KeyboardInterrupt:
        raise interrupted("the ranks that write a save go on; the last one that is whole: %mesh restore DIR") from None


def _begin(session: Session, procs: ProcMesh, plan: RegularSave, step: float | None = None) -> Any:
    """Begin a save, and have its end noted. Raises: UsageError."""
    from meshbook.tensors.handles.checkpoints import begin_save

    saves = session.part(MeshSaves)
    held = held_on_mesh(session, procs)
    chosen = [name for name in plan.names if name not in held]
    state = {name: value for name, value in held.items() if not plan.names or name in plan.names}
    only = chosen if chosen or not plan.names else None
    begun = begin_save(plan.folder, only, state or None, procs=procs, step=step, keep=plan.keep, format=plan.format)
    saves.writing[procs.name] = begun.written
    begun.written.add_done_callback(partial(_note_end, session, procs.name))
    return begun


def _note_end(session: Session, name: str, written: Future[Saved]) -> None:
    saves = session.part(MeshSaves)
    if saves.writing.get(name) is written:
        del saves.writing[name]
    if written.exception(0) is None:
        saves.last[name] = LastSave.of(written.result(0))


def held_on_mesh(session: Session, procs: ProcMesh) -> dict[str, Any]:
    """Return the notebook's tensors on a mesh, and its modules, optimizers and schedulers with such tensors."""
    if "meshbook.tensors.handles.mesh_tensor" not in sys.modules:
        return {}
    import torch

    from meshbook.tensors.handles.mesh_tensor import MeshTensor

    def is_there(value: object) -> bool:
        if isinstance(value, torch.nn.Module):
            return any(map(is_there, value.parameters()))
        if isinstance(value, torch.optim.Optimizer):
            return any(is_there(each) for group in value.param_groups for each in group["params"])
        if isinstance(optimizer := getattr(value, "optimizer", None), torch.optim.Optimizer):  # of a scheduler
            return is_there(optimizer)
        return isinstance(value, MeshTensor) and value.mesh.procs.id == procs.id

    names = session.shell.user_ns
    return {name: value for name, value in names.items() if not name.startswith("_") and is_there(value)}


def save_due(session: Session, *_: object) -> None:
    """Save, after a cell, the meshes whose time has come; tell of a failure."""
    saves = session.part(MeshSaves)
    for name, plan in list(saves.regular.items()):
        procs = session.meshes.get(name)
        if procs is None or not procs.alive or name in saves.writing or procs.base().lost:
            continue
        is_due = time.monotonic() - saves.begun.get(name, 0.0) >= plan.every_s
        if not is_due or states.ahead(procs.base(), is_sent=False):
            continue
        saves.begun[name] = time.monotonic()
        tell = partial(show_message, sink_for(session.shell), WARN)
        try:
            begun = _begin(session, procs.base(), plan)
            begun.written.add_done_callback(
                partial(_tell_failure, tell, ". It is tried again; end that: %mesh save --stop")
            )
        except (MeshError, KeyboardInterrupt) as error:
            tell(f"the regular save did not begin: {error or 'interrupted'}")


def _tell_failure(tell: Callable[[str], object], more: str, written: Future[Saved]) -> None:
    if (error := written.exception(0)) is not None:
        tell(f"{error}{more}")


def _described(saved: Saved) -> str:
    step = "" if saved.step is None else f" at step {saved.step:g}"
    return f"{name_some(_names_in(saved), NAMED) or 'nothing'}{step}: {format_bytes(saved.size_bytes)}"


def _names_in(saved: Saved, only: Sequence[str] = ()) -> list[str]:
    return [name for name in saved.manifest.kinds if not name.startswith("_") and (not only or name in only)]


@Command(
    name="%mesh restore",
    summary="Restore what was saved, on a mesh of this or another size, after all of it is checked.",
    words="DIR [NAME ...]",
    options=(STEP,),
    examples=("%mesh restore ckpt", "%mesh restore ckpt model opt", "%mesh restore ckpt --step 1200"),
    notes="""
The last save in DIR, or DIR itself where it is one. Modules, optimizers and what else is made by code have to be there:
run the cells that make them first. On a mesh of another size each rank reads its own part of sharded tensors; values
that differed between ranks go back to the ranks that are left.""",
)
def restore(session: Session, arguments: Arguments) -> object:
    folder, names = arguments.words[0], [check_identifier(name, "%mesh restore") for name in arguments.words[1:]]
    path = str(Path(folder).expanduser().absolute())
    procs = session.mesh().base()
    with _waiting_told(procs):
        saved = restore_mesh(session, procs, path, names, arguments.number("--step"))
    tell_restored(procs, saved, names)
    return saved


def restore_mesh(
    session: Session, procs: ProcMesh, folder: str, names: Sequence[str] = (), step: float | None = None
) -> Saved:
    """Restore a save on all ranks, and what the notebook holds on the mesh. Raises: UsageError."""
    from meshbook.tensors.handles.checkpoints import describe, restore_from

    told = describe(folder, procs, step)
    manifest, here = told.saved.manifest, session.shell.user_ns
    of_notebook = [name for name in _names_in(told.saved, names) if name in manifest.of_notebook]
    for name in of_notebook:
        if name not in here:
            raise UsageError(
                f"the save has the notebook's {manifest.kinds[name]} {name}, which is not there: run the cell that "
                "makes it"
            )
    only = [name for name in names if name not in of_notebook]
    has_others = bool(only) if names else any(name not in manifest.of_notebook for name in manifest.kinds)
    state = {name: here[name] for name in of_notebook}
    saved = restore_from(told, only if has_others else None, state, procs=procs)
    session.part(MeshSaves).last[procs.name] = LastSave.of(saved)
    return saved


def last_save(session: Session, procs: ProcMesh) -> LastSave | None:
    """Return the last save of a mesh, by a command or by code on its ranks; None where there is none."""
    known, found = session.part(MeshSaves).last.get(procs.name), states.last_save(procs)
    is_newer = found is not None and (known is None or found.manifest.saved_at > known.at)
    return LastSave.of(found) if found is not None and is_newer else known


def tell_restored(procs: ProcMesh, saved: Saved, names: Sequence[str] = ()) -> None:
    """Say what was restored, and what was not."""
    was = saved.manifest.world_size
    before = "" if was == len(procs) else f", saved from {was} ranks"
    names_shown = name_some(_names_in(saved, names), NAMED)
    print(f"restored {names_shown} on {name_ranks(procs.ranks)} from {saved.title}, {saved.age} old{before}")
    for note in saved.notes:
        print(f"  {note}")
