"""Stacks as text: equal ones once, innermost line last, libraries folded; one screen for any number of ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshbook.errors.advice import advice
from meshbook.formatting import format_some_ranks
from meshbook.source.location import RUNTIME, USER
from meshbook.stacks.frames import NATIVE, Frame, ThreadStack

if TYPE_CHECKING:
    from meshbook.stacks.mesh_stacks import RankStack

FULL = 6
"""Groups of equal stacks that are shown with their frames."""
BRIEF = 18
"""Further ones that get a line."""
FRAMES = 12
"""Frames of one stack that are shown, unless all are asked for."""
PLACE_CHARS, FUNCTION_CHARS, SOURCE_CHARS, RANKS_CHARS = 24, 24, 72, 40
NAME_CHARS = 60


def describe_groups(ranks: Sequence[RankStack], odd: Collection[int], all_frames: bool) -> list[str]:
    """The lines for all ranks; groups with ``odd`` ranks first, then the larger ones."""
    groups: dict[tuple[object, ...], list[RankStack]] = {}
    for one in ranks:
        groups.setdefault(_key(one, all_frames), []).append(one)
    ordered = sorted(groups.values(), key=lambda each: (each[0].rank not in odd, each[0].state == "idle", -len(each)))
    lines: list[str] = []
    for index, group in enumerate(ordered[: FULL + BRIEF]):
        lines.append(_headline(group))
        if index < FULL or all_frames:
            lines += _body(group[0], all_frames)
    rest = [one.rank for group in ordered[FULL + BRIEF :] for one in group]
    if rest:
        some = format_some_ranks(rest, RANKS_CHARS)
        choose = advice().stacks_of.format(rank=rest[0])
        lines.append(f"[{some}] {len(rest)} ranks in other places; choose some: {choose}")
    return lines


def _key(one: RankStack, all_frames: bool) -> tuple[object, ...]:
    """What equal stacks have in common."""
    threads = tuple(
        (thread.name, tuple(_line(frame) for frame in (thread.frames if all_frames else thread.users)))
        for thread in one.threads
    )
    number = one.collectives.waiting[0].number if one.state == "waiting" and one.collectives is not None else 0
    return (one.state, one.doing, number, one.read_by, one.problem, threads)


def _line(frame: Frame) -> tuple[str, int, str]:
    return frame.file, frame.line, frame.function


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
    """Outermost first, as tracebacks go. waits: the headline says what it ends in."""
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
    """Neighbours that are shown, and those that are folded."""
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
