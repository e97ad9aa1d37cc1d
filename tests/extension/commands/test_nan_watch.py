"""``%mesh watch --nan``: the first value that is not finite is named with its place, step and rank, in one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.extension.conftest import Notebook

MODEL = """%%mesh
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(bad_rank, bad_step, bad=float("nan"), steps=6):
    for step in range(steps):
        x = torch.ones(2, 4)
        if rank == bad_rank and step == bad_step: x[0, 0] = bad
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def trained(notebook: Notebook) -> Notebook:
    notebook.run(MODEL)
    return notebook


@pytest.fixture(autouse=True)
def nothing_watched(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%mesh watch --stop")


def test_the_rank_whose_module_made_a_nan_is_named_with_its_step_once(trained: Notebook) -> None:
    said = trained.run("%mesh watch --nan")
    assert (said.stdout, said.stderr, said.displays) == ("", "", [])
    ran = trained.run("%%mesh\ntrain(2, 3)")
    line = "a NaN is on rank 2 in the output of model.module.0 (Linear) at step 3\n"
    assert (ran.stderr, ran.stdout) == (line, ""), ran
    again = trained.run("%%mesh\ntrain(-1, 0, steps=2)")  # the weights are NaN by now
    assert again.stderr == "a NaN is on ranks 0-3 in the output of model.module.0 (Linear) at step 0\n"


def test_infinities_and_gradients_are_told_too(trained: Notebook) -> None:
    trained.run(MODEL)
    trained.run("%mesh watch --nan")
    ran = trained.run("%%mesh\ntrain(1, 1, float('inf'))")
    assert ran.stderr == (
        "a value that is not finite is on rank 1 in the output of model.module.0 (Linear) at step 1\n"
    )
    cell = """%%mesh
w = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(w.parameters(), lr=0.1)
(w(torch.ones(1, 2)).abs() * 0).sqrt().sum().backward()
sgd.step()"""
    assert trained.run(cell).stderr == "a NaN is on ranks 0-3 in the gradient of w.weight at step 0\n"


def test_a_logged_scalar_is_told_with_its_own_step(trained: Notebook) -> None:
    trained.run("%mesh watch --nan")
    cell = """%%mesh
import meshbook
for step in range(10, 20):
    meshbook.log(step=step, loss=float("nan") if step > 14 else 1.0)"""
    assert trained.run(cell).stderr == "a NaN is on ranks 0-3 in the loss at step 15\n"
    own = trained.run("import meshbook\nfor step in range(3): meshbook.log(mine=[1.0, 2.0, float('inf')][step])")
    assert own.stderr == "a value that is not finite is in the mine at step 2\n"


def test_without_the_watch_nothing_is_said_and_nothing_is_hooked(trained: Notebook) -> None:
    trained.run(MODEL)
    trained.run("%mesh watch --nan")
    trained.run("%mesh watch --stop")
    ran = trained.run("%%mesh\ntrain(0, 1)\nfrom torch.nn.modules import module\nlen(module._global_forward_hooks)")
    assert ran.stderr == "" and ran.plain.strip() == "[0-3] 0"


def test_a_job_that_runs_already_is_watched_and_told_at_once(trained: Notebook) -> None:
    trained.run(MODEL)
    job = """%%mesh --async
import time
for turn in range(30):
    train(3, 0 if turn == 25 else -1, steps=1)
    time.sleep(0.1)"""
    trained.run(job)
    assert trained.run("%mesh watch --nan").stderr == ""
    trained.run("%mesh wait")
    shown = trained.run("%mesh output")
    line = "a NaN is on rank 3 in the output of model.module.0 (Linear) at step "
    assert line in shown.stdout + shown.stderr, shown


def test_a_new_rank_is_watched_too(trained: Notebook) -> None:
    trained.run("%mesh watch --nan")
    trained.run("%mesh respawn rank=1")
    cell = """%%mesh --no-collective
model2 = torch.nn.Linear(2, 2)
model2(torch.full((1, 2), float("nan") if rank == 1 else 1.0)).sum()
None"""
    ran = trained.run(cell)
    assert ran.stderr == "a NaN is on rank 1 in the output of model2 (Linear) at step 0\n"
    assert "output of" not in trained.run("%mesh watch").plain
