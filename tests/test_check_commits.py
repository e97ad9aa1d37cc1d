"""The check of the commits' subjects looks at those that are new, and finds what it is there for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import check_commits
import pytest

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git: apt-get install git")

LONG = "A subject of a time before the rule, " * 3


class Repository:
    """A repository of its own whose commits change no file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(self.folder), *who, *arguments], check=True, timeout=60)

    def commit(self, subject: str) -> None:
        self.git("commit", "-q", "--allow-empty", "-m", subject)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """The repository has one commit on main, from before the rule."""
    made = Repository(tmp_path)
    made.commit(LONG)
    return made


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("x" * 73, "it has 73 characters"),
        ("WIP", "it is unfinished"),
        ("wip: halos", "it is unfinished"),
        ("fixup! Halos are sent", "it is unfinished"),
        ("halos are sent", "it begins with a small letter"),
        ("Halos are sent.", "it ends with a full stop"),
        ("Fixed the halos", "'Fixed' tells of the past"),
    ],
)
def test_subjects_that_say_too_much_or_too_little_are_told(
    repository: Repository, capsys: pytest.CaptureFixture[str], subject: str, fault: str
) -> None:
    repository.git("switch", "-q", "-c", "halos")
    repository.commit(subject)
    assert check_commits.main([], repository.folder) == 1
    told = capsys.readouterr().out.splitlines()
    assert repr(subject) in told[0]
    assert fault in told[0]


@pytest.mark.parametrize("subject", ["x".upper() * 72, "Fix the halos", "torch.roll sends halos", "8 ranks send halos"])
def test_good_subjects_pass(repository: Repository, capsys: pytest.CaptureFixture[str], subject: str) -> None:
    repository.git("switch", "-q", "-c", "halos")
    repository.commit(subject)
    assert check_commits.main([], repository.folder) == 0
    assert capsys.readouterr().out == "Subjects of commits are in order: 1 that main does not have.\n"


def test_commits_before_the_last_tag_are_not_looked_at(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.git("tag", "v1")
    repository.commit("Send halos")
    assert check_commits.main([], repository.folder) == 0
    assert capsys.readouterr().out == "Subjects of commits are in order: 1 since the tag v1.\n"
    assert check_commits.main(["HEAD"], repository.folder) == 1


def test_a_clone_of_main_has_nothing_new(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.git("clone", "-q", str(repository.folder), str(tmp_path / "clone"))
    assert check_commits.main([], tmp_path / "clone") == 0
    assert capsys.readouterr().out == "No new commits to look at: there is no tag, and origin/main has them all.\n"
    clone = Repository(tmp_path / "clone")
    clone.commit(LONG)
    assert check_commits.main([], clone.folder) == 1


def test_a_folder_that_is_no_repository_has_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert check_commits.main([], tmp_path) == 0
    assert "no git" in capsys.readouterr().out


def test_a_range_that_git_does_not_know_is_told(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_commits.main(["nowhere..HEAD"], repository.folder) == 2
    assert "git knows no commits nowhere..HEAD" in capsys.readouterr().out
