"""Hosts of one mesh that run different versions: told before something else fails of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.queries import ask_rank

ANSWER_S = 2.0
"""How long a rank that has just started may take to say what it runs."""


def warn_of_versions(controller: Controller, mesh: MeshState) -> None:
    """Warn if hosts differ in what matters between ranks. Hosts that share the notebook's environment do not."""
    firsts = {host: mesh.placement.index(host) for host in mesh.hosts}
    if len(firsts) < 2 or all(host.shares_environment for host in firsts):
        return
    asked = ask_rank("versions")
    answers = controller.questions.gather(mesh, list(firsts.values()), asked, dict[str, str], ANSWER_S)
    told = {host.name: answers[rank] for host, rank in firsts.items() if rank in answers}
    if difference := describe_difference(told):
        warnings.warn(f"the hosts differ: {difference}. Between them tensors and collectives may fail", stacklevel=4)


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
