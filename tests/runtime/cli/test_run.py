"""meshbook run: a script of torchrun on ranks that end with it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.runtime.cli.conftest import COMMAND, Run

SCRIPT = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
if sys.argv[1:] == [os.environ["RANK"]]:
    raise ValueError("bad shard")
dist.all_reduce(total)
print("total", total.item(), "with", sys.argv[1:], end="")
dist.destroy_process_group()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "train.py").write_text(SCRIPT)
    return path


def test_a_script_prints_with_its_ranks_and_ends_with_0(meshbook: Run, script: Path) -> None:
    ran = meshbook("run", "--gpus", "2", str(script), "--lr")
    assert sorted(ran.stdout.splitlines()) == ["[0] total 3.0 with ['--lr']", "[1] total 3.0 with ['--lr']"]
    assert (ran.returncode, ran.stderr) == (0, "")


def test_its_exit_code_is_that_of_the_script(meshbook: Run, script: Path) -> None:
    ran = meshbook("run", "--gpus", "2", str(script), "--exit", "7")
    assert ran.returncode == 7 and "ranks 0,1 raised ScriptExit" in ran.stderr
    assert "train.py ended with exit code 7" in ran.stderr


def test_a_rank_that_raises_ends_the_others(meshbook: Run, script: Path) -> None:
    ran = meshbook("run", "--gpus", "2", str(script), "1")
    assert ran.returncode == 1
    assert "rank 1 raised ValueError: bad shard" in ran.stderr and "train.py:5" in ran.stderr
    assert "rank 0 was waiting in all_reduce (train.py, line 6)" in ran.stderr and "\x1b[" not in ran.stderr


def test_hosts_of_an_engine_run_it_too(meshbook: Run, script: Path) -> None:
    ran = meshbook("run", "--hosts", "2", "--gpus", "1", str(script))
    assert ran.returncode == 0 and ran.stdout.count("total 3.0") == 2, ran.stderr


def test_a_module_is_run_by_its_name(meshbook: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    assert meshbook("run", "--gpus", "1", "-m", "part", "-x").stdout == "[0] __main__ ['-x']\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "name the script to run"),
        (["run", "tran.py"], "there is no tran.py"),
        (["run", "--gpus", "0", "train.py"], "--gpus and --hosts are numbers from 1 on."),
        (["run", "--on", "slrm", "train.py"], 'unknown engine "slrm". Did you mean "slurm"?'),
        (["run", "--on", "slurm", "train.py"], "say how many nodes of Slurm: hosts=N."),
        (["run", "wrong.py"], "wrong.py, line 1: invalid syntax"),
    ],
)
def test_bad_usage_is_a_clear_line(
    meshbook: Run, script: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    script.with_name("wrong.py").write_text("def (\n")
    ran = meshbook(*words)
    assert ran.returncode == 2 and says in ran.stderr and ran.stderr.count("\n") <= 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_its_ranks(number: signal.Signals, code: int, tmp_path: Path) -> None:
    (path := tmp_path / "loop.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen([*COMMAND, "run", "--gpus", "1", str(path)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        rank = psutil.Process(int(running.stdout.readline().split()[1]))
        running.send_signal(number)
        assert running.wait(60) == code
    psutil.wait_procs([rank], timeout=30)
    assert not rank.is_running()
