"""The driver of Ray: has a placement group, and in each of its bundles an actor that starts an agent.

    python -m meshbook.launchers.engines.ray_driver     gets the order of `meshbook.launchers.ray` by stdin

It ends when it is told to (SIGTERM), when its controller goes before Ray had the nodes, and when the last agent has
ended and no controller is there: with its end Ray removes its remaining actors and the placement group.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from meshbook.launchers.agent_start import with_words
from meshbook.launchers.engines.driver import CONNECT_S, Driver, fail, say
from meshbook.system.processes import describe_shell_exit

JOIN_S = 60.0
"""The time within which Ray has to let us in."""
ANSWER_S = "10"
"""The seconds for which Ray looks for a node of the cluster on this machine, unless the environment says otherwise."""
LOOK_S = 1.0
"""The time between two looks whether Ray has the nodes or has started an actor."""
END_S = 3.0
"""The time that Ray has to end its actors: its cluster does so by itself when we are gone."""
AWAY_S, AGAIN_S = 5.0, 1.0
"""An actor that Ray cannot reach, and does not call dead either, counts as alive so long, and is asked so often."""
CLIENT, PORT = "ray://", 6379
SAID_LINES = 30

_DETAILS = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")


class AgentActor:
    """The actor on a node of Ray, which gets there by value: its subprocess is the agent. It needs only Python there.

    The agent gets its ticket by stdin, and notices by its stdout that the actor has gone.
    """

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._end: tuple[int, str] | None = None

    def node_id(self) -> str:
        """Return Ray's id of the actor's node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, script: str, ticket: bytes) -> None:
        """Start the agent, by a script for sh; ``python3`` is Ray's own there."""
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        self._agent = subprocess.Popen(
            ["sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PATH": path},
        )
        assert self._agent.stdin is not None
        try:
            self._agent.stdin.write(ticket + b"\n")
            self._agent.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, and `watch` says why

    def watch(self) -> tuple[int, str]:
        """Wait for the agent's end; returns its exit status, as in `subprocess`, and its last lines."""
        if self._end is None:
            assert self._agent is not None and self._agent.stderr is not None
            lines = collections.deque(self._agent.stderr, SAID_LINES)
            self._end = self._agent.wait(), b"".join(lines).decode(errors="replace")
        return self._end


class Host:
    """A bundle and its actor; another takes its place when it is lost."""

    def __init__(self, agent: dict[str, Any], bundle: int) -> None:
        self.agent, self.bundle, self.actor = agent, bundle, None
        self.id, self.ended = str(agent["host_id"]), False


class RayDriver(Driver):
    """wanted: see `meshbook.launchers.ray`."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        super().__init__(wanted["socket"])
        self._wanted = wanted
        self._hosts = {host.id: host for host in map(Host, wanted["agents"], range(len(wanted["agents"])))}
        self._is_placed = False
        self._group: Any = None

    # ---- its life ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Become a driver of the cluster, or end."""
        address = self._wanted["address"]
        if address and ":" not in address.removeprefix(CLIENT):
            address += f":{PORT}"
        host, _, port = address.removeprefix(CLIENT).rpartition(":")
        try:
            if host:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except ValueError:
            fail(f'there is no Ray cluster at {address}: "{port}" is no port')
        except OSError as error:
            fail(f"there is no Ray cluster at {address}: {error.strerror or error}")
        refused = threading.Timer(JOIN_S, fail, [f"Ray at {address} has not let us in within {JOIN_S:g} s"])
        refused.daemon = True
        refused.start()
        os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", ANSWER_S)
        try:
            import ray

            ray.init(address or "auto", log_to_driver=False, configure_logging=False, namespace="meshbook")
            job = str(ray.get_runtime_context().get_job_id())
        except Exception as error:
            fail(f"Ray{f' at {address}' if address else ''}: {words_of(error)}")
        refused.cancel()
        say(job=job, socket=self._wanted["socket"])

    def begin(self) -> None:
        self._start(self._place)

    def is_done(self) -> bool:
        return not self._is_placed or all(host.ended for host in self._hosts.values())

    def on_request(self, request: dict[str, Any]) -> None:
        import ray

        if "start" in request:
            host = Host(request["start"], request["bundle"])
            self._hosts[host.id] = host
            self._start(self._run_host, host)
            return
        host = self._hosts[request["end"]]
        host.ended = True
        if host.actor is not None:
            ray.kill(host.actor)
        self.wake_up()

    def end(self) -> None:
        """End the actors, and with them the agents, and the placement group."""
        import ray
        from ray.util import remove_placement_group

        limit = threading.Timer(END_S, os._exit, [0])
        limit.daemon = True
        limit.start()
        self._is_over = True
        with contextlib.suppress(Exception):  # the cluster may be gone
            for host in self._hosts.values():
                if host.actor is not None:
                    ray.kill(host.actor)
            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()
        os._exit(0)  # threads wait for what is over

    def _start(self, target: Any, *arguments: object) -> None:
        """Run something in a thread; the loop looks again when it is done."""

        def run() -> None:
            try:
                target(*arguments)
            except Exception as error:
                if not self._is_over:
                    fail(words_of(error))
            self.wake_up()

        threading.Thread(target=run, daemon=True).start()

    # ---- hosts ------------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Have a node for each host, then an agent there."""
        from ray.util import placement_group

        count, bundle = len(self._hosts), self._bundle()
        self._check_nodes(count, bundle)
        name = "-".join(["meshbook", *self._wanted["socket"].split("/")[-2:]])  # Ray has no two of one name
        self._group = placement_group([bundle] * count, strategy="STRICT_SPREAD", name=name)
        began = time.monotonic()
        while not self._group.wait(LOOK_S):
            say(waits=self._missing(count, bundle, time.monotonic() - began))
        say(waits="Ray starts its agents")
        self._is_placed = True
        for host in tuple(self._hosts.values()):
            self._start(self._run_host, host)

    def _bundle(self) -> dict[str, float]:
        """Return the resources that each host asks for."""
        wanted, bundle = self._wanted, {}
        gpus = wanted["num_gpus"]
        if gpus is None and (gpus := wanted["gpus_if_any"]):
            having = [node for node in live_nodes() if node["Resources"].get("GPU", 0) >= gpus]
            gpus = gpus if len(having) >= len(self._hosts) else 0
        bundle = {"CPU": wanted["num_cpus"], "GPU": gpus or 0, **wanted["resources"]}
        return {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}

    def _check_nodes(self, count: int, bundle: dict[str, float]) -> None:
        """Fail where Ray can never have them."""
        nodes = live_nodes()
        able = [node for node in nodes if has_room(node["Resources"], bundle)]
        if len(able) < count and not self._wanted["wait_for_nodes"]:
            has = f"{len(able)} of its {len(nodes)} nodes have" if able or len(nodes) > 1 else "its node does not have"
            fail(
                f"Ray has too few nodes for {count} hosts, each on a node of its own: {has} {listed(bundle)}. "
                "Where more are to come: -- --wait-for-nodes"
            )

    def _missing(self, count: int, bundle: dict[str, float], seconds: float) -> str:
        """Describe the nodes that Ray does not have yet."""
        free = count_free(bundle)
        has = "" if free is None else f"; {free} of {len(live_nodes())} nodes have that free"
        each = f"{count} hosts need a node each with" if count > 1 else "a host needs a node with"
        return f"Ray's queue: {each} {listed(bundle)}{has}; waited {rounded(seconds)}"

    def _run_host(self, host: Host) -> None:
        """Start its actor and its agent, and wait for the end of either."""
        import ray

        try:
            host.actor = actor = self._make_actor(host.bundle)
            node = self._await_actor(host, actor.node_id.remote())
            if host.ended:  # nobody wants it any more
                ray.kill(actor)
                return
            name = name_of(node)
            agent = {**host.agent, "name": name}
            ray.get(actor.start.remote(self._wanted["script"], json.dumps(agent).encode()))
            say(node=name or node[:8], host=host.id)
            status, said = watch_agent(actor)
            lines = [line for line in said.splitlines() if line.strip() not in ("", "Killed")]
            why = with_words(f"its agent{name and f' on {name}'} ended ({describe_shell_exit(status)})", lines)
            ray.kill(actor)
        except Exception as error:
            why = words_of(error)
        host.ended = True
        if not self._is_over:
            say(ended=why, host=host.id)

    def _make_actor(self, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wants = self._group.bundle_specs[bundle]
        others = {name: amount for name, amount in wants.items() if name not in ("CPU", "GPU", "memory")}
        return (
            ray.remote(AgentActor)  # of __main__, so that it goes by value, whatever is installed there
            .options(
                num_cpus=wants.get("CPU", 0),
                num_gpus=wants.get("GPU", 0),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            )
            .remote()
        )

    def _await_actor(self, host: Host, answer: Any) -> str:
        """Wait until Ray has started an actor; returns the id of its node."""
        import ray

        began = time.monotonic()
        while not ray.wait([answer], timeout=LOOK_S)[0]:
            seconds = time.monotonic() - began
            say(waits=f"Ray starts an actor for it; waited {rounded(seconds)}", host=host.id)
        return str(ray.get(answer))


def watch_agent(actor: Any) -> tuple[int, str]:
    """Wait for the end of an actor's agent, as `AgentActor.watch`. Raises: the error of Ray where the actor ends."""
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


def words_of(error: BaseException) -> str:
    """Return an error of Ray in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line.rstrip(".:") for line in lines if line and not line.startswith(_DETAILS)]
    if len(told) > 1 and told[0].startswith("The actor died unexpectedly"):
        told = told[1:3]  # why
    return "; ".join(told) or type(error).__name__


def live_nodes() -> list[dict[str, Any]]:
    """Return the living nodes of the cluster, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def name_of(node_id: str) -> str:
    """Return the name that its owner has given a node; empty where there is none."""
    for node in live_nodes():
        if node["NodeID"] == node_id and node["NodeName"] != node["NodeManagerAddress"]:
            return str(node["NodeName"])
    return ""


def has_room(resources: dict[str, float], bundle: dict[str, float]) -> bool:
    """Whether a bundle fits into these resources."""
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def count_free(bundle: dict[str, float]) -> int | None:
    """Count the nodes that have a bundle free now; None where Ray does not say."""
    try:
        from ray._private.state import available_resources_per_node

        return sum(has_room(free, bundle) for free in available_resources_per_node().values())
    except Exception:  # it is nobody's promise
        return None


def listed(bundle: dict[str, float]) -> str:
    """Return a bundle in words: ``1 CPU, 2 GPU``."""
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def rounded(seconds: float) -> str:
    """Round a time so that a new line is written seldom: after 1, 5, 10, 30 s, then every minute."""
    if seconds >= 60:
        return f"{seconds // 60:.0f} min"
    return f"{max(step for step in (0, 1, 5, 10, 30) if step <= seconds)} s"


if __name__ == "__main__":
    driver = RayDriver(json.loads(sys.stdin.buffer.readline()))
    driver.join()
    driver.serve()
    driver.end()
