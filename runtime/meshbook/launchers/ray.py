"""Host agents on the nodes of a Ray cluster: a placement group, and in it an actor on each node that starts an agent.

    controller ──stdin: hosts to start──> driver ──Ray──> actor ──stdin: the ticket──> sh ──> agent
        │── session folder: a socket ───────'                                                  │
        '── own address: port <══════════════════════════ network ═════════════════════════════'

The driver (`meshbook.launchers.engines.ray_driver`) is a process beside us, so that the notebook's own is no driver of
Ray, which would change its signal handlers and its output. Like salloc it outlives the controller, as agents do, until
its last agent has ended; its own end is the end of the placement group, the actors and the agents. A lost host comes
back by another actor in its bundle, which Ray puts on another node where the first has gone: the driver is asked by its
socket, by the next controller too. Where the driver has ended, and for hosts that come later, there is another one with
a placement group of its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from meshbook.errors import SpawnError
from meshbook.launchers.agent_start import PYTHON_HINTS, address_reaching, agent_script
from meshbook.launchers.base import EngineLauncher, EngineOptions, LaunchedHost, Launcher
from meshbook.launchers.engines.clients import DrivenHost, DriverClient, DriverLog
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost
from meshbook.system.interfaces import in_endpoint
from meshbook.wire.ticket import Ticket, elsewhere

_HINTS = (
    *PYTHON_HINTS,
    ("Version mismatch", "Install the cluster's versions of Ray and Python for the notebook."),
    ("Could not find any running Ray instance", "Start one, or name it, as in ray:HOST:PORT"),
    (
        "Failed to connect to Ray cluster",
        "A machine that is no node of it goes by Ray's client port: ray://HOST:10001",
    ),
    ("No module named 'grpc'", "Install what that needs: pip install 'meshbook[ray]'"),
)


@dataclass
class RayLog(DriverLog):
    """The log of a driver of Ray. job: Ray's number of the driver. node: the node on which an agent was started."""

    engine = "Ray"
    asked = "Ray is asked for nodes"
    hints = _HINTS


class RayClient(DriverClient[RayLog]):
    """A driver, which has a placement group for us."""

    log_type = RayLog
    package = "ray"
    missing = "Ray is not installed for the notebook's Python; install it: pip install 'meshbook[ray]'"
    module = "meshbook.launchers.engines.ray_driver"


class RayHost(DrivenHost[RayClient]):
    """An agent that is started by the actor of a bundle, whose number is ``task``."""


class RayLauncher(EngineLauncher[RayHost]):
    """An agent on each of some nodes of a Ray cluster."""

    name = "ray"

    def __init__(
        self, address: str = "", *, python: str | None = None, options: Sequence[str] = (), gpus: int = 0
    ) -> None:
        """address: ``HOST:PORT`` of the cluster, or ``ray://HOST:PORT``; by default that of this machine.

        python: the interpreter there; by default the path of our own where there is one, else Ray's.
        options: the resources of each host: ``--num-cpus N``, ``--num-gpus N``, ``--resources JSON``; with
        ``--wait-for-nodes`` more nodes than there are may come.
        gpus: asked for on each host where so many nodes have them, unless ``--num-gpus`` says otherwise.
        Raises: UsageError.
        """
        super().__init__(python, options)
        self.address, self.gpus = address, gpus
        self._wanted = _read_options(self.options)

    @property
    def named(self) -> tuple[str, ...]:
        return (self.address, str(self.gpus))

    @property
    def transport(self) -> str:
        """TCP to the address of this machine that leads to the cluster."""
        host = (self.address or os.environ.get("RAY_ADDRESS", "")).removeprefix("ray://").rpartition(":")[0]
        return f"tcp://{in_endpoint(address_reaching([host.strip('[]')] if host else []))}"

    @property
    def place_is_gone(self) -> bool:
        return self._place is not None and self._place.client.poll() is not None

    def for_more(self, beside: Sequence[LaunchedHost]) -> RayLauncher:
        """Return one that has another placement group."""
        return self.in_place_of(None)

    def _start(self, tickets: list[Ticket]) -> list[RayHost]:
        """Ask for nodes and an agent on each; both come when Ray has them. Raises: OSError, SpawnError."""
        agents = [msgspec.to_builtins(elsewhere(ticket, ends_with_launcher=True)) for ticket in tickets]
        if self._place is not None:
            driver, first = self._place.client, self._place.task
            if not driver.ask({"start": agents[0], "bundle": first}):
                why = driver.said.why_ended("", driver.poll()) or "the driver of Ray does not answer"
                raise SpawnError(f"{why}; its placement group has ended")
        else:
            driver, first = self._start_driver(tickets[0], agents), 0
        return [RayHost(driver, ticket.host_id, task=bundle) for bundle, ticket in enumerate(tickets, first)]

    def _start_driver(self, ticket: Ticket, agents: list[object]) -> RayClient:
        wanted = {
            **vars(self._wanted),
            "address": self.address,
            "gpus_if_any": self.gpus,
            "script": agent_script(self.python),
            "socket": f"{ticket.session}/{ticket.host_id}",
            "agents": agents,
        }
        return RayClient.start_driver(Path(ticket.log_dir) / f"agent-{ticket.host_id}.log", wanted)


def parse(asked: Asked) -> RayLauncher:
    ranks = asked.count_ranks()
    wants = asked.device == "cuda" and "--num-gpus" not in " ".join(asked.options)
    options = [*([f"--num-gpus={ranks}"] if wants else []), *asked.options]
    gpus = ranks if asked.device is None else 0
    return RayLauncher(asked.named, python=asked.python, options=options, gpus=gpus)


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    launcher = saved.launcher
    host = RayHost(RayClient.find(logs / launcher.job, saved.pid, saved.started), id, task=launcher.task)
    address, gpus, *options = launcher.options
    return host, RayLauncher(address, python=launcher.python, options=options, gpus=int(gpus)).in_place_of(host)


def _read_options(options: Sequence[str]) -> argparse.Namespace:
    """Return the resources that a host may ask for, named as by ``ray start``. Raises: UsageError."""
    known = EngineOptions("Ray", "nodes")
    known.add_argument("--num-cpus", type=float, default=1.0, metavar="N")
    known.add_argument("--num-gpus", type=float, default=None, metavar="N")
    known.add_argument("--resources", type=_resources, default={}, metavar="JSON")
    known.add_argument("--wait-for-nodes", action="store_true")
    return known.parse_args(list(options))


def _resources(text: str) -> dict[str, float]:
    """Raises: ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
        raise ValueError(text)
    return found
