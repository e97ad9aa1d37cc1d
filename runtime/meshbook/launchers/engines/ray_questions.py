"""What the driver asks of Ray, and what Ray says, in words for people."""

from __future__ import annotations

import socket
import time
from typing import Any

from meshbook.system.processes import describe_shell_exit

CLIENT = "ray://"
CONNECT_S = 5.0
"""How long the cluster's address may take to answer."""
AWAY_S, AGAIN_S = 5.0, 1.0
"""How long an actor that Ray cannot reach, and does not call dead either, is taken to be there, and when it is asked
again."""


def require_answer(address: str) -> None:
    """Raises: OSError if nobody listens there."""
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except ValueError:
            raise OSError(f'"{port}" is no port') from None


def watch_agent(actor: Any) -> tuple[int, str]:
    """How its agent has ended. Raises: what Ray says of the end of the actor."""
    import ray

    away_since = 0.0
    while True:
        asked = time.monotonic()
        try:
            status, said = ray.get(actor.watch.remote())
            return status, said
        except ray.exceptions.ActorUnavailableError:
            now = time.monotonic()
            if not away_since or now - asked > AWAY_S:  # until now it was there
                away_since = now
            if now - away_since > AWAY_S:
                raise
            time.sleep(AGAIN_S)


def describe_end(status: int, node: str, said: str) -> str:
    """How an agent has ended, with what it said last. status: as in `subprocess`."""
    lines = [line.strip() for line in said.splitlines() if line.strip() not in ("", "Killed")]
    words = "; ".join(lines[-3:])
    return f"its agent{node and f' on {node}'} ended ({describe_shell_exit(status)}){words and f': {words}'}"


_DETAILS = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")


def words_of(error: BaseException) -> str:
    """What Ray says, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line.rstrip(".:") for line in lines if line and not line.startswith(_DETAILS)]
    if len(told) > 1 and told[0].startswith("The actor died unexpectedly"):
        told = told[1:3]  # why
    return "; ".join(told) or type(error).__name__


def live_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def name_of(node_id: str) -> str:
    """What its owner calls a node; empty where nobody has named it."""
    for node in live_nodes():
        if node["NodeID"] == node_id and node["NodeName"] != node["NodeManagerAddress"]:
            return str(node["NodeName"])
    return ""


def has_room(resources: dict[str, float], bundle: dict[str, float]) -> bool:
    """Whether a bundle goes into so much."""
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def count_free(bundle: dict[str, float]) -> int | None:
    """How many nodes have that free now; None where Ray does not say."""
    try:
        from ray._private.state import available_resources_per_node

        return sum(has_room(free, bundle) for free in available_resources_per_node().values())
    except Exception:  # it is nobody's promise
        return None


def listed(bundle: dict[str, float]) -> str:
    """A bundle as people read it: ``1 CPU, 2 GPU``."""
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def rounded(seconds: float) -> str:
    """So that a line is told seldom: after 1, 5, 10, 30 s, then every minute."""
    if seconds >= 60:
        return f"{seconds // 60:.0f} min"
    return f"{max(step for step in (0, 1, 5, 10, 30) if step <= seconds)} s"
