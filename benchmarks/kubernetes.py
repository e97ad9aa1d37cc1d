"""Hosts in pods of Kubernetes, on nodes that are this machine: spawn, a host that is lost."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import meshbook
from benchmarks.clusters import spawn_and_lose
from benchmarks.figures import Figure, Settings
from benchmarks.ssh_hosts import NoDaemonError
from meshbook.launchers.k8s import KubernetesLauncher

QUESTION = (
    "Two hosts with two ranks each in two pods (of Kubernetes' own programs where they are on the path, else of a "
    "stand-in of its API server): spawn until all have answered, process group formed; the agent of a host is killed: "
    "until its loss is known, and healed."
)


def run(settings: Settings) -> Iterator[Figure]:
    """Nothing where there is no client, or there can be no containers."""
    if importlib.util.find_spec("kubernetes") is None:
        print("left out: there is no client of Kubernetes: pip install 'meshbook[k8s]'")
        return
    from benchmarks.k8s.cluster import PROGRAMS, cluster

    kind = "real" if all(map(shutil.which, PROGRAMS)) else "stand-in"
    engine = "Kubernetes" if kind == "real" else "a stand-in of Kubernetes"
    try:
        with tempfile.TemporaryDirectory(prefix="mb-k8s-") as folder, cluster(kind, Path(folder)) as here:
            launcher = KubernetesLauncher(python=here.python, options=here.options())
            yield from spawn_and_lose(
                "kubernetes", launcher, engine, settings.count(5),
                lambda host: here.nodes.of(host.launched.job).agent().pid,  # it knows its number in its pod only
            )  # fmt: skip
            meshbook.shutdown()
    except NoDaemonError as error:
        print(f"left out: {error}")
    finally:
        meshbook.shutdown()
