"""Commands that bring ranks back, add or remove them: heal, respawn, grow, shrink."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from meshbook.errors import CallError
from meshbook.formatting import name_ranks
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.resize import Change, resize
from meshbook_extension.cells.run import start, wait_for
from meshbook_extension.cells.running import interrupted
from meshbook_extension.commands import Command
from meshbook_extension.commands.checkpoints import last_save, restore_mesh, tell_restored
from meshbook_extension.commands.packages import send_again
from meshbook_extension.commands.spawn import ON, PYTHON, WITHIN, read_other_engine
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import Setup, follow_ranks, view_after

FORCE = Option("--force", "also a rank that ends again and again, and ranks whose host is silent")
RESTORE = Option("--restore", "bring all ranks back to the last %mesh save")
REPLAY = Option("--replay", "run the cells marked %%mesh --setup on the new ranks")


@Command(
    name="%mesh heal",
    summary="Start the ranks that ended again, in their places; %%mesh --setup cells run there again.",
    options=(FORCE, RESTORE, ON, PYTHON, WITHIN),
    rest="ENGINE OPTIONS",
    examples=("%mesh heal", "%mesh heal --restore", "%mesh heal --force", "%mesh heal --on ssh:nodeC -- -p 2222"),
    notes="""
The other ranks keep their variables; nothing is restored without --restore, which is for all ranks, since an old
replica beside newer ones would be wrong. Hosts whose agent is lost are started again too, where they were or, of a
cluster that has taken that, where it gives another; --on has an engine of your choice start others in their places.
A rank that ended more than 3 times within 60 s is left alone, unless --force is given.
A host that is silent but not known to have ended keeps its ranks; --force gives it up and starts another.""",
)
def heal(session: Session, arguments: Arguments) -> None:
    procs = session.mesh()
    launcher = read_other_engine(arguments, procs.base())
    force, within_s = arguments.flag("--force"), arguments.number(WITHIN.name)
    last = last_save(session, procs) if procs.lost or arguments.flag(RESTORE.name) else None
    if arguments.flag(RESTORE.name) and last is None:
        raise arguments.grammar.refuse(
            "there is no save of this mesh. From a folder: %mesh heal, then %mesh restore DIR"
        )
    with _interrupts_told():
        repaired = procs.base().heal(force=force, note=_note, launcher=launcher, within_s=within_s)
    print(repaired)
    send_again(session, procs, repaired.ranks)
    owing = session.setups.owe(procs.name, repaired.ranks)
    if last is None or not arguments.flag(RESTORE.name):
        if last is not None and owing:
            print(f"  last save: {last}: %mesh heal --restore")
        _replay_after(session, procs, owing)
        return
    if owing:  # on all ranks together: what they make may need collectives, as DDP does
        _replay_after(session, procs, session.setups.owe(procs.name, range(len(procs.base()))), owing)
    with _interrupts_told():
        saved = restore_mesh(session, procs.base(), last.path)
    tell_restored(procs.base(), saved)


@Command(
    name="%mesh respawn",
    summary="End ranks, busy or not, and start them again in their places, without their variables.",
    words="[SLICE]",
    pairs="AXIS=.. [AXIS=.. ...]",
    options=(REPLAY, FORCE, WITHIN),
    examples=("%mesh respawn rank=3", "%mesh respawn rank=3 --replay", "%mesh respawn gpus=0:2"),
)
def respawn(session: Session, arguments: Arguments) -> None:
    if not arguments.words and not arguments.pairs:
        raise arguments.grammar.refuse("say which ranks.")
    procs = session.mesh()
    ranks, within_s = session.target(arguments.words, arguments.pairs).ranks, arguments.number(WITHIN.name)
    with _interrupts_told():
        repaired = procs.base().respawn(ranks, force=arguments.flag("--force"), note=_note, within_s=within_s)
    print(repaired)
    send_again(session, procs, repaired.ranks)
    if arguments.flag("--replay"):
        _replay_after(session, procs, session.setups.owe(procs.name, repaired.ranks))
    else:
        target = [*arguments.words, *(f"{axis}={text}" for axis, text in arguments.pairs.items())]
        print(_describe_loss(session, procs, repaired.ranks, f"%mesh respawn {' '.join(target)} --replay"))


@Command(
    name="%mesh grow",
    summary="Add indices to axes of the mesh; its ranks keep their processes and variables.",
    pairs="AXIS=N [AXIS=N ...]",
    options=(REPLAY, ON, PYTHON, WITHIN),
    rest="ENGINE OPTIONS",
    examples=(
        "%mesh grow gpus=2",
        "%mesh grow hosts=1",
        "%mesh grow gpus=2 --replay",
        "%mesh grow hosts=1 --on ssh:nodeC -- -p 2222",
    ),
    notes="""
Ranks are numbered anew, by the axes; new ranks have no variables. hosts can grow where the mesh has its own: by who
started the others, with the same options, or by --on and what follows --, as of %mesh spawn.""",
)
def grow(session: Session, arguments: Arguments) -> None:
    more = _read(arguments)
    if not more:
        raise arguments.grammar.refuse("say along which axis, and by how much.")
    procs = session.mesh()
    launcher = read_other_engine(arguments, procs)
    within_s = arguments.number(WITHIN.name)
    with _interrupts_told():
        change = resize(procs, grow=more, note=_note, launcher=launcher, within_s=within_s)
    _take_over(session, procs, change)
    send_again(session, change.procs, change.new)
    if arguments.flag("--replay"):
        _replay_after(session, change.procs, session.setups.owe(procs.name, change.new))
    else:
        print(_describe_loss(session, change.procs, change.new, ""))


@Command(
    name="%mesh shrink",
    summary="Remove indices of axes: those of ranks that ended first, then from the end.",
    pairs="[AXIS=N ...]",
    examples=("%mesh shrink gpus=2", "%mesh shrink"),
    notes="""
Without an axis: go on without the ranks that ended, with as few of the others as must go too.""",
)
def shrink(session: Session, arguments: Arguments) -> None:
    fewer = _read(arguments)
    procs = session.mesh()
    with _interrupts_told():
        change = resize(procs, shrink=fewer, note=_note)
    _take_over(session, procs, change)


@contextlib.contextmanager
def _interrupts_told() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise interrupted("stopped halfway; look: %mesh    bring back what is dead: %mesh heal") from None


def _note(text: str) -> None:
    print(f"  {text}", flush=True)


def _read(arguments: Arguments) -> dict[str, int]:
    for axis, text in arguments.pairs.items():
        if not text.isdigit() or int(text) < 1:
            raise arguments.grammar.refuse(f"{axis}={text}: say by how many, a whole number of at least 1.")
    return {axis: int(text) for axis, text in arguments.pairs.items()}


# ---- after it ------------------------------------------------------------------------------------------------------


def _take_over(session: Session, before: ProcMesh, change: Change) -> None:
    """Update the session's names for the mesh and its parts."""
    session.arrange(change.procs)
    print(change)
    for name, named in tuple(session.slices.items()):
        if named.mesh != change.procs.name:
            continue
        view = view_after(named.view, named.pairs, before, change)
        if isinstance(view, str):
            del session.slices[name]
            print(f'  slice "{name}" is gone: {view}')
        else:
            pairs = None if named.pairs is None else follow_ranks(named.pairs, before, change)
            session.slices[name] = named._replace(view=view, pairs=pairs)
    session.setups.follow(change.procs.name, before, change)


def _describe_loss(session: Session, procs: ProcMesh, ranks: Collection[int], again: str) -> str:
    cells = list(session.setups.of(procs.name))
    text = f"  {name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} no variables"
    if cells and again:
        return f"{text}; the setup cells give {'it' if len(ranks) == 1 else 'them'} theirs: {again}"
    return f"{text}; run the cells that make them there, as in %%mesh rank={min(ranks)}"


def _replay_after(session: Session, procs: ProcMesh, ranks: tuple[int, ...], new: tuple[int, ...] = ()) -> None:
    """Run the setup cells on new ranks, and say that these have lost their variables.

    new: the new ranks among ``ranks``; all by default.
    Raises: the error of a setup cell; then the ranks still owe it, and the next ``%mesh heal`` runs it again.
    """
    if not ranks:
        return
    new = new or ranks
    names, pronoun = name_ranks(new), "its" if len(new) == 1 else "their"
    ran: list[str] = []
    for setup in session.setups.of(procs.name):
        try:
            if _replay(session, procs, setup, ranks):
                ran.append(str(setup.cell_number))
        except (CallError, KeyboardInterrupt):
            print(f"  setup cell {setup.cell_number} did not end well on {names}; mend it, then: %mesh heal")
            raise
    session.setups.settle(procs.name)
    if ran:
        noun = "setup cell" if len(ran) == 1 else "setup cells"
        where = "there" if new == ranks else "on all ranks"
        print(f"  {names} lost {pronoun} variables; {noun} {', '.join(ran)} ran {where} again")
    else:
        print(f"  {names} lost {pronoun} variables; mark cells that make them %%mesh --setup, and heal runs them again")


def _replay(session: Session, procs: ProcMesh, setup: Setup, ranks: tuple[int, ...]) -> bool:
    """Run a setup cell on those of ``ranks`` that it is for; returns whether there are any."""
    target = setup.ranks(procs)
    chosen = [rank for rank in target if rank in ranks]
    if chosen:
        part, number, offset = procs.base().select(chosen), setup.cell_number, setup.line_offset
        alone = len(chosen) < len(target)
        with contextlib.ExitStack() as holding:
            cell = start(
                session, part, setup.code, holding, cell_number=number, line_offset=offset, forbid_collectives=alone
            )
            wait_for(session, cell, holding)
    return bool(chosen)
