"""Jobs of engines that hold hosts of ours, or are to, from whichever machine: for lists of what runs and costs.

Each engine that is used here is asked at once, in a thread of its own, and has a few seconds: who does not answer is
named, and keeps nobody waiting. Of schedulers they are those of this user
(`meshbook.launchers.engines.scheduler_jobs`); Ray and Kubernetes know no users of the machine, so they are those of the
cluster, and of the namespace.

    python -m meshbook.launchers.engines.own_jobs ray|k8s     a line of JSON; Ray, or the client, is imported there
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from meshbook.errors import SpawnError
from meshbook.launchers.engines.commands import answer_of
from meshbook.launchers.engines.scheduler_jobs import SCHEDULERS_ASKED, OwnJob

DEADLINE_S = 6.0
"""How long an engine has: Ray and the client of Kubernetes are imported for it."""

_RAY_CURRENT = Path("/tmp/ray/ray_current_cluster")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class JobSearch:
    """Begins when it is made; `results` waits for what has not answered, no longer than the deadline."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._found: dict[str, list[OwnJob] | str] = {}
        self._threads = {}
        for engine, is_here, find in _ENGINES:
            if is_here():
                self._threads[engine] = threading.Thread(
                    target=self._find, args=(engine, find, deadline_s), daemon=True
                )
        for thread in self._threads.values():
            thread.start()

    def _find(self, engine: str, find: Callable[[float], list[OwnJob]], deadline_s: float) -> None:
        try:
            self._found[engine] = find(deadline_s)
        except Exception as error:  # whatever an engine says: others are listed all the same
            self._found[engine] = str(error)

    def results(self) -> tuple[list[OwnJob], list[str]]:
        """The jobs, and a line for each engine that has not told."""
        jobs, silent = list[OwnJob](), list[str]()
        for engine, thread in self._threads.items():
            thread.join(max(0.0, self._deadline - time.monotonic()))
            found = self._found.get(engine, "no answer in time")
            if isinstance(found, str):
                silent.append(f"{engine} has not told its jobs: {found}")
            else:
                jobs += found
        return jobs, silent


# ---- by processes of their own --------------------------------------------------------------------------------------


_TITLES = {"ray": "Ray", "k8s": "Kubernetes"}


def _by_process(engine: str) -> Callable[[float], list[OwnJob]]:
    def find(deadline_s: float) -> list[OwnJob]:
        done = answer_of(_TITLES[engine], sys.executable, "-m", __name__, engine, timeout_s=deadline_s)
        for line in reversed(done.stdout.splitlines()):
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                if isinstance(told, dict):
                    raise SpawnError(str(told.get("failed")))
                return [OwnJob(*each) for each in told]
        raise SpawnError((done.stderr.strip().splitlines() or ["it has said nothing"])[-1])

    return find


def ray_jobs() -> list[OwnJob]:
    """The placement groups of ours in the cluster that RAY_ADDRESS names, or that this machine is a node of."""
    import ray
    from ray._private.state import state
    from ray.util import placement_group_table

    os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", f"{DEADLINE_S:g}")
    ray.init("auto", log_to_driver=False, configure_logging=False, namespace="meshbook")
    began = {str(job["JobID"]): job for job in state.job_table()}
    found = []
    for group in placement_group_table().values():
        if group["name"].startswith("meshbook-") and group["state"] != "REMOVED":
            number = group["placement_group_id"][-8:]  # the last 4 bytes are of the job that has made it
            since = began.get(number, {}).get("StartTime")
            age_s = time.time() - since / 1000 if since else None
            what, hosts = group["state"].lower(), len(group["bundles"])
            found.append(
                OwnJob("Ray", number, what, age_s, hosts, "", f"kill its driver, {_driver(began.get(number))}")
            )
    return found


def _driver(job: Any) -> str:
    return f"process {job['DriverPid']} of {job['DriverIPAddress']}" if job else "which Ray does not name"


def k8s_jobs() -> list[OwnJob]:
    """The Jobs of ours in the namespace of the kubeconfig, or in that of our own pod."""
    from meshbook.launchers.engines.k8s_api import Cluster, words_of

    cluster = Cluster("", "", "")
    try:
        jobs = cluster.jobs(DEADLINE_S)
    except Exception as error:
        raise SpawnError(words_of(error, cluster.server)) from None
    found = []
    for job in jobs:
        status, name = job.get("status") or {}, job["metadata"]["name"]
        if status.get("completionTime") or status.get("failed"):
            continue  # it goes by itself
        made = datetime.fromisoformat(job["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        what = "running" if status.get("ready", status.get("active")) else "pending"
        end = f"kubectl delete job -n {cluster.namespace} {name}"
        found.append(OwnJob("Kubernetes", name, what, time.time() - made.timestamp(), 1, "", end))
    return found


def _has_ray() -> bool:
    return bool(os.environ.get("RAY_ADDRESS") or _RAY_CURRENT.exists()) and importlib.util.find_spec("ray") is not None


def _has_k8s() -> bool:
    config = Path(os.environ.get("KUBECONFIG", "").split(":")[0] or "~/.kube/config").expanduser()
    return (config.exists() or _ACCOUNT.exists()) and importlib.util.find_spec("kubernetes") is not None


_ENGINES: Sequence[tuple[str, Callable[[], bool], Callable[[float], list[OwnJob]]]] = (
    *SCHEDULERS_ASKED,
    (_TITLES["ray"], _has_ray, _by_process("ray")),
    (_TITLES["k8s"], _has_k8s, _by_process("k8s")),
)

if __name__ == "__main__":
    try:
        print(json.dumps({"ray": ray_jobs, "k8s": k8s_jobs}[sys.argv[1]]()), flush=True)
    except Exception as error:
        print(json.dumps({"failed": " ".join(str(error).split())[:300] or type(error).__name__}), flush=True)
    os._exit(0)  # threads of theirs wait for what is over
