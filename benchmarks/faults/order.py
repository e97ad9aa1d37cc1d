"""Random programs of prints, plots, errors and commands: what each rank shows comes once, in the order of its code.

The whole road is used up to the front end: ranks, agents, controller, and what a notebook makes of it with each of the
``--group`` modes. All ranks print at once, which is the load. Now and then a rank is killed in the middle: then what it
has shown before is there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from benchmarks.faults.findings import Findings
from meshbook import ProcMesh, this_host
from meshbook.errors import MeshError
from meshbook.mesh import states
from meshbook.mesh.rank_calls import start_cell
from meshbook_extension.cells.output import CellOutput
from meshbook_extension.output.line_merging import grouping_for
from meshbook_extension.output.publisher import Publisher

RANKS = 4
DEADLINE_S = 60.0
DEATHS = 0.03  # of this part of the programs a rank does not see the end
STEPS = 30
ERRORS = 4  # most steps of a program on stderr: many changes between the streams are sorted by stream, on purpose

_TOKEN = re.compile(r"<(\d+\.\w+)>")
_LABEL = re.compile(r"\[([\d,-]+)\]")
_CAPTION = re.compile(r"<summary[^>]*><span[^>]*>\[([\d,-]+)\]")
_BEGIN = "import os, signal, sys, threading, time\nfrom IPython.display import HTML, display\n"
_STEPS = {
    "print": 'print(f"{said}")',
    "begin": 'print(f"{said}", end="")',
    "error": 'print(f"{said}", file=sys.stderr)',
    "html": 'display(HTML(f"{said}"))',
    "plain": 'display({{"text/plain": f"{said}"}}, raw=True)',
    "command": '!echo "{said}"',
    "thread": 't = threading.Thread(target=lambda: (print(f"{said}"), display(HTML(f"{more}")))); t.start(); t.join()',
    "update": 'h = display(HTML(f"{said}"), display_id=True); h.update(HTML(f"new {said}"))',
    "wait": "time.sleep(0.02 * rank)",
    "die": "rank == {who} and (sys.stdout.flush(), os.kill(os.getpid(), signal.SIGKILL))",
}


class Program(NamedTuple):
    """A cell, and what each rank shows in it, in order."""

    code: str
    tokens: dict[int, list[str]]
    dies: int | None


def make(seed: random.Random) -> Program:
    """Write a program."""
    lines = [_BEGIN]
    tokens: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    dies = seed.randrange(RANKS) if seed.random() < DEATHS else None
    kinds = seed.choices(list(_STEPS)[:-1], [8, 2, 2, 4, 2, 0.3, 1, 1, 0.5], k=seed.randint(3, STEPS))
    dead_at = seed.randrange(len(kinds)) if dies is not None else -1
    errors, has_begun = 0, False
    for number, kind in enumerate(kinds):
        errors += kind == "error"
        if (kind == "error" and errors > ERRORS) or (kind in ("error", "thread") and has_begun):
            kind = "print"  # a line stands where it ends
        has_begun = kind == "begin" or (kind == "wait" and has_begun)
        if number == dead_at:
            lines.append(_STEPS["die"].format(who=dies))
        who = seed.choice(["all", "{rank}"])
        said, more = f"<{number}.{who}>", f"<{number}99.{who}>"
        lines.append(_STEPS[kind].format(said=said, more=more))
        for rank, mine in tokens.items():
            if kind != "wait" and not (rank == dies and number >= dead_at):
                mine += [text[1:-1].format(rank=rank) for text in ((said, more) if kind == "thread" else (said,))]
    lines.append('f"<9999.{rank // 2}>"')
    for rank, mine in tokens.items():
        if rank != dies:
            mine.append(f"9999.{rank // 2}")
    return Program("\n".join(lines), tokens, dies)


Piece: TypeAlias = tuple[Sequence[int], str]
"""Ranks, and a token that they have shown."""


class Page:
    """A sink that reads what a person would."""

    replaces = True

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._places: list[list[Piece]] = []
        self._ranks: Sequence[int] = ()
        self._open = ""
        self._ids: dict[str, list[Piece]] = {}
        """The place of each display id, whose pieces its updates replace."""

    def seen(self) -> dict[int, list[str]]:
        """Return the tokens of each rank in the order of the page."""
        pieces = [piece for place in self._places for piece in place]
        return {rank: [token for ranks, token in pieces if rank in ranks] for rank in range(RANKS)}

    def stream(self, name: str, text: str) -> None:
        """Lines behind their labels; the rest of a line that is open has none."""
        for line in text.splitlines(keepends=True):
            if self._open != name:
                self._read_label(line)
            self._places.append([(self._ranks, token) for token in _TOKEN.findall(line)])
            self._open = "" if line.endswith("\n") else name

    def display(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None = None, update: bool = False
    ) -> None:
        text = str(data.get("text/html") or data.get("text/plain"))
        if update and display_id is not None:
            if display_id not in self._ids:
                self.wrong.append(f"an update came before its display: {text}")
                return
            place = self._ids[display_id]
            place[:] = _read_grid(text) or [(place[0][0], token) for token in _TOKEN.findall(text)]
            return
        if "text/html" not in data:
            self._read_label(text)
        place = _read_grid(text) or [(self._ranks, token) for token in _TOKEN.findall(text)]
        self._places.append(place)
        if display_id is not None:
            self._ids[display_id] = place

    def error(self, ename: str, evalue: str, traceback: Sequence[str]) -> None:
        if ename != "WorkerLost":
            self.wrong.append(f"{ename}: {evalue}")

    def bars(self, lines: Sequence[str]) -> None:
        """None are drawn."""

    def _read_label(self, line: str) -> None:
        if found := _LABEL.match(line):
            self._ranks = _ranks_in(found[1])


def _ranks_in(label: str) -> list[int]:
    ends = [part.split("-") for part in label.split(",")]
    return [rank for end in ends for rank in range(int(end[0]), int(end[-1]) + 1)]


def _read_grid(markup: str) -> list[Piece]:
    """Return the pieces of a grid, whose cards have captions; none for another display."""
    _, *cards = _CAPTION.split(markup)
    pairs = zip(cards[::2], cards[1::2], strict=True)
    return [(_ranks_in(label), token) for label, card in pairs for token in _TOKEN.findall(card)]


def run_order(seed: int, count: int) -> Findings:
    """Run so many programs."""
    found = Findings("order", f"{count:,} random programs on {RANKS} ranks, seed {seed}")
    publisher = Publisher()
    with found.running(), this_host().spawn_procs({"gpus": RANKS}, name="order", device="cpu", group=False) as mesh:
        for number in range(count):
            _run(mesh, publisher, random.Random(f"{seed}-{number}"), found, f"program {seed}-{number}")
    publisher.stop()
    return found


def _run(mesh: ProcMesh, publisher: Publisher, seed: random.Random, found: Findings, name: str) -> None:
    program, group, page = make(seed), seed.choice(["equal", "rank", "none"]), Page()
    grouping = grouping_for(group, mesh.ranks)
    come = partial(states.await_printed, mesh)
    output = CellOutput(mesh.ranks, page, grouping, publisher, mesh.log_paths, come, mesh.name)
    run = start_cell(mesh, program.code, cell_number=1, on_output=output.receive)
    try:
        run.future.get(DEADLINE_S)
    except TimeoutError:
        found.hangs.append(f"{name} ({group})")
        run.interrupt()
    except MeshError as error:
        if program.dies is None:
            found.wrong.append(f"{name} ({group}): {error}")
    output.finish()
    found.wrong += [f"{name} ({group}): {text}" for text in page.wrong]
    shown = page.seen()
    for rank, expected in program.tokens.items():
        if (seen := shown[rank]) != expected:
            found.wrong.append(f"{name} ({group}), rank {rank}: {seen}, not {expected}")
        found.count("pieces", len(expected))
    found.count("deaths", program.dies is not None)
    if program.dies is not None:
        mesh.heal(force=True)
