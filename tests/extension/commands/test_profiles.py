"""``%mesh spawn @NAME``: lines that a project has written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshbook.errors import UsageError
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.commands.spawn import find_profiles, with_profile
from meshbook_extension.notebook.grammar import Arguments, parse


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two profiles; the notebook lies in a folder of it."""
    (tmp_path / "meshbook.toml").write_text(
        "[spawn]\n"
        'small = "gpus=2 --no-torch --name little"\n'
        'far = "gpus=8 --on ssh:nodeA --env A=1 -- -p 2222"\n'
        'wrong = "gpus=2 --nmae x"\n'
        'turns = "@small"\n'
    )
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    monkeypatch.chdir(notebooks)
    return tmp_path


def read(line: str) -> Arguments:
    load_all()
    return with_profile(parse(COMMANDS["spawn"][0], line))


def test_it_stands_for_its_line(project: Path) -> None:
    arguments = read("@far")
    assert (arguments.pairs, arguments.rest) == ({"gpus": "8"}, ("-p", "2222"))
    assert (arguments.text("--on"), arguments.text("--env")) == ("ssh:nodeA", "A=1")


def test_what_is_typed_counts(project: Path) -> None:
    arguments = read("@far gpus=1 tp=2 --on local --no-group -- -v")
    assert (arguments.pairs, arguments.rest) == ({"gpus": "1", "tp": "2"}, ("-v",))
    assert (arguments.text("--on"), arguments.flag("--no-group")) == ("local", True)


def test_the_nearest_file_that_has_some_counts(project: Path) -> None:
    (project / "notebooks" / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert find_profiles(Path.cwd()).path == project / "meshbook.toml"
    (project / "notebooks" / "pyproject.toml").write_text('[tool.meshbook.spawn]\nsmall = "gpus=3"\n')
    assert read("@small").pairs == {"gpus": "3"}


@pytest.mark.parametrize(
    "line, said",
    [
        ("@smal", 'there is no profile "smal". Did you mean "small"? /'),
        ("@", 'there is no profile "@". /'),
        ("@wrong", 'meshbook.toml: unknown option "--nmae" of %mesh spawn. Did you mean "--name"?'),
        ("@turns", "meshbook.toml: a profile has axes, options, and what follows --"),
        ("@small @far", "one profile at a time, but got @small and @far."),
    ],
)
def test_what_makes_no_sense_is_told(project: Path, line: str, said: str) -> None:
    with pytest.raises(UsageError) as told:
        read(line)
    assert said in str(told.value)


def test_a_file_that_makes_no_sense_is_named(project: Path) -> None:
    (project / "meshbook.toml").write_text("[spawn]\nsmall = 3\n")
    with pytest.raises(UsageError, match=r"meshbook\.toml: each profile below \[spawn\] is a line"):
        read("@small")
    (project / "meshbook.toml").write_text("[spawn\n")
    with pytest.raises(UsageError, match=r"meshbook\.toml cannot be read for profiles: "):
        read("@small")


def test_without_a_file_it_says_how_to_write_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"No file here has any\.\n  write it in meshbook\.toml, here or above, below "
    ):
        read("@gpu")


def test_a_mesh_is_spawned_by_its_profile(empty_notebook: Any, project: Path) -> None:
    ran = empty_notebook.run("%mesh spawn @small")
    assert ran.stdout.startswith('mesh "little": gpus=2, cpu, no process group; ready in ')
    empty_notebook.run("%mesh stop little")
