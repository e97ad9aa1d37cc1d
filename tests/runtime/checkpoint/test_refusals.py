"""Saves and restores that cannot be: a clear line, nothing changed, and a mesh that goes on."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

import meshbook
from meshbook import ProcMesh, errors, this_host

BEGIN = """
import meshbook, threading, time, torch
from torch import nn

class Stateful:
    def __init__(self, given):
        self.given = given
    def state_dict(self):
        return self.given()
    def load_state_dict(self, known):
        pass

model = nn.Linear(2, 2)
opt = torch.optim.AdamW(model.parameters())
"""


@pytest.fixture(scope="module")
def mesh(clean_end: None) -> Iterator[ProcMesh]:
    """Two ranks with a model."""
    with this_host().spawn_procs({"gpus": 2}, name="refusing", device="cpu") as mesh:
        mesh.run(BEGIN).get(60)
        yield mesh


@pytest.fixture
def saved(mesh: ProcMesh, tmp_path: Path) -> Path:
    """A folder with a save."""
    run(mesh, tmp_path, "nn.init.ones_(model.weight); meshbook.save(d, {'model': model, 'opt': opt, 'step': 7})")
    return tmp_path


def run(mesh: ProcMesh, folder: Path, code: str) -> list[Any]:
    """Run code on all ranks, with the folder as ``d``; return the values of its last line."""
    return list(mesh.run(f"d = {str(folder)!r}\n{textwrap.dedent(code)}").get(60).values())


def refusal(mesh: ProcMesh, folder: Path, code: str) -> str:
    """Run code that all ranks refuse for the same reason; return the reason."""
    with pytest.raises(errors.CallFailed) as caught:
        run(mesh, folder, code)
    causes = {str(failure.load()) for failure in caught.value.failures}
    assert len(causes) == 1 and len(caught.value.failures) == len(mesh), caught.value
    return causes.pop()


def assert_it_goes_on(mesh: ProcMesh, folder: Path) -> None:
    """Assert that the mesh saves, and that the folder has saves alone then."""
    assert run(mesh, folder, "meshbook.save(d, {'model': model}).skipped") == [{}] * len(mesh)
    assert all(path.name.startswith("save-") for path in folder.iterdir()), list(folder.iterdir())


def test_folders_that_cannot_be_written(mesh: ProcMesh, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "ckpt"):
        assert re.search(f"nothing can be saved to {folder}: .*", refusal(mesh, folder, "meshbook.save(d, {'x': 1})"))
    assert "there is no folder" in refusal(mesh, tmp_path / "none", "meshbook.restore(d, {'x': 1})")
    assert "there is no save in" in refusal(mesh, tmp_path, "meshbook.restore(d, {'x': 1})")


def test_a_full_disk(mesh: ProcMesh, tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True, timeout=60
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        assert_it_goes_on(mesh, tmp_path)
        text = refusal(mesh, tmp_path, "meshbook.save(d, {'large': torch.ones(1 << 20) * (1 + rank)})")
        assert re.match(r"nothing was saved: rank [01] could not write its part: .*[Nn]o space left", text), text
        assert [path.name for path in tmp_path.iterdir()] == ["save-1"]
        assert_it_goes_on(mesh, tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True, timeout=60)


def test_a_folder_that_hosts_do_not_share(mesh2x2: ProcMesh, tmp_path: Path) -> None:
    apart = """
        import ctypes, meshbook, os
        import meshbook.checkpoint.folder as folders
        folders.TOKEN_TIMEOUT_S = 0.5
        libc = ctypes.CDLL(None, use_errno=True)
        def mount_own():  # the main thread alone has other file systems then
            return libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None) or libc.mount(
                b"none", d.encode(), b"tmpfs", 0, None)
        mount_own() if rank >= 2 else 0
    """
    if any(run(mesh2x2, tmp_path, apart)):
        pytest.skip("hosts cannot have file systems of their own here")
    text = refusal(mesh2x2, tmp_path, "meshbook.save(d, {'x': 1})")
    assert re.search(rf"does not see {tmp_path}.*folder that all hosts share", text), text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: os.truncate(next(path.glob("*.distcp")), 10), r"has 10 bytes instead of \d+; restore another"),
        (lambda path: next(path.glob("*.distcp")).unlink(), "is not whole: .*; restore another save"),
        (lambda path: os.truncate(path / "manifest.json", 20), "is cut short or changed"),
        (lambda path: (path / "manifest.json").write_text('{"version": 99}'), "a newer version of Meshbook"),
        (lambda path: (path / ".metadata").write_bytes(bytes((path / ".metadata").stat().st_size)), "cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "cannot be read|not saved by Meshbook"),
    ],
)
def test_spoilt_saves(mesh: ProcMesh, saved: Path, spoil: Any, why: str) -> None:
    spoil(saved / "save-1")
    state = "values = {'model': model, 'step': 0}; nn.init.zeros_(model.weight)"
    assert re.search(why, refusal(mesh, saved, f"{state}; meshbook.restore(d, values)"))
    assert run(mesh, saved, "values['step'], model.weight.sum().item()") == [(0, 0.0)] * 2
    assert_it_goes_on(mesh, saved)


def test_files_that_changed_inside_leave_a_clear_line(mesh: ProcMesh, saved: Path) -> None:
    for file in (saved / "save-1").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    text = refusal(mesh, saved, "meshbook.restore(d, {'model': model})")
    assert "half old and half new now: restore a save again" in text or "restore another save" in text, text


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("{'model': nn.Linear(3, 2)}", r"model.weight has shape \(2, 3\), and \(2, 2\) in the save"),
        (
            "{'model': nn.Linear(2, 2, bias=False)}",
            "model is another model than was saved: only the save has model.bias",
        ),
        ("{'model': nn.Sequential(nn.Linear(2, 2))}", "another model than was saved: the save does not have model.0."),
        ("{'model': 3}", "model is a value, and was saved as a module"),
        ("{'opt': torch.optim.SGD(model.parameters(), lr=1), 'model': model}", "opt is SGD, and the save has AdamW"),
        ("{'opt': torch.optim.AdamW([model.bias]), 'model': model}", "opt has other parameters than in the save"),
        ("{'modl': model}", 'has no modl. Did you mean "model"?'),
    ],
)
def test_other_objects_than_were_saved(mesh: ProcMesh, saved: Path, state: str, why: str) -> None:
    run(mesh, saved, f"nn.init.zeros_(model.weight); values = {{'step': 0, **{state}}}")
    text = refusal(mesh, saved, "meshbook.restore(d, values)")
    assert re.search(why, text), text
    assert run(mesh, saved, "values['step'], model.weight.sum().item()") == [(0, 0.0)] * 2


def test_one_rank_that_cannot_take_part_frees_the_others(mesh: ProcMesh, tmp_path: Path) -> None:
    for given, why in (
        ("lambda: 1 / 0 if rank else {}", "rank 1: part cannot be saved: .*division by zero"),
        ("lambda: {'x': threading.Lock()} if rank else {}", "rank 1: part cannot be saved: .*cannot pickle"),
    ):
        text = refusal(mesh, tmp_path, f"meshbook.save(d, {{'part': Stateful({given})}})")
        assert re.search(why, text), text
    assert "x.y" in refusal(mesh, tmp_path, "meshbook.save(d, {'x.y': 1})")
    assert "cannot be saved: it is code" in refusal(mesh, tmp_path, "meshbook.save(d, {'nn': nn})")
    assert list(tmp_path.iterdir()) == []
    run(mesh, tmp_path, "meshbook.save(d, {'part': Stateful(lambda: {})})")
    text = refusal(mesh, tmp_path, "meshbook.restore(d, {'part': Stateful(lambda: 1 / 0 if rank else {})})")
    assert re.search("rank 1: .*part", text), text
    assert_it_goes_on(mesh, tmp_path)


def test_variables_that_cannot_be_saved_are_listed(mesh: ProcMesh, tmp_path: Path) -> None:
    run(mesh, tmp_path, "lock, broken, kept = threading.Lock(), Stateful(lambda: 1 / 0), 5")
    saved = meshbook.save(tmp_path, procs=mesh)
    assert isinstance(saved, meshbook.checkpoint.folder.Saved)
    assert saved.skipped["lock"] == "lock has no state_dict"
    assert "division by zero" in saved.skipped["broken"]
    assert saved.manifest.kinds["kept"] == "value" and "Stateful" not in saved.skipped
    run(mesh, tmp_path, "del lock, broken; kept = 6")
    meshbook.restore(tmp_path, procs=mesh)
    assert run(mesh, tmp_path, "kept") == [5, 5]
    run(mesh, tmp_path, "old_model = model; del model; kept = 6")
    with pytest.raises(errors.UsageError, match="the module model, which is not there: run the cell that makes it"):
        meshbook.restore(tmp_path, procs=mesh)
    assert run(mesh, tmp_path, "model = old_model; kept") == [6, 6]


@pytest.mark.parametrize("at", ["files.hash_entry", "files.copy_to_host", "files.SaveFiles.write", "restoring._load"])
def test_an_interrupt_leaves_a_mesh_that_saves(mesh: ProcMesh, saved: Path, at: str) -> None:
    """A rank takes long in the middle of its part, and the others wait for it, or have theirs already."""
    owner, name = at.rsplit(".", 1)
    slow = f"""
        import os, meshbook.checkpoint.files as files, meshbook.checkpoint.restoring as restoring
        real = {at}
        def slowly(*args, **options):
            {at} = real
            open(d + "/entered", "w").close()
            until = time.monotonic() + 60
            while time.monotonic() < until and not os.path.exists(d + "/go"):
                time.sleep(0.01)
            return real(*args, **options)
        if rank == 1: {at} = slowly
    """
    run(mesh, saved, slow)
    wait = name == "write"
    values = "{'model': model, 'own': torch.full((3,), rank)}"
    call = mesh.run(
        f"meshbook.save(d, {values}, wait={wait})" if owner != "restoring" else "meshbook.restore(d, {'model': model})"
    )
    wait_until((saved / "entered").exists)
    mesh.interrupt()
    with pytest.raises(errors.MeshError):
        call.get(60)
    run(mesh, saved, "nn.init.zeros_(model.weight)")
    (saved / "go").write_text("")
    (saved / "entered").unlink()
    run(mesh, saved, "meshbook.save(d, {'model': model})")  # after the end of the other one
    (saved / "go").unlink()
    assert sorted(path.name for path in saved.iterdir()) == ["save-1", "save-2"]
    assert (
        run(mesh, saved, "meshbook.restore(d, {'model': model}).step, model.weight.sum().item()") == [(None, 0.0)] * 2
    )


def test_a_rank_that_ends_while_the_others_write(mesh2: ProcMesh, tmp_path: Path) -> None:
    run(mesh2, tmp_path, BEGIN)
    run(mesh2, tmp_path, "meshbook.save(d, {'model': model, 'step': 1})")
    slow = """
        import os, signal, meshbook.checkpoint.files as files
        def die(self):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1: files.SaveFiles.write = die
        future = meshbook.save(d, {'model': model, 'step': 2}, wait=False)
        None
    """
    try:
        run(mesh2, tmp_path, slow)
    except errors.WorkerLost:
        pass
    wait_until(lambda: mesh2.lost)
    with pytest.raises(errors.MeshError):
        meshbook.save(tmp_path, procs=mesh2)
    mesh2.heal()
    run(mesh2, tmp_path, BEGIN)
    why = mesh2.select([0]).evaluate("str(future.exception(30))").get(60).values()[0]
    assert re.match("nothing was saved: a rank ended, or the process groups were formed again", why), why
    assert run(mesh2, tmp_path, "v = {'model': model, 'step': 0}; meshbook.restore(d, v); v['step']") == [1, 1]
    assert_it_goes_on(mesh2, tmp_path)


def test_meshes_without_groups(tmp_path: Path, clean_end: None) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="bare", device="cpu", group=False) as bare:
        bare.run("x = 1").get(60)
        with pytest.raises(errors.UsageError, match="without"):
            meshbook.save(tmp_path, procs=bare)
    with this_host().spawn_procs({"gpus": 2}, name="plain", torch=False) as plain:
        plain.run("x = 1").get(60)
        with pytest.raises(errors.MeshError, match="no rank of a mesh with torch"):
            meshbook.save(tmp_path, procs=plain)
    assert list(tmp_path.iterdir()) == []
