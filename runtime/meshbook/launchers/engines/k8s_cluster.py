"""A namespace of a Kubernetes cluster, by the Python client, and the status of its pods in words for people.

The client is imported when it is connected, in the driver alone: that takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshbook.launchers.agent_start import with_words
from meshbook.launchers.engines.k8s_manifests import GROUP_LABEL, HOST_LABEL, owned_by
from meshbook.system.processes import describe_shell_exit

CONNECT_S, ANSWER_S = 5.0, 10.0
"""The times within which the API server has to let us in, and to answer."""
TAIL_LINES = 20

_IN_TIME = {"_request_timeout": (CONNECT_S, ANSWER_S)}
_RAW = {**_IN_TIME, "_preload_content": False}
"""Arguments of calls of the client: it has no deadline of its own, and its models are slow to make."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterError(Exception):
    """The API server cannot be reached by this configuration."""


class Cluster:
    """A namespace of a cluster."""

    def __init__(self, kubeconfig: str, context: str, namespace: str) -> None:
        """Read how it is reached; nothing is sent. Raises: ClusterError."""
        from kubernetes import client

        settings = client.Configuration()
        if not (kubeconfig or context or os.environ.get("KUBECONFIG")) and (_ACCOUNT / "token").exists():
            self.context, default = "", _in_cluster(settings)
        else:
            self.context, default = _by_kubeconfig(settings, kubeconfig, context)
        self.namespace, self.server = namespace or default, settings.host
        settings.retries = False  # who is not there is not asked again
        api = client.ApiClient(settings)
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)

    def create(self, job: dict[str, Any], secret: dict[str, Any]) -> None:
        """Make a Job, and the Secret that ends with it. Raises: the errors of the client."""
        name = job["metadata"]["name"]
        made = self._batch.create_namespaced_job(self.namespace, job, **_IN_TIME)
        self._core.create_namespaced_secret(self.namespace, owned_by(secret, name, made.metadata.uid), **_IN_TIME)

    def delete(self, name: str) -> None:
        """Remove a Job with its pod and its Secret, if it is there. Raises: the errors of the client."""
        from kubernetes.client import ApiException

        try:
            self._batch.delete_namespaced_job(name, self.namespace, propagation_policy="Background", **_IN_TIME)
        except ApiException as error:
            if error.status != 404:
                raise

    def pods(self, group: str) -> tuple[list[Pod], str]:
        """Return the pods of a group, and the version of that list. Raises: the errors of the client."""
        answer = self._core.list_namespaced_pod(self.namespace, label_selector=f"{GROUP_LABEL}={group}", **_RAW)
        found = json.loads(answer.data)
        return list(map(Pod, found["items"])), found["metadata"].get("resourceVersion", "")

    def changes(self, group: str, since: str, seconds: int) -> Iterator[tuple[bool, Pod]]:
        """Give pods of a group as they change, and whether each is there still. Raises: the errors of the client."""
        from kubernetes import watch

        events = watch.Watch().stream(
            self._core.list_namespaced_pod, self.namespace, label_selector=f"{GROUP_LABEL}={group}",
            resource_version=since, timeout_seconds=seconds, _request_timeout=(CONNECT_S, seconds + ANSWER_S),
        )  # fmt: skip
        for event in events:
            yield event["type"] != "DELETED", Pod(event["raw_object"])

    def last_warning(self, name: str) -> str:
        """Return Kubernetes' last complaint about a Job or a pod; empty where it has none, or may not be asked."""
        with contextlib.suppress(Exception):  # it is only more to tell
            about = f"involvedObject.name={name}"
            answer = self._core.list_namespaced_event(self.namespace, field_selector=about, **_RAW)
            events = [each for each in json.loads(answer.data)["items"] if each.get("type") == "Warning"]
            if events:
                last = max(events, key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "")
                return f"{last.get('reason', '')}: {str(last.get('message', '')).rstrip('.')}"
        return ""

    def log_tail(self, pod: str, container: str) -> str:
        """Return the last lines of a container's log; empty where they cannot be read."""
        with contextlib.suppress(Exception):  # it is only more to tell
            wanted = {"container": container, "tail_lines": TAIL_LINES}
            answer = self._core.read_namespaced_pod_log(pod, self.namespace, **wanted, **_RAW)
            return bytes(answer.data).decode(errors="replace")
        return ""

    def words_of(self, error: BaseException) -> str:
        """Return the API server's message, or the reason why it cannot be reached, in one line."""
        if body := getattr(error, "body", None):
            with contextlib.suppress(ValueError, TypeError):
                return str(json.loads(body)["message"]) or str(error)
        if status := getattr(error, "status", None):
            return f"the API server at {self.server} answers {status} ({getattr(error, 'reason', '')})"
        text = " ".join(str(error).split())
        if not type(error).__module__.startswith("urllib3"):
            return text or type(error).__name__
        said = re.search(r"\[Errno -?\d+\] ([^'\")]+)|certificate verify failed: ([^(\"]+)", text)
        why = next(filter(None, said.groups()), "") if said else ""
        late = f"no answer within {CONNECT_S:g} s" if "imed out" in text or "imeout" in text else text
        return f"the API server at {self.server} does not answer: {(why or late).strip()}"


def _in_cluster(settings: Any) -> str:
    """Return the namespace of our own pod. Raises: ClusterError."""
    from kubernetes import config

    try:
        config.load_incluster_config(client_configuration=settings)
        return (_ACCOUNT / "namespace").read_text().strip() or "default"
    except (config.ConfigException, OSError) as error:
        raise ClusterError(f"the notebook's own pod does not say how its cluster is reached: {error}") from None


def _by_kubeconfig(settings: Any, path: str, context: str) -> tuple[str, str]:
    """Return the context, and its namespace. Raises: ClusterError."""
    from kubernetes import config

    where = path or os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        contexts, current = config.list_kube_config_contexts(config_file=path or None)
        known = {each["name"]: each["context"] for each in contexts}
        name = context or current["name"]
        if name not in known:
            raise ClusterError(f'the kubeconfig {where} has no context "{name}"; it has {", ".join(known)}')
        config.load_kube_config(config_file=path or None, context=name, client_configuration=settings)
        return name, known[name].get("namespace") or "default"
    except ClusterError:
        raise
    except config.ConfigException as error:
        missing = "No configuration found" in str(error) or "current-context" in str(error)
        why = f"there is none at {where} that names a cluster, and this is no pod of one" if missing else str(error)
        raise ClusterError(f"no kubeconfig can be used: {why}") from None
    except Exception as error:  # of YAML, or of what is written there
        raise ClusterError(f"the kubeconfig {where} cannot be read: {' '.join(str(error).split())}") from None


_HOPELESS = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
    "CrashLoopBackOff",
}  # fmt: skip
"""Reasons of a waiting container that stay until a person sees to them, though the kubelet tries again."""


class Pod:
    """A pod, as the API server describes it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._metadata: dict[str, Any] = content["metadata"]
        self._spec: dict[str, Any] = content.get("spec") or {}
        self._status: dict[str, Any] = content.get("status") or {}
        self._conditions: list[dict[str, Any]] = self._status.get("conditions") or []
        self.name = str(self._metadata["name"])
        self.host = str((self._metadata.get("labels") or {}).get(HOST_LABEL, ""))
        """The name of its Job."""
        self.node = str(self._spec.get("nodeName") or "")
        self.place = f"pod {self.name}{self.node and f' on node {self.node}'}"

    @property
    def container(self) -> str:
        """The name of the container with the agent, the first one."""
        return str(self._spec["containers"][0]["name"]) if self._spec.get("containers") else ""

    @property
    def runs(self) -> bool:
        """Whether its agent was started."""
        return "running" in self._state or "terminated" in self._state

    def cannot_start(self) -> str:
        """Return why its agent will not be started; empty while it may be."""
        hopeless = (each for each in self._waiting if each.get("reason") in _HOPELESS)
        return next((f"{self.place} cannot start: {_reason_of(each)}" for each in hopeless), "")

    def waits_for(self) -> str:
        """Return the obstacle to the start of its agent."""
        for condition in self._conditions:
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                why = condition.get("message") or condition.get("reason") or "no node yet"
                return f"pod {self.name} waits for a node: {str(why).rstrip('.')}"
        if not self.node:
            return f"pod {self.name} waits for the scheduler"
        return f"{self.place} starts: {next(map(_reason_of, self._waiting), 'not begun')}"

    def why_ended(self, is_there: bool, read_log: Callable[[], str]) -> str:
        """Return how its agent has ended, or must end; empty while it runs.

        is_there: False where the API server has said that the pod is gone. read_log: returns the end of the
        container's log.
        """
        phase, is_deleted = self._status.get("phase"), bool(self._metadata.get("deletionTimestamp"))
        ended = self._state.get("terminated") or {}
        disruption = ("DisruptionTarget", "True")
        disrupted = [each for each in self._conditions if (each.get("type"), each.get("status")) == disruption]
        if disrupted or (self._status.get("reason") and (phase == "Failed" or is_deleted)):
            return f"Kubernetes has ended {self.place}: {_reason_of(disrupted[-1] if disrupted else self._status)}"
        if ended.get("reason") == "OOMKilled":
            resources = self._spec["containers"][0].get("resources") or {}
            limit = (resources.get("limits") or {}).get("memory")
            of = f"; its limit is {limit}" if limit else ""
            return f"{self.place} was out of memory (OOMKilled, exit code {ended.get('exitCode')}{of})"
        if is_deleted:
            return f"{self.place} was deleted"
        if not ended:
            if phase in ("Failed", "Succeeded"):
                return f"{self.place} has ended: {_joined(phase, self._status.get('message'))}"
            return "" if is_there else f"{self.place} was deleted"
        last = with_words("", [line for line in read_log().splitlines() if line.strip()])
        how = _reason_of(ended) if ended.get("reason") not in ("Error", "Completed", None) else ""
        exit = describe_shell_exit(int(ended.get("exitCode", 0)))
        return with_words(f"its agent in {self.place} ended ({exit})", list(filter(None, (how, last))))

    @property
    def _state(self) -> dict[str, Any]:
        """The state of the agent's container."""
        for status in self._status.get("containerStatuses") or []:
            if status.get("name") == self.container:
                return {name: state for name, state in (status.get("state") or {}).items() if state is not None}
        return {}

    @property
    def _waiting(self) -> list[dict[str, Any]]:
        """The reasons why containers wait, those of init containers first."""
        statuses = [*(self._status.get("initContainerStatuses") or []), *(self._status.get("containerStatuses") or [])]
        found = [(each.get("state") or {}).get("waiting") for each in statuses]
        return [each for each in found if each]


def _reason_of(status: dict[str, Any]) -> str:
    return _joined(status.get("reason"), status.get("message"))


def _joined(reason: object, message: object) -> str:
    return ": ".join(str(each).strip().rstrip(".") for each in (reason, message) if each)
