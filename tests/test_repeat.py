"""What runs the suite again and again finds the tests that fail now and then, and ends what it started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import repeat
from patience import wait_until

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make: apt-get install make")

SUITE = """
from pathlib import Path

def test_fails_every_second_time():
    seen = Path(__file__).with_name("seen")
    if seen.exists():
        seen.unlink()
        raise ValueError
    seen.touch()

def test_passes(): pass
"""
PLUGINS = ["-p", "xdist", "-p", "pytest_timeout", "-p", "pytest_rerunfailures"]
"""Others only take time to be loaded."""
HANGS = """
import threading
from pathlib import Path

def test_waits():
    Path(__file__).with_name("begun").touch()
    threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "logs"
    monkeypatch.setattr(repeat, "LOGS", folder)
    return folder


def suite(folder: Path, text: str) -> list[str]:
    """Arguments with which pytest runs only this, with the settings of our own suite."""
    (folder / "suite").mkdir()
    (folder / "suite" / "test_it.py").write_text(text)
    return [
        *PLUGINS,
        "-n",
        "0",
        "-c",
        str(repeat.ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        str(folder / "suite"),
    ]


@pytest.mark.slow
def test_a_test_that_fails_now_and_then_is_named_and_counted(
    tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children()
    assert repeat.main(["3", "--beside", "1", "--", *suite(tmp_path, SUITE)]) == 1
    told = capsys.readouterr().out
    runs = re.findall(r"run (\d) of 3: \d+ s, \d+ s of CPU, (\d) passed, (\d) failed, 0 skipped", told)
    assert runs == [("1", "2", "0"), ("2", "1", "1"), ("3", "2", "0")], told
    name = "suite/test_it.py::test_fails_every_second_time"
    assert told.splitlines()[-1] == f"failed in 1 of 3: {name}"
    assert told.count(name) == 2
    assert "ValueError" in (logs / "2.txt").read_text()
    assert psutil.Process().children() == before


def test_a_run_that_names_no_failed_test_is_no_good_one(
    tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repeat.main(["1", "--", *suite(tmp_path, "def test_passes(): pass"), "--no-such-option"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "names no test that failed; see" in told[-2]
    assert told[-1] == "did not come to an end: 1 of 1"
    assert "--no-such-option" in (logs / "1.txt").read_text()


def test_computing_processes_have_sessions_of_their_own_and_end_with_the_block() -> None:
    with repeat.busy_loops(2) as loops:
        assert len({os.getsid(loop.pid) for loop in loops} | {os.getsid(0)}) == 3
        wait_until(lambda: all(psutil.Process(loop.pid).cpu_times().user > 0 for loop in loops))
    assert all(loop.returncode == -signal.SIGKILL for loop in loops)


@pytest.mark.some("9")
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_from_outside_ends_the_run_and_what_computes(tmp_path: Path, how: signal.Signals) -> None:
    arguments = ["2", "--beside", "2", "--", *suite(tmp_path, HANGS)]
    code = f"import pathlib, sys, repeat; repeat.LOGS = pathlib.Path({str(tmp_path)!r}); "
    code += "sys.exit(repeat.main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(repeat.__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)
    wait_until((tmp_path / "suite" / "begun").exists, 100)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    assert process.wait(100) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[how]
    if how == signal.SIGKILL:  # only what computes can know
        make = next(each for each in below if each.name() == "make")
        os.killpg(make.pid, signal.SIGKILL)
    assert psutil.wait_procs(below, 60)[1] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "required: runs"),
        (["0"], "'0' is no whole number from 1 on"),
        (["many"], "'many' is no whole number"),
        (["2", "--beside", "-1"], "'-1' is no whole number from 0 on"),
        (["2", "tests/runtime"], "unrecognized arguments: tests/runtime"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        repeat.main(arguments)
    assert told in capsys.readouterr().err
