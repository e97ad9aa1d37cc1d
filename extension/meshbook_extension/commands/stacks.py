"""Who hangs, what failed, and what failures hold: stacks, errors, free."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshbook.formatting import format_bytes, format_some_ranks, group_ranks, name_ranks
from meshbook_extension.commands import on_ranks
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import columns, label

if TYPE_CHECKING:
    from meshbook.shell.postmortem_memory import Freed

READ_S, NATIVE_S = 3.0, 20.0
"""What reading stacks from outside may take; native ones need the symbols of all libraries."""

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
    """The verdict, and a block per stack."""
    procs = session.target(arguments.words, arguments.pairs)
    native = arguments.flag(NATIVE.name)
    found = procs.stacks(
        all_threads=arguments.flag(ALL_THREADS.name), native=native, timeout_s=NATIVE_S if native else READ_S
    )
    print(found.text(all_frames=arguments.flag(ALL_FRAMES.name)))


FULL = Option("--full", "with the tracebacks; of ranks that ended, the last lines of their logs")
SHOWN = 10
WORTH_BYTES = 1_000_000
"""Less is not worth a word."""
RANKS_CHARS = 24


@on_ranks(
    name="%mesh errors",
    summary="The last failures of the ranks, newest first, equal ones once; or one of them with its traceback.",
    words="[NUMBER|SLICE]",
    options=(Option("-n", f"so many of them ({SHOWN})", int, "N"), FULL),
    examples=("%mesh errors", "%mesh errors 7", "%mesh errors gpus=0 -n 3 --full"),
)
def errors(session: Session, arguments: Arguments) -> None:
    """A line each, or in full."""
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
        print(error_table(chosen, of_many=len({error.mesh for error in found}) > 1))
        older = len(found) - len(chosen)
        more = f"    {older} older: %mesh errors -n {len(found)}" if older else ""
        print(f"  look: %mesh errors {chosen[0].number}{more}")


def error_table(errors: list[LoggedError], *, of_many: bool = False) -> str:
    """A row each: number, time, ranks, cell, what. of_many: say of which mesh."""
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
    return "\n".join(columns(rows))


def in_full(error: LoggedError) -> str:
    """Its line, then what is kept of the traceback."""
    return f"{error_table([error])}\n{error.traceback}".rstrip()


@on_ranks(
    name="%mesh free",
    summary="Let go of what the last exception of each rank holds, and of device caches; says how much that was.",
    examples=("%mesh free", "%mesh free rank=3"),
    notes="The frames of a rank's last exception are kept for a post-mortem, and hold their tensors.\n\n",
)
def free(session: Session, arguments: Arguments) -> None:
    """A line for ranks with equal words."""
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
    """``1.21 GB that the frames of ValueError held; the process is smaller by 1.2 GB``"""
    parts = []
    if freed.ename:
        held = format_bytes(freed.held_bytes) if freed.held_bytes else "nothing"
        parts.append(f"the frames of {freed.ename} are let go: they held {held}")
    if freed.resident_bytes >= WORTH_BYTES:
        parts.append(f"the process is {format_bytes(freed.resident_bytes)} smaller")
    if freed.device_bytes:
        parts.append(f"{format_bytes(freed.device_bytes)} of device memory given back")
    return "; ".join(parts) or "nothing to let go"
