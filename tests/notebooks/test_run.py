"""The runner behind ``make demo``, on small notebooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(NOTEBOOKS / "run.py"), str(path), *options], capture_output=True, text=True, timeout=60
    )


def write(path: Path, *sources: str, kernel: str = "python3") -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    metadata = {"kernelspec": {"name": kernel, "display_name": kernel}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


@pytest.mark.slow
def test_prints_each_cell_with_its_output(tmp_path: Path) -> None:
    result = run(write(tmp_path / "small.ipynb", "print('a', end=''); print('b')", "6 * 7"))
    assert result.returncode == 0, result.stderr
    assert "[1] print('a', end=''); print('b')\n    ab\n[2] 6 * 7\n    42\n" in result.stdout
    assert "small.ipynb passed: 2 cells in " in result.stdout


@pytest.mark.slow
def test_failing_cell_stops_the_run_and_sets_the_exit_code(tmp_path: Path) -> None:
    result = run(write(tmp_path / "small.ipynb", "1 / 0", "print('never')"))
    assert result.returncode == 1
    assert "ZeroDivisionError: division by zero" in result.stdout
    assert "small.ipynb failed: a cell raised an error; " in result.stdout
    assert "never" not in result.stdout


@pytest.mark.slow
def test_questions_are_answered_from_the_cells_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "small.ipynb", "print('hello', input('who? '), input('and? '))", "print('on')")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].metadata["answers"] = ["Ada", "Bob"]
    nbformat.write(notebook, path)
    result = run(path, "--save", str(tmp_path / "saved.ipynb"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "    who? Ada\n    and? Bob\n    hello Ada Bob\n[2] print('on')\n    on\n" in result.stdout
    saved = nbformat.read(tmp_path / "saved.ipynb", as_version=4)
    assert "who? Ada" in saved.cells[0].outputs[0]["text"]


@pytest.mark.slow
def test_a_question_without_an_answer_does_not_hang(tmp_path: Path) -> None:
    path = write(tmp_path / "small.ipynb", "input('who? '), input('and? ')")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].metadata["answers"] = ["Ada"]
    nbformat.write(notebook, path)
    assert "EOFError" in run(path).stdout


@pytest.mark.slow
def test_silent_cell_meets_its_time_limit(tmp_path: Path) -> None:
    result = run(write(tmp_path / "small.ipynb", "import time; time.sleep(600)"), "--timeout", "2")
    assert result.returncode == 1
    assert "timed out" in result.stdout


@pytest.mark.slow
def test_notebook_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    missing = run(tmp_path / "nothing.ipynb")
    assert missing.returncode == 2
    assert "There is no notebook" in missing.stderr
    no_kernel = run(write(tmp_path / "small.ipynb", "1", kernel="fortran-77"))
    assert no_kernel.returncode == 2
    assert "fortran-77" in no_kernel.stderr
