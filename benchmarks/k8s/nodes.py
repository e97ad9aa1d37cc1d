"""Nodes of a Kubernetes cluster that are this machine: a kubelet that runs the first container of a pod here.

A container is a namespace of processes, names and mounts, with its ticket as a file where that is to be mounted. There
are no images, of which one is known, and no limits: who is out of memory is said by `Nodes.run_out_of_memory`.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import signal
import subprocess
import threading
import time
from typing import Any

import psutil
from kubernetes import client, watch

IMAGE = "meshbook:test"
CONTAINER = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_SET_UP = """
hostname "$1"; mount -t tmpfs tmpfs /run && mkdir -p "$2" && cat >"$2/ticket" && chmod 400 "$2/ticket" || exit 99
shift 2; exec "$@" </dev/null
"""


class Container:
    """The first container of a pod, on a node."""

    def __init__(self, pod: Any, secret: bytes) -> None:
        self.pod, self.why = pod, ""
        container = pod.spec.containers[0]
        folder = next((mount.mount_path for mount in container.volume_mounts or () if mount.read_only), "/run/none")
        self.output, written = os.pipe()
        self.process = subprocess.Popen(
            [*CONTAINER, "sh", "-c", _SET_UP, "sh", pod.metadata.name, folder, *container.command],
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
        os.close(written)
        os.set_blocking(self.output, False)
        assert self.process.stdin is not None
        self.process.stdin.write(secret)
        self.process.stdin.close()
        self.said = b""

    def first(self) -> psutil.Process:
        """Its process 1."""
        return psutil.Process(self.process.pid).children()[0]

    def log(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 1 << 16):
                self.said += data
        return self.said.decode(errors="replace")

    def agent(self) -> psutil.Process:
        """The host agent in it, not a fork of it."""
        return next(each for each in self.first().children() if "meshbook agent" in " ".join(each.cmdline()))


class Nodes:
    """gpus: of each node, by its name."""

    def __init__(self, api: client.ApiClient, gpus: dict[str, int]) -> None:
        self._core = client.CoreV1Api(api)
        self.containers: dict[str, Container] = {}
        """By the name of their pods, of those that run."""
        self.ended: dict[str, Container] = {}
        self._gpus, self._over, self._told = gpus, False, set[str]()
        self._lock = threading.RLock()
        for name in gpus:
            labels = {"kubernetes.io/hostname": name}
            self._core.create_node({"metadata": {"name": name, "labels": labels}})
            has = {"cpu": "8", "memory": "8Gi", "pods": "20", "nvidia.com/gpu": str(gpus[name])}
            self._core.patch_node_status(name, {"status": {"capacity": has, "allocatable": has}})
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._follow, self._work)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over = True
        for thread in self._threads:
            thread.join(30)
        for container in self.containers.values():
            container.process.kill()
            container.process.wait(30)
        for container in (*self.containers.values(), *self.ended.values()):
            os.close(container.output)

    def of(self, job: str) -> Container:
        """What runs for a Job."""
        return next(each for name, each in self.containers.items() if name.startswith(f"{job}-"))

    def run_out_of_memory(self, job: str) -> None:
        container = self.of(job)
        container.why = "OOMKilled"
        container.first().kill()

    # ---- as a kubelet -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._over:
            with contextlib.suppress(client.ApiException, OSError):
                events = watch.Watch().stream(self._core.list_pod_for_all_namespaces, timeout_seconds=1)
                for event in events:
                    self._see(event["object"], event["type"] != "DELETED")

    def _work(self) -> None:
        while not self._over:
            with self._lock:
                for name, container in tuple(self.containers.items()):
                    if container.process.poll() is not None:
                        self._on_end(name, container)
            time.sleep(0.02)

    def _see(self, pod: Any, is_there: bool) -> None:
        name = pod.metadata.name
        if pod.spec.node_name not in self._gpus:
            return
        with self._lock:
            container = self.containers.get(name)
            if container is not None and (pod.metadata.deletion_timestamp or not is_there):
                self._end(container)
            elif pod.metadata.deletion_timestamp and is_there and name not in self.containers:
                self._remove(pod)
            elif container is None and is_there and name not in self.ended and name not in self._told:
                self._start(pod)

    def _start(self, pod: Any) -> None:
        container = pod.spec.containers[0]
        if container.image != IMAGE:
            message = f'failed to pull and unpack image "{container.image}": not found'
            self._tell(pod, "Pending", {"waiting": {"reason": "ErrImagePull", "message": message}})
            self._told.add(pod.metadata.name)
            return
        name = next((volume.secret.secret_name for volume in pod.spec.volumes or () if volume.secret), "")
        try:
            found = self._core.read_namespaced_secret(name, pod.metadata.namespace).data if name else {}
        except client.ApiException:
            return  # it comes yet, and the pod is seen again
        secret = base64.b64decode((found or {}).get("ticket", ""))
        self.containers[pod.metadata.name] = Container(pod, secret)
        self._tell(pod, "Running", {"running": {"startedAt": _now()}})

    def _end(self, container: Container) -> None:
        """SIGTERM to its first process, and SIGKILL when its time is over."""
        if not container.why and container.process.poll() is None:
            container.why = "Deleted"
            with contextlib.suppress(psutil.Error, IndexError):
                container.first().send_signal(signal.SIGTERM)
            grace = container.pod.spec.termination_grace_period_seconds
            timer = threading.Timer(grace, container.process.kill)
            timer.daemon = True
            timer.start()

    def _on_end(self, name: str, container: Container) -> None:
        self.ended[name] = self.containers.pop(name)
        code = container.process.returncode
        code = 137 if container.why == "OOMKilled" else 128 - code if code < 0 else code
        reason = "OOMKilled" if container.why == "OOMKilled" else "Error" if code else "Completed"
        terminated = {"exitCode": code, "reason": reason, "startedAt": _now(), "finishedAt": _now()}
        self._tell(container.pod, "Failed" if code else "Succeeded", {"terminated": terminated})
        if container.why == "Deleted":
            self._remove(container.pod)

    def _tell(self, pod: Any, phase: str, state: dict[str, Any]) -> None:
        container = pod.spec.containers[0]
        runs = "running" in state
        told = {"name": container.name, "image": container.image, "imageID": "", "ready": runs, "restartCount": 0}
        status = {"phase": phase, "containerStatuses": [{**told, "state": state}]}
        with contextlib.suppress(client.ApiException):  # it has gone
            self._core.patch_namespaced_pod_status(pod.metadata.name, pod.metadata.namespace, {"status": status})

    def _remove(self, pod: Any) -> None:
        with contextlib.suppress(client.ApiException):
            self._core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, grace_period_seconds=0)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat()
