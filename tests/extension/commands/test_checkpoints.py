"""``%mesh save``, ``%mesh restore`` and ``%mesh heal --restore``, as a person uses them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from patience import wait_until

MAKE = """%%mesh --setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(nn.Linear(4, 4))
opt = torch.optim.AdamW(model.parameters(), lr=0.1)
losses, step = [], 0
def train(steps):
    global step
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).square().sum()
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item()); step += 1
    return losses
"""
ON_MESH = """
import meshbook, torch
mesh = meshbook.Mesh(shape=(2,), mesh_dim_names=("gpus",))
torch.manual_seed(1)
net = meshbook.module_to_mesh(torch.nn.Linear(4, 1), mesh)
adam = torch.optim.AdamW(net.parameters(), lr=0.1)
plan = torch.optim.lr_scheduler.StepLR(adam, 2)
rows = meshbook.ones(8, 4, mesh=mesh)
def go_on(steps):
    seen = []
    for _ in range(steps):
        loss = net(rows).square().mean()
        adam.zero_grad(); loss.backward(); adam.step(); plan.step()
        seen.append(round(float(loss.item()), 6))
    return seen
"""


@pytest.fixture(scope="module")
def two(empty_notebook: Any) -> Iterator[Any]:
    """Two ranks that train."""
    empty_notebook.run("%mesh spawn gpus=2 --device cpu --out procs")
    empty_notebook.run(MAKE)
    yield empty_notebook
    empty_notebook.run("%mesh stop --all")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the notebook."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_variables_are_saved_and_restored(two: Any, folder: Path) -> None:
    two.run("%%mesh\ntrain(3)\nimport threading; lock = threading.Lock()")
    ran = two.run("%mesh save ckpt")
    path = folder / "ckpt" / "save-1"
    assert re.match(rf"saved model, opt, losses, step at step 3: [\d.]+ kB to {path}\n", ran.stdout), ran.stdout
    assert "  not saved: lock (lock has no state_dict)\n" in ran.stdout and ran.stderr == ""
    wanted = two.run("%%mesh\ntrain(2)").plain
    two.run("%%mesh\ndel lock, losses, step\nopt.state.clear(); nn.init.zeros_(model.module.weight)")
    text = two.run("%mesh restore ckpt").stdout
    assert re.fullmatch(r"restored model, opt, losses, step on ranks 0,1 from save-1, step 3, \S+ m?s old\n", text), (
        text
    )
    assert two.run("%%mesh\ntrain(2)").plain == wanted
    assert two.run("%mesh restore ckpt step").stdout.startswith("restored step on ranks 0,1 from save-1")
    assert two.run("%%mesh\nstep, len(losses)").plain.strip() == "[0,1] (3, 5)"


def test_names_steps_and_the_number_that_is_kept(two: Any, folder: Path) -> None:
    for number in (1, 2, 3):
        two.run(f"%%mesh\nstep = {number}; alone = 5 if rank else 0\nif not rank: del alone")
        two.run("%mesh save ckpt step alone --keep 2")
    assert sorted(path.name for path in (folder / "ckpt").iterdir()) == ["save-2", "save-3"]
    two.run("%mesh save ckpt step --step 10 --keep 5")
    two.run("%mesh restore ckpt --step 2")
    assert two.run("%%mesh\nstep, globals().get('alone')").plain.splitlines() == ["[0] (2, None)", "[1] (2, 5)"]
    text = two.fail("%mesh restore ckpt --step 7")
    assert re.search("no save of step 7 in .*; there are 2, 3, 10", text), text
    two.run("%mesh restore ckpt/save-3")
    assert two.run("%%mesh\nstep").plain.strip() == "[0,1] 3"
    assert 'no variable stp. Did you mean "step"?' in two.fail("%mesh save ckpt stp")
    assert "--keep 0" in two.fail("%mesh save ckpt --keep 0") and "to which folder" in two.fail("%mesh save")
    assert "there is no folder" in two.fail("%mesh restore nowhere")


def test_saves_aside_and_from_time_to_time(two: Any, folder: Path) -> None:
    text = two.run("%mesh save aside --async").stdout
    assert re.match(r"saving [\d.]+ k?B to aside; the ranks were held for [\d.]+ s\n", text), text
    wait_until(lambda: [path.name for path in (folder / "aside").iterdir()] == ["save-1"])
    text = two.run("%mesh save timed step --every 0.01s --keep 3").stdout
    assert "between cells; end that: %mesh save --stop" in text, text
    wait_until(lambda: bool(two.run("%%mesh\nstep += 1") and (folder / "timed" / "save-3").exists()))
    two.run("%mesh save --stop")
    wait_until(lambda: all(path.name.startswith("save-") for path in (folder / "timed").iterdir()))
    count = len(list((folder / "timed").iterdir()))
    two.run("%%mesh\nstep += 1")
    assert len(list((folder / "timed").iterdir())) == count == 3
    assert two.run("%mesh save --stop").stdout == "nothing is saved from time to time\n"


def test_stop_waits_for_a_save_that_is_being_written(two: Any, folder: Path) -> None:
    two.run("%mesh spawn gpus=2 --device cpu --name short")
    two.run("%%mesh\nlarge = torch.ones(40_000_000)")
    two.run("%mesh save left --async")
    two.run("%mesh stop short")
    two.run("%mesh use main")
    assert [path.name for path in (folder / "left").iterdir()] == ["save-1"]


def test_a_regular_save_that_fails_is_told(two: Any, folder: Path) -> None:
    two.run("%mesh save timed step --every 0.01s")
    (folder / "timed").rename(folder / "before")
    (folder / "timed").write_text("")
    shown: list[str] = []

    def told() -> bool:
        ran = two.run("%%mesh\nstep += 1")
        shown.append(ran.stdout + ran.stderr + ran.plain)
        return "nothing can be saved to" in shown[-1]

    wait_until(told)
    two.run("%mesh save --stop")


def test_what_the_notebook_holds_on_the_mesh_goes_into_the_same_save(two: Any, folder: Path) -> None:
    two.run(ON_MESH)
    two.run("seen = go_on(2)\n%mesh save ckpt\nafter = go_on(3)")
    wanted = two["after"]
    keys = dcp.FileSystemReader(folder / "ckpt" / "save-1").read_metadata().state_dict_metadata.keys()
    assert {"net.weight", "adam.state.weight.exp_avg", "model.weight", "opt.state.weight.exp_avg"} <= keys
    two.run("%mesh restore ckpt")
    two.run("after = go_on(3)")
    assert two["after"] == wanted
    two.run(ON_MESH)  # new objects
    two.run("%mesh restore ckpt net adam plan\nafter = go_on(3)")
    assert two["after"] == wanted
    two.run("saved = meshbook.save('own', {'net': net, 'adam': adam, 'plan': plan, 'list': seen, 'step': 2})")
    two.run("state = {'net': net, 'adam': adam, 'plan': plan, 'list': seen, 'step': 0}\nafter = go_on(3)")
    wanted = two["after"]
    two.run("seen.clear(); back = meshbook.restore('own', state); after = go_on(3)")
    assert two["after"] == wanted and two["state"]["step"] == 2 and len(two["seen"]) == 2
    assert two["back"].values["step"] == 2 and two["saved"].manifest.of_notebook
    plain = {"net.weight": torch.zeros(1, 4)}
    two.run("%mesh save ckpt net")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(plain, checkpoint_id=folder / "ckpt" / "save-2", no_dist=True)
    assert plain["net.weight"].abs().sum() > 0
    two.run("%%mesh\nnet = 3")
    assert "the notebook and the ranks both have net: rename one" in two.fail("%mesh save ckpt")
    two.run("%%mesh\ndel net")
    two.run("part = meshbook.ones(2, mesh=mesh.slice(gpus=0))")
    text = two.fail("meshbook.save('own', {'part': part})")
    assert "on a part of a mesh" in text, text
    two.run("del part, net, adam, plan, rows")


def test_a_lost_rank_goes_back_to_the_last_save_with_all_others(two: Any, folder: Path) -> None:
    two.run("%%mesh\nlosses, step = [], 0; t = train(3)")
    two.run("%mesh save ckpt\n%mesh save ckpt --step 12 --async")
    wait_until(lambda: (folder / "ckpt" / "save-2").exists())
    wanted = two.run("%%mesh\ntrain(2)").plain
    procs = two["procs"].base()
    os.kill({status.rank: status.pid for status in procs.status()}[1], signal.SIGKILL)
    wait_until(lambda: 1 in procs.lost)
    assert "%mesh heal" in two.fail("%mesh save ckpt")
    text = two.fail("%mesh heal")  # and the setup cell needs all ranks, for DDP
    assert re.search(r"  last save: step 12, \S+ m?s ago: %mesh heal --restore\n", text), text
    assert "restored" not in text
    text = two.run("%mesh heal --restore").stdout
    assert (
        "is whole: nothing to heal" in text and "ran on all ranks again" in text and "from save-2, step 12" in text
    ), text
    assert two.run("%%mesh\ntrain(2)").plain == wanted
    text = two.fail("%mesh restore other")
    assert "there is no folder" in text


def test_a_mesh_without_a_save_says_so(empty_notebook: Any, folder: Path) -> None:
    empty_notebook.run("%mesh spawn gpus=1 --device cpu --name fresh")
    assert "there is no save of this mesh" in empty_notebook.fail("%mesh heal --restore")
    empty_notebook.run("%mesh stop fresh")
