"""Host agents on the nodes of a Ray cluster: a placement group, and in it an actor on each node that starts an agent.

    controller ──stdin: what is wanted──> driver ──Ray──> actor ──stdin: the ticket──> sh ──> agent
        │── session folder: a socket ───────'                                                  │
        '── own address: port <══════════════════════════ network ═════════════════════════════'

The driver (`meshbook.launchers.engines.ray_driver`) is a process beside us, so that the notebook's own is no driver of
Ray, which would change its signal handlers and its output. Like salloc it outlives the controller, as agents do, until
its last agent has ended; its own end is the end of the placement group, the actors and the agents. What it says goes to
a file (`meshbook.launchers.engines.ray_log`). A lost host comes back by another actor in its bundle, which Ray puts on
another node where the first has gone: the driver is asked by its socket, by the next controller too. Where the driver
has ended, and for hosts that come later, there is another one with a placement group of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.launchers.engines.client import Client
from meshbook.launchers.engines.ray_log import RayLog
from meshbook.launchers.local import reap_released
from meshbook.launchers.registry import Asked
from meshbook.launchers.starting.elsewhere import agent_script
from meshbook.launchers.starting.head_start import open_log
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.interfaces import address_towards, in_endpoint, own_address
from meshbook.system.processes import start_time
from meshbook.wire.ticket import Ticket, elsewhere

DRIVER = "meshbook.launchers.engines.ray_driver"
ASK_S = 5.0
"""How long the driver may take to hear what it is asked."""
LOOK_S = 0.02
"""How often its log is looked at by who waits for it."""


class RayLauncher:
    """An agent on each of some nodes of a Ray cluster."""

    name = "ray"
    shares_environment = False
    fixed = ""
    named_hosts = ()

    def __init__(
        self,
        address: str = "",
        *,
        python: str | None = None,
        options: Sequence[str] = (),
        gpus: int = 0,
        place: RayHost | None = None,
    ) -> None:
        """address: ``HOST:PORT`` of the cluster, or ``ray://HOST:PORT``; by default that of this machine.

        python: the interpreter there; by default the path of our own where there is one, else Ray's.
        options: what each host asks for: ``--num-cpus N``, ``--num-gpus N``, ``--resources JSON``; with
        ``--wait-for-nodes`` more nodes than there are may come.
        gpus: asked for on each host where so many nodes have them, unless ``--num-gpus`` says otherwise.
        place: a host in whose place it starts another one. Raises: UsageError.
        """
        self.address, self.python, self.gpus, self._place = address, python or "", gpus, place
        self.options = tuple(map(str, options))
        self._wanted = _RayOptions().parse_args(list(self.options))
        self._launched: list[RayHost] = []

    @property
    def transport(self) -> str:
        return f"tcp://{in_endpoint(_address_for_nodes(self.address))}"

    def for_host(self, index: int) -> RayLauncher:
        place = self._launched[index] if self._launched else None
        return RayLauncher(self.address, python=self.python, options=self.options, gpus=self.gpus, place=place)

    @property
    def place_is_gone(self) -> bool:
        return self._place is not None and self._place.group.client.poll() is not None

    def for_more(self, beside: Sequence[LaunchedHost]) -> RayLauncher:
        """By another placement group."""
        return RayLauncher(self.address, python=self.python, options=self.options, gpus=self.gpus)

    @property
    def saved(self) -> SavedLauncher:
        spec = (self.address, str(self.gpus), *self.options)
        if self._place is None:
            return SavedLauncher(self.name, python=self.python, options=spec)
        place = self._place
        return SavedLauncher(
            self.name, python=self.python, options=spec, job=place.group.client.log.name, task=place.bundle
        )

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Ask for nodes and an agent on each; both come when Ray has them. Raises: OSError, SpawnError."""
        reap_released()
        agents = [_for_driver(ticket) for ticket in tickets]
        if self._place is not None:
            group, first = self._place.group, self._place.bundle
            group.ask({"start": agents[0], "bundle": first})
        else:
            group, first = self._start_driver(tickets[0], agents), 0
        self._launched = [RayHost(group, ticket.host_id, bundle) for bundle, ticket in enumerate(tickets, first)]
        return list(self._launched)

    def _start_driver(self, ticket: Ticket, agents: list[object]) -> PlacementGroup:
        if importlib.util.find_spec("ray") is None:
            raise SpawnError("Ray is not installed for the notebook's Python; install it: pip install 'meshbook[ray]'")
        log = Path(ticket.log_dir) / f"agent-{ticket.host_id}.log"
        wanted = {
            **vars(self._wanted),
            "address": self.address,
            "gpus_if_any": self.gpus,
            "script": agent_script(self.python),
            "socket": f"{ticket.session}/{ticket.host_id}",
            "agents": agents,
        }
        with open_log(log) as output:
            process = subprocess.Popen(
                [sys.executable, "-m", DRIVER],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        client = RayClient(log, process.pid, start_time(process.pid) or 0, process)
        client.write(json.dumps(wanted).encode() + b"\n")
        return _group(client)


class RayClient(Client[RayLog]):
    """A driver."""

    def _read(self, text: str) -> RayLog:
        return RayLog.read(text)


class PlacementGroup:
    """Bundles of Ray, which a driver has for us."""

    def __init__(self, client: RayClient) -> None:
        self.client = client
        self.hosts: set[str] = set()
        """The ids of those that are there; with the last one it ends."""

    def ask(self, what: dict[str, object]) -> None:
        """Tell the driver something. Raises: SpawnError."""
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(ASK_S)
                sock.connect(self.client.said.socket)
                sock.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            why = self.client.said.why_ended("", self.client.poll()) or "the driver of Ray does not answer"
            raise SpawnError(f"{why}; its placement group has ended") from None

    def leave(self, host_id: str, timeout_s: float) -> None:
        """A host has ended, or is to; without hosts everything ends that was started here, within the time."""
        self.hosts.discard(host_id)
        if not self.hosts:
            self.client.end(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while self.client.said.why_ended(host_id, self.client.poll()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        with contextlib.suppress(SpawnError):  # all of them have ended
            self.ask({"end": host_id})


class RayHost:
    """An agent that is started by the actor of a bundle."""

    def __init__(self, group: PlacementGroup, host_id: str, bundle: int) -> None:
        self.group, self.bundle, self._id = group, bundle, host_id
        self.pid, self.started = group.client.pid, group.client.started
        group.hosts.add(host_id)

    def failure(self) -> str | None:
        status = self.group.client.poll()  # first: when it has ended, the log is whole
        return self.group.client.said.why_ended(self._id, status)

    @property
    def job(self) -> str:
        return self.group.client.said.job

    def waits_for(self) -> str:
        return "" if self.failure() else self.group.client.said.waits_for(self._id)

    def close(self, timeout_s: float) -> None:
        """Leave the placement group, which ends with its last host; the agent was told, if it hears."""
        self.group.leave(self._id, timeout_s)

    def release(self) -> None:
        self.group.client.release()


def parse(asked: Asked) -> RayLauncher:
    """See `meshbook.launchers.registry`."""
    ranks = asked.count_ranks()
    wants = asked.device == "cuda" and "--num-gpus" not in " ".join(asked.options)
    options = [*([f"--num-gpus={ranks}"] if wants else []), *asked.options]
    gpus = ranks if asked.device is None else 0
    return RayLauncher(asked.named, python=asked.python, options=options, gpus=gpus)


def find(hosts: Mapping[str, SavedHost], logs: Path) -> Iterator[tuple[str, LaunchedHost, Launcher]]:
    """See `meshbook.launchers.registry`."""
    for id, saved in hosts.items():
        launcher = saved.launcher
        host = RayHost(_group(RayClient(logs / launcher.job, saved.pid, saved.started)), id, launcher.task)
        address, gpus, *options = launcher.options
        yield id, host, RayLauncher(address, python=launcher.python, options=options, gpus=int(gpus), place=host)


_groups: weakref.WeakValueDictionary[Path, PlacementGroup] = weakref.WeakValueDictionary()


def _group(client: RayClient) -> PlacementGroup:
    """That whose driver has this log."""
    found = _groups.get(client.log)
    if found is None:
        found = _groups[client.log] = PlacementGroup(client)
    return found


def _for_driver(ticket: Ticket) -> object:
    """What the driver needs of a ticket."""
    return msgspec.to_builtins(msgspec.structs.replace(elsewhere(ticket), ends_with_launcher=True))


def _address_for_nodes(address: str) -> str:
    """The address of this machine that leads to the nodes."""
    host = (address or os.environ.get("RAY_ADDRESS", "")).removeprefix("ray://").rpartition(":")[0]
    with contextlib.suppress(OSError):
        towards = address_towards(host.strip("[]")) if host else ""
        if towards and not towards.startswith("127.") and towards != "::1":
            return towards
    return own_address()


class _RayOptions(argparse.ArgumentParser):
    """What a host of Ray may ask for, named as by ``ray start``."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--num-cpus", type=float, default=1.0)
        self.add_argument("--num-gpus", type=float, default=None)
        self.add_argument("--resources", type=_resources, default={})
        self.add_argument("--wait-for-nodes", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"{message}. Options of Ray are --num-cpus N, --num-gpus N, --resources JSON and --wait-for-nodes; hosts=N "
            "says how many nodes."
        )


def _resources(text: str) -> dict[str, float]:
    """Raises: ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
        raise ValueError(text)
    return found
