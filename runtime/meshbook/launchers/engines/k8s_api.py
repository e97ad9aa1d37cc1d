"""What is asked of a Kubernetes API server, by its Python client, and what it says, in words for people.

The client is imported when it is connected: that takes seconds, and is the driver's own affair
(`meshbook.launchers.engines.k8s_driver`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshbook.launchers.engines.k8s_manifests import GROUP_LABEL, owned_by
from meshbook.launchers.engines.k8s_pods import Pod

CONNECT_S, ANSWER_S = 5.0, 10.0
"""How long the API server may take to let us in, and to answer."""
TAIL_LINES = 20

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterError(Exception):
    """What is wrong with the way to the API server."""


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
        """A Job, and the Secret that ends with it. Raises: what the client raises."""
        name = job["metadata"]["name"]
        made = self._batch.create_namespaced_job(self.namespace, job, _request_timeout=(CONNECT_S, ANSWER_S))
        owned = owned_by(secret, name, made.metadata.uid)
        self._core.create_namespaced_secret(self.namespace, owned, _request_timeout=(CONNECT_S, ANSWER_S))

    def delete(self, name: str) -> None:
        """A Job with its pod and its Secret, if it is there. Raises: what the client raises."""
        from kubernetes.client import ApiException

        try:
            self._batch.delete_namespaced_job(
                name, self.namespace, propagation_policy="Background", _request_timeout=(CONNECT_S, ANSWER_S)
            )
        except ApiException as error:
            if error.status != 404:
                raise

    def pods(self, group: str) -> tuple[list[Pod], str]:
        """Those of a group, and as of when. Raises: what the client raises."""
        answer = self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{GROUP_LABEL}={group}", _preload_content=False,
            _request_timeout=(CONNECT_S, ANSWER_S),
        )  # fmt: skip
        found = json.loads(answer.data)
        return found["items"], found["metadata"].get("resourceVersion", "")

    def changes(self, group: str, since: str, seconds: int) -> Iterator[tuple[bool, Pod]]:
        """Pods of a group as they change: whether each is there still. Raises: what the client raises."""
        from kubernetes import watch

        events = watch.Watch().stream(
            self._core.list_namespaced_pod, self.namespace, label_selector=f"{GROUP_LABEL}={group}",
            resource_version=since, timeout_seconds=seconds, _request_timeout=(CONNECT_S, seconds + ANSWER_S),
        )  # fmt: skip
        for event in events:
            yield event["type"] != "DELETED", event["raw_object"]

    def last_warning(self, name: str) -> str:
        """What Kubernetes has complained of last about a Job or a pod; empty where it has not, or may not be asked."""
        with contextlib.suppress(Exception):  # it is only more to tell
            answer = self._core.list_namespaced_event(
                self.namespace, field_selector=f"involvedObject.name={name}", _preload_content=False,
                _request_timeout=(CONNECT_S, ANSWER_S),
            )  # fmt: skip
            events = [each for each in json.loads(answer.data)["items"] if each.get("type") == "Warning"]
            if events:
                last = max(events, key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "")
                return f"{last.get('reason', '')}: {str(last.get('message', '')).rstrip('.')}"
        return ""

    def log_tail(self, pod: str, container: str) -> str:
        """What an agent has said last; empty where that cannot be read."""
        with contextlib.suppress(Exception):  # it is only more to tell
            answer = self._core.read_namespaced_pod_log(
                pod, self.namespace, container=container, tail_lines=TAIL_LINES, _preload_content=False,
                _request_timeout=(CONNECT_S, ANSWER_S),
            )  # fmt: skip
            return bytes(answer.data).decode(errors="replace")
        return ""

    def words_of(self, error: BaseException) -> str:
        """What is wrong, in one line."""
        return words_of(error, self.server)


def words_of(error: BaseException, server: str = "") -> str:
    """What the API server says, or what keeps us from it."""
    body = getattr(error, "body", None)
    if body:
        with contextlib.suppress(ValueError, TypeError):
            return str(json.loads(body)["message"]) or str(error)
    if getattr(error, "status", None):
        return f"the API server at {server} answers {error.status} ({error.reason})"  # type: ignore[attr-defined]
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("urllib3"):
        said = re.search(r"\[Errno -?\d+\] ([^'\")]+)|certificate verify failed: ([^(\"]+)", text)
        why = next(filter(None, said.groups()), "") if said else ""
        if not why:
            why = f"no answer within {CONNECT_S:g} s" if "imed out" in text or "imeout" in text else text
        return f"the API server at {server} does not answer: {why.strip()}"
    return text or type(error).__name__


def _in_cluster(settings: Any) -> str:
    """Returns the namespace that we are in. Raises: ClusterError."""
    from kubernetes import config

    try:
        config.load_incluster_config(client_configuration=settings)
        return (_ACCOUNT / "namespace").read_text().strip() or "default"
    except (config.ConfigException, OSError) as error:
        raise ClusterError(f"the notebook's own pod does not say how its cluster is reached: {error}") from None


def _by_kubeconfig(settings: Any, path: str, context: str) -> tuple[str, str]:
    """Returns the context, and its namespace. Raises: ClusterError."""
    from kubernetes import config

    where = path or os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        contexts, current = config.list_kube_config_contexts(config_file=path or None)
        names = [each["name"] for each in contexts]
        name = context or current["name"]
        if name not in names:
            raise ClusterError(f'the kubeconfig {where} has no context "{name}"; it has {", ".join(names)}')
        config.load_kube_config(config_file=path or None, context=name, client_configuration=settings)
        found = next(each["context"] for each in contexts if each["name"] == name)
        return name, found.get("namespace") or "default"
    except ClusterError:
        raise
    except config.ConfigException as error:
        missing = "No configuration found" in str(error) or "current-context" in str(error)
        why = f"there is none at {where} that names a cluster, and this is no pod of one" if missing else str(error)
        raise ClusterError(f"no kubeconfig can be used: {why}") from None
    except Exception as error:  # of YAML, or of what is written there
        raise ClusterError(f"the kubeconfig {where} cannot be read: {' '.join(str(error).split())}") from None
