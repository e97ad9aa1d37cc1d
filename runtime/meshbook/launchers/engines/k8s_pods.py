"""What the status of a pod says, in words for people: what it waits for, that it cannot start, why it has ended."""

from __future__ import annotations

from typing import Any

from meshbook.system.processes import describe_shell_exit

Pod = dict[str, Any]

_HOPELESS = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
    "CrashLoopBackOff",
}  # fmt: skip
"""Reasons of a container that waits; the kubelet tries again, but what is wrong stays so until somebody sees to it."""

_SAID_LINES, _SAID_CHARS = 3, 400


def name_of(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def place_of(pod: Pod) -> str:
    """The pod, and its node where it has one."""
    node = pod.get("spec", {}).get("nodeName")
    return f"pod {name_of(pod)}{f' on node {node}' if node else ''}"


def runs(pod: Pod) -> bool:
    """Whether its agent was started."""
    return "running" in _state(pod) or "terminated" in _state(pod)


def cannot_start(pod: Pod) -> str:
    """Why its agent will not be started; empty while it may be."""
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            return f"{place_of(pod)} cannot start: {_joined(waiting.get('reason'), waiting.get('message'))}"
    return ""


def waits_for(pod: Pod) -> str:
    """What it waits for before its agent is started."""
    for condition in _conditions(pod):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            why = condition.get("message") or condition.get("reason") or "no node yet"
            return f"pod {name_of(pod)} waits for a node: {str(why).rstrip('.')}"
    if not pod.get("spec", {}).get("nodeName"):
        return f"pod {name_of(pod)} waits for the scheduler"
    waiting = [status.get("state", {}).get("waiting") for status in _statuses(pod)]
    said = next((_joined(each.get("reason"), each.get("message")) for each in waiting if each), "not begun")
    return f"{place_of(pod)} starts: {said}"


def why_ended(pod: Pod, said: str = "") -> str:
    """Why its agent has ended, or must; empty while it runs. said: the end of its log."""
    status = pod.get("status", {})
    terminated = _state(pod).get("terminated")
    disrupted = [each for each in _conditions(pod) if _is_disruption(each)]
    if disrupted:
        why = _joined(disrupted[-1].get("reason"), disrupted[-1].get("message"))
        return f"Kubernetes has ended {place_of(pod)}: {why}"
    if status.get("reason") and (status.get("phase") == "Failed" or pod["metadata"].get("deletionTimestamp")):
        return f"Kubernetes has ended {place_of(pod)}: {_joined(status['reason'], status.get('message'))}"
    if terminated and terminated.get("reason") == "OOMKilled":
        return f"{place_of(pod)} was out of memory (OOMKilled, exit code {terminated.get('exitCode')}{_limit(pod)})"
    if pod["metadata"].get("deletionTimestamp"):
        return f"{place_of(pod)} was deleted"
    if terminated:
        reason = terminated.get("reason") if terminated.get("reason") not in ("Error", "Completed") else ""
        how = _joined(reason, terminated.get("message")) if reason else ""
        words = "; ".join(filter(None, (how, _last(said))))
        return f"its agent in {place_of(pod)} ended ({_exit(terminated)}){words and f': {words}'}"
    if status.get("phase") in ("Failed", "Succeeded"):
        return f"{place_of(pod)} has ended: {_joined(status['phase'], status.get('message'))}"
    return ""


def deleted(place: str) -> str:
    """Of a pod that has gone without a word."""
    return f"{place} was deleted"


def _is_disruption(condition: dict[str, Any]) -> bool:
    return condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"


def _conditions(pod: Pod) -> list[dict[str, Any]]:
    return pod.get("status", {}).get("conditions") or []


def _statuses(pod: Pod) -> list[dict[str, Any]]:
    """Of its containers, those that come first in front."""
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _state(pod: Pod) -> dict[str, Any]:
    """Of the container with the agent, the first one."""
    containers = pod.get("spec", {}).get("containers") or [{}]
    for status in pod.get("status", {}).get("containerStatuses") or []:
        if status.get("name") == containers[0].get("name"):
            return {name: state for name, state in (status.get("state") or {}).items() if state is not None}
    return {}


def _limit(pod: Pod) -> str:
    resources = pod["spec"]["containers"][0].get("resources") or {}
    memory = (resources.get("limits") or {}).get("memory")
    return f"; its limit is {memory}" if memory else ""


def _exit(terminated: dict[str, Any]) -> str:
    code = int(terminated.get("exitCode", 0))
    return describe_shell_exit(code)


def _joined(reason: object, message: object) -> str:
    return ": ".join(str(each).strip().rstrip(".") for each in (reason, message) if each)


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-_SAID_LINES:])[-_SAID_CHARS:].rstrip(".")
