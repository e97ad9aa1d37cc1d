"""``%mesh spawn --on k8s`` in a notebook: what it says when it makes no sense, or there is no cluster."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpus=2 --on k8s -- --image i:1", "say how many pods of Kubernetes: hosts=N"),
        ("hosts=2 gpus=2 --on k8s", "Kubernetes needs an image that has meshbook in it, as in -- --image IMAGE"),
        (
            "hosts=2 gpus=2 --on k8s -- --image i:1 --gpu 8",
            "unrecognized arguments: --gpu 8. Options of Kubernetes are",
        ),
        ("hosts=2 gpus=2 --on k8s:ml -- --image i:1", 'the engine k8s has no hosts to name, but got "ml"'),
        ("hosts=2 gpus=2 --on k8", 'unknown engine "k8". Did you mean "k8s"?'),
    ],
)
def test_lines_that_make_no_sense(empty_notebook, line: str, said: str) -> None:
    assert said in empty_notebook.fail(f"%mesh spawn --name none {line}")


@pytest.mark.slow
def test_no_cluster(empty_notebook, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    options = f"--image i:1 --kubeconfig {tmp_path}/none"
    said = empty_notebook.fail(f"%mesh spawn --name none hosts=2 gpus=1 --on k8s -- {options}")
    assert f"no kubeconfig can be used: there is none at {tmp_path}/none" in said
