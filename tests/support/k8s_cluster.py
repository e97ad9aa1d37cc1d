"""Kubernetes on this machine, for tests: skipped where there can be none, and held to leave nothing behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.k8s.cluster import KubernetesHere, stand_in
from benchmarks.ssh_hosts import NoDaemonError


def drivers() -> list[psutil.Process]:
    """Drivers of ours among the children of this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "meshbook.launchers.engines.k8s_driver" in child.cmdline():
                found.append(child)
    return found


def await_quiet(here: KubernetesHere, timeout_s: float = 60.0) -> None:
    """Wait until there is nothing of ours in the cluster, no container, and no driver among our children."""
    deadline = time.monotonic() + timeout_s
    while (left := [*here.left(), *here.nodes.containers, *drivers()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left


@contextlib.contextmanager
def kubernetes_here(folder: Path) -> Iterator[KubernetesHere]:
    """A stand-in; the environment names no other cluster."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).delenv("KUBECONFIG", raising=False)
        try:
            here = stack.enter_context(stand_in(folder))
        except NoDaemonError as error:
            pytest.skip(str(error))
        yield here
        await_quiet(here)
