"""The meshes of a notebook and their parts: list, use, stop, detach, attach, slice, split, rename, flatten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshbook.agent.lease import default_lease_s
from meshbook.errors import AttachError, UsageError
from meshbook.formatting import Table, did_you_mean, format_duration, format_sizes, name_ranks
from meshbook.launchers.engines.commands import job_lists
from meshbook.mesh import driven, states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import rename_mesh
from meshbook.mesh.rank_calls import set_axes
from meshbook.sessions import listing
from meshbook.sessions.listing import SavedSession
from meshbook.sessions.words import describe, describe_age, names_of, notebook_key_of, notebook_of, owner_of
from meshbook_extension.cells.running import Jobs, interrupted
from meshbook_extension.commands import Command
from meshbook_extension.commands.spawn import find_profiles
from meshbook_extension.notebook.grammar import Arguments, Option, check_identifier
from meshbook_extension.notebook.saves import MeshSaves
from meshbook_extension.notebook.session import NamedSlice, Session
from meshbook_extension.notebook.targets import FORMS, RANK
from meshbook_extension.output.labels import count, show_tables
from meshbook_extension.output.publisher import sink_for
from meshbook_extension.reattach.notebook_state import StateWriter
from meshbook_extension.reattach.restore import restore

SHOWN = 5
"""The most sessions of others that a list shows."""


@Command(
    name="%mesh list",
    summary="All meshes and named slices; what other kernels have, what waits to be attached, and jobs of engines.",
    options=(Option("--all", f"those of others too, where they are more than {SHOWN}"),),
    examples=("%mesh list", "%mesh list --all"),
    notes="What this notebook has left comes first, then what waits for anybody.",
)
def list_meshes(session: Session, arguments: Arguments) -> None:
    others = [each for each in listing.sessions() if not each.is_ours]
    others.sort(key=lambda each: (not _left_by(each, session.notebook), each.owner_pid is not None))
    if not session.meshes and not others:
        print("no mesh yet. Start one: %mesh spawn gpus=4")
    rows = []
    for name, procs in session.meshes.items():
        mark = "*" if name == session.current else " "
        state = f"{count(len(procs), 'rank')}, {describe_age(states.saved_mesh(procs))}" if procs.alive else "stopped"
        rows.append([mark, name, format_sizes(procs.sizes), states.device_of(procs), state])
        for slice_name, named in session.slices.items():
            if named.mesh == name:
                rows.append(["", slice_name, format_sizes(named.view.sizes), "", f"slice of {name}"])
    if rows:
        table = Table(["", "mesh", "axes", "device", "state"], rows)
        show_tables(sink_for(session.shell), [table], str(replace(table, heads=())))
    shown = others if arguments.flag("--all") else others[:SHOWN]
    for number, each in enumerate(shown):
        names = names_of(each)
        unique = sum(names[0] in names_of(other) for other in others) == 1
        how = "" if each.owner_pid is not None else f"\n      %mesh attach {names[0] if unique else each.id}"
        print(f"  {describe(each)}{how}" if number else f"elsewhere:\n  {describe(each)}{how}", flush=True)
    if len(others) > len(shown):
        print(f"  and {len(others) - len(shown)} more: %mesh list --all")
    for number, line in enumerate(job_lists()):
        print(f"  {line}" if number else f"jobs, as their engines have them:\n  {line}", flush=True)


@Command(
    name="%mesh use",
    names="meshes",
    summary="Make another mesh the current one; a ProcMesh of the notebook can be adopted by its name.",
    words="NAME",
    options=(Option("--out", "bind the mesh, a ProcMesh, to this name in the notebook", str, "VAR"),),
    examples=("%mesh use trainers", "%mesh use main --out procs"),
)
def use(session: Session, arguments: Arguments) -> ProcMesh:
    (name,) = arguments.words
    out = arguments.text("--out")
    value = session.shell.user_ns.get(name)
    if name not in session.meshes and isinstance(value, ProcMesh):
        session.check_name_is_free(value.name)
        session.add(value)
    procs = session.mesh(name if name in session.meshes else None if isinstance(value, ProcMesh) else name)
    session.current = procs.name
    if out is not None:
        session.bind(out, procs)
    print(f'mesh "{procs.name}" is current: {format_sizes(procs.sizes)}')
    return procs


@Command(
    name="%mesh stop",
    names="meshes",
    summary="End the processes of a mesh: the current one, the one named, or all.",
    words="[NAME]",
    options=(Option("--all", "every mesh"),),
    examples=("%mesh stop", "%mesh stop trainers", "%mesh stop --all"),
)
def stop(session: Session, arguments: Arguments) -> None:
    if arguments.flag("--all"):
        if arguments.words:
            raise UsageError("either a name or --all.\n  for example: %mesh stop --all")
        names = list(session.meshes)
    else:
        names = list(arguments.words) or [session.current or session.mesh().name]
    if not names:
        print("no mesh is running")
    for name in names:
        if name not in session.meshes:
            session.mesh(name)  # says which there are
        session.part(MeshSaves).await_written(name)
        session.meshes[name].stop()
        session.forget(name)
        print(f'mesh "{name}" stopped')
    if names and session.current:
        print(f'mesh "{session.current}" is current now')


@Command(
    name="%mesh detach",
    summary="Let all meshes live on without this notebook, for the lease; cells on them run on.",
    options=(Option("--lease", "how long they wait to be attached (10m)", float, "TIME"),),
    examples=("%mesh detach", "%mesh detach --lease 2h"),
    notes="""
A kernel that is restarted or dies leaves its meshes for the lease anyway; this is for shutting it down, or for going
on elsewhere. The next kernel of this notebook attaches them by itself.""",
)
def detach(session: Session, arguments: Arguments) -> None:
    asked_s = arguments.number("--lease")
    lease_s = default_lease_s() if asked_s is None else asked_s
    session.part(StateWriter).save()
    names = [mesh.name for folder in driven.own_sessions() for mesh in folder.state.meshes.values()]
    if not names:
        print("no mesh to detach. Start one: %mesh spawn gpus=4")
        return
    running = len(session.part(Jobs).running())
    driven.detach(lease_s)
    for name in list(session.meshes):
        session.forget(name, detached=True)
    for name in names:
        print(f'mesh "{name}" lives on for {format_duration(lease_s)} without this notebook')
    jobs = f"; {running} job{'s run' if running > 1 else ' runs'} on" if running else ""
    print(f"  back to it: %mesh attach {names[0]}{jobs}")


@Command(
    name="%mesh attach",
    names="waiting",
    summary="Go on with a mesh that was detached, or whose kernel has died; with all of its session.",
    words="[NAME]",
    options=(Option("--as", "what it is called here, where its name is taken", str, "OTHER"),),
    examples=("%mesh attach", "%mesh attach trainers", "%mesh attach train.ipynb", "%mesh attach main --as theirs"),
    notes="""
NAME is that of a mesh, or of the notebook that has left it; without one it is what this notebook has left. See
%mesh list for what waits. What another notebook has left waits again, for its lease, when this one is shut down.""",
)
def attach(session: Session, arguments: Arguments) -> None:
    found = _find(session, arguments.words[0] if arguments.words else None)
    name = arguments.text("--as")
    if name is not None:
        check_identifier(name, "--as")
        if len(found.meshes) > 1:
            raise UsageError(f"--as names one mesh, but this session has {', '.join(names_of(found))}.")
    for mesh_name in [name] if name is not None else names_of(found):
        session.check_name_is_free(mesh_name, f"%mesh attach {found.id} --as other")
    is_own, notebook = _left_by(found, session.notebook), notebook_of(found) or "another notebook"
    try:
        attachment = driven.attach(found)
    except KeyboardInterrupt:
        raise interrupted("nothing was attached") from None
    if name is not None:
        rename_mesh(attachment.meshes[0], name)
    if not is_own:
        attachment.controller.waits_again = frozenset(mesh.id for mesh in attachment.meshes), found.lease_s
    restore(session, attachment, again=False)
    session.current = name or session.current
    if not is_own:
        again = f"it waits again, for {format_duration(found.lease_s)}, when this one is shut down"
        print(f'  mesh "{session.current}" is current now; left by {notebook}; {again}')


def _find(session: Session, name: str | None) -> SavedSession:
    """Return the session that a person means. Raises: UsageError, AttachError."""
    known = listing.sessions()
    if name is None:
        found = [each for each in known if each.owner_pid is None]
        if not found:
            raise UsageError("no mesh waits to be attached." + _list_others(known))
    else:
        found = [each for each in known if name in (each.id, *names_of(each)) or name == notebook_of(each) != ""]
    waiting = [each for each in found if each.owner_pid is None]
    own = [each for each in waiting if _left_by(each, session.notebook)]
    if len(own or waiting) == 1 and (own or name is not None):
        return (own or waiting)[0]
    if waiting:
        newest_first = sorted(own or waiting, key=lambda each: -max(mesh.began for mesh in each.meshes))
        lines = "".join(f"\n  %mesh attach {each.id}    {describe(each)}" for each in newest_first)
        which = f'several meshes that are called "{name}" wait' if name else "several meshes of this notebook wait"
        if name is None and not own:
            which = "this notebook has left no mesh, others have"
        raise UsageError(f"{which}; say which:{lines}")
    if not found:
        near = did_you_mean(name or "", [known_name for each in known for known_name in names_of(each)])
        raise UsageError(f'no mesh "{name}" waits to be attached.{near}{_list_others(known)}')
    if found[0].is_ours:
        raise UsageError(f'mesh "{name}" is attached here already. Make it current: %mesh use {names_of(found[0])[0]}')
    owner = owner_of(found[0])
    raise AttachError(
        f'mesh "{name}" belongs to {owner}.\n'
        f"  take it over: run %mesh detach there, or end that kernel; then %mesh attach {name}"
    )


def welcome(session: Session) -> Table:
    """Return the answer of ``%mesh`` where there is no mesh: the first steps, and what this notebook has left."""
    waiting = [each for each in listing.sessions() if each.owner_pid is None and _left_by(each, session.notebook)]
    rows = [("%mesh spawn gpus=4", "start 4 ranks on this machine"), ("%%mesh", "above a cell: run it on all of them")]
    rows += [(f"%mesh attach {each.id}", f"go on with {describe(each)}") for each in waiting]
    rows += [(f"%mesh spawn @{name}", line) for name, line in find_profiles(Path.cwd()).lines.items()]
    rows += [("%mesh help", "all commands")]
    return Table((), rows, title=session.absence)


def _left_by(saved: SavedSession, notebook: str) -> bool:
    """Whether this notebook, or an earlier kernel of it, has left the session."""
    return notebook_key_of(saved) == notebook != ""


def _list_others(known: list[SavedSession]) -> str:
    elsewhere = [each for each in known if not each.is_ours]
    return "".join(f"\n  {describe(each)}" for each in elsewhere) or "\n  start one: %mesh spawn gpus=4"


@Command(
    name="%mesh slice",
    summary="Give a part of the mesh a name, to be used as a target.",
    words="NAME",
    pairs="AXIS=.. [AXIS=.. ...]",
    examples=("%mesh slice left gpus=0:2", "%mesh slice evens rank=0,2", "%%mesh left"),
    notes=FORMS,
)
def name_slice(session: Session, arguments: Arguments) -> None:
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
    _arrange(session, session.mesh().flatten(arguments.words[0]))


def _arrange(session: Session, view: ProcMesh) -> None:
    """Give the mesh the axes of ``view``."""
    set_axes(view).get()
    session.arrange(view)
    print(f'mesh "{view.name}": {format_sizes(view.sizes)}')
