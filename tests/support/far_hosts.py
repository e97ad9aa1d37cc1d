"""Hosts as on other machines: agents of which only their connections tell, and a launcher whose place has gone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from meshbook import LocalLauncher
from meshbook.launchers.base import LaunchedHost
from meshbook.launchers.local import LocalHost
from meshbook.wire.ticket import Ticket

if TYPE_CHECKING:
    from benchmarks.faults.namespace import Namespace


class FarHost:
    """`meshbook.launchers.base.LaunchedHost`, without a word of what becomes of it."""

    pid = started = 0
    job = ""

    def __init__(self, host: LocalHost) -> None:
        self._process = psutil.Process(host.pid)
        host.release()  # it has no pipe from us either

    def failure(self) -> None:
        return None

    def waits_for(self) -> str:
        return ""

    def close(self, timeout_s: float) -> None:
        """Wait only: nobody can end a process on another machine."""
        with contextlib.suppress(psutil.Error):
            self._process.wait(timeout_s)

    def release(self) -> None:
        pass


class IslandsLauncher(LocalLauncher):
    """Each host lives in a namespace of its own."""

    def __init__(self, *islands: Namespace) -> None:
        super().__init__(separate_hosts=True)
        self._islands = islands

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        started: list[LaunchedHost] = []
        for island, ticket in zip(self._islands, tickets, strict=True):
            with island.inside():
                started += super().launch([ticket])
        return [FarHost(host) for host in started if isinstance(host, LocalHost)]


class FarLauncher(LocalLauncher):
    """namespace: in which the last host of each launch lives."""

    def __init__(self, namespace: Namespace | None = None) -> None:
        super().__init__(separate_hosts=True)
        self._namespace = namespace

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        started = super().launch(tickets[:-1])
        with self._namespace.inside() if self._namespace else contextlib.nullcontext():
            started += super().launch(tickets[-1:])
        return [FarHost(host) for host in started if isinstance(host, LocalHost)]


class MovedLauncher(LocalLauncher):
    """Starts hosts until what it starts them with has gone."""

    has_gone = False

    def launch(self, tickets: Sequence[Ticket]) -> list[LaunchedHost]:
        if self.has_gone:
            raise FileNotFoundError(2, "it has gone")
        return super().launch(tickets)

    def for_host(self, index: int) -> MovedLauncher:
        return self
