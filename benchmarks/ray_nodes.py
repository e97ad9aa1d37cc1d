"""A real Ray cluster of our own on this machine: a head and a raylet for each node, kept by a process of its own.

python -m benchmarks.ray_nodes COUNT     asked by lines of JSON on stdin, answers on stdout; ends with its stdin
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

from benchmarks.ssh_hosts import NoDaemonError, end_with_parent

CPUS = 1
GPUS = 2  # of each node but the first, as far as Ray knows
STORE_BYTES = 80 << 20


class RayNodes:
    """A cluster that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        ready = self._read()
        self.address, self.raylets = str(ready["address"]), set(cast(list[int], ready["raylets"]))
        """Their pids, also of those that were killed."""

    def ask(self, what: str, *arguments: object) -> dict[str, Any]:
        """kill NAME, add NAME, or groups: what is left of placement groups and actors."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read()
        self.raylets.update(answer.get("raylets", ()))
        return answer

    def left(self) -> list[str]:
        """Placement groups that have not been removed."""
        return cast(list[str], self.ask("groups")["left"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                return cast(dict[str, Any], json.loads(line))
        raise NoDaemonError("no Ray cluster could be started here")


@contextlib.contextmanager
def ray_nodes(count: int = 3) -> Iterator[RayNodes]:
    """Nodes r1, r2, ... of one CPU each, and two GPUs but for the first; they are not there. Raises: NoDaemonError."""
    if importlib.util.find_spec("ray") is None:
        raise NoDaemonError("there is no Ray: pip install 'meshbook[ray]'")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ray_nodes", str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
        env={**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield RayNodes(process)
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class _Keeper:
    """The cluster, in the process that has it."""

    def __init__(self, count: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        quick = {
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 3,
            "health_check_timeout_ms": 500,
            "prestart_worker_first_driver": False,
        }
        for tries_left in (1, 0):
            self._cluster, self._nodes = Cluster(), dict[str, Any]()
            try:
                for number in range(1, count + 1):
                    self.add(f"r{number}", **({"_system_config": quick, "num_gpus": 0} if number == 1 else {}))
                break
            except Exception:  # Ray gives a node 30 s, in which a busy machine may not start it
                self._cluster.shutdown()
                if not tries_left:
                    raise
        ray.init(self._cluster.address, log_to_driver=False, configure_logging=False)

    def add(self, name: str, **options: object) -> dict[str, object]:
        default = {"num_cpus": CPUS, "num_gpus": GPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._nodes[name] = self._cluster.add_node(node_name=name, **{**default, **options})
        return self._describe()

    def kill(self, name: str) -> dict[str, object]:
        """As by a loss of power."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)
        return self._describe()

    def groups(self) -> dict[str, object]:
        from ray.util import placement_group_table

        groups = placement_group_table().values()
        return {
            "left": [f"{each['placement_group_id']} {each['state']}" for each in groups if each["state"] != "REMOVED"]
        }

    def hold(self, cpus: float, nodes: int) -> dict[str, object]:
        """Have others use CPUs, on so many nodes."""
        from ray.util import placement_group

        self._held = placement_group([{"CPU": cpus}] * nodes, strategy="STRICT_SPREAD")
        self._held.wait(30)
        return {}

    def give_back(self) -> dict[str, object]:
        from ray.util import remove_placement_group

        remove_placement_group(self._held)
        return {}

    def _describe(self) -> dict[str, object]:
        raylets = [node.all_processes["raylet"][0].process.pid for node in self._nodes.values()]
        return {"address": self._cluster.address, "raylets": raylets}

    def serve(self) -> None:
        import ray

        print(json.dumps(self._describe()), flush=True)
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            print(json.dumps(getattr(self, what)(*arguments)), flush=True)
        ray.shutdown()
        self._cluster.shutdown()


if __name__ == "__main__":
    _Keeper(int(sys.argv[1])).serve()
