"""``make notebooks-save`` on small notebooks, and what the outputs in git must hold to."""

from __future__ import annotations

import getpass
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest

from notebooks.normalise import Machine, normalise
from notebooks.save import check_sizes

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
SAVE_LIMIT_S = 240
BIG = "import base64, os; from IPython.display import Image, display; display(Image(os.urandom(101_000), format='png'))"
NO_DAEMON = "class NoDaemonError(Exception): ...\nraise NoDaemonError('there is no sshd')"
SOURCES = {
    "good": "import os, time\nprint('in process', os.getpid(), os.getcwd() + '/x')\ntime.sleep(0.1)\nprint('on')",
    "fails": "1 / 0",
    "no-daemon": NO_DAEMON,
    "big": BIG,
}


class Saved(NamedTuple):
    folder: Path
    result: subprocess.CompletedProcess[str]

    def line(self, name: str) -> str:
        """What was said of a notebook in the end."""
        (found,) = [line for line in self.result.stdout.splitlines() if line.startswith(f"{name}.ipynb  ")]
        return found.partition("  ")[2]


def save(folder: Path, *names: str) -> Saved:
    paths = [str(folder / f"{name}.ipynb") for name in names]
    return Saved(
        folder,
        subprocess.run(
            [sys.executable, "-m", "notebooks.save", *paths],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SAVE_LIMIT_S,
        ),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    for name, source in SOURCES.items():
        cell = nbformat.v4.new_code_cell(source, id="only", metadata={"answers": ["a"]})
        metadata = {"kernelspec": {"name": "python3", "display_name": "python3"}}
        nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=metadata), folder / f"{name}.ipynb")
    return save(folder, *SOURCES)


@pytest.mark.slow
def test_outputs_are_saved_normalised(saved: Saved) -> None:
    assert saved.line("good") == "saved", saved.result.stdout + saved.result.stderr
    (cell,) = nbformat.read(saved.folder / "good.ipynb", as_version=4).cells
    assert [output.text for output in cell.outputs] == ["in process 1001 …/x\non\n"]
    assert (cell.id, cell.execution_count, cell.metadata) == ("only", 1, {"answers": ["a"]})
    assert (saved.folder / "good.ipynb").read_text().endswith("}\n")


@pytest.mark.slow
def test_a_notebook_that_says_the_same_is_left_as_it_is(saved: Saved) -> None:
    before = (saved.folder / "good.ipynb").stat().st_mtime_ns
    assert save(saved.folder, "good").line("good") == "says the same as before"
    assert (saved.folder / "good.ipynb").stat().st_mtime_ns == before


@pytest.mark.quick("no-daemon", "big")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fails", "NOT SAVED: it failed"),
        ("no-daemon", "skipped: there is no sshd"),
        ("big", "NOT SAVED: cell only of big.ipynb has a picture of 101 kB, and at most 100 kB go into git"),
    ],
    ids=["fails", "no-daemon", "big"],
)
def test_what_cannot_be_saved_says_why_and_stays(saved: Saved, name: str, told: str) -> None:
    assert saved.line(name).startswith(told)
    (cell,) = nbformat.read(saved.folder / f"{name}.ipynb", as_version=4).cells
    assert not cell.outputs
    assert saved.result.returncode == 1


@pytest.mark.slow
def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "notebooks.save", "quickstar"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "There is no notebook quickstar; there are actors, batch_inference, " in result.stderr


# ---- in git ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def in_git(request: pytest.FixtureRequest) -> Any:
    return nbformat.read(request.param, as_version=4)


def texts_of(notebook: Any) -> str:
    parts = [
        text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        for text in (
            output.get("text", ""),
            *output.get("traceback", ()),
            *(data for mime, data in output.get("data", {}).items() if mime.startswith("text/")),
        )
    ]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(parts))


def test_notebooks_are_for_our_kernel_and_were_executed_in_order(in_git: Any) -> None:
    nbformat.validate(in_git)
    assert in_git.metadata.kernelspec.name == "meshbook"
    assert in_git.metadata.language_info == {"name": "python"} and "widgets" not in in_git.metadata
    code = [cell for cell in in_git.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]


def test_outputs_tell_nothing_of_the_machine(in_git: Any) -> None:
    text = texts_of(in_git)
    assert text
    assert not re.findall(r"(?<![\w.:/<…])~?/(?:home|root|tmp|usr|opt|var|Users|mnt|proc)\b\S*|site-packages", text)
    assert not re.findall(r"0x[0-9a-f]{6,}|\b\d\d:\d\d:\d\d\b|\b20\d\d-\d\d-\d\d\b", text)
    assert all(1000 < int(pid) < 1100 for pid in re.findall(r"\b(?:pid|process) (\d+)", text))
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], getpass.getuser()} - {"root", "localhost"}
    sources = "\n".join(cell.source for cell in in_git.cells)
    for name in names - {*re.findall(r"[\w.-]+", sources)}:
        assert not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text), name


def test_outputs_are_normalised(in_git: Any) -> None:
    before = nbformat.writes(in_git)
    normalise(in_git, Machine.here())
    assert nbformat.writes(in_git) == before, "make notebooks-save saves it again"


def test_outputs_are_small(in_git: Any) -> None:
    check_sizes(in_git, "it")
