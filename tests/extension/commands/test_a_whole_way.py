"""A stranger's way: from a script of torchrun into the notebook, past a death, to another size, and out again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BUILD = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
"""
TRAIN = """
def train(steps):
    global step
    for _ in range(steps):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(48, 16, generator=drawn)
        y = x.prod(1, keepdim=True).tanh()
        part = slice(rank, None, world_size)
        loss = (model(x[part]) - y[part]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.7f}")
        step += 1
"""


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"step \d+ loss ([\d.]+)", text)]


def by_torchrun(count: int, *command: str) -> list[float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run([*launch, *command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def test_a_script_becomes_a_notebook_and_a_script_again(empty_notebook: Notebook, tmp_path: Path) -> None:
    notebook = empty_notebook
    script, saves, exported = tmp_path / "train.py", tmp_path / "saves", tmp_path / "exported.py"
    script.write_text(f"{BUILD}{TRAIN}\ntrain(int(sys.argv[1]))\n")
    expected = by_torchrun(4, str(script), "12")
    assert len(expected) == 12

    # the script as it is, then in cells
    notebook.run("%mesh spawn gpus=4 --device cpu")
    assert losses(notebook.run(f"%mesh run {script} 4").stdout) == pytest.approx(expected[:4], abs=1e-6)
    notebook.run(f"%%mesh --setup\n{BUILD}{TRAIN}")
    assert losses(notebook.run("%%mesh\ntrain(4)").stdout) == pytest.approx(expected[:4], abs=1e-6)
    notebook.run(f"%mesh save {saves}")
    notebook.run("%%mesh\ntrain(3)")

    # a rank is lost: all go back to the save, then to another size
    notebook.fail("%%mesh rank=3\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "last save: step 4" in notebook.try_to_run("%mesh heal").stdout
    assert "restored model, opt, step on ranks 0-3" in notebook.run("%mesh heal --restore").stdout
    assert losses(notebook.run("%%mesh\ntrain(4)").stdout) == pytest.approx(expected[4:8], abs=1e-6)
    notebook.run(f"%mesh save {saves}")
    notebook.run("%mesh shrink gpus=2")
    notebook.run("%mesh respawn rank=: --replay")
    assert "saved from 4 ranks" in notebook.run(f"%mesh restore {saves}").stdout
    assert losses(notebook.run("%%mesh\ntrain(4)").stdout) == pytest.approx(expected[8:], abs=1e-5)

    # what was worked out goes on without the notebook, to the same numbers
    notebook.run(f"%%mesh\n{BUILD}{TRAIN}")
    notebook.run("%%mesh\ntrain(6)\ntrain(6)")
    last = notebook.shell.execution_count - 1
    told = notebook.run(f"%mesh export {exported} {last - 1}-{last} --verify").stdout
    assert "verified: " in told
    assert by_torchrun(2, str(exported)) == pytest.approx(expected, abs=1e-5)
    assert by_torchrun(4, str(exported)) == pytest.approx(expected, abs=1e-6)
