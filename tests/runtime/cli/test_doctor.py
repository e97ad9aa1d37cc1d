"""``meshbook doctor`` on this machine, and on one that it is told to find fault with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from controllers import Zygote

from meshbook import __version__
from meshbook.launchers.registry import ENGINES, Engine
from tests.runtime.cli.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_report_has_all_that_an_issue_needs_and_nothing_secret(
    zygote: Zygote, meshbook: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHBOOK_OF_MINE", "hush-hush")
    told = meshbook("doctor", "--json")
    report = json.loads(told.stdout)
    facts, faults = report["facts"], report["faults"]
    assert facts["meshbook"].startswith(__version__)
    assert facts["torch"].startswith("2.") and "CUDA" in facts["torch"] and "NCCL" in facts["torch"]
    assert "ipykernel" in facts["jupyter"] and "kernel python3" in facts
    assert {"system", "ulimits", "pidfd", "/dev/shm", "sessions", "logs", "meshes"} <= facts.keys()
    assert all(name in facts["engines"] for name in ENGINES)
    assert "up in" in facts["two ranks"] and "all_reduce of 1 MB by" in facts["two ranks"]
    assert "MESHBOOK_OF_MINE" in facts["variables set"] and "hush-hush" not in told.stdout + told.stderr
    assert told.returncode == (1 if any(fault["weight"] for fault in faults) else 0)
    assert all(fault["what"] and fault["mend"] for fault in faults)


def test_faults_come_worst_first_with_how_to_mend_them(
    zygote: Zygote, meshbook: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    spec = tmp_path / "kernels" / "lost" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/nowhere/python", "-m", "meshbook_kernel"], "display_name": "Lost"}))
    told = meshbook("doctor")
    assert told.returncode == 1, told.stderr
    assert "is too long for sockets\n  mend: set XDG_RUNTIME_DIR to a shorter one" in told.stdout
    lost = "kernel lost names /nowhere/python, which is not there\n  mend: jupyter kernelspec remove lost"
    assert lost in told.stdout
    assert "two ranks on cpu do not work: " in told.stdout
    assert told.stdout.index("too long for sockets") < told.stdout.index("kernel lost names")
    assert "nothing is wrong" not in told.stdout


@pytest.mark.parametrize(
    ("engine", "missing"),
    [(Engine("local"), ""), (Engine("sh", program="sh"), ""), (Engine("x", program="no-such"), "no-such"),
     (Engine("x", package="no_such"), "no_such"), (Engine("x", package="json"), "")],
)  # fmt: skip
def test_an_engine_tells_what_it_lacks_here(engine: Engine, missing: str) -> None:
    assert engine.missing == missing
