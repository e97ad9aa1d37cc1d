"""``%mesh watch --nan``: the first value that is not finite is named with its place, step and rank, in one line."""

from __future__ import annotations

import re
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
    place = r"at cell \d+, line 11"  # no step was made in this cell yet
    assert re.fullmatch(rf"a NaN is on ranks 0-3 in the output of model\.module\.0 \(Linear\) {place}\n", again.stderr)


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


def test_the_step_is_that_of_the_log_or_of_the_optimizer_else_the_line_is_named(trained: Notebook) -> None:
    cell = """%%mesh
import meshbook
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range({first}, {first} + 4):
    x = torch.full((2, 4), float("nan") if step == {first} + 2 else 1.0)
    net(x).mean().backward()
    {rest}
None"""
    trained.run("%mesh watch --nan")
    logged = trained.run(cell.format(first=1_000_000, rest="sgd.step(); meshbook.log(step=step, lr=0.1)"))
    assert logged.stderr == "a NaN is on ranks 0-3 in the output of net (Linear) after step 1000001\n"
    one_logs = "sgd.step(); rank == 1 and meshbook.log(step=step, lr=0.1)"
    assert trained.run(cell.format(first=1_000_000, rest=one_logs)).stderr == logged.stderr
    counted = trained.run(cell.format(first=1_000_000, rest="sgd.step(); meshbook.log(lr=0.1)"))
    assert counted.stderr == "a NaN is on ranks 0-3 in the output of net (Linear) at step 2\n"
    neither = trained.run(cell.format(first=0, rest="pass"))
    assert re.fullmatch(r"a NaN is on ranks 0-3 in the output of net \(Linear\) at cell \d+, line 8\n", neither.stderr)
    assert "output of net (Linear) after step 1000001" in trained.run("%mesh metrics").stdout


def test_finds_take_none_of_the_names_of_a_program(trained: Notebook) -> None:
    trained.run("%mesh watch --nan")
    cell = """%%mesh
import meshbook
from meshbook.curves.recorder import recorder
net, before = torch.nn.Linear(4, 1), set(recorder.names)
net(torch.full((2, 4), float("nan")))
recorder.names == before"""
    ran = trained.run(cell)
    assert "output of net (Linear) at cell" in ran.stderr and ran.plain.strip() == "[0-3] True"


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
    assert re.fullmatch(r"a NaN is on rank 1 in the output of model2 \(Linear\) at cell \d+, line 3\n", ran.stderr)
    assert "output of" not in trained.run("%mesh watch").plain
