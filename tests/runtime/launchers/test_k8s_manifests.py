"""What is asked of Kubernetes is what it knows, in several versions; and what a pod says, in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshbook import start_hosts
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.engines.k8s_cluster import Pod
from meshbook.launchers.engines.k8s_manifests import make_job, make_secret, owned_by, read_options, read_template
from meshbook.launchers.k8s import K8sLog, KubernetesLauncher

VERSIONS = ("1.25", "1.28", "1.31", "1.37")

TEMPLATE = """
metadata:
  labels: {team: ml, meshbook/host: other}
  annotations: {kueue.x-k8s.io/priority: high}
spec:
  priorityClassName: high
  restartPolicy: Always
  securityContext: {fsGroup: 1000, runAsUser: 1000}
  imagePullSecrets: [{name: registry}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}, {name: shm, emptyDir: {medium: Memory}}]
  containers:
  - name: main
    image: registry/meshbook:1
    args: [never]
    volumeMounts: [{name: data, mountPath: /data}, {name: shm, mountPath: /dev/shm}]
    resources: {requests: {cpu: 2}, limits: {cpu: 4}}
  - name: sidecar
    image: registry/logs:1
"""


def job_of(options: list[str], template: dict[str, Any] | None = None, python: str = "") -> dict[str, Any]:
    return make_job("meshbook-1-k8s-1", "meshbook-1-k8s-1", read_options(options), python, template or {})


ALL = [
    "--image=i:1", "--cpu=2", "--memory=4Gi", "--gpus=8", "--resource=rdma/hca=1", "--node-selector=pool=gpu",
    "--service-account=me",
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_all_that_is_asked(version: str, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    (tmp_path / "pod.yaml").write_text(TEMPLATE)
    template = read_template(str(tmp_path / "pod.yaml"))
    secret = owned_by(make_secret("meshbook-1-k8s-1", "ticket"), "meshbook-1-k8s-1", "uid")
    for manifest in (job_of(["--image", "i:1"]), job_of(ALL), job_of([*ALL, "--template", "x"], template), secret):
        validate.validate(manifest, version, strict=True)
    wrong = job_of(ALL)
    wrong["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, version, strict=True)


def test_a_template_is_kept_but_for_what_is_ours(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(TEMPLATE)
    made = job_of(["--template", "x", "--gpus", "2"], read_template(str(tmp_path / "pod.yaml")))["spec"]["template"]
    main, sidecar = made["spec"]["containers"]
    assert made["metadata"]["labels"] == {
        "team": "ml", "app.kubernetes.io/name": "meshbook",
        "meshbook/host": "meshbook-1-k8s-1", "meshbook/group": "meshbook-1-k8s-1",
    }  # fmt: skip
    assert made["metadata"]["annotations"] == {"kueue.x-k8s.io/priority": "high"}
    assert main["image"] == "registry/meshbook:1" and "args" not in main and sidecar["name"] == "sidecar"
    assert main["resources"] == {"requests": {"cpu": 2}, "limits": {"cpu": 4, "nvidia.com/gpu": "2"}}
    assert [mount["mountPath"] for mount in main["volumeMounts"]] == ["/data", "/dev/shm", "/run/meshbook"]
    assert made["spec"]["restartPolicy"] == "Never" and made["spec"]["priorityClassName"] == "high"


def test_a_ticket_is_in_the_secret_alone() -> None:
    job, secret = job_of(ALL), make_secret("meshbook-1-k8s-1", "a secret ticket")
    volume = job["spec"]["template"]["spec"]["volumes"][0]
    assert volume["secret"] == {"secretName": "meshbook-1-k8s-1", "defaultMode": 0o400}
    assert "a secret ticket" in json.dumps(secret) and "a secret ticket" not in json.dumps(job)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Kubernetes needs an image that has meshbook in it, as in -- --image IMAGE"),
        (["--image", "i", "--gpu", "8"], "unrecognized arguments: --gpu 8. Options of Kubernetes are --image IMAGE"),
        (["--image", "i", "--gpus", "-1"], "--gpus -1: a pod has 0 GPUs or more"),
        (["--image", "i", "--node-selector", "gpu"], "argument --node-selector: invalid NAME=VALUE: 'gpu'"),
        (["--template", "/no/such/file"], "the template cannot be read"),
    ],
)
def test_options_that_make_no_sense(options: list[str], said: str) -> None:
    with pytest.raises(UsageError) as told:
        start_hosts({"hosts": 1}, KubernetesLauncher(options=options))
    assert said in str(told.value)


def test_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = KubernetesLauncher(options=["--template", "pod.yaml", "--kubeconfig=config", "--cpu", "2"]).saved.options
    assert options == ("--template", f"{tmp_path}/pod.yaml", f"--kubeconfig={tmp_path}/config", "--cpu", "2")


def test_an_address_that_is_anothers() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1, which are others"):
        start_hosts({"hosts": 1}, KubernetesLauncher(options=["--image", "i", "--address", "192.0.2.1"]))


@pytest.mark.parametrize(("text", "said"), [("[1]", "no template of a pod"), ("spec: {}", "names no image")])
def test_templates_that_make_no_sense(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(text)
    with pytest.raises(UsageError, match=said):
        start_hosts({"hosts": 1}, KubernetesLauncher(options=["--template", str(tmp_path / "pod.yaml")]))


def test_without_the_client_of_kubernetes() -> None:
    code = (
        "import sys; sys.modules['kubernetes'] = None; sys.meta_path.insert(0, type('No', (), {'find_spec': "
        "staticmethod(lambda name, *_: None)})); import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'kubernetes' else find(name)\n"
        "from meshbook import start_hosts\nfrom meshbook.launchers.k8s import KubernetesLauncher\n"
        "start_hosts({'hosts': 1}, KubernetesLauncher(options=['--image', 'i']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "install it: pip install 'meshbook[k8s]'" in done.stderr


# ---- what pods say --------------------------------------------------------------------------------------------------


def pod(status: dict[str, Any], node: str = "n1", **metadata: str) -> Pod:
    spec = {"containers": [{"name": "host", "resources": {"limits": {"memory": "1Gi"}}}], "nodeName": node}
    return Pod({"metadata": {"name": "p", **metadata}, "spec": spec, "status": status})


def state(**of: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "other", "state": {}}, {"name": "host", "state": of}]}


NOT_SCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient cpu."}
PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for another"}


@pytest.mark.parametrize(
    ("status", "waits", "stuck"),
    [
        ({"conditions": [NOT_SCHEDULED]}, "pod p waits for a node: 0/3 nodes are available: 3 Insufficient cpu", ""),
        ({}, "pod p on node n1 starts: not begun", ""),
        (state(waiting={"reason": "ContainerCreating"}), "pod p on node n1 starts: ContainerCreating", ""),
        (
            state(waiting={"reason": "ImagePullBackOff", "message": 'Back-off pulling image "i"'}), None,
            'pod p on node n1 cannot start: ImagePullBackOff: Back-off pulling image "i"',
        ),
        (
            {"initContainerStatuses": [{"name": "a", "state": {"waiting": {"reason": "CreateContainerError"}}}]}, None,
            "pod p on node n1 cannot start: CreateContainerError",
        ),
    ],
)  # fmt: skip
def test_what_a_pod_waits_for(status: dict[str, Any], waits: str | None, stuck: str) -> None:
    assert pod(status).cannot_start() == stuck and not pod(status).runs
    assert pod(status).why_ended(True, str) == ""
    if waits is not None:
        assert pod(status).waits_for() == waits


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (pod(state(running={})), ""),
        (
            pod(state(terminated={"exitCode": 0, "reason": "Completed"})),
            "its agent in pod p on node n1 ended (exit code 0)",
        ),
        (
            pod(state(terminated={"exitCode": 139, "reason": "Error"})),
            "ended (killed by SIGSEGV, a crash in native code)",
        ),
        (
            pod(state(terminated={"exitCode": 137, "reason": "OOMKilled"})),
            "pod p on node n1 was out of memory (OOMKilled, exit code 137; its limit is 1Gi)",
        ),
        (
            pod(state(terminated={"exitCode": 128, "reason": "StartError", "message": 'exec: "sh": not found'})),
            'ended (exit code 128): StartError: exec: "sh": not found',
        ),
        (
            pod({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}),
            "Kubernetes has ended pod p on node n1: Evicted: The node was low on resource: memory",
        ),
        (
            pod({"phase": "Failed", "reason": "DeadlineExceeded"}),
            "Kubernetes has ended pod p on node n1: DeadlineExceeded",
        ),
        (
            pod({"phase": "Running", "reason": "NodeLost"}, deletionTimestamp="now"),
            "Kubernetes has ended pod p on node n1: NodeLost",
        ),
        (
            pod({"conditions": [PREEMPTED]}, deletionTimestamp="now"),
            "Kubernetes has ended pod p on node n1: PreemptionByScheduler: for another",
        ),
        (pod(state(running={}), deletionTimestamp="now"), "pod p on node n1 was deleted"),
    ],
)
def test_why_a_pod_has_ended(found: Pod, said: str) -> None:
    why = found.why_ended(True, str)
    assert why.endswith(said) and bool(why) == bool(said)


def test_a_pod_that_is_gone_was_deleted() -> None:
    assert pod(state(running={})).why_ended(False, str) == "pod p on node n1 was deleted"


def test_what_the_log_of_a_container_adds() -> None:
    ended = pod(state(terminated={"exitCode": 1, "reason": "Error"}))
    why = ended.why_ended(True, lambda: "Traceback\n\nModuleNotFoundError: No module named 'meshbook'\n")
    log = K8sLog.read("meshbook: " + json.dumps({"ended": why, "host": "k8s-1"}))
    said = log.why_ended("k8s-1", None)
    assert said is not None and said.endswith(
        "Traceback; ModuleNotFoundError: No module named 'meshbook'. Install meshbook in the image, or name another "
        "interpreter there: --python PATH"
    )


@pytest.mark.slow
def test_no_cluster_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SpawnError) as told:
        start_hosts({"hosts": 1}, KubernetesLauncher(options=["--image", "i:1"])).await_ready()
    assert "no kubeconfig can be used: there is none at" in str(told.value) and "--kubeconfig FILE" in str(told.value)
