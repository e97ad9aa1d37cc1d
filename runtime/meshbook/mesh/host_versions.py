"""What the hosts of one mesh say of themselves when it starts: versions and clocks that differ, and their addresses."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import TypeVar

from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.queries import ask_rank

ANSWER_S = 2.0
"""How long a rank that has just started may take to say what it runs."""
CLOCK_S = 5.0
"""By so much clocks may differ without a word."""

T = TypeVar("T")


def warn_of_differences(controller: Controller, mesh: MeshState) -> None:
    """Warn if hosts differ in what matters between ranks. Hosts that share the notebook's environment do not."""
    if all(host.shares_environment for host in mesh.hosts):
        return
    began = time.time()
    clocks = dict(_ask(controller, mesh, "clock", float))
    if wrong := describe_clocks(clocks, began, time.time()):
        warnings.warn(f"{wrong}. Times in logs and of files differ by that; certificates may fail", stacklevel=4)
    told = dict(_ask(controller, mesh, "versions", dict[str, str]))
    if difference := describe_difference(told):
        warnings.warn(f"the hosts differ: {difference}. Between them tensors and collectives may fail", stacklevel=4)


def describe_clocks(clocks: Mapping[str, float], began: float, ended: float) -> str:
    """Whose clocks are wrong, and by how much, as in ``the clock of b is 62 s behind ours``; empty if none is.

    clocks: what was told by each host between ``began`` and ``ended``.
    """
    off = {host: min(0.0, told - began) + max(0.0, told - ended) for host, told in clocks.items()}
    parts = [
        f"the clock of {host} is {abs(by):.0f} s {'behind' if by < 0 else 'ahead of'} ours"
        for host, by in off.items()
        if abs(by) > CLOCK_S
    ]
    return "; ".join(parts)


def addresses_of(controller: Controller, mesh: MeshState) -> list[tuple[str, str]]:
    """The address at which each host is known to the others, and its interface, where there are several hosts."""
    told = _ask(controller, mesh, "way", str) if len(mesh.hosts) > 1 else []
    return [(host, way) for host, way in told if way]


def _ask(controller: Controller, mesh: MeshState, question: str, kind: type[T]) -> list[tuple[str, T]]:
    """What the first rank of each host answers, if it does in time, with the host's name; several may have the same."""
    firsts = {host: mesh.placement.index(host) for host in mesh.hosts}
    answers = controller.questions.gather(mesh, list(firsts.values()), ask_rank(question), kind, ANSWER_S)
    return [(host.name, answers[rank]) for host, rank in firsts.items() if rank in answers]


def describe_difference(versions: Mapping[str, Mapping[str, str]]) -> str:
    """What differs between hosts, as in ``torch 2.13.0 on a, b and 2.12.0 on c``; empty if nothing does.

    versions: what each host runs, by the name of the thing.
    """
    parts = []
    for thing in dict.fromkeys(name for told in versions.values() for name in told):
        hosts: dict[str, list[str]] = {}
        for host, told in versions.items():
            hosts.setdefault(told.get(thing, "none"), []).append(host)
        if len(hosts) > 1:
            parts.append(f"{thing} " + " and ".join(f"{version} on {', '.join(on)}" for version, on in hosts.items()))
    return "; ".join(parts)
