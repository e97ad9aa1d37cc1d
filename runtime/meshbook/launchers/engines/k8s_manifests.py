"""The manifests of a host: its Job, and the Secret with its ticket. They are plain data; nothing is called here.

A host has a Job of its own, of one pod. One Indexed Job of all hosts would start a pod again by itself, with a ticket
that was used, or would end with its first lost host, where ``backoffLimitPerIndex`` is not known yet (before 1.29);
its pods would see each other's tickets; and a host could neither leave it nor come back. A pod without a Job would stay
where nobody is left to remove it: Jobs go with ``ttlSecondsAfterFinished``, and take their pod and Secret along.
"""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.agent_start import AGENT, NO_PYTHON, quoted_program
from meshbook.launchers.base import EngineOptions

NO_TICKET = "meshbook: no ticket"
NO_CLIENT = (
    "the client of Kubernetes is not installed for the notebook's Python; install it: pip install 'meshbook[k8s]'"
)
GPU = "nvidia.com/gpu"
HOST_LABEL, GROUP_LABEL = "meshbook/host", "meshbook/group"
"""Labels of pods and Jobs: the name of the Job, and the group of the hosts of one driver."""

KEPT_S = 60
"""The time for which a Job that has ended stays where no driver is left to remove it."""
GRACE_S = 10
"""The time that an agent has to end when its pod is deleted."""

_FILES = ("--template", "--kubeconfig")
_FOLDER, _FILE = "/run/meshbook", "ticket"
_SCRIPT = """umask 077
[ -r {ticket} ] || {{ echo "{no_ticket} at {ticket} for user $(id -u)" >&2; exit 66; }}
for p in {pythons}; do command -v "$p" >/dev/null 2>&1 && break; p=; done
[ "$p" ] || {{ echo {no_python} >&2; exit 127; }}
cat {ticket} | exec "$p" -m meshbook.launchers.templates {agent} &
trap "kill -TERM $!" TERM
wait $!; code=$?
kill -0 $! 2>/dev/null && {{ wait $!; code=$?; }}
exit $code
"""
"""The first process of a container gets no signal that it does not ask for, so it passes SIGTERM on to the agent."""


_TEXTS = ("image", "namespace", "context", "kubeconfig", "address", "cpu", "memory", "service-account", "template")


def read_options(options: Sequence[str]) -> argparse.Namespace:
    """Return the options of each host. Raises: UsageError."""
    known = EngineOptions("Kubernetes", "pods")
    for name in _TEXTS:
        known.add_argument(f"--{name}", default="", metavar=name.upper())
    known.add_argument("--gpus", type=int, default=0, metavar="N")
    known.add_argument("--resource", type=_pair, action="append", default=[], metavar="NAME=AMOUNT")
    known.add_argument("--node-selector", type=_pair, action="append", default=[], metavar="LABEL=VALUE")
    wanted = known.parse_args(list(options))
    if not wanted.image and not wanted.template:
        raise UsageError("Kubernetes needs an image that has meshbook in it, as in -- --image IMAGE.")
    if wanted.gpus < 0:
        raise UsageError(f"--gpus {wanted.gpus}: a pod has 0 GPUs or more.")
    return wanted


def with_whole_paths(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options with absolute paths, so that they mean the same in any folder."""
    found: list[str] = []
    for option in map(str, options):
        name, equals, path = option.partition("=")
        if name in _FILES and equals:
            option = f"{name}={_whole(path)}"
        elif found and found[-1] in _FILES:
            option = _whole(option)
        found.append(option)
    return tuple(found)


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def read_template(path: str) -> dict[str, Any]:
    """Read a pod, or the template of one, in YAML or JSON. Raises: UsageError, SpawnError."""
    if not path:
        return {}
    try:
        import yaml
    except ImportError:
        raise SpawnError(NO_CLIENT) from None
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"the template cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise UsageError(f"{path} is no template of a pod: metadata and spec, as in a Job's spec.template.")
    if not isinstance(found["spec"].get("containers", []), list):
        raise UsageError(f"{path} is no template of a pod: its spec.containers is no list.")
    return found


def make_job(
    name: str, group: str, wanted: argparse.Namespace, python: str, template: dict[str, Any]
) -> dict[str, Any]:
    """Return the Job of a host; the first container of the template runs its agent. Raises: UsageError."""
    labels = {"app.kubernetes.io/name": "meshbook", HOST_LABEL: name, GROUP_LABEL: group}
    given = template.get("metadata") or {}
    metadata: dict[str, Any] = {"labels": {**(given.get("labels") or {}), **labels}}
    if given.get("annotations"):
        metadata["annotations"] = given["annotations"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 0,  # whether another host takes the place of a lost one is ours to say
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {"metadata": metadata, "spec": _make_pod(name, group, wanted, python, template)},
        },
    }


def make_secret(name: str, ticket: str) -> dict[str, Any]:
    """Return the Secret of a host. It belongs to the Job, which is there first, and ends with it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "meshbook", HOST_LABEL: name}},
        "stringData": {_FILE: ticket + "\n"},
    }


def owned_by(secret: dict[str, Any], name: str, uid: str) -> dict[str, Any]:
    """Return the Secret as that of a Job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    return {**secret, "metadata": {**secret["metadata"], "ownerReferences": [owner]}}


def _make_pod(
    name: str, group: str, wanted: argparse.Namespace, python: str, template: dict[str, Any]
) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {GROUP_LABEL: group}},
            }
        ],
        **copy.deepcopy(template.get("spec") or {}),
        "restartPolicy": "Never",
    }
    container, *others = spec.get("containers") or [{}]
    mounts, volumes = container.get("volumeMounts") or [], spec.get("volumes") or []
    mounts = [*mounts, {"name": "meshbook-ticket", "mountPath": _FOLDER, "readOnly": True}]
    volumes = [*volumes, {"name": "meshbook-ticket", "secret": {"secretName": name, "defaultMode": 0o400}}]
    if not any(mount.get("mountPath") == "/dev/shm" for mount in mounts):  # else it has 64 MiB, too few for NCCL
        mounts.append({"name": "meshbook-shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "meshbook-shm", "emptyDir": {"medium": "Memory"}})
    container = {"name": "host", **container, "command": ["sh", "-c", _script(python)], "volumeMounts": mounts}
    container.pop("args", None)
    if wanted.image:
        container["image"] = wanted.image
    if not container.get("image"):
        raise UsageError("the template names no image for its first container: -- --image IMAGE.")
    if limits := _limits(wanted):
        resources = container.get("resources") or {}
        container["resources"] = {**resources, "limits": {**(resources.get("limits") or {}), **limits}}
    spec.update(containers=[container, *others], volumes=volumes)
    if wanted.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **dict(wanted.node_selector)}
    if wanted.service_account:
        spec["serviceAccountName"] = wanted.service_account
    return spec


def _limits(wanted: argparse.Namespace) -> dict[str, str]:
    named = {"cpu": wanted.cpu, "memory": wanted.memory, GPU: str(wanted.gpus or "")}
    return {name: amount for name, amount in named.items() if amount} | dict(wanted.resource)


def _script(python: str) -> str:
    pythons = [python] if python else ["python3", "python"]
    return _SCRIPT.format(
        ticket=f"{_FOLDER}/{_FILE}",
        no_ticket=NO_TICKET,
        pythons=" ".join(map(quoted_program, pythons)),
        no_python=shlex.quote(f"{NO_PYTHON} at {' or '.join(pythons)}"),
        agent=AGENT,
    )


def _pair(text: str) -> tuple[str, str]:
    """Raises: argparse.ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"invalid NAME=VALUE: {text!r}")
    return name, value
