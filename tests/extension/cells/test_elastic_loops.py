"""The body of an elastic loop in a cell is run again when a rank ends, and means what it says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from meshbook_extension.cells.elastic_loops import ElasticLoops


def elastic(items: Any) -> Any:
    """Another function of this name."""
    return items


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"elastic": elastic}
    exec(compile(ElasticLoops().visit(ast.parse(code)), "cell", "exec"), names)
    return names


LOOPS = """
seen = []
for number in elastic(range(6)):
    if number == 1:
        continue
    if number == stop:
        break
    seen.append(number)
else:
    seen.append("end")

def first(items):
    for item in elastic(items):
        for inner in elastic(item):
            return len(item), inner
    return None
"""


def test_loops_of_other_functions_mean_what_they_say() -> None:
    assert run("stop = 4" + LOOPS)["seen"] == [0, 2, 3]
    names = run("stop = 9" + LOOPS)
    assert names["seen"] == [0, 2, 3, 4, 5, "end"]
    assert names["first"]([[], "ab"]) == (2, "a") and names["first"]([]) is None
    assert [name for name in names if "elastic" in name] == ["elastic"]


def test_lines_of_errors_hold() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run("x = 0\nfor number in elastic(range(2)):\n    y = 1\n    y / x\n")
    assert raised.traceback[-1].lineno == 3  # from 0


@pytest.mark.parametrize("items", ["range(3)", "enumerate(elastic(items))"])  # the loop's error says what to write
def test_other_loops_stay_as_they_are(items: str) -> None:
    plain = f"for x in {items}:\n    pass"
    assert ast.dump(ElasticLoops().visit(ast.parse(plain))) == ast.dump(ast.parse(plain))


TRAINING = """
import os, signal, torch, meshbook
torch.manual_seed(0)
model = meshbook.module_to_mesh(torch.nn.Linear(4, 4), meshbook.current_mesh(), {"*": "shard"})
optimizer = torch.optim.AdamW(model.parameters())
losses, pids, marks = [], [], []
batches = meshbook.stream([torch.randn(8, 4) for _ in range(8)], meshbook.current_mesh())
state = {"model": model, "optimizer": optimizer, "losses": losses}
for x in meshbook.elastic(batches, state, save=FOLDER, every=3):
    marks.append(len(losses))
    if len(losses) == 4 and marks.count(4) == 1:
        victim = meshbook.current_mesh().procs.status()[2].pid
        os.kill(victim, signal.SIGKILL)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def test_a_cell_goes_on_when_a_rank_ends(notebook: Any, tmp_path: Path) -> None:
    ran = notebook.run(TRAINING.replace("FOLDER", repr(str(tmp_path))))
    assert notebook["marks"] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7] and len(notebook["losses"]) == 8
    (line,) = ran.stdout.splitlines()
    assert line.startswith("elastic: rank 2 ended (killed by SIGKILL) at batch 4; healed in ")
    assert line.endswith(" s, back to the save of batch 3, repeating 1 batch")


def test_errors_of_a_cell_show_its_lines_alone(notebook: Any, tmp_path: Path) -> None:
    bad = TRAINING.replace("FOLDER", repr(str(tmp_path))).replace("loss.backward()", "loss.backwards()")
    shown = notebook.fail(bad)
    notebook.run("batches.close()")
    assert "AttributeError" in shown and "loss.backwards()" in shown and "elastic_loops" not in shown
