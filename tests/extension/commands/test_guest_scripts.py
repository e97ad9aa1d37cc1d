"""Scripts of Accelerate, Lightning and transformers: unchanged by torchrun, by %mesh run and by %run in a cell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPTS = Path(__file__).parents[2] / "guests"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def notebook(empty_notebook: Notebook) -> Notebook:
    """Two ranks, which serve all scripts one after the other."""
    empty_notebook.run("%mesh spawn gpus=2 --device cpu")
    return empty_notebook


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^(?:\[0\] )?(?:epoch|step) \d+ loss ([\d.]+)$", text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("script", "package", "steps"),
    [
        ("accelerate_loop.py", "accelerate", 12),
        ("fabric_loop.py", "lightning", 12),
        ("lightning_trainer.py", "lightning", 8),
        ("hugging_face_trainer.py", "transformers", 5),
    ],
)
def test_losses_are_those_of_torchrun(notebook: Notebook, script: str, package: str, steps: int) -> None:
    pytest.importorskip(package)
    path = SCRIPTS / script
    by_torchrun = subprocess.run([*LAUNCH, str(path)], capture_output=True, text=True, timeout=200)
    expected = losses(by_torchrun.stdout)
    assert len(expected) == steps, by_torchrun.stderr
    for cell in (f"%mesh run {path}", f"%mesh run {path}", f"%%mesh\n%run {path}"):
        assert losses(notebook.run(cell).stdout) == pytest.approx(expected, abs=1e-6)
    notebook.run("%%mesh\nx = torch.ones(1); dist.all_reduce(x); x.item()")
    assert notebook["_mesh"].values() == [2.0, 2.0]
