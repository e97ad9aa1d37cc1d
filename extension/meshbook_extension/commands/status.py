"""The state of the ranks: status, top, actors, tensors, stacks, errors, free, logs."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace

from meshbook.actor.identity import actor_table
from meshbook.calls.output import StreamText
from meshbook.formatting import (
    Table,
    format_bytes,
    format_duration,
    format_sizes,
    format_some_ranks,
    group_ranks,
    name_ranks,
)
from meshbook.mesh.driven import own_meshes
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.states import follow_logs
from meshbook.mesh.visits import NATIVE_S, STACKS_S
from meshbook.shell.postmortem_memory import Freed
from meshbook_extension.cells.output import open_output
from meshbook_extension.commands import Command, on_ranks
from meshbook_extension.commands.meshes import welcome
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.waiting import pause
from meshbook_extension.output.labels import label, show_tables
from meshbook_extension.output.publisher import sink_for
from meshbook_extension.widget.display import WORTH_BYTES, HealthDisplays, status_table, status_text
from meshbook_extension.widget.variables import RANKS_CHARS

TEXT = Option("--text", "as text, also where the widget can be shown")


@on_ranks(
    name="%mesh top",
    summary="The same as %mesh status.",
    options=(TEXT,),
    examples=("%mesh top", "%mesh top gpus=0:2"),
)
@on_ranks(
    name="%mesh status",
    summary="The ranks: where they run, what they do, how much memory they hold; live where a widget can be shown.",
    options=(TEXT,),
    examples=("%mesh status", "%mesh status gpus=0:2", "%mesh status --text", "%mesh"),
)
def status(session: Session, arguments: Arguments) -> None:
    if session.current is None and not arguments.words and not arguments.pairs:
        show_tables(sink_for(session.shell), [welcome(session)])
        return
    procs = session.target(arguments.words, arguments.pairs)
    as_text = arguments.flag(TEXT.name)
    if as_text or not session.part(HealthDisplays).show(session, procs):
        table = status_table(session, procs, procs.status())
        if as_text:
            print(status_text(table))
        else:
            show_tables(sink_for(session.shell), [table], status_text(table))


@on_ranks(
    name="%mesh actors",
    summary="The actors of the ranks: what each is doing, and how many messages wait for it.",
    examples=("%mesh actors", "%mesh actors gpus=0:2"),
    notes="Without a current mesh: those of all meshes that this notebook has made in Python.\n",
)
def actors(session: Session, arguments: Arguments) -> None:
    if session.current is None and not arguments.words and not arguments.pairs and (meshes := own_meshes()):
        tables = []
        for procs in meshes:
            title, states = f'mesh "{procs.name}": {format_sizes(procs.sizes)}', procs.actors()
            table = replace(actor_table(states), title=title)
            tables.append(table if states else Table((), (), title=f"{title}, no actors"))
    else:
        procs = session.target(arguments.words, arguments.pairs)
        if not (states := procs.actors()):
            how = f'%mesh use {procs.name} --out procs, then procs.spawn("name", Class)'
            print(f"no actors on these ranks. Make some: {how}")
            return
        tables = [actor_table(states)]
    text = "\n".join(str(replace(table, heads=())) for table in tables)
    show_tables(sink_for(session.shell), tables, text)


@Command(
    name="%mesh tensors",
    summary="The notebook's mesh tensors: how they lie, and what each rank holds of them.",
    examples=("%mesh tensors",),
    notes="Tensors and modules that a variable holds, of all meshes; the totals count those without a name too.",
)
def tensors(session: Session, arguments: Arguments) -> None:
    tables: list[Table] = []
    if "meshbook.tensors.handles.mesh_tensor" in sys.modules:  # there is none otherwise, and torch need not be imported
        from meshbook.tensors.handles.displays import tensor_tables

        names = session.shell.user_ns
        tables = tensor_tables({name: value for name, value in list(names.items()) if not name.startswith("_")})
    if tables:
        show_tables(sink_for(session.shell), tables)
    else:
        print("no mesh tensors yet. Make one: meshbook.distribute(tensor, mesh)")


ALL_FRAMES = Option("--all-frames", "with the frames of libraries and of the runtime, which are folded otherwise")
ALL_THREADS = Option("--all-threads", "not only the main thread of each rank")
NATIVE = Option("--native", "with the frames of native code (C, C++), read by py-spy")


@on_ranks(
    name="%mesh stacks",
    summary="Where each rank is, busy, blocked or stopped; equal stacks once; and who holds the others up.",
    options=(ALL_FRAMES, ALL_THREADS, NATIVE),
    examples=("%mesh stacks", "%mesh stacks rank=3 --all-frames", "%mesh stacks gpus=0:2 --native"),
)
def stacks(session: Session, arguments: Arguments) -> None:
    procs = session.target(arguments.words, arguments.pairs)
    native = arguments.flag(NATIVE.name)
    found = procs.stacks(
        all_threads=arguments.flag(ALL_THREADS.name), native=native, timeout_s=NATIVE_S if native else STACKS_S
    )
    all_frames = arguments.flag(ALL_FRAMES.name)
    show_tables(sink_for(session.shell), [found.table(all_frames=all_frames)], found.text(all_frames=all_frames))


FULL = Option("--full", "with the tracebacks; of ranks that ended, the last lines of their logs")
SHOWN = 10


@on_ranks(
    name="%mesh errors",
    summary="The last failures of the ranks, newest first, equal ones once; or one of them with its traceback.",
    words="[NUMBER|SLICE]",
    options=(Option("-n", f"so many of them ({SHOWN})", int, "N"), FULL),
    examples=("%mesh errors", "%mesh errors 7", "%mesh errors gpus=0 -n 3 --full"),
)
def errors(session: Session, arguments: Arguments) -> None:
    session.errors.note_lost([procs for procs in session.meshes.values() if procs.alive])
    if arguments.words and arguments.words[0].isdigit() and not arguments.pairs:
        print(in_full(session.errors.find(int(arguments.words[0]))))
        return
    found = session.errors.all()[::-1]
    if arguments.words or arguments.pairs:
        procs = session.target(arguments.words, arguments.pairs)
        found = [error for error in found if error.mesh == procs.name and not set(procs.ranks).isdisjoint(error.ranks)]
    count = arguments.whole("-n")
    chosen = found[: SHOWN if count is None else count]
    if not chosen:
        print("no failures" if not found else f"{len(found)} failures")
    elif arguments.flag(FULL.name):
        print("\n\n".join(map(in_full, chosen)))
    else:
        older = len(found) - len(chosen)
        more = f"    {older} older: %mesh errors -n {len(found)}" if older else ""
        look = f"  look: %mesh errors {chosen[0].number}{more}"
        table = error_table(chosen, of_many=len({error.mesh for error in found}) > 1)
        text = str(replace(table, heads=(), notes=[look]))
        show_tables(sink_for(session.shell), [replace(table, notes=[look])], text)


def error_table(errors: list[LoggedError], *, of_many: bool = False) -> Table:
    """Return a row per error: number, time, ranks, cell, text. of_many: whether the mesh is named too."""
    rows = [
        [
            str(error.number),
            time.strftime("%H:%M:%S", time.localtime(error.at)),
            f"[{format_some_ranks(error.ranks, RANKS_CHARS)}]",
            *([error.mesh] if of_many else []),
            error.what or "idle",
            error.headline + (f" ({error.where})" if error.where else ""),
        ]
        for error in errors
    ]
    heads = ["", "time", "ranks", *(["mesh"] if of_many else []), "cell", "failure"]
    return Table(heads, rows)


def in_full(error: LoggedError) -> str:
    """Return the error's row, then its traceback as far as it is kept."""
    return f"{replace(error_table([error]), heads=())}\n{error.traceback}".rstrip()


@on_ranks(
    name="%mesh free",
    summary="Let go of what the last exception of each rank holds, and of device caches; says how much that was.",
    examples=("%mesh free", "%mesh free rank=3"),
    notes="The frames of a rank's last exception are kept for a post-mortem, and hold their tensors.\n\n",
)
def free(session: Session, arguments: Arguments) -> None:
    procs = session.target(arguments.words, arguments.pairs)
    states = {one.rank: one.state for one in procs.status()}
    idle = [rank for rank, state in states.items() if state == "idle"]
    if idle:
        freed = procs.select(idle).free().get().values()
        texts = group_ranks(zip(idle, map(describe_freed, freed), strict=True))
        print("\n".join(f"{label(ranks)} {text}" for text, ranks in texts.items()))
    if busy := [rank for rank, state in states.items() if state not in ("idle", "dead")]:
        is_, it_holds = ("is", "it holds") if len(busy) == 1 else ("are", "they hold")
        print(f"{name_ranks(busy)} {is_} busy: free what {it_holds} afterwards")


def describe_freed(freed: Freed) -> str:
    """Describe the memory that a rank gave back."""
    parts = []
    if freed.ename:
        held = format_bytes(freed.held_bytes) if freed.held_bytes else "nothing"
        parts.append(f"the frames of {freed.ename} are let go: they held {held}")
    if freed.resident_bytes >= WORTH_BYTES:
        parts.append(f"the process is {format_bytes(freed.resident_bytes)} smaller")
    if freed.device_bytes:
        parts.append(f"{format_bytes(freed.device_bytes)} of device memory given back")
    return "; ".join(parts) or "nothing to let go"


LINES = 20
LINES_BEFORE = 5
"""The number of earlier lines of each rank that are shown first."""
LOOK_S = 0.2
NOBODY = frozenset({-1})
"""The ranks that end an output that is followed: none."""


@on_ranks(
    name="%mesh logs",
    summary="The last lines that each rank has written, those that were too many for the notebook too.",
    options=(
        Option("-n", f"so many lines of each ({LINES}; {LINES_BEFORE} before what is followed)", int, "N"),
        Option("-f", "follow: show what the ranks write from now on, until you interrupt"),
        Option("--for", "follow for so long: 10s, 5m", float, "TIME"),
        Option("--grep", "only lines with this text", str, "TEXT"),
    ),
    examples=(
        "%mesh logs",
        "%mesh logs rank=3 -n 100",
        "%mesh logs gpus=0:2",
        "%mesh logs -f",
        "%mesh logs --for 10s",
        "%mesh logs --grep loss -n 5",
    ),
    notes="""
Following shows what any cell, job or thread of the ranks writes, equal lines of several ranks once. It ends with an
interrupt, after the time that --for gives, and when the cell is full.""",
)
def logs(session: Session, arguments: Arguments) -> None:
    procs = session.target(arguments.words, arguments.pairs)
    lines = arguments.whole("-n")
    text = arguments.text("--grep") or ""
    duration_s = arguments.number("--for")
    if duration_s is not None or arguments.flag("-f"):
        _follow(session, procs, LINES_BEFORE if lines is None else lines, text, duration_s)
        return
    paths = procs.log_paths()
    found = procs.logs(LINES if lines is None else lines, containing=text)
    for rank in procs.ranks:
        print(f"{label([rank])} {paths.get(rank, '')}")
        if rank not in found:
            print("its host does not answer")
        elif found[rank].strip():
            print(found[rank].rstrip("\n"))
        elif text:
            print(f'no line with "{text}" among the last 256 kB')


def _follow(session: Session, procs: ProcMesh, lines: int, wanted: str, duration_s: float | None) -> None:
    """Show new text until the time is over, the person interrupts, or the cell is full."""
    output, follower = open_output(session, procs, ranks=NOBODY), follow_logs(procs, lines)
    until = "interrupt to end" if duration_s is None else f"for {format_duration(duration_s)}"
    print(f"following {name_ranks(procs.ranks)}: {until}", flush=True)
    deadline = math.inf if duration_s is None else time.monotonic() + duration_s
    begun: dict[int, str] = {}
    skipped = dict.fromkeys(procs.ranks, 0)
    ending = ""  # why it is over, where the person does not know
    try:
        while not ending:
            left_s = deadline - time.monotonic()
            news = follower.look()
            for rank, text, left_out in news:
                skipped[rank] += left_out
                if text := _choose(begun, rank, text, wanted) if wanted else text:
                    output.receive(StreamText(rank, "stdout", text, 0))
            if left_s <= 0:
                break
            if output.is_full:
                ending = "the cell is full; go on in another: %mesh logs -f"
            elif not news and len(procs.lost) == len(procs):
                ending = f"{name_ranks(procs.ranks)} ended; start again: %mesh heal"
            else:
                pause(min(LOOK_S, left_s))
    except KeyboardInterrupt:
        pass
    finally:
        output.finish()
    if ranks := [rank for rank, size in skipped.items() if size]:
        total = format_bytes(sum(skipped.values()))
        print(f"left out, as it came too fast: {total} of {name_ranks(ranks)}; all of it is in the logs: %mesh logs")
    if ending:
        print(ending)


def _choose(begun: dict[int, str], rank: int, text: str, wanted: str) -> str:
    """Return the lines with the wanted text. begun: the unfinished line of each rank."""
    *lines, rest = (begun.pop(rank, "") + text).split("\n")
    begun[rank] = rest[-10_000:]
    return "".join(f"{line}\n" for line in lines if wanted in line)
