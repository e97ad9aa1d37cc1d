"""What the driver of Ray (`meshbook.launchers.engines.ray_driver`) has said: what hosts wait for, why they ended.

A module of its own because it has Ray's words, as `meshbook.launchers.engines.k8s_log` has those of Kubernetes.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshbook.launchers.engines.driver_log import ALL, DriverLog
from meshbook.launchers.starting.elsewhere import PYTHON_HINTS, with_hint
from meshbook.system.processes import describe_exit

_HINTS = (
    *PYTHON_HINTS,
    ("Version mismatch", "Install the cluster's versions of Ray and Python for the notebook."),
    ("Could not find any running Ray instance", "Start one, or name it, as in ray:HOST:PORT"),
    ("Failed to connect to Ray cluster", "A machine that is no node of it goes by Ray's client port: ray://HOST:10001"),
    ("No module named 'grpc'", "Install what that needs: pip install 'meshbook[ray]'"),
)


@dataclass
class RayLog(DriverLog):
    """job: Ray's number of the driver. node: where Ray has started the agent."""

    def waits_for(self, host: str) -> str:
        """What a host waits for; empty once its agent was started."""
        return "" if host in self.node else self.waits.get(host) or self.waits.get(ALL) or "Ray is asked for nodes"

    def why_ended(self, host: str, status: int | None) -> str | None:
        """Why there is no agent any more; None while there may be. status: how the driver ended, None while it runs."""
        if said := self.why(host):
            return with_hint(said, _HINTS)
        if status is None:
            return None
        words = self.last_words if status > 0 else ""  # else they are of something else
        return with_hint(f"the driver of Ray has ended ({describe_exit(status)}){words and f': {words}'}", _HINTS)
