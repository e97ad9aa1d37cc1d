"""Host agents in the pods of a Kubernetes cluster: a Job for each host, and the Secret with its ticket.

    controller ──stdin: hosts to start──> driver ──API server──> Job ──> pod: sh ──> agent
        │── session folder: a socket ───────'           '──> Secret ──a file──'        │
        '── own address: port <══════════════════════════ network ════════════════════'

The driver (`meshbook.launchers.engines.k8s_driver`) is a process beside us, since the client of Kubernetes takes
seconds to import, and since it is there when we are killed: it removes what still waits. Pods that run need no driver;
where they are to be ended another one takes over. `meshbook.launchers.engines.k8s_manifests` has the manifests, and why
they are so.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshbook.errors import SpawnError
from meshbook.launchers.agent_start import NO_PYTHON, own_ip
from meshbook.launchers.base import EngineLauncher, LaunchedHost, Launcher
from meshbook.launchers.engines.clients import END_S, DrivenHost, DriverClient, DriverLog, wait_for_end
from meshbook.launchers.engines.k8s_manifests import (
    NO_CLIENT,
    NO_TICKET,
    make_job,
    make_secret,
    read_options,
    read_template,
    with_whole_paths,
)
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost
from meshbook.system.interfaces import in_endpoint
from meshbook.wire.ticket import Ticket, elsewhere, encode_ticket

_HINTS = (
    (NO_PYTHON, "Name the interpreter that has meshbook in the image: --python PATH"),
    (
        "No module named 'meshbook",
        "Install meshbook in the image, or name another interpreter there: --python PATH",
    ),
    (
        NO_TICKET,
        "An image that runs as another user than root reads it where a --template sets securityContext.fsGroup.",
    ),
    (
        "is forbidden: User",
        "It needs create and delete of jobs and secrets, list and watch of pods: see docs/clusters.md",
    ),
    ("Unauthorized", "Log in again: kubectl auth whoami tells as whom."),
    ("namespaces ", "Name another: -- --namespace NAME"),
    ("ErrImage", "Name another image: -- --image IMAGE; its registry's secret goes into a --template."),
    ("ImagePullBackOff", "Name another image: -- --image IMAGE; its registry's secret goes into a --template."),
    ("InvalidImageName", "Name another image: -- --image IMAGE"),
    ("kubeconfig", "Name one: -- --kubeconfig FILE, or set KUBECONFIG"),
    ("OOMKilled", "Its limit is that of -- --memory"),
)


@dataclass
class K8sLog(DriverLog):
    """The log of a driver of Kubernetes. job: none. node: the pod and the node on which a host's container runs."""

    group: str = ""
    """The label of its pods."""
    namespace: str = ""
    context: str = ""
    """The context of the kubeconfig; empty in a cluster."""
    process: str = ""
    """The driver's pid and start time."""

    engine = "Kubernetes"
    asked = "Kubernetes is asked for pods"
    outlived = True
    hints = _HINTS


class KubernetesClient(DriverClient[K8sLog]):
    """A driver. group: the label of its pods."""

    log_type = K8sLog
    package = "kubernetes"
    missing = NO_CLIENT
    module = "meshbook.launchers.engines.k8s_driver"
    group = ""

    def end(self, timeout_s: float) -> None:
        """Wait until it ends, as it does with its agents, then tell it to; never by force: it removes its Jobs."""
        self.close_stdin()
        wait_for_end(lambda: self.poll() is not None, timeout_s)
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            wait_for_end(lambda: self.poll() is not None, END_S)
        if self.poll() is None:  # the API server is slow
            self.release()

    def adopt(self, other: KubernetesClient) -> None:
        """Go on with another driver of the same hosts."""
        self.log, self.pid, self.started, self._process = other.log, other.pid, other.started, other._process
        self._read_bytes = -1


class KubernetesHost(DrivenHost[KubernetesClient]):
    """An agent in a pod. job: the name of its Job. launcher: the one that it was started by."""

    def __init__(self, driver: KubernetesClient, id: str, job: str, launcher: KubernetesLauncher) -> None:
        super().__init__(driver, id, job=job)
        self.launcher = launcher
        self.pid = self.started = 0  # it may live on without any process here

    def close(self, timeout_s: float) -> None:
        """Leave the driver, which ends with its last host; where it was killed another one takes its place first."""
        driver = self.client
        if driver.poll() is not None and not driver.said.end_of(self.id):
            said, log = driver.said, driver.log.with_name(f"end-{self.id}.log")
            driver.close_stdin()
            if said.socket:  # else it has made nothing
                with contextlib.suppress(OSError, SpawnError):  # then Jobs go some time after their agents
                    hosts = [{"id": id, "name": job} for id, job in driver.hosts.items()]
                    another = self.launcher.in_place_of(self).start_driver(log, said.socket, hosts, driver.group)
                    driver.adopt(another)
        super().close(timeout_s)


class KubernetesLauncher(EngineLauncher[KubernetesHost]):
    """An agent in each of some pods."""

    name = "k8s"

    def __init__(self, *, python: str | None = None, options: Sequence[str] = ()) -> None:
        """options: ``--image IMAGE``, ``--namespace NAME`` and others, as of `read_options`.

        python: the interpreter in the image, by default ``python3`` there. Raises: UsageError.
        """
        super().__init__(python, with_whole_paths(options))
        self._wanted = read_options(self.options)

    @property
    def transport(self) -> str:
        address = self._wanted.address
        return f"tcp://{in_endpoint(own_ip(address, '--address 10.0.0.5'))}" if address else super().transport

    def _start(self, tickets: list[Ticket]) -> list[KubernetesHost]:
        """Ask for pods with an agent in each; they come when Kubernetes has them. Raises: OSError, SpawnError."""
        driver = self._place.client if self._place is not None else None
        names = [f"meshbook-{Path(ticket.session).name}-{ticket.host_id}".lower() for ticket in tickets]
        template, group = read_template(self._wanted.template), driver.group if driver is not None else names[0]
        hosts = [
            {
                "id": ticket.host_id,
                "name": name,
                "job": make_job(name, group, self._wanted, self.python, template),
                # the host is called by its id rather than by the pod's name
                "secret": make_secret(name, encode_ticket(elsewhere(ticket, name=ticket.host_id)).decode()),
            }
            for ticket, name in zip(tickets, names, strict=True)
        ]
        if driver is None or not all(driver.ask({"start": host}) for host in hosts):
            log, listens = Path(tickets[0].log_dir), f"{tickets[0].session}/{tickets[0].host_id}"
            driver = self.start_driver(log / f"agent-{tickets[0].host_id}.log", listens, hosts, group)
        return [KubernetesHost(driver, ticket.host_id, name, self) for ticket, name in zip(tickets, names, strict=True)]

    def start_driver(self, log: Path, listens: str, hosts: Sequence[object], group: str) -> KubernetesClient:
        """Start a driver of some hosts. Raises: OSError, SpawnError."""
        before = self._place.client.said if self._place is not None else K8sLog()
        wanted = {
            "kubeconfig": self._wanted.kubeconfig,
            "context": self._wanted.context or before.context,
            "namespace": self._wanted.namespace or before.namespace,
            "socket": listens,
            "group": group,
            "hosts": hosts,
        }
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it takes that when it can remove its Jobs
        try:
            client = KubernetesClient.start_driver(log, wanted)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        client.group = group
        return client


def parse(asked: Asked) -> KubernetesLauncher:
    gpus = [f"--gpus={asked.count_ranks()}"] if asked.device == "cuda" else []
    return KubernetesLauncher(python=asked.python, options=[*gpus, *asked.options])


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    driver = KubernetesClient.find(logs / saved.launcher.job, 0, 0)
    if not driver.group:
        driver.group = driver.said.group
        driver.pid, driver.started = map(int, (driver.said.process or "0 0").split())
    asks = KubernetesLauncher(python=saved.launcher.python, options=saved.launcher.options)
    host = KubernetesHost(driver, id, saved.launcher.step, asks)
    return host, asks.in_place_of(host)
