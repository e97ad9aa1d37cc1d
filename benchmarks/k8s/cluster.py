"""Kubernetes on this machine: its own programs where they are on the path, and a stand-in of them.

`benchmarks.k8s.nodes` are its nodes in both. The client of Kubernetes is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kubernetes import client

from benchmarks.k8s import server as api_server
from benchmarks.k8s.nodes import CONTAINER, IMAGE, Nodes
from benchmarks.ssh_hosts import NoDaemonError

CERTIFICATE, SERVER_NAME = "certificates/apiserver.crt", "kubernetes"
"""Of the API server, which makes one for itself; its address is not in that."""

NODES = {"n1": 2, "n2": 2, "n3": 0}
"""Their GPUs."""


@dataclass
class KubernetesHere:
    """kubeconfig: of an administrator, in the namespace ``ml``."""

    server: str
    kubeconfig: Path
    api: client.ApiClient
    nodes: Nodes
    has_logs: bool = True
    """Whether the API server reads what a container has said: it asks the kubelet by another protocol."""
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
    cluster = {"server": server}
    if server.startswith("https"):
        cluster |= {"certificate-authority": str(path.parent / CERTIFICATE), "tls-server-name": SERVER_NAME}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": token, "namespace": "ml"}}],
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": token, "user": {"token": token}}],
    }
    path.write_text(json.dumps(config))
    path.chmod(0o600)


@contextlib.contextmanager
def cluster(kind: str, folder: Path) -> Iterator[KubernetesHere]:
    """kind: ``stand-in``, or ``real`` where its programs are on the path. Raises: NoDaemonError."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        raise NoDaemonError("namespaces of processes and mounts are not allowed, without which there are no containers")
    with stand_in(folder) if kind == "stand-in" else real(folder) as here:
        yield here


@contextlib.contextmanager
def stand_in(folder: Path) -> Iterator[KubernetesHere]:
    """Nodes n1 to n3 of a stand-in."""
    store = api_server.Store()
    server = api_server.start(store)
    try:
        with _nodes(folder, f"http://127.0.0.1:{server.server_port}") as here:
            known = here.nodes
            store.log = lambda pod: (known.containers.get(pod) or known.ended[pod]).log()
            yield here
    finally:
        server.end(store)


@contextlib.contextmanager
def _nodes(folder: Path, server: str, has_logs: bool = True) -> Iterator[KubernetesHere]:
    kubeconfig = folder / "config"
    write_kubeconfig(kubeconfig, server, "admin")
    settings = client.Configuration(host=server)
    settings.api_key["authorization"] = "Bearer admin"
    if server.startswith("https"):
        settings.ssl_ca_cert, settings.tls_server_name = str(folder / CERTIFICATE), SERVER_NAME
    api = client.ApiClient(settings)
    nodes = Nodes(api, NODES)
    try:
        yield KubernetesHere(server, kubeconfig, api, nodes, has_logs)
    finally:
        nodes.close()
        api.rest_client.pool_manager.clear()


PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


@contextlib.contextmanager
def real(folder: Path) -> Iterator[KubernetesHere]:
    """etcd, API server, controllers and scheduler of Kubernetes, with nodes n1 to n3. Raises: NoDaemonError."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise NoDaemonError(f"there is no {', '.join(missing)} on this machine, of which Kubernetes is made")
    url = f"https://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        start = functools.partial(_start, stack, folder)
        etcd, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        urls = [f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peers}"]
        start("etcd", f"--data-dir={folder}/etcd", *urls, f"--initial-advertise-peer-urls={peers}",
              f"--initial-cluster=default={peers}")  # fmt: skip
        key = folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        tokens = folder / "tokens"
        tokens.write_text("admin,admin,1,system:masters\nreader,reader,2\n")
        start(
            "kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={url.rpartition(':')[2]}",
            "--bind-address=127.0.0.1", f"--cert-dir={folder}/certificates", f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC", "--anonymous-auth=false", "--service-cluster-ip-range=10.0.0.0/24",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc", "--feature-gates=TTLAfterFinished=true",
            "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip
        config = folder / "components"
        write_kubeconfig(config, url, "admin")
        _await_answer(url)
        start(
            "kube-controller-manager", f"--kubeconfig={config}", "--feature-gates=TTLAfterFinished=true",
            f"--service-account-private-key-file={key}", "--leader-elect=false", "--port=0", "--secure-port=0",
        )  # fmt: skip
        start("kube-scheduler", f"--kubeconfig={config}", "--leader-elect=false", "--port=0", "--secure-port=0")
        with _nodes(folder, url, has_logs=False) as here:
            core = client.CoreV1Api(here.api)
            for namespace in ("ml", "full"):
                core.create_namespace({"metadata": {"name": namespace}})
            quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
            core.create_namespaced_resource_quota("full", quota)
            role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
            reader = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "reader"}
            binding = {"metadata": {"name": "reader"}, "roleRef": role, "subjects": [reader]}
            client.RbacAuthorizationV1Api(here.api).create_cluster_role_binding(binding)
            yield here


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _start(stack: contextlib.ExitStack, folder: Path, program: str, *options: str) -> None:
    """Run it until the stack ends."""
    output = stack.enter_context((folder / f"{program}.log").open("wb"))
    process = subprocess.Popen([program, *options], stdout=output, stderr=output, cwd=folder)

    def end() -> None:
        process.terminate()
        process.wait(30)

    stack.callback(end)


def _await_answer(url: str) -> None:
    context = ssl._create_unverified_context()
    request = urllib.request.Request(f"{url}/readyz", headers={"Authorization": "Bearer admin"})
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5, context=context):
                return
        except OSError:
            assert time.monotonic() < deadline, "the API server does not begin"
            time.sleep(0.1)
