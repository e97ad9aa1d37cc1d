"""Host agents in the pods of a Kubernetes cluster: a Job for each host, and the Secret with its ticket.

    controller ──stdin: what is wanted──> driver ──API server──> Job ──> pod: sh ──> agent
        │── session folder: a socket ───────'           '──> Secret ──a file──'        │
        '── own address: port <══════════════════════════ network ════════════════════'

The driver (`meshbook.launchers.engines.k8s_driver`) is a process beside us, since the client of Kubernetes takes
seconds to import, and since it is there when we are killed: it removes what still waits. What it says goes to a file
(`meshbook.launchers.engines.k8s_log`). Pods that run need no driver; where they are to be ended another one takes over.
What is asked of Kubernetes, and why so: `meshbook.launchers.engines.k8s_manifests`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from meshbook.errors import SpawnError
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.launchers.engines.client import END_S, Client
from meshbook.launchers.engines.k8s_log import K8sLog
from meshbook.launchers.engines.k8s_manifests import (
    NO_CLIENT,
    HostOptions,
    make_job,
    make_secret,
    read_template,
    with_whole_paths,
)
from meshbook.launchers.local import reap_released
from meshbook.launchers.registry import Asked
from meshbook.launchers.starting.elsewhere import own_ip
from meshbook.launchers.starting.head_start import open_log
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.interfaces import in_endpoint, own_address
from meshbook.system.processes import start_time
from meshbook.wire.ticket import Ticket, elsewhere, encode_ticket

DRIVER = "meshbook.launchers.engines.k8s_driver"
ASK_S = 5.0
"""How long the driver may take to hear what it is asked."""
LOOK_S = 0.02
"""How often its log is looked at by who waits for it."""


class KubernetesLauncher:
    """An agent in each of some pods."""

    name = "k8s"
    shares_environment = False
    place_is_gone = False
    fixed = ""
    named_hosts = ()

    def __init__(
        self, *, python: str | None = None, options: Sequence[str] = (), place: KubernetesHost | None = None
    ) -> None:
        """options: ``--image IMAGE``, ``--namespace NAME`` and others, as of `HostOptions`.

        python: the interpreter in the image, by default ``python3`` there.
        place: a host in whose place it starts another one. Raises: UsageError.
        """
        self.python, self.options, self._place = python or "", with_whole_paths(options), place
        self._wanted = HostOptions().read(self.options)
        self._launched: list[KubernetesHost] = []

    @property
    def transport(self) -> str:
        address = self._wanted.address
        return f"tcp://{in_endpoint(own_ip(address, '--address 10.0.0.5') if address else own_address())}"

    def for_host(self, index: int) -> KubernetesLauncher:
        return self.in_place_of(self._launched[index] if self._launched else None)

    def for_more(self, beside: Sequence[LaunchedHost]) -> KubernetesLauncher:
        return self

    def in_place_of(self, place: KubernetesHost | None) -> KubernetesLauncher:
        return KubernetesLauncher(python=self.python, options=self.options, place=place)

    @property
    def saved(self) -> SavedLauncher:
        saved = SavedLauncher(self.name, python=self.python, options=self.options)
        if self._place is None:
            return saved
        return msgspec.structs.replace(saved, job=self._place.pods.client.log.name, step=self._place.job)

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Ask for pods with an agent in each; they come when Kubernetes has them. Raises: OSError, SpawnError."""
        reap_released()
        pods = self._place.pods if self._place is not None else None
        names = [_job_name(ticket) for ticket in tickets]
        template, group = read_template(self._wanted.template), pods.group if pods is not None else names[0]
        hosts = [
            {
                "id": ticket.host_id,
                "name": name,
                "job": make_job(name, group, self._wanted, self.python, template),
                "secret": make_secret(name, _for_pod(ticket)),
            }
            for ticket, name in zip(tickets, names, strict=True)
        ]
        if pods is None or not all(pods.ask({"start": host}) for host in hosts):
            pods = self._start_driver(tickets[0], hosts, group)
        self._launched = [
            KubernetesHost(pods, ticket.host_id, name, self) for ticket, name in zip(tickets, names, strict=True)
        ]
        return list(self._launched)

    def _start_driver(self, ticket: Ticket, hosts: Sequence[object], group: str) -> PodGroup:
        log = Path(ticket.log_dir) / f"agent-{ticket.host_id}.log"
        return _group(self.start_driver(log, f"{ticket.session}/{ticket.host_id}", hosts, group), group)

    def start_driver(self, log: Path, listens: str, hosts: Sequence[object], group: str) -> KubernetesClient:
        """A driver of some hosts. Raises: OSError, SpawnError."""
        if importlib.util.find_spec("kubernetes") is None:
            raise SpawnError(NO_CLIENT)
        before = self._place.pods.client.said if self._place is not None else K8sLog()
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
            with open_log(log) as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", DRIVER],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        client = KubernetesClient(log, process.pid, start_time(process.pid) or 0, process)
        client.write(json.dumps(wanted).encode() + b"\n")
        return client


class KubernetesClient(Client[K8sLog]):
    """A driver."""

    def _read(self, text: str) -> K8sLog:
        return K8sLog.read(text)

    def end(self, timeout_s: float) -> None:
        """Wait until it ends, as it does with its agents, then tell it to; never by force: it removes its Jobs."""
        self.close_stdin()
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if self.poll() is None:  # the API server is slow
            self.release()


class PodGroup:
    """Pods that a driver has for us. group: their label."""

    def __init__(self, client: KubernetesClient, group: str) -> None:
        self.client, self.group = client, group
        self.jobs: dict[str, str] = {}
        """The Jobs of the hosts that are there, by their ids; with the last one the driver ends."""

    def ask(self, what: dict[str, object]) -> bool:
        """Tell the driver something; whether it has heard it."""
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(ASK_S)
                sock.connect(self.client.said.socket)
                sock.sendall(json.dumps(what).encode() + b"\n")
                return bool(sock.recv(1))
        except OSError:
            return False

    def leave(self, host: KubernetesHost, timeout_s: float) -> None:
        """A host has ended, or is to; without hosts everything ends that was started here, within the time."""
        if self.client.poll() is not None and not self.client.said.why(host.id):
            self._revive(host)
        self.jobs.pop(host.id, None)
        if not self.jobs:
            self.client.end(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while not self.client.said.why(host.id) and self.client.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self.ask({"end": host.id})

    def _revive(self, host: KubernetesHost) -> None:
        """Have another driver in the place of one that was killed."""
        said, log = self.client.said, self.client.log.with_name(f"end-{host.id}.log")
        self.client.close_stdin()
        if said.socket:  # else it has made nothing
            with contextlib.suppress(OSError, SpawnError):  # then Jobs go some time after their agents
                hosts = [{"id": id, "name": job} for id, job in self.jobs.items()]
                self.client = host.launcher.in_place_of(host).start_driver(log, said.socket, hosts, self.group)


class KubernetesHost:
    """An agent in a pod."""

    pid = started = 0  # it may live on without any process here

    def __init__(self, pods: PodGroup, id: str, job: str, launcher: KubernetesLauncher) -> None:
        self.pods, self.id, self.job, self.launcher = pods, id, job, launcher
        pods.jobs[id] = job

    def failure(self) -> str | None:
        status = self.pods.client.poll()  # first: when it has ended, the log is whole
        return self.pods.client.said.why_ended(self.id, status)

    def waits_for(self) -> str:
        return "" if self.failure() else self.pods.client.said.waits_for(self.id)

    def close(self, timeout_s: float) -> None:
        """Leave the others, whose driver ends with the last of them; the agent was told, if it hears."""
        self.pods.leave(self, timeout_s)

    def release(self) -> None:
        self.pods.client.release()


def parse(asked: Asked) -> KubernetesLauncher:
    """See `meshbook.launchers.registry`."""
    gpus = [f"--gpus={asked.count_ranks()}"] if asked.device == "cuda" else []
    return KubernetesLauncher(python=asked.python, options=[*gpus, *asked.options])


def find(hosts: Mapping[str, SavedHost], logs: Path) -> Iterator[tuple[str, LaunchedHost, Launcher]]:
    """See `meshbook.launchers.registry`."""
    for id, saved in hosts.items():
        launcher, log = saved.launcher, logs / saved.launcher.job
        said = KubernetesClient(log, 0, 0).said
        pid, started = map(int, (said.process or "0 0").split())
        pods = _group(KubernetesClient(log, pid, started), said.group)
        asks = KubernetesLauncher(python=launcher.python, options=launcher.options)
        host = KubernetesHost(pods, id, launcher.step, asks)
        yield id, host, asks.in_place_of(host)


_groups: weakref.WeakValueDictionary[Path, PodGroup] = weakref.WeakValueDictionary()


def _group(client: KubernetesClient, group: str) -> PodGroup:
    """That whose driver has this log."""
    found = _groups.get(client.log)
    if found is None:
        found = _groups[client.log] = PodGroup(client, group)
    return found


def _job_name(ticket: Ticket) -> str:
    """Of the host that gets a ticket; its session's own."""
    return f"meshbook-{Path(ticket.session).name}-{ticket.host_id}".lower()


def _for_pod(ticket: Ticket) -> str:
    return encode_ticket(msgspec.structs.replace(elsewhere(ticket), name=ticket.host_id)).decode()
