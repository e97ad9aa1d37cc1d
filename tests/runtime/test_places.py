"""It starts where people are: users without a home, folders of others, hosts without IPv4, kernels without pidfds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOBODY = 45678
"""A uid without an entry in the passwd file."""

TIMEOUT_S = 100

FIND = """
    import json, warnings
    with warnings.catch_warnings(record=True) as told:
        from meshbook.user_folders import log_base, runtime_base
        found = {"runtime": str(runtime_base()), "logs": str(log_base()), "again": str(log_base())}
        print(json.dumps({**found, "told": [str(one.message) for one in told]}))
"""

SPAWN = """
    from pathlib import Path
    from meshbook import this_host
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        sums = mesh.run("x = torch.ones(2); dist.all_reduce(x); print('said'); x.tolist()").get(60)
        print(sums.values())
        print([Path(path).read_text() for path in mesh.log_paths().values()])
"""


@pytest.fixture
def world() -> Iterator[Path]:
    """A folder that everybody may enter and write, as the temp folder is; pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def run_as_nobody(code: str, world: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as `NOBODY`, with the temp folder ``world`` and of the environment only ``variables``.

    It may read what root may, since the Python that runs the tests often lies in root's home.
    """
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, by setpriv")
    rights = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    become = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups {rights}".split()
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(world), "MESHBOOK_LEASE_S": "5", **variables}
    return subprocess.run(
        [*become, sys.executable, "-c", textwrap.dedent(code)],
        cwd="/", env=environment, umask=0o022, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def find(world: Path, **variables: str) -> dict[str, Any]:
    """What `FIND` prints."""
    ran = run_as_nobody(FIND, world, **variables)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["logs"] == found["again"]
    return found


def test_a_mesh_starts_without_a_home_or_a_runtime_folder_and_beside_a_squatter(world: Path) -> None:
    (world / f"meshbook-{NOBODY}").mkdir()
    ran = run_as_nobody(SPAWN, world, XDG_RUNTIME_DIR="/run/user/of-somebody-gone")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-2:] == [str([[2.0, 2.0]] * 2), str(["said\n"] * 2)]
    assert ran.stderr.count("Set XDG_STATE_HOME to keep them") == 1, ran.stderr
    assert list((world / f"meshbook-{NOBODY}.1").glob(".kept/logs/*/*/rank-1.log"))


@pytest.mark.parametrize(
    "variables",
    [{}, {"HOME": "/nonexistent"}, {"HOME": "/proc"}, {"HOME": "/root"}, {"XDG_STATE_HOME": "/sys"}],
    ids=["no_home", "missing", "read_only", "anothers", "state"],
)
def test_without_a_home_logs_lie_with_the_session_and_one_word_says_so(world: Path, variables: dict[str, str]) -> None:
    found = find(world, **variables)
    assert found["runtime"] == f"{world}/meshbook-{NOBODY}"
    assert found["logs"] == f"{world}/meshbook-{NOBODY}/.kept/logs"
    assert len(found["told"]) == 1 and "Set XDG_STATE_HOME" in found["told"][0]


def test_logs_of_another_user_in_an_inherited_home_are_left_alone(world: Path) -> None:
    theirs = world / ".local" / "state" / "meshbook" / "logs"
    theirs.mkdir(parents=True)
    found = find(world, HOME=str(world))
    assert found["logs"].endswith(".kept/logs") and "belongs to another user" in found["told"][0]
    assert not list(theirs.iterdir())


@pytest.mark.parametrize("inherited", ["/run/user/of-somebody-gone", "/root", "/proc", "relative"])
def test_a_runtime_folder_that_is_not_ours_is_passed_over(world: Path, inherited: str) -> None:
    found = find(world, HOME=str(world), XDG_RUNTIME_DIR=inherited)
    assert found["runtime"] == f"{world}/meshbook-{NOBODY}"
    assert found["logs"] == f"{world}/.local/state/meshbook/logs" and not found["told"]


def test_a_squatter_in_the_temp_folder_costs_a_name_for_good(world: Path) -> None:
    taken = world / f"meshbook-{NOBODY}"
    taken.mkdir(mode=0o777)
    (world / f"meshbook-{NOBODY}.1").symlink_to(taken)
    first = find(world, HOME=str(world))["runtime"]
    assert first == f"{world}/meshbook-{NOBODY}.2" and Path(first).stat().st_mode & 0o777 == 0o700
    taken.rmdir()  # nobody may lose sight of their sessions by that
    assert find(world, HOME=str(world))["runtime"] == first


def test_squatters_of_all_names_are_told_of(world: Path) -> None:
    for number in range(10):
        (world / f"meshbook-{NOBODY}{f'.{number}' if number else ''}").mkdir()
    ran = run_as_nobody(FIND, world, HOME=str(world))
    assert "SpawnError: other users have taken all names" in ran.stderr and "Set XDG_RUNTIME_DIR" in ran.stderr
