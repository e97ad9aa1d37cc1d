"""Hosts by Ray where there is no cluster, or no Ray; and what its driver says is read as why a host ended."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

import meshbook
from meshbook import start_hosts
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.ray import RayLauncher, RayLog

pytestmark = pytest.mark.cluster

STARTED = """
meshbook: {"job": "02000000", "socket": "/run/a"}
meshbook: {"waits": "Ray starts its agents"}
(raylet) something of its own
meshbook: {"node": "r1", "host": "ray-1"}
"""


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ("", None, None),
        ('meshbook: {"ended": "its agent ended", "host": "ray-1"}', None, None),
        ('meshbook: {"ended": "its agent ended", "host": "ray-2"}', None, "its agent ended"),
        ('meshbook: {"ended": "Version mismatch: 3 and 4"}', 1, "3 and 4. Install the cluster's versions of Ray"),
        ('meshbook: {"ended": "half a li', None, None),
        ("", -9, "the driver of Ray has ended (killed by SIGKILL, by kill -9 or the OOM killer)"),
        ("ValueError: no", 1, "(exit code 1): (raylet) something of its own; ValueError: no"),
    ],
)
def test_why_a_host_ended(more: str, status: int | None, said: str | None) -> None:
    log = RayLog.read(STARTED + more)
    assert log.job == "02000000" and log.socket == "/run/a"
    assert log.waits_for("ray-1") == "" and log.waits_for("ray-2") == "Ray starts its agents"
    why = log.why_ended("ray-2", status)
    assert why is None if said is None else why is not None and said in why


def test_no_cluster_at_the_address() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(SpawnError, match=f"there is no Ray cluster at {address}: Connection refused"):
        start_hosts({"hosts": 1}, RayLauncher(address)).spawn_procs(torch=False, owns_hosts=True)
    meshbook.shutdown()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpawnError, match=r"pip install 'meshbook\[ray\]'"):
        start_hosts({"hosts": 1}, RayLauncher())
    meshbook.shutdown()


@pytest.mark.parametrize("options", [["--nodes=3"], ["--num-cpus", "many"], ["--resources", "[1]"]])
def test_options_that_make_no_sense(options: list[str]) -> None:
    with pytest.raises(UsageError, match="Options of Ray are --num-cpus N"):
        RayLauncher(options=options)


def test_who_has_no_such_hosts_does_not_load_it() -> None:
    code = "import sys, meshbook.mesh.driven as _, meshbook.monarch.job\n"
    code += "print({'ray', 'meshbook.launchers.ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
