"""The protocol of launchers: each starts host agents somewhere, which then dial in.

Nothing beside the launcher, and `meshbook.launchers.registry`, knows which engine starts the hosts.
"""

from __future__ import annotations

import argparse
import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, NoReturn, Protocol, TypeVar

from typing_extensions import Self

from meshbook.errors import UsageError
from meshbook.sessions.folder import SavedLauncher
from meshbook.system.interfaces import in_endpoint, own_address
from meshbook.wire.ticket import Ticket


class LaunchedHost(Protocol):
    """A host agent that was started, and may not have dialled in yet."""

    pid: int
    """The process here that ends with the agent; 0 when there is none."""
    started: int
    """Its start time; 0 when there is none."""

    def failure(self) -> str | None:
        """Return why the agent ended; None while it runs, or while its end cannot be seen from here."""

    @property
    def job(self) -> str:
        """The engine's own number for the job that the agent runs in; empty where there is none."""
        return ""

    def waits_for(self) -> str:
        """Return the obstacle to the agent's start, as a job's place in a queue; empty where there is none."""
        return ""

    def close(self, timeout_s: float) -> None:
        """Wait for the agent to end, and end it by force after ``timeout_s``."""

    def release(self) -> None:
        """Let the agent live on without us."""


class Launcher(Protocol):
    """A way to start host agents."""

    name: str
    shares_environment: bool = False
    """Whether working folder, sys.path and environment of the controller make sense on its hosts."""

    @property
    def transport(self) -> str:
        """The agents' way to the controller: ``unix``, ``tcp`` by loopback, ``tcp://ADDRESS``. Raises: SpawnError."""

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Start one agent per ticket; does not wait until they dial in. Raises: OSError, SpawnError."""

    def for_host(self, index: int) -> Launcher:
        """Return the launcher that starts another host in the place of the one with the ticket of this number."""
        return self

    @property
    def place_is_gone(self) -> bool:
        """Whether the place of the host that it was made for has gone, as an allocation does; asks the engine."""
        return False

    def for_more(self, beside: Sequence[LaunchedHost]) -> Launcher:
        """Return the launcher that adds hosts with the same options, on other machines than those of ``beside``."""
        return self

    @property
    def fixed(self) -> str:
        """The reason why it can start no further hosts, as in ``its hosts were named``; empty where it can."""
        return ""

    @property
    def named_hosts(self) -> tuple[str, ...]:
        """The hosts that it was made for, by their names; empty where it is told how many there are to be."""
        return ()

    @property
    def saved(self) -> SavedLauncher:
        """The record from which the session's next controller makes the same launcher (`meshbook.launchers.registry`).

        A launcher of several hosts is asked for the records of `for_host` only.
        """


class PlacedHost(LaunchedHost, Protocol):
    """A host of an engine that another one can take the place of."""

    def save(self, saved: SavedLauncher) -> SavedLauncher:
        """Return ``saved`` with the details needed to find this host again."""


HostT = TypeVar("HostT", bound=PlacedHost)


class EngineLauncher(Launcher, Generic[HostT]):
    """A launcher that is told how many hosts there are to be, and can start another one in the place of one of them.

    python: the interpreter on the hosts; empty where the engine's default is meant. options: of the engine.
    """

    def __init__(self, python: str | None, options: Sequence[str]) -> None:
        self.python, self.options = python or "", tuple(map(str, options))
        self._place: HostT | None = None
        self._launched: list[HostT] = []

    @property
    def transport(self) -> str:
        return f"tcp://{in_endpoint(own_address())}"

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        self._launched = self._start(tickets)
        return list(self._launched)

    @abstractmethod
    def _start(self, tickets: list[Ticket]) -> list[HostT]:
        """Ask the engine for a host per ticket; they come when it has them. Raises: OSError, SpawnError."""

    def in_place_of(self, place: HostT | None) -> Self:
        """Return the same launcher for another host in the place of one."""
        other = copy.copy(self)
        other._place, other._launched = place, []
        return other

    def for_host(self, index: int) -> Self:
        return self.in_place_of(self._launched[index] if self._launched else None)

    @property
    def named(self) -> tuple[str, ...]:
        """The arguments that are saved in front of the options."""
        return ()

    @property
    def saved(self) -> SavedLauncher:
        saved = SavedLauncher(self.name, python=self.python, options=(*self.named, *self.options))
        return saved if self._place is None else self._place.save(saved)


class EngineOptions(argparse.ArgumentParser):
    """The options of an engine, named as the engine's own tool names them."""

    def __init__(self, engine: str, hosts: str) -> None:
        """hosts: the engine's word for them, as in ``pods``."""
        super().__init__(add_help=False, allow_abbrev=False)
        self._engine = engine
        self._hosts = hosts

    def error(self, message: str) -> NoReturn:
        """Raises: UsageError."""
        options = (f"{each.option_strings[0]} {each.metavar or ''}".rstrip() for each in self._actions)
        raise UsageError(
            f"{message}. Options of {self._engine} are {', '.join(options)}; hosts=N says how many {self._hosts}."
        )
