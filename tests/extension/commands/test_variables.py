"""Variables of ranks in a table, and whether ranks hold the same, without sending a tensor."""

from __future__ import annotations

CELL = """%%mesh
import numpy as np, math
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
opt = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward(); opt.step()
x = torch.full((2, 3), float(rank))
half = torch.arange(10).to(torch.bfloat16)
complexes = torch.ones(3, dtype=torch.complex64).conj()
empty, number, array = torch.ones(0, 3), torch.tensor(2.5), np.ones((2, 2))[:, ::-1]
lr, text, names = 0.1, "abc" * 100, ["x"] * (3 + rank // 3)
if rank == 2:
    with torch.no_grad(): model[2].bias += 1
    alone = 5
class Broken:
    def __len__(self): raise ValueError
odd, loop = Broken(), []
loop.append(loop)
from torch.distributed import tensor as dt
sharded = dt.distribute_tensor(torch.arange(8.), mesh, [dt.Shard(0)])
whole = dt.distribute_tensor(torch.arange(8.), mesh, [dt.Replicate()])
sparse = torch.eye(3).to_sparse()
meta = torch.ones(2, device="meta")
"""


def table(notebook, line: str) -> dict[str, str]:
    """The rows of the table that a command shows, by their first cell."""
    shown = notebook.run(line).stdout
    return {row.split()[0]: " ".join(row.split()[1:]) for row in shown.rstrip().splitlines()[1:]}


def test_variables_of_ranks_are_listed_with_where_they_are_equal(notebook) -> None:
    assert notebook.run("%mesh vars").stdout.startswith("no variables on ranks 0-3 yet. Make some: %%mesh")
    notebook.run(CELL)
    rows = table(notebook, "%mesh vars")
    assert rows["lr"] == "float 0.1 equal on 0-3"
    assert rows["x"] == "Tensor (2, 3) float32 24 B cpu differs on each of 0-3"
    assert rows["half"] == "Tensor (10,) bfloat16 20 B cpu equal on 0-3"
    assert rows["model"] == "Sequential 4 parts float32 232 B cpu differs: [0,1,3] [2]"
    assert rows["opt"].startswith("AdamW ") and rows["opt"].endswith("equal on 0-3")
    assert rows["alone"] == "int 5 only on 2"
    assert rows["names"] == "list 4 entries only on 3"  # the last of two rows: ranks 0-2 have another length
    assert rows["number"] == "Tensor () float32 4 B cpu 2.5 equal on 0-3"
    assert rows["sharded"] == "DTensor (8,) float32 8 B cpu in parts on 0-3"
    assert rows["whole"].endswith("equal on 0-3")
    for name in ("complexes", "empty", "array"):
        assert rows[name].endswith("equal on 0-3"), rows[name]
    for name in ("odd", "loop", "sparse", "meta", "Broken"):
        assert rows[name].endswith("on 0-3") and "equal" not in rows[name], rows[name]
    assert not rows.keys() & {"np", "torch", "rank", "mesh", "get_ipython", "In"}
    assert table(notebook, "%mesh vars gpus=0:2")["names"] == "list 3 entries equal on 0,1"


def test_diff_names_the_parts_that_differ(notebook) -> None:
    shown = notebook.run("bad = %mesh diff model")
    first, _, row = shown.stdout.splitlines()
    assert first == "model (232 B): 3 of 4 parts equal on ranks 0-3"
    assert row.split() == ["2.bias", "(2,)", "float32", "[0,1,3]", "[2]"]
    assert notebook["bad"] == {"2.bias": [[0, 1, 3], [2]]}
    assert notebook.run("%mesh diff gpus=0:2 model").stdout == "model (232 B): 4 of 4 parts equal on ranks 0,1\n"
    assert notebook.run("%mesh diff half").stdout == "half (20 B): equal on ranks 0-3\n"
    assert notebook.run("%mesh diff x[:, 1:]").stdout.startswith("x[:, 1:] (16 B): differs on ranks 0-3\n")
    told = notebook.run("%mesh diff [sharded, whole, sparse]").stdout
    assert told == (
        "[sharded, whole, sparse] (76 B): 1 of 3 parts equal on ranks 0-3; "
        "1 not compared: each rank holds another part of a DTensor; 1 not compared, without bytes: 2\n"
    )
    assert notebook.run("%mesh diff names").stdout.splitlines()[2].split() == ["3", "str", "only", "on", "3"]


def test_diff_of_what_is_not_there_says_so(notebook) -> None:
    notebook.run("%mesh slice odd rank=1,3\nhere = 1")
    assert "name 'nowhere' is not defined" in notebook.fail("%mesh diff nowhere")
    assert notebook.fail("%mesh diff here").endswith("\n  here is defined in the notebook: %mesh push here\n")
    assert "%mesh diff: invalid syntax\n    model.\n          ^" in notebook.fail("%mesh diff model.")
    assert "the ranks of a slice: %mesh diff --at odd model" in notebook.fail("%mesh diff odd model")


def test_busy_ranks_are_looked_at_too(notebook) -> None:
    notebook.run("%%mesh --async\nimport time\nfor busy_step in range(60): time.sleep(0.1)")
    try:
        assert "busy_step" in table(notebook, "%mesh vars --now")
        assert "\nat that time: cell " in notebook.run("%mesh diff --now model").stdout
    finally:
        notebook.try_to_run("%mesh interrupt")
        notebook.try_to_run("%mesh wait")
