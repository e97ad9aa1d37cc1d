"""What the driver of Kubernetes (`meshbook.launchers.engines.k8s_driver`) has said: why a host waits, or has ended."""

from __future__ import annotations

from dataclasses import dataclass

from meshbook.launchers.engines.driver_log import ALL, DriverLog
from meshbook.launchers.engines.k8s_manifests import NO_TICKET
from meshbook.launchers.starting.elsewhere import NO_PYTHON, with_hint
from meshbook.system.processes import describe_exit

_HINTS = (
    (NO_PYTHON, "Name the interpreter that has meshbook in the image: --python PATH"),
    ("No module named 'meshbook", "Install meshbook in the image, or name another interpreter there: --python PATH"),
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
    """job: none. node: the pod and the node on which a host's container runs."""

    group: str = ""
    """The label of its pods."""
    namespace: str = ""
    context: str = ""
    """Of the kubeconfig; empty in a cluster."""
    process: str = ""
    """The driver's pid and start time."""

    def waits_for(self, host: str) -> str:
        """What a host waits for; empty once its container runs."""
        return (
            "" if host in self.node else self.waits.get(host) or self.waits.get(ALL) or "Kubernetes is asked for pods"
        )

    def why_ended(self, host: str, status: int | None) -> str | None:
        """Why there is no agent any more, or will be none; None while there may be.

        status: how the driver has ended, None while it runs. Pods that run live on without it.
        """
        if said := self.why(host):
            return with_hint(said, _HINTS)
        if status is None or host in self.node:
            return None
        words = f": {self.last_words}" if status > 0 and self.said else ""
        return f"the driver of Kubernetes has ended ({describe_exit(status)}){words}"
