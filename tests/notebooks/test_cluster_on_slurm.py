"""The notebook of two hosts, executed with Slurm in the place of ssh by the line that docs/engines/slurm.md shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from executed_notebooks import NOTEBOOKS, execute, text_of
from slurm_cluster import await_quiet, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SPAWN = "%mesh spawn hosts=2 gpus=2 --on slurm --device cpu -- --partition main --time 30"
CUT = """
%mesh use main --out far
import os, signal
os.kill(far._mesh.hosts[1].hello.pid, signal.SIGKILL)
"""
INSTEAD = {"hosts": "", "spawn-code": SPAWN, "cut": CUT, "stop-code": "%mesh stop"}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, slurm_cluster(patch) as nodes:
        cells = execute("cluster.ipynb", tmp_path_factory.mktemp("slurm"), INSTEAD)[1]
        yield cells
        await_quiet(nodes)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("spawn-code", ["hosts=2, gpus=2, cpu, gloo", "(4 ranks on 2 hosts)", "hosts reach each other at n1 "]),
        ("lost", ["on n2 ended", "its agent on n2 ended", "repair: %mesh heal"]),
        ("heal-code", ["host n2 started again, ranks 2,3 started again", "ran there again"]),
        ("accuracy", ["accuracy on 397 held-out digits: "]),
        ("stop-code", ['mesh "main" stopped']),
    ],
)
def test_what_each_cell_says(cells: dict[str, Any], cell: str, said: list[str]) -> None:
    for words in said:
        assert words in text_of(cells[cell])


def test_the_docs_show_this_line() -> None:
    assert SPAWN in (NOTEBOOKS.parent / "docs" / "engines" / "slurm.md").read_text()
