"""Hosts and meshes that did not come up, have ended, are lost, or are another process's."""

from __future__ import annotations

from meshbook.errors.advice import advice
from meshbook.errors.base import MeshError, UsageError
from meshbook.errors.deaths import RankDeath, describe_deaths


class SpawnError(MeshError):
    """Hosts or workers did not come up."""


class HostsEndedError(SpawnError, RuntimeError):
    """Hosts that were shut down: nothing is started on them any more."""


class NotOwnerError(UsageError, RuntimeError):
    """A reference to hosts that others have started, who alone can shut them down."""


class DeviceError(SpawnError):
    """A host has fewer devices than the ranks that were asked for."""

    def __init__(self, wanted: int, found: int, host: str) -> None:
        super().__init__(wanted, found, host)
        self.wanted, self.found, self.host = wanted, found, host

    def __str__(self) -> str:
        fewer = f"Ask for at most {self.found}, or add" if self.found else "Add"
        return (
            f"{self.wanted} ranks were asked for on {self.host}, which has {self.found} CUDA "
            f"device{'' if self.found == 1 else 's'}. {fewer} {advice().cpu}."
        )


class CrashLoopError(SpawnError):
    """A rank ended so often within ``window_s`` that it is not started again unless somebody insists."""

    def __init__(self, rank: int, host: str, cause: str, log_tail: str, times: int, window_s: float) -> None:
        super().__init__(rank, host, cause, log_tail, times, window_s)
        self.rank, self.host, self.cause, self.log_tail = rank, host, cause, log_tail
        self.times, self.window_s = times, window_s

    def __str__(self) -> str:
        often = f"ended {self.times} times within {self.window_s:g} s and is not started again"
        last = describe_deaths([RankDeath(self.rank, self.host, self.cause, self.log_tail)])
        return "\n".join(
            [
                f"rank {self.rank} on {self.host} {often}",
                f"  the last time: {self.cause}",
                *last[1:],
                f"  all of its log: {advice().logs.format(ranks=self.rank)}    "
                f"try all the same: {advice().insist.format(ranks=self.rank, list=[self.rank])}    "
                f"go on without: {advice().shrink}",
            ]
        )


class MeshStoppedError(MeshError):
    """A call on a mesh that was stopped."""

    def __init__(self, mesh: str) -> None:
        super().__init__(mesh)
        self.mesh = mesh

    def __str__(self) -> str:
        return f'mesh "{self.mesh}" was stopped. Start another: {advice().spawn_call}.'


class MeshDetachedError(MeshStoppedError):
    """A call on a mesh that lives on without this process."""

    def __init__(self, mesh: str, session: str) -> None:
        super().__init__(mesh)
        self.args = (mesh, session)
        self.session = session

    def __str__(self) -> str:
        return f'mesh "{self.mesh}" was detached. Attach it again: meshbook.attach("{self.session}").'


class AttachError(MeshError):
    """A session that cannot be attached; the message says why and what to do."""


class SessionInUse(AttachError):
    """A session that another process drives."""

    def __init__(self, session: str, owner_pid: int) -> None:
        super().__init__(session, owner_pid)
        self.session, self.owner_pid = session, owner_pid

    def __str__(self) -> str:
        return (
            f"session {self.session} is driven by process {self.owner_pid}. "
            f"Detach it there ({advice().detach}) or end that process, then attach again."
        )


class HostLost(MeshError):
    """A host agent went silent or ended, and its workers with it."""

    def __init__(self, host: str, cause: str) -> None:
        super().__init__(host, cause)
        self.host, self.cause = host, cause

    def __str__(self) -> str:
        return f"host {self.host} is lost: {self.cause}. Its workers ended. Start them again: {advice().heal_call}."


class DebugError(MeshError):
    """The debugger of a rank could not be started, or is gone."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause

    def __str__(self) -> str:
        return f"rank {self.rank} is not under the debugger: {self.cause}."
