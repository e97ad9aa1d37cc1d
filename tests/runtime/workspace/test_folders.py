"""Copies of folders: only what differs, whole files, nothing outside of the copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshbook.errors import UsageError
from meshbook.tools.config import Workspace
from meshbook.tools.config.workspace import Workspace as SameWorkspace
from meshbook.workspace import folders
from meshbook.workspace.folders import checked_name, list_folder, missing_there, tidy_there, write_there


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKSPACE_DIR", str(tmp_path / "there"))
    return tmp_path / "there" / "copy"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    here = tmp_path / "here"
    (here / "deep" / "er").mkdir(parents=True)
    (here / "one.txt").write_text("one")
    (here / "deep" / "er" / "same.txt").write_text("one")
    (here / "run.sh").write_text("echo")
    (here / "run.sh").chmod(0o755)
    (here / "link").symlink_to("deep")
    (here / "__pycache__").mkdir()
    (here / "__pycache__" / "one.pyc").write_bytes(b"cache")
    return here


def copy(here: Path) -> list[str]:
    """As a program and a host do it; returns the versions that travelled."""
    marks = list_folder(here)
    missing = missing_there("copy", marks)
    by_version = {mark.version: (here / mark.path).read_bytes() for mark in marks if not mark.is_link}
    write_there("copy", {version: by_version[version] for version in missing}, marks)
    assert Path(tidy_there("copy", marks)).name == "copy"
    return missing


def test_a_copy_is_what_the_folder_is_and_equal_content_travels_once(here: Path, there: Path) -> None:
    assert len(copy(here)) == 2  # "one", which two files hold, and "echo"
    assert (there / "deep" / "er" / "same.txt").read_text() == "one"
    assert os.readlink(there / "link") == "deep" and not (there / "__pycache__").exists()
    assert (there / "run.sh").stat().st_mode & 0o777 == 0o755
    assert copy(here) == []


def test_what_is_no_more_goes_and_what_others_have_put_there_stays(here: Path, there: Path) -> None:
    copy(here)
    (there / "theirs.txt").write_text("theirs")
    (there / "one.txt").write_text("ONE")
    (here / "deep" / "er" / "same.txt").unlink()
    (here / "run.sh").chmod(0o700)
    assert len(copy(here)) == 1
    assert (there / "one.txt").read_text() == "one" and (there / "theirs.txt").read_text() == "theirs"
    assert not (there / "deep").exists() and (there / "run.sh").stat().st_mode & 0o777 == 0o700


def test_folders_files_and_links_take_each_others_places_and_no_link_leads_out(
    here: Path, there: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "same.txt").write_text("precious")
    (outside / "kept.txt").write_text("precious")
    copy(here)
    (here / "deep" / "er" / "same.txt").rename(here / "kept.txt")
    (here / "deep" / "er").rmdir()
    (here / "deep").rmdir()
    (here / "deep").symlink_to(outside)
    (here / "link").unlink()
    (here / "link").mkdir()
    (here / "link" / "kept.txt").write_text("within")
    copy(here)
    assert os.readlink(there / "deep") == str(outside) and (there / "link" / "kept.txt").read_text() == "within"
    (here / "deep").unlink()
    (here / "deep").mkdir()
    (here / "deep" / "kept.txt").write_text("within")
    copy(here)
    assert (there / "deep" / "kept.txt").read_text() == "within"
    assert {path.name: path.read_text() for path in outside.iterdir()} == {
        "same.txt": "precious",
        "kept.txt": "precious",
    }


def test_a_workspace_names_folders_as_monarchs_does(here: Path, tmp_path: Path) -> None:
    assert SameWorkspace is Workspace
    assert Workspace(dirs=[here]).dirs == {here: "here"}
    assert Workspace(dirs={str(here): "github/project"}).dirs == {here: "github/project"}
    assert Workspace(dirs=["~/project"]).dirs == {Path.home() / "project": "project"}
    assert Workspace() == Workspace.null() and Workspace(dirs=[here]) != Workspace()
    Workspace(dirs={here: ""}).merge(tmp_path / "merged")
    assert (tmp_path / "merged" / "one.txt").read_text() == "one"


@pytest.mark.parametrize("dirs", ["a/folder", Path("a"), [""], {"": "x"}])
def test_what_names_no_folders(dirs: object) -> None:
    with pytest.raises(UsageError, match=r"dirs is a list of folders|a folder is named by its path"):
        Workspace(dirs=dirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["/etc", "../x", "a/../../x", "a\0b", 7, None])
def test_copies_lie_within_the_workspace(name: object) -> None:
    with pytest.raises(UsageError, match="a copy lies within the workspace of the host"):
        checked_name(name)


def test_a_folder_that_is_none_and_one_that_is_too_large(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*one\.txt; a workspace has folders"):
        list_folder(here / "one.txt")
    monkeypatch.setattr(folders, "MOST_BYTES", 3)
    with pytest.raises(UsageError, match=r"has 4 files, 10 B in all, and 3 B are the most"):
        list_folder(here)
