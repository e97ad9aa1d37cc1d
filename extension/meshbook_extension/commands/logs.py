"""What ranks have written to their logs, and what they write: ``%mesh logs``, ``%mesh logs -f``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshbook.calls.output import StreamText
from meshbook.formatting import format_bytes, name_ranks
from meshbook_extension.cells.output import open_output
from meshbook_extension.commands import on_ranks
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.waiting import pause
from meshbook_extension.output.labels import format_duration, label, parse_duration

if TYPE_CHECKING:
    from meshbook.controller.logs import LogFollower
    from meshbook.mesh.proc_mesh import ProcMesh

LINES = 20
LINES_BEFORE = 5
"""Of each rank, before what is followed."""
LOOK_S = 0.2
NOBODY = frozenset({-1})
"""No rank ends what is followed."""


@on_ranks(
    name="%mesh logs",
    summary="The last lines that each rank has written, those that were too many for the notebook too.",
    options=(
        Option("-n", f"so many lines of each ({LINES}; {LINES_BEFORE} before what is followed)", int, "N"),
        Option("-f", "follow: show what the ranks write from now on, until you interrupt"),
        Option("--for", "follow for so long: 10s, 5m", str, "TIME"),
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
    """A block per rank, or what comes."""
    procs = session.target(arguments.words, arguments.pairs)
    lines = arguments.whole("-n")
    text = arguments.text("--grep") or ""
    bound = arguments.text("--for")
    if bound is not None or arguments.flag("-f"):
        duration_s = None if bound is None else parse_duration(bound, "--for")
        _Following(session, procs, LINES_BEFORE if lines is None else lines, text).show(duration_s)
        return
    _show_last(procs, LINES if lines is None else lines, text)


def _show_last(procs: ProcMesh, lines: int, text: str) -> None:
    paths = procs.log_paths()
    found = procs.logs(lines, containing=text)
    for rank in procs.ranks:
        print(f"{label([rank])} {paths.get(rank, '')}")
        if rank not in found:
            print("its host does not answer")
        elif found[rank].strip():
            print(found[rank].rstrip("\n"))
        elif text:
            print(f'no line with "{text}" among the last 256 kB')


class _Following:
    """What one ``%mesh logs -f`` follows and prints."""

    def __init__(self, session: Session, procs: ProcMesh, lines: int, wanted: str) -> None:
        self._procs, self._wanted = procs, wanted
        self._follower: LogFollower = procs.follow_logs(lines)
        self._begun: dict[int, str] = {}
        """The line of a rank that has not ended, where lines are chosen."""
        self._skipped: dict[int, int] = {}
        self._output = open_output(session, procs, ranks=NOBODY)

    def show(self, duration_s: float | None) -> None:
        """Show what comes until the time is over, the person interrupts, or the cell is full."""
        until = "interrupt to end" if duration_s is None else f"for {format_duration(duration_s)}"
        print(f"following {name_ranks(self._procs.ranks)}: {until}", flush=True)
        deadline = None if duration_s is None else time.monotonic() + duration_s
        try:
            ending = self._look_until(deadline)
        except KeyboardInterrupt:
            ending = ""
        finally:
            self._output.finish()
        for line in (self._describe_skipped(), ending):
            if line:
                print(line)

    def _look_until(self, deadline: float | None) -> str:
        """Returns: why it is over, where the person does not know."""
        while True:
            is_last = deadline is not None and time.monotonic() >= deadline
            news = self._follower.look()
            for rank, text, skipped in news:
                self._skipped[rank] = self._skipped.get(rank, 0) + skipped
                if text := self._choose(rank, text):
                    self._output.receive(StreamText(rank, "stdout", text, 0))
            if is_last:
                return ""
            if self._output.is_full:
                return "the cell is full; go on in another: %mesh logs -f"
            if not news and len(self._procs.lost) == len(self._procs):
                return f"{name_ranks(self._procs.ranks)} ended; start again: %mesh heal"
            pause(LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic())))

    def _choose(self, rank: int, text: str) -> str:
        """The lines that are wanted; all of the text where none are chosen."""
        if not self._wanted:
            return text
        *lines, begun = (self._begun.pop(rank, "") + text).split("\n")
        self._begun[rank] = begun[-10_000:]
        return "".join(f"{line}\n" for line in lines if self._wanted in line)

    def _describe_skipped(self) -> str:
        ranks = [rank for rank, size in self._skipped.items() if size]
        if not ranks:
            return ""
        total = format_bytes(sum(self._skipped.values()))
        return f"left out, as it came too fast: {total} of {name_ranks(ranks)}; all of it is in the logs: %mesh logs"
