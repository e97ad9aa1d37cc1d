"""Folders on hosts, by `sync_workspace`: copies there, modules that processes import, and reload."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import meshbook
from meshbook import LocalLauncher, start_hosts, this_host
from meshbook.errors import UsageError
from meshbook.job import ProcessJob
from meshbook.mesh import workspace_copies
from meshbook.tools.config import Workspace

pytestmark = pytest.mark.monarch


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "local" / "copied_project"
    project.mkdir(parents=True)
    (project / "copied_module.py").write_text("value = 1\n")
    (project / "other_module.py").write_text("import random\nonce = random.random()\n")
    (project / "README.md").write_text("hello world")
    return project


def test_hosts_of_a_job_get_a_folder_below_their_workspace_dir(tmp_path: Path, project: Path, clean_end: None) -> None:
    there = tmp_path / "remote"
    job = ProcessJob({"hosts": 2}, env={"WORKSPACE_DIR": str(there)})
    hosts = job.state(cached_path=None).hosts
    asyncio.run(_sync(hosts, Workspace(dirs=[project])))
    assert (there / "copied_project" / "README.md").read_text() == "hello world"
    (project / "README.md").unlink()
    hosts.sync_workspace(Workspace(dirs={project: "elsewhere/it"})).get(120)
    hosts.sync_workspace(Workspace(dirs=[project])).get(120)
    assert not (there / "copied_project" / "README.md").exists()
    assert (there / "elsewhere" / "it" / "copied_module.py").exists()
    hosts.sync_workspace(Workspace.null()).get(120)
    hosts.shutdown().get()


async def _sync(hosts: meshbook.HostMesh, workspace: Workspace) -> None:
    await hosts.sync_workspace(workspace)


def test_processes_import_from_copies_and_reload_what_has_changed(tmp_path: Path, project: Path) -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True)).with_environment(
        {"WORKSPACE_DIR": str(tmp_path / "remote")}
    )
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
        hosts.sync_workspace(Workspace(dirs=[project])).get(120)
        told = procs.run("import copied_module, other_module; once = other_module.once; copied_module.__file__")
        assert told.get(60).values() == [str(tmp_path / "remote" / "copied_project" / "copied_module.py")] * 2
        (project / "copied_module.py").write_text("value = 22\n")
        hosts.sync_workspace(Workspace(dirs=[project])).get(120)
        assert procs.evaluate("copied_module.value").get(60).values() == [1, 1]
        (project / "copied_module.py").write_text("value = 333\n")
        hosts.sync_workspace(Workspace(dirs=[project]), auto_reload=True).get(120)
        assert procs.evaluate("copied_module.value").get(60).values() == [333, 333]
        assert procs.evaluate("other_module.once == once").get(60).values() == [True, True]


def test_what_is_large_goes_in_portions(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_copies, "AT_ONCE_BYTES", 1 << 10)
    monkeypatch.setenv("WORKSPACE_DIR", "")
    for number in range(5):
        (project / f"{number}.bin").write_bytes(os.urandom(700))
    hosts = this_host().with_environment({"WORKSPACE_DIR": str(tmp_path / "remote")})
    hosts.sync_workspace(Workspace(dirs=[project])).get(120)
    for number in range(5):
        there = tmp_path / "remote" / "copied_project" / f"{number}.bin"
        assert there.read_bytes() == (project / f"{number}.bin").read_bytes()


def test_what_cannot_be_copied_is_said_before_anything_is(tmp_path: Path, project: Path) -> None:
    host = this_host()
    with pytest.raises(UsageError, match="there is no folder"):
        host.sync_workspace(Workspace(dirs=[project, tmp_path / "nowhere"])).get(120)
    with pytest.raises(UsageError, match="a copy lies within the workspace of the host"):
        host.sync_workspace(Workspace(dirs={project: "../up"})).get(120)
    with pytest.raises(UsageError, match="conda=True"):
        host.sync_workspace(Workspace(dirs=[project]), conda=True)
    with host.spawn_procs(torch=False) as procs, pytest.raises(UsageError, match=r"procs\.host_mesh\.sync_workspace"):
        procs.sync_workspace(Workspace(dirs=[project]))  # type: ignore[arg-type]
