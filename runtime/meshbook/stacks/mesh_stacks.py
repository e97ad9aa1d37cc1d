"""The stacks of a mesh as a value and as text: equal ones once, the odd ranks first, and who holds the others up.

In the text the innermost line comes last and libraries are folded, so that any number of ranks fills one screen. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from meshbook.calls.rank_state import State
from meshbook.errors.advice import advice
from meshbook.formatting import Table, format_some_ranks
from meshbook.groups.deadlock import RankProgress, find_stragglers
from meshbook.groups.progress import Collectives
from meshbook.source.location import NATIVE, RUNTIME, USER, Frame, ThreadStack

PATIENCE_S = 0.5
"""A wait that is shorter is no reason to speak of odd ranks."""
FULL = 6
"""Groups of equal stacks that are shown with their frames."""
BRIEF = 18
"""Further ones that get a line."""
FRAMES = 12
"""Frames of one stack that are shown, unless all are asked for."""
PLACE_CHARS, FUNCTION_CHARS, SOURCE_CHARS, RANKS_CHARS = 24, 24, 72, 40
NAME_CHARS = 60


class RankTold(NamedTuple):
    """The answer of one rank."""

    busy_s: float
    """0 when idle."""
    where: str
    """The place in the words of `meshbook.source.location`; ``idle``."""
    paused: str
    """The place where it stopped in pdb; empty when it did not."""
    collectives: Collectives
    threads: tuple[ThreadStack, ...]
    """The main thread first."""


class RankStack(NamedTuple):
    """The stacks of one rank, and its state."""

    rank: int
    state: State
    """``idle``, ``busy``, ``waiting`` (in a collective), ``pdb``, ``stopped``, ``silent`` or ``dead``."""
    doing: str
    """``all_reduce (cell 7, line 5)`` where it waits, ``in time.sleep (train.py:41)``; why it does not answer."""
    busy_s: float
    """The time that its call runs, or for a rank that waits how long it does; 0 where it is not known."""
    threads: tuple[ThreadStack, ...]
    """The main thread first; empty for a rank that is idle, dead, or cannot be read."""
    collectives: Collectives | None = None
    read_by: str = ""
    """The tool that read the stacks from outside: ``signal``, ``py-spy``; empty where the rank told them itself."""
    problem: str = ""
    """The reason why there are none, and a way out."""

    @property
    def main(self) -> ThreadStack | None:
        """Return the stack of the main thread."""
        return next((thread for thread in self.threads if thread.is_main), None)


class MeshStacks:
    """The result of `ProcMesh.stacks`: a sequence of `RankStack`, and a text to print."""

    def __init__(self, ranks: Sequence[RankStack], others: Sequence[RankStack] = ()) -> None:
        """others: ranks of the mesh that were not asked for, but that these may wait for."""
        self.ranks = tuple(ranks)
        verdict = find_stragglers(
            {one.rank: RankProgress(predicate(one), one.collectives) for one in (*ranks, *others)}
        )
        self.verdict = verdict if verdict is not None and verdict.since_s >= PATIENCE_S else None
        """The verdict on who holds the others up; None where no rank has waited for `PATIENCE_S`."""

    def __iter__(self) -> Iterator[RankStack]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> RankStack:
        """Return the stacks of a base rank. Raises: KeyError."""
        for one in self.ranks:
            if one.rank == rank:
                return one
        raise KeyError(rank)

    def text(self, *, all_frames: bool = False) -> str:
        """The verdict, then equal stacks once. all_frames: library and runtime frames too, which are folded else."""
        lines = [] if self.verdict is None else [self.verdict.text, ""]
        odd = self.verdict.odd if self.verdict is not None else ()
        for label, state, *body in _describe_groups(self.ranks, odd, all_frames):
            lines += [f"{label} {state}", *body]
        return "\n".join(lines)

    def table(self, *, all_frames: bool = False) -> Table:
        """Return the same as a table: the ranks, and their state above their frames."""
        odd = self.verdict.odd if self.verdict is not None else ()
        groups = _describe_groups(self.ranks, odd, all_frames)
        rows = [(label, "\n".join([state, *body])) for label, state, *body in groups]
        return Table((), rows, title=self.verdict.text if self.verdict is not None else "")

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def predicate(one: RankStack) -> str:
    """Return the end of a sentence on a rank's doing."""
    if one.state == "idle":
        return "is idle: it runs no cell"
    if one.state == "pdb":
        return f"is stopped in pdb ({one.doing})"
    if one.state in ("silent", "dead"):
        place = f" ({found})" if one.state == "silent" and (found := users_place(one)) else ""
        return f"does not answer: {one.doing}{place}"
    return f"waits in {one.doing}" if one.state == "waiting" else f"is {one.doing}"


def users_place(one: RankStack) -> str:
    """``cell 7, line 5``: the innermost line of the user's own code, where it is known."""
    main = one.main
    return main.users[0].place if main is not None and main.users else ""


# ---- text -----------------------------------------------------------------------------------------------------------


def _describe_groups(ranks: Sequence[RankStack], odd: Collection[int], all_frames: bool) -> list[list[str]]:
    """Return ranks, state and frames of each group; groups with ``odd`` ranks first, then the larger ones."""
    groups: dict[tuple[object, ...], list[RankStack]] = {}
    for one in ranks:
        groups.setdefault(_key(one, all_frames), []).append(one)
    ordered = sorted(groups.values(), key=lambda each: (each[0].rank not in odd, each[0].state == "idle", -len(each)))
    told = []
    for index, group in enumerate(ordered[: FULL + BRIEF]):
        body = _body(group[0], all_frames) if index < FULL or all_frames else []
        told.append([*_headline(group).split(" ", 1), *body])
    rest = [one.rank for group in ordered[FULL + BRIEF :] for one in group]
    if rest:
        some = format_some_ranks(rest, RANKS_CHARS)
        choose = advice().stacks_of.format(rank=rest[0])
        told.append([f"[{some}]", f"{len(rest)} ranks in other places; choose some: {choose}"])
    return told


def _key(one: RankStack, all_frames: bool) -> tuple[object, ...]:
    """Return a key that is equal for equal stacks."""
    threads = tuple(
        (
            thread.name,
            tuple((each.file, each.line, each.function) for each in (thread.frames if all_frames else thread.users)),
        )
        for thread in one.threads
    )
    number = one.collectives.waiting[0].number if one.state == "waiting" and one.collectives is not None else 0
    return (one.state, one.doing, number, one.read_by, one.problem, threads)


def _headline(group: Sequence[RankStack]) -> str:
    """``[0,2-7] waiting in all_reduce (cell 7, line 5) for 12.3 s, operation 41``"""
    first = group[0]
    longest = max(one.busy_s for one in group)
    time = f" for {longest:.1f} s" if longest else ""
    label = f"[{format_some_ranks((one.rank for one in group), RANKS_CHARS)}]"
    if first.state == "waiting" and first.collectives is not None:
        waiting = first.collectives.waiting[0]
        number = f", operation {waiting.number}" if waiting.peer is None else ""
        return f"{label} waiting in {first.doing}{time}{number}"
    if first.state == "busy":
        return f"{label} busy{time}, {first.doing}"
    if first.state == "pdb":
        return f"{label} stopped in pdb, {first.doing}"
    if first.state == "idle":
        return f"{label} idle"
    if first.state == "dead":
        return f"{label} {first.doing}"
    read_by = f"; read from outside ({first.read_by})" if first.read_by else ""
    silent = first.doing if first.state == "stopped" else f"silent: {first.doing}"
    return f"{label} {silent}{read_by}"


def _body(one: RankStack, all_frames: bool) -> list[str]:
    lines = []
    for thread in one.threads:
        if not thread.is_main:
            lines.append(f"  thread {thread.name}")
        lines += _frames(thread, all_frames, one.state in ("waiting", "pdb") and thread.is_main)
    if one.problem:
        lines.append(f"    {one.problem}")
    return lines


def _frames(thread: ThreadStack, all_frames: bool, waits: bool) -> list[str]:
    """Outermost first, as tracebacks go. waits: the headline names the wait that it ends in."""
    rows: list[tuple[str, str, str]] = []
    runs = _runs([frame for frame in reversed(thread.frames) if not _is_interpreter(frame)], all_frames)
    for index, (shown, run) in enumerate(runs):
        last = index == len(runs) - 1
        if shown:
            rows += [(frame.place, frame.function, frame.source) for frame in run]
        elif last and not (waits and rows):
            rows.append(_innermost(run))
        elif rows and not last:  # what stands above the user's first line is how we came there
            rows.append((f"... {len(run)} in {_package(run[0].file)}", "", ""))
    if len(rows) > FRAMES and not all_frames:
        left = len(rows) - FRAMES
        rows = [*rows[:2], (f"... {left} more", "", ""), *rows[left + 2 :]]
    places = min(PLACE_CHARS, max((len(place) for place, _, _ in rows), default=0))
    functions = min(FUNCTION_CHARS, max((len(_cut(function)) for _, function, _ in rows), default=0))
    return [
        f"    {place:{places}}  {_cut(function):{functions}}  {source[:SOURCE_CHARS]}".rstrip()
        for place, function, source in rows
    ]


def _runs(frames: Iterable[Frame], all_frames: bool) -> list[tuple[bool, list[Frame]]]:
    """The neighbours that are shown, and the folded ones."""
    runs: list[tuple[bool, list[Frame]]] = []
    for frame in frames:
        shown = all_frames or frame.kind in (USER, NATIVE)
        if not runs or runs[-1][0] != shown:
            runs.append((shown, []))
        runs[-1][1].append(frame)
    return runs


def _innermost(run: Sequence[Frame]) -> tuple[str, str, str]:
    """Library frames as one line: the innermost, and how many there are above it."""
    inner = next((frame for frame in reversed(run) if frame.kind != RUNTIME), run[-1])
    more = f"and {len(run) - 1} above it in " if len(run) > 1 else "in "
    return (inner.place, inner.function, f"{more}{_package(inner.file)}")


def _is_interpreter(frame: Frame) -> bool:
    """A native frame that says nothing: of Python itself, or without a name."""
    return frame.kind == NATIVE and (frame.function.startswith("0x") or "libpython" in frame.file)


def _cut(function: str) -> str:
    """C++ names may fill pages."""
    name = function.rpartition(".<locals>.")[2]
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 3]}..."


def _package(file: str) -> str:
    """``torch`` for a file of an installed package, else the name of its module."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.partition(folder)[2].split("/")[0].removesuffix(".py")
    return "meshbook" if "/meshbook/" in file else Path(file).stem
