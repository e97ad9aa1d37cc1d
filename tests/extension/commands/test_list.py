"""How ``%mesh list`` tells since when a mesh is there."""

from __future__ import annotations

import time

import pytest

from meshbook.sessions.folder import SavedMesh
from meshbook_extension.commands.meshes import describe_age


@pytest.mark.parametrize(
    "hosts, jobs, expected",
    [
        (["a"], [], "up 3 h"),
        (["a", "a"], [], "up 3 h"),
        (["a", "b"], [], "up 3 h (6 h of hosts)"),
        (["a", "b", "c"], ["12"], "up 3 h (9 h of hosts), job 12"),
    ],
)
def test_hosts_count_each_and_jobs_are_named(hosts: list[str], jobs: list[str], expected: str) -> None:
    mesh = SavedMesh("main", {"gpus": 4}, hosts, began=time.time() - 3 * 3600, jobs=jobs)
    assert describe_age(mesh) == expected
