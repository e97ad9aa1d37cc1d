"""How hosts come to be: a launcher starts host agents, which then dial in. Nothing else knows which launcher it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshbook.sessions.folder import SavedLauncher
from meshbook.wire.ticket import Ticket


class LaunchedHost(Protocol):
    """A host agent that was started, and may not have dialled in yet."""

    pid: int
    """Of the process here whose end is the agent's end; 0 when there is none."""
    started: int
    """Its start time; 0 when there is none."""

    def failure(self) -> str | None:
        """Why it ended, or None while it runs (or while nobody can tell)."""

    @property
    def job(self) -> str:
        """The engine's own number for what it runs in; empty where there is none."""

    def waits_for(self) -> str:
        """What it waits for before there is an agent, as a job in a queue does; empty where it waits for nothing."""

    def close(self, timeout_s: float) -> None:
        """Wait for it to end, and end it by force after ``timeout_s``."""

    def release(self) -> None:
        """Let it live on without us."""


class Launcher(Protocol):
    """Starts host agents somewhere."""

    name: str
    shares_environment: bool
    """Whether working folder, sys.path and environment of the controller make sense on its hosts."""

    @property
    def transport(self) -> str:
        """How agents reach the controller: ``unix``, ``tcp`` by loopback, or ``tcp://ADDRESS``. Raises: SpawnError."""

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Start one agent per ticket; does not wait until they dial in. Raises: OSError, SpawnError."""

    def for_host(self, index: int) -> Launcher:
        """What starts another host in the place of the one that got the ticket of this number."""

    @property
    def place_is_gone(self) -> bool:
        """Whether the place of the host that it was made for has gone, as an allocation does; asks the engine."""

    def for_more(self, beside: Sequence[LaunchedHost]) -> Launcher:
        """What starts hosts in the place of none, with the same options, and on other machines than ``beside``."""

    @property
    def fixed(self) -> str:
        """Why there are no more hosts than it was made for, as in ``its hosts were named``; empty where there are."""

    @property
    def named_hosts(self) -> tuple[str, ...]:
        """The hosts that it was made for, by their names; empty where it is told how many there are to be."""

    @property
    def saved(self) -> SavedLauncher:
        """What the next controller of the session makes the same launcher of (`meshbook.launchers.registry.find`).

        Of a launcher of several hosts that is asked of `for_host` only.
        """
