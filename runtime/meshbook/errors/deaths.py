"""The ends of ranks as lines for people: who ended of what, and what helps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshbook.errors.advice import advice, name_cells
from meshbook.formatting import format_ranks, name_ranks


class RankDeath(NamedTuple):
    """The end of one rank."""

    rank: int
    host: str
    cause: str
    log_tail: str = ""


def describe_deaths(deaths: Iterable[RankDeath]) -> list[str]:
    """``ranks 0-3 on a ended: killed by SIGKILL``, and the last lines of the first rank that wrote any."""
    by_cause: dict[str, list[RankDeath]] = {}
    for death in sorted(deaths):
        by_cause.setdefault(death.cause, []).append(death)
    lines: list[str] = []
    for cause, group in by_cause.items():
        ranks = [death.rank for death in group]
        lines.append(f"{name_ranks(ranks)} on {_name_hosts(group)} ended: {cause}")
        spoke = [death for death in group if death.log_tail]
        if spoke:
            lines.append("  its last lines:" if len(ranks) == 1 else f"  the last lines of rank {spoke[0].rank}:")
            lines += [f"    {line}" for line in name_cells(spoke[0].log_tail).splitlines()]
    return lines


def next_steps(lost: Collection[int], survivors: Collection[int] | None = None) -> list[str]:
    """What is left and which commands help.

    survivors: the ranks of the mesh that live; None where that is not known, nor whether it is the current mesh.
    """
    say = advice()
    steps = f"repair: {say.heal}    go on without: {say.shrink}"
    logs = f"  all of {'its log' if len(lost) == 1 else 'their logs'}: {say.logs.format(ranks=format_ranks(lost))}"
    if survivors is None:
        elsewhere = [f"  {say.elsewhere}"] if say.elsewhere else []
        return [f"  the other ranks keep their state    {steps}", logs, *elsewhere]
    if not survivors:
        return [f"  repair: {say.heal}", logs]
    whose = "its" if len(lost) == 1 else "their"
    keep = "keeps its" if len(survivors) == 1 else "keep their"
    return [f"  {name_ranks(survivors)} {keep} state; {whose} calls failed    {steps}", logs]


def _name_hosts(deaths: Sequence[RankDeath]) -> str:
    hosts = list(dict.fromkeys(death.host for death in deaths))
    return " and ".join(hosts) if len(hosts) < 3 else f"{len(hosts)} hosts"
