"""Who hangs, what failed, and what failures hold: stacks, errors, free."""

from __future__ import annotations

from meshbook_extension.commands import command
from meshbook_extension.options import Arguments, Grammar, Option
from meshbook_extension.session import Session
from meshbook_extension.targets import FORMS

READ_S, NATIVE_S = 3.0, 20.0
"""What reading stacks from outside may take; native ones need the symbols of all libraries."""

ALL_FRAMES = Option("--all-frames", "with the frames of libraries and of the runtime, which are folded otherwise")
ALL_THREADS = Option("--all-threads", "not only the main thread of each rank")
NATIVE = Option("--native", "with the frames of native code (C, C++), read by py-spy")


@command(
    Grammar(
        name="%mesh stacks",
        summary="Where each rank is, busy, blocked or stopped; equal stacks once; and who holds the others up.",
        words="[SLICE]",
        count=(0, 1),
        pairs="[AXIS=.. ...]",
        options=(ALL_FRAMES, ALL_THREADS, NATIVE),
        examples=("%mesh stacks", "%mesh stacks rank=3 --all-frames", "%mesh stacks gpus=0:2 --native"),
        notes=FORMS,
    )
)
def stacks(session: Session, arguments: Arguments) -> None:
    """The verdict, and a block per stack."""
    procs = session.target(arguments.words, arguments.pairs)
    native = arguments.flag(NATIVE.name)
    found = procs.stacks(
        all_threads=arguments.flag(ALL_THREADS.name), native=native, timeout_s=NATIVE_S if native else READ_S
    )
    print(found.text(all_frames=arguments.flag(ALL_FRAMES.name)))
