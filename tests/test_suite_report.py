"""The end of a run names the files that it spent its time on, and says elsewhere what others want to know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import suite_report

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TESTS = """
import time
from pathlib import Path

def test_takes_its_time(): time.sleep({sleep_s})
def test_passes(): pass
"""
OF_ALL_KINDS = """
from pathlib import Path
import pytest

def test_passes_again():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise ValueError

def test_fails(): raise ValueError
def test_is_skipped(): pytest.skip("not today")

@pytest.fixture
def fails_late():
    yield
    raise ValueError

def test_leaves_something(fails_late): pass
"""


def run_suite(folder: Path, *arguments: str) -> list[str]:
    """What a run of the tests of a folder prints, with the settings of our own suite."""
    plugins = ["-p", "xdist", "-p", "pytest_timeout", "-p", "pytest_rerunfailures"]
    settings = [*plugins, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of those that only take time to be loaded
        suite_report.RERUN_LOG: str(folder / "reruns"),
        suite_report.RESULTS: str(folder / "results"),
    }
    command = [sys.executable, "-m", "pytest", *settings, *arguments, str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.splitlines()


@pytest.mark.quick("0")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_whole_run_names_its_dearest_files(tmp_path: Path, workers: str) -> None:
    for number in range(suite_report.WHOLE + 1):
        (tmp_path / f"test_{number}.py").write_text(TESTS.format(sleep_s=0.5 if number == 7 else 0))
    told = run_suite(tmp_path, "-n", workers)
    at = next(i for i, line in enumerate(told) if "the dearest 20 of 21 files" in line)
    assert re.fullmatch(r" +\d+\.\d s  test_7\.py \(2 tests\)", told[at + 1]), told
    assert [line.endswith(" tests)") for line in told[at + 1 :]].index(False) == suite_report.DEAREST
    assert "42 passed" in told[-1]


def test_a_part_of_the_suite_names_none(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.format(sleep_s=0))
    told = run_suite(tmp_path, "-n", "0")
    assert "2 passed" in told[-1]
    assert not any("dearest" in line for line in told)
    assert not (tmp_path / "reruns").exists()


@pytest.mark.quick("0")
@pytest.mark.parametrize("workers", ["0", "1"])
def test_results_and_second_tries_are_written_where_the_environment_says(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(OF_ALL_KINDS)
    (tmp_path / "test_unreadable.py").write_text("def test_(")
    run_suite(tmp_path, "-n", workers, "--reruns", "1", "--continue-on-collection-errors")
    failures = ["test_it.py::test_fails", "test_it.py::test_leaves_something", "test_unreadable.py"]
    results = json.loads((tmp_path / "results").read_text())
    assert results == {"counts": {"passed": 1, "failed": 3, "skipped": 1}, "failures": failures}
    reruns = [line.partition(" (Python 3.") for line in (tmp_path / "reruns").read_text().splitlines()]
    names = [name for name, _, _ in reruns]
    assert names == [f"test_it.py::{name}" for name in ("test_passes_again", "test_fails", "test_leaves_something")]
    assert all(rest.endswith(": ValueError") for _, _, rest in reruns), reruns
