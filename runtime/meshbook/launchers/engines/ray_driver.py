"""The driver of Ray: has a placement group, and in each of its bundles an actor that starts an agent.

    python -m meshbook.launchers.engines.ray_driver     what is wanted, a line on stdin; what became of it: `driver_log`

It ends when it is told to (SIGTERM), when its controller goes before Ray had the nodes, and when the last agent has
ended and no controller is there: with its end Ray removes what is left of its actors and of the placement group.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

from meshbook.launchers.engines.driver_log import say
from meshbook.launchers.engines.ray_questions import (
    CLIENT,
    CONNECT_S,
    count_free,
    describe_end,
    has_room,
    listed,
    live_nodes,
    name_of,
    require_answer,
    rounded,
    watch_agent,
    words_of,
)

JOIN_S = 60.0
"""How long Ray may take to let us in."""
ANSWER_S = "10"
"""How long Ray looks for a node of the cluster on this machine, unless the environment says otherwise."""
LOOK_S = 1.0
"""How often it looks whether Ray has what it waits for."""
END_S = 3.0
"""How long Ray may take to end what there is: its cluster does so by itself when we are gone."""
LINE_BYTES = 1 << 20
PORT = 6379


def main() -> None:
    """Entry point."""
    wanted = json.loads(sys.stdin.buffer.readline())
    driver = Driver(wanted)
    driver.join()
    driver.serve()
    driver.end()


class Host:
    """A bundle and its actor; another takes its place when it is lost."""

    def __init__(self, agent: dict[str, Any], bundle: int) -> None:
        self.agent, self.bundle, self.actor = agent, bundle, None
        self.id, self.ended = str(agent["host_id"]), False


class Driver:
    """wanted: see `meshbook.launchers.ray`."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted
        self._hosts = {host.id: host for host in map(Host, wanted["agents"], range(len(wanted["agents"])))}
        self._placed = self._over = self._alone = False
        self._group: Any = None
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(wanted["socket"])
        os.chmod(wanted["socket"], 0o600)
        self._listening.listen()

    # ---- its life ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Become a driver of the cluster, or end."""
        address = self._wanted["address"]
        if address and ":" not in address.removeprefix(CLIENT):
            address += f":{PORT}"
        try:
            require_answer(address)
        except OSError as error:
            self._fail(f"there is no Ray cluster at {address}: {error.strerror or error}")
        refused = threading.Timer(JOIN_S, self._fail, [f"Ray at {address} has not let us in within {JOIN_S:g} s"])
        refused.daemon = True
        refused.start()
        os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", ANSWER_S)
        try:
            import ray

            ray.init(address or "auto", log_to_driver=False, configure_logging=False, namespace="meshbook")
            job = str(ray.get_runtime_context().get_job_id())
        except Exception as error:
            self._fail(f"Ray{f' at {address}' if address else ''}: {words_of(error)}")
        refused.cancel()
        say(job=job, socket=self._wanted["socket"])

    def serve(self) -> None:
        """Have the nodes, and serve until there is nothing left to be served."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_term)
        self._start(self._place)
        poll = select.poll()
        for each in (0, self._listening.fileno(), self._woken.fileno()):
            poll.register(each, select.POLLIN)
        while not self._over:
            ready = [fd for fd, _ in poll.poll()]
            if 0 in ready and not os.read(0, 1 << 12):
                poll.unregister(0)
                self._alone = True
            if self._listening.fileno() in ready:
                self._hear()
            if self._woken.fileno() in ready:
                self._woken.recv(1 << 12)
            if self._alone and (not self._placed or all(host.ended for host in self._hosts.values())):
                return

    def end(self) -> None:
        """End the actors, and with them the agents, and the placement group."""
        import ray
        from ray.util import remove_placement_group

        limit = threading.Timer(END_S, os._exit, [0])
        limit.daemon = True
        limit.start()
        self._over = True
        with contextlib.suppress(Exception):  # the cluster may be gone
            for host in self._hosts.values():
                if host.actor is not None:
                    ray.kill(host.actor)
            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()
        os._exit(0)  # threads wait for what is over

    def _on_term(self, *_: object) -> None:
        self._over = True

    def _start(self, target: Any, *arguments: object) -> None:
        """Run something in a thread; the loop looks again when it is done."""

        def run() -> None:
            try:
                target(*arguments)
            except Exception as error:
                if not self._over:
                    self._fail(words_of(error))
            self._wake_up()

        threading.Thread(target=run, daemon=True).start()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is awake
            self._wake.send(b"\0")

    def _fail(self, why: str) -> None:
        say(ended=why)
        os._exit(1)

    # ---- what is asked ----------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # whoever asks that is gone already
            sock, _ = self._listening.accept()
            with sock, sock.makefile("rb") as lines:
                sock.settimeout(CONNECT_S)
                asked = json.loads(lines.readline(LINE_BYTES))
            if "start" in asked:
                host = Host(asked["start"], asked["bundle"])
                self._hosts[host.id] = host
                self._start(self._run_host, host)
            else:
                self._end_host(self._hosts[asked["end"]])

    def _end_host(self, host: Host) -> None:
        import ray

        host.ended = True
        if host.actor is not None:
            ray.kill(host.actor)
        self._wake_up()

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
        self._placed = True
        for host in tuple(self._hosts.values()):
            self._start(self._run_host, host)

    def _bundle(self) -> dict[str, float]:
        """What each host asks for."""
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
            self._fail(
                f"Ray has too few nodes for {count} hosts, each on a node of its own: {has} {listed(bundle)}. "
                "Where more are to come: -- --wait-for-nodes"
            )

    def _missing(self, count: int, bundle: dict[str, float], seconds: float) -> str:
        """What Ray has not yet."""
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
            why = describe_end(status, name, said)
            ray.kill(actor)
        except Exception as error:
            why = words_of(error)
        host.ended = True
        if not self._over:
            say(ended=why, host=host.id)

    def _make_actor(self, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from meshbook.launchers.engines import ray_actor

        ray.cloudpickle.register_pickle_by_value(ray_actor)  # whatever is installed there
        wants = self._group.bundle_specs[bundle]
        others = {name: amount for name, amount in wants.items() if name not in ("CPU", "GPU", "memory")}
        return (
            ray.remote(ray_actor.AgentActor)
            .options(
                num_cpus=wants.get("CPU", 0),
                num_gpus=wants.get("GPU", 0),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            )
            .remote()
        )

    def _await_actor(self, host: Host, answer: Any) -> str:
        """Where it is, as soon as Ray has started it."""
        import ray

        began = time.monotonic()
        while not ray.wait([answer], timeout=LOOK_S)[0]:
            seconds = time.monotonic() - began
            say(waits=f"Ray starts an actor for it; waited {rounded(seconds)}", host=host.id)
        return str(ray.get(answer))


if __name__ == "__main__":
    main()
