"""Kubernetes on this machine: a stand-in of its API server and controllers, with nodes (`benchmarks.k8s.nodes`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kubernetes import client

from benchmarks.k8s import server as api_server
from benchmarks.k8s.nodes import CONTAINER, IMAGE, Nodes
from benchmarks.ssh_hosts import NoDaemonError

NODES = {"n1": 2, "n2": 2, "n3": 0}
"""Their GPUs."""


@dataclass
class KubernetesHere:
    """kubeconfig: of an administrator, in the namespace ``ml``."""

    server: str
    kubeconfig: Path
    api: client.ApiClient
    nodes: Nodes
    python = sys.executable

    def options(self, *more: str) -> Sequence[str]:
        return ["--kubeconfig", str(self.kubeconfig), "--image", IMAGE, *more]

    def as_user(self, token: str, server: str = "") -> str:
        """A kubeconfig of another user, or of another server."""
        path = self.kubeconfig.with_name(f"config-{token}{'-other' * bool(server)}")
        write_kubeconfig(path, server or self.server, token)
        return str(path)

    def left(self) -> list[str]:
        """Jobs, Secrets and pods of ours that are there."""
        batch, core = client.BatchV1Api(self.api), client.CoreV1Api(self.api)
        lists = (
            batch.list_job_for_all_namespaces,
            core.list_secret_for_all_namespaces,
            core.list_pod_for_all_namespaces,
        )
        found = [
            each.metadata for make in lists for each in make(label_selector="app.kubernetes.io/name=meshbook").items
        ]
        return [f"{each.namespace}/{each.name}" for each in found]

    def delete_pod(self, job: str) -> None:
        pod = self.nodes.of(job).pod.metadata
        client.CoreV1Api(self.api).delete_namespaced_pod(pod.name, pod.namespace)


def write_kubeconfig(path: Path, server: str, token: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": token, "namespace": "ml"}}],
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": token, "user": {"token": token}}],
    }
    path.write_text(json.dumps(config))
    path.chmod(0o600)


@contextlib.contextmanager
def stand_in(folder: Path) -> Iterator[KubernetesHere]:
    """Nodes n1 to n3 of a stand-in. Raises: NoDaemonError."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        raise NoDaemonError("namespaces of processes and mounts are not allowed, without which there are no containers")
    store = api_server.Store()
    server = api_server.start(store)
    url, kubeconfig = f"http://127.0.0.1:{server.server_port}", folder / "config"
    write_kubeconfig(kubeconfig, url, "admin")
    settings = client.Configuration(host=url)
    settings.api_key["authorization"] = "Bearer admin"
    api = client.ApiClient(settings)
    nodes = Nodes(api, NODES)
    store.log = lambda pod: (nodes.containers.get(pod) or nodes.ended[pod]).log()
    try:
        yield KubernetesHere(url, kubeconfig, api, nodes)
    finally:
        nodes.close()
        api.rest_client.pool_manager.clear()
        server.end(store)
