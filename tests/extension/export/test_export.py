"""An executed notebook leaves as a script of torchrun, which gives the same; what a script cannot have is refused."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Notebook

import meshbook
from meshbook_extension.cells.record import CellRecord, ExecutedCell
from meshbook_extension.completion.completer import LivingRanks
from meshbook_extension.export.plain_python import PlainCell, indented, with_last_value
from meshbook_extension.export.program import choose_cells
from meshbook_extension.export.verification import _is_same_text

PAGE = Path(__file__).parents[3] / "docs" / "export.md"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pair(empty_notebook: Notebook) -> Notebook:
    """A notebook with two ranks along gpus."""
    empty_notebook.run("%mesh spawn gpus=2 --device cpu")
    return empty_notebook


@pytest.fixture
def notebook(pair: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """The notebook in a folder of its own, with nothing recorded."""
    monkeypatch.chdir(tmp_path)
    record_of(pair).cells.clear()
    yield pair


def record_of(notebook: Notebook) -> CellRecord:
    record: CellRecord = vars(notebook.shell)["_meshbook_session"].part(CellRecord)
    return record


def exported(notebook: Notebook, *cells: str, line: str = "") -> str:
    """Run cells, export them, and return the script."""
    for cell in cells:
        notebook.run(cell)
    notebook.run(f"%mesh export out.py {line}")
    return Path("out.py").read_text()


def torchrun(script: Path, ranks: int) -> dict[int, list[str]]:
    """Run a script; returns the lines of each rank."""
    logs = script.parent / "logs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(logs), "--redirects", "3", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=script.parent)
    errors = "".join(each.read_text() for each in logs.glob("*/*/*/stderr.log"))
    assert ended.returncode == 0, ended.stderr + errors
    return {int(each.parent.name): each.read_text().splitlines() for each in logs.glob("*/*/*/stdout.log")}


TRAINING = """\
%%mesh
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
losses = []
"""
STEPS = """\
%%mesh
torch.manual_seed(rank)
for step in range(5):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
print(f"last loss {losses[-1]:.6f}")
losses
"""


def test_a_ddp_training_gives_the_same_losses_under_torchrun(notebook: Notebook) -> None:
    notebook.run("lr = 0.05\n%mesh push lr")
    notebook.run(TRAINING)
    notebook.run(STEPS)
    expected = notebook["_mesh"]
    script = exported(
        notebook,
        "%mesh pull losses\nbest = min(losses.values(), key=lambda each: each[-1])\nlr = best[-1] / 10\n%mesh push lr",
        "%%mesh\nfor group in optimizer.param_groups:\n    group['lr'] = lr\nlr",
    )
    printed = torchrun(Path("out.py").absolute(), 2)
    for rank in range(2):
        assert ast.literal_eval(printed[rank][1]) == pytest.approx(expected[rank], rel=1e-6)
        assert float(printed[rank][2]) == pytest.approx(notebook["_mesh"][rank], rel=1e-6)
    assert "torchrun --nproc-per-node 2 out.py" in script and "# In [" in script
    assert "lr = 0.05\n" in script.replace("local_", "") and "gather_objects(losses, range(world_size))" in script


@pytest.mark.slow
def test_the_page_shows_what_comes(notebook: Notebook) -> None:
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    came = [notebook.run(text).stdout for kind, text in blocks if kind == "python"]
    assert came[-1] == blocks[len(came)][1]


@pytest.mark.slow
def test_verify_compares_prints_and_values(notebook: Notebook) -> None:
    notebook.run("%%mesh gpus=0\nkept = 1")
    for cell in ("%%mesh\ntorch.manual_seed(rank)\nw = torch.rand(3)\nw", "%%mesh gpus=1\nprint('one')\npoint['gpus']"):
        notebook.run(cell)
    ran = notebook.run("%mesh export out.py --verify")
    assert re.search(r"verified: 4 printed lines and \d+ values are equal on ranks 0,1", ran.stdout), ran.stdout
    notebook.run("%%mesh\nassert 'kept' in globals() or rank")  # the notebook's own mesh is as it was
    assert list(vars(notebook.shell)["_meshbook_session"].meshes) == ["main"]


@pytest.mark.slow
def test_verify_finds_what_is_not_the_same_twice(notebook: Notebook) -> None:
    notebook.run("%%mesh\nimport time\nnow = time.time()\ndrawn = torch.rand(2)\nprint('drawn', drawn)")
    told = notebook.fail("%mesh export out.py --verify")
    assert "not verified: the cells on a fresh mesh and the script differ" in told
    assert "[0] line 1: 'drawn" in told and "[0] drawn: tensor(" in told and "[0] now:" in told


SLOW_LATER = "%%mesh\nimport os, time\nif os.path.exists('slow'):\n    time.sleep(100)"
"""A cell that is slow when it is run again, once there is a file ``slow``."""


@pytest.mark.slow
def test_verify_says_why_a_run_failed_and_when_it_takes_too_long(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(SLOW_LATER.replace("'slow'", repr(str(tmp_path / "slow"))))
    (tmp_path / "slow").touch()
    assert "took longer than" in notebook.fail("%mesh export out.py --verify --timeout 4")
    record_of(notebook).cells.clear()
    notebook.run("%%mesh\nimport os\nassert 'TORCHELASTIC_RUN_ID' not in os.environ, 'a script'")
    told = notebook.fail("%mesh export out.py --verify")
    assert "the script under torchrun failed" in told and "AssertionError: a script" in told


def test_cells_of_some_ranks_await_shell_lines_and_texts(notebook: Notebook) -> None:
    script = exported(
        notebook,
        '%%mesh gpus=0\ntext = """a\n  b"""\nname = f"""{rank}\n c"""\nprint(text, name)',
        "%%mesh\nimport asyncio\nasync def soon(x):\n    await asyncio.sleep(0.01)\n    return x",
        "%%mesh\ngot = await soon(rank)\ngot",
        "%%mesh\nagain = await soon(2)",
        "%%mesh rank=1\n!echo from {rank}\nlines = !echo one; echo two\nlen(lines)",
        "%%mesh\n%env WORDS=two words\nimport os\nos.environ['WORDS']",
        "%%mesh\nfrom __future__ import annotations\ndef f(x: Nowhere): ...",
    )
    assert 'if point["gpus"] == 0:\n    text = """a\n  b"""\n    name = f"""{rank}\n c"""' in script
    assert "if rank == 1:\n    subprocess.run(f'echo from {rank}', shell=True)" in script
    assert script.index("from __future__ import annotations") < script.index("import asyncio")
    printed = torchrun(Path("out.py").absolute(), 2)
    assert printed[0] == ["a", "  b 0", " c", "0", "env: WORDS=two words", "'two words'"]
    assert printed[1][:3] == ["1", "from 1", "2"] or sorted(printed[1][:3]) == ["1", "2", "from 1"]


def test_axes_follow_the_mesh(notebook: Notebook) -> None:
    notebook.run("%%mesh\npoint['gpus']")
    notebook.run("%mesh rename gpus=dp")
    script = exported(notebook, "%%mesh dp=1\nprint(point['dp'], mesh.mesh_dim_names)", "%mesh rename dp=gpus")
    assert script.index('point = {"gpus": rank}') < script.index('point = {"dp": rank}') < script.index("if point[")
    assert torchrun(Path("out.py").absolute(), 2) == {0: ["0"], 1: ["1", "1 ('dp',)"]}


def test_values_cross_as_they_did(notebook: Notebook) -> None:
    script = exported(
        notebook,
        "import random\nnumbers = [3, 1, 2, 5]\nnumbers.sort()\nunrelated = open",
        "%mesh scatter numbers",
        "%%mesh\nnumbers = [each * 10 for each in numbers]\nnumbers",
        "%mesh gather numbers --out whole",
        "total = sum(whole) + numbers[0]\ndef scaled(x):\n    return x * factor\nfactor = float('2')",
        "%mesh push total scaled factor",
        "%mesh push whole",
        "%mesh broadcast numbers --from rank=1",
        "%mesh eval (total, scaled(total), numbers, whole)",
    )
    assert "unrelated" not in script and "take_piece(local_numbers" in script
    expected = [repr(notebook["_mesh"][rank]) for rank in range(2)]
    printed = torchrun(Path("out.py").absolute(), 2)
    assert [printed[rank][-1] for rank in range(2)] == expected
    assert printed[0][0] == "[10, 20]"


def test_random_numbers_of_the_notebook_and_of_the_ranks_stay_apart(notebook: Notebook) -> None:
    script = exported(
        notebook,
        "import torch\ntorch.manual_seed(7)\nstart = torch.rand(2).tolist()\n%mesh push start",
        "%%mesh\ntorch.manual_seed(rank)\nfirst = torch.rand(1).item()",
        "more = torch.rand(2).tolist()\n%mesh push more",
        "%%mesh\n[*start, first, *more, torch.rand(1).item()]",
    )
    assert "with torch.random.fork_rng():" in script
    expected = [notebook["_mesh"][rank] for rank in range(2)]
    printed = torchrun(Path("out.py").absolute(), 2)
    assert [ast.literal_eval(printed[rank][-1]) for rank in range(2)] == expected


@pytest.mark.slow
def test_mesh_tensors_become_dtensors(notebook: Notebook) -> None:
    notebook.run("""\
import meshbook, torch
grid = meshbook.Mesh(shape=(2,), mesh_dim_names=("rows",))
torch.manual_seed(0)
data = torch.randn(8, 4)
x = meshbook.distribute(data, grid, sharding_spec=["rows", None])
print(x.placements)""")
    notebook.run("""\
layer = meshbook.module_to_mesh(torch.nn.Linear(4, 4), grid)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
@meshbook.compile
def step(batch):
    optimizer.zero_grad()
    loss = (layer(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss

losses = [step(x).item() for _ in range(3)]
print(losses)
f"{loss:.3f}" if (loss := step(x)) is not None else \"\"""")
    ran = notebook.run("%mesh export out.py --verify")
    script = Path("out.py").read_text()
    assert "verified: 3 printed lines" in ran.stdout, ran.stdout + script
    assert "distribute_tensor(data, grid, [Shard(0)])" in script and "meshbook." not in script
    notebook.run("y = meshbook.rand(4, mesh=grid)\nz = torch.nn.functional.mse_loss(x, x)")
    told = notebook.fail("%mesh export out.py")
    assert "line 1: meshbook.rand()" in told and "line 2: the gradient of torch.nn.functional.mse_loss" in told


@pytest.mark.slow
def test_a_script_whose_names_were_kept_is_part_of_it(notebook: Notebook) -> None:
    lines = [
        "import sys",
        "import torch.distributed as dist",
        'dist.init_process_group("gloo")',
        "x = int(sys.argv[1])",
    ]
    Path("first.py").write_text("\n".join(lines))
    Path("alone.py").write_text("print(1)")
    text = exported(notebook, "%mesh run --keep first.py 7", "%mesh run alone.py", "%%mesh\nx + rank", line="--verify")
    assert text.count("init_process_group") == 1 and "print(1)" not in text
    assert torchrun(Path("out.py"), 2) == {0: ["7"], 1: ["8"]}


def test_what_a_script_cannot_have_is_told_by_its_line_and_nothing_is_written(notebook: Notebook) -> None:
    cells = {
        "%%mesh\ndef ask():\n    return input('?')": "line 3: input()",
        "%%mesh\ndef stop():\n    breakpoint()": "line 3: breakpoint()",
        "%%mesh\n\n%who": "line 3: %who",
        "%%mesh gpus=0\nif rank == 9:\n    dist.barrier()": "line 3: barrier leaves out rank 1",
        "%%mesh\ndef everyone():\n    dist.barrier()": "",
        "%%mesh gpus=1\n_ = everyone if rank else everyone()": "line 2: everyone leaves out rank 0",
        "%%mesh --out result\nrank": "its value is used in the notebook",
        "%mesh pull rank --out ranks\none = ranks.item(gpus=1) + result[0]\n%mesh push one": "line 2: ranks.item",
        "for _ in range(2):\n    %mesh push one": "%mesh inside of a block",
        "t = __import__('pathlib').Path('t')\nt.write_text('')\n%mesh run --keep t\nt.unlink()": "there is no t",
    }
    for cell in cells:
        notebook.run(cell)
    told = notebook.fail("%mesh export out.py")
    for problem in cells.values():
        assert problem in told, (problem, told)
    assert not Path("out.py").exists()
    numbers = [cell.number for cell in record_of(notebook).cells]
    notebook.run(f"%mesh export out.py {numbers[4]}")


def test_a_cell_that_ran_again_counts_once_and_a_failed_one_not(notebook: Notebook) -> None:
    for cell in ("%%mesh\na = 1", "%%mesh\nb = 2", "%%mesh\na = 1"):
        notebook.run(cell)
    notebook.fail("%%mesh\n1 / 0")
    ran = notebook.run("%mesh export out.py")
    text = Path("out.py").read_text()
    assert text.index("b = 2") < text.index("a = 1") and text.count("a = 1") == 1
    failed = record_of(notebook).cells[3].number
    assert f"left out, since they failed: cells {failed}" in ran.stdout
    assert exported(notebook, line="--as-run").count("a = 1") == 2
    assert "it failed with CallFailed: run it again" in notebook.fail(f"%mesh export out.py {failed}")


def test_a_name_that_only_a_cell_left_out_binds_is_told(notebook: Notebook) -> None:
    for each in ("%%mesh\nbase = 1", "scale = float('3')", "%mesh push scale", "%%mesh\nbase * scale"):
        notebook.run(each)
    numbers = [cell.number for cell in record_of(notebook).cells]
    told = notebook.fail(f"%mesh export out.py {numbers[2]}-{numbers[3]}")
    assert f"base is of cell {numbers[0]}: export that too" in told
    assert f"scale is of cell {numbers[1]}: export that too" in told
    notebook.run("%%mesh\nbase = 1")
    assert f"base is of cell {numbers[0]}: that was run again later" in notebook.fail("%mesh export out.py")
    notebook.run("%mesh export out.py --as-run")


def test_places_and_cells_that_are_none_are_refused(notebook: Notebook) -> None:
    assert "so there is nothing to export" in notebook.fail("%mesh export out.py")
    notebook.run("%%mesh\na = 1")
    assert "there is no folder" in notebook.fail("%mesh export nowhere/out.py")
    assert "is a folder; name the file" in notebook.fail("%mesh export .")
    assert "no cell 999 was executed" in notebook.fail("%mesh export out.py 999")
    assert "names no cells" in notebook.fail("%mesh export out.py three")
    Path("own.py").write_text("own = 1\n")
    assert "export has not written it" in notebook.fail("%mesh export own.py")
    notebook.run("%mesh export own.py --force")
    notebook.run("%mesh export own.py")
    assert "own = 1" not in Path("own.py").read_text()
    assert sorted(each.name for each in Path().iterdir()) == ["own.py"]


@pytest.mark.slow
def test_an_interrupt_ends_both_runs(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(SLOW_LATER.replace("'slow'", repr(str(tmp_path / "slow"))))
    (tmp_path / "slow").touch()
    interrupt = "import _thread, threading\nthreading.Timer(6, _thread.interrupt_main).start()\n"
    ran = notebook.try_to_run(f"{interrupt}%mesh export out.py --verify")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert notebook.run("%%mesh\nrank").error is None


def test_the_record_is_kept_with_the_session(notebook: Notebook) -> None:
    notebook.run("%%mesh gpus=1\nkept = 'caf\u00e9'")
    number = record_of(notebook).cells[-1].number
    found = CellRecord(vars(notebook.shell)["_meshbook_session"])
    found.take_up(meshbook.recall("cells"))
    last = found.cells[-1]
    assert (last.number, last.text, last.targets[0].pairs, last.targets[0].ranks) == (
        number, "%%mesh gpus=1\nkept = 'caf\u00e9'", {"gpus": "1"}, (1,),
    )  # fmt: skip
    found.take_up(meshbook.recall("cells") + b'{"cut')
    assert found.cells[-1] == last and len(found.cells) == len({id(each) for each in found.cells})


def test_the_record_is_bounded(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbook_extension.cells.record.KEPT_CHARS", 400)
    record = record_of(notebook)
    record.take_up(b"")
    for number in range(60):
        notebook.run(f"value = {number}  # and some words")
    found = CellRecord(vars(notebook.shell)["_meshbook_session"])
    found.take_up(kept := meshbook.recall("cells"))
    assert kept is not None and len(kept) < 3000 and found.cells == record.cells
    assert sum(len(each.text) for each in record.cells) <= 400 and record.cells[-1].text.startswith("value = 59")


def test_completion_between_cells_names_no_target(notebook: Notebook) -> None:
    session = vars(notebook.shell)["_meshbook_session"]
    view = LivingRanks(session).view((), {"gpus": "0"})
    assert view is not None and view.ranks == (0,)
    notebook.run("%%mesh gpus=1\nx = 1")
    assert [each.ranks for each in record_of(notebook).cells[-1].targets] == [(1,)]


def cell(number: int, text: str, cell_id: str = "") -> ExecutedCell:
    return ExecutedCell(number, cell_id, text, False, "", ())


def test_cells_are_chosen_by_number_and_by_name() -> None:
    cells = [cell(1, "a", "x"), cell(2, "b", "y"), cell(3, "a2", "x"), cell(4, "b"), cell(1, "later")]
    assert [each.text for each in choose_cells(cells, "", as_run=False)] == ["a2", "b", "later"]
    assert [each.text for each in choose_cells(cells, "2-3", as_run=False)] == ["b", "a2"]
    assert [each.text for each in choose_cells(cells, "1,2", as_run=False)] == ["b", "later"]
    assert len(choose_cells(cells, "", as_run=True)) == 5


@pytest.mark.parametrize(
    ("code", "python"),
    [
        ("%cd /tmp", "os.chdir(os.path.expanduser('/tmp'))\nprint(os.getcwd())"),
        ("if x:\n    %cd -q ..", "if x:\n    os.chdir(os.path.expanduser('..'))"),
        ("!ls $HOME $x {y}", "subprocess.run(f'ls $HOME {x} {y}', shell=True)"),
        ("!awk '{print $1}' f", "subprocess.run(\"awk '{print $1}' f\", shell=True)"),
        ("%time y = f(x)", "y = f(x)"),
        ("%%time\ny = 1\nz = 2", "y = 1\nz = 2"),
        ("%matplotlib inline\nx = 1", "\nx = 1"),
        ("f?", "help(f)"),
        ("%%bash\nls\necho hi", 'subprocess.run(["bash", "-c", """ls\necho hi\n"""])'),
        ("%timeit -n 10 f()", "print(f\"{timeit.timeit('f()', globals=globals(), number=10) / 10:.3g} s per loop\")"),
    ],
)
def test_magics_with_a_python_form_become_it(code: str, python: str) -> None:
    plain = PlainCell(code, 1, 0, ["x", "y"])
    assert (plain.text.rstrip("\n"), plain.problems) == (python, [])


def test_indenting_leaves_texts_alone_and_means_the_same() -> None:
    code = 'x = """a\n  b"""\nif x:\n    y = f"""{x}\n{1 + 1}\n"""  # c\nz = (1,\n2)\n\ns = "a\\\nb"\n'
    code += 't = """\x0c\u2028\n f"""\n'
    deeper = ast.parse(f"if True:\n{indented(code)}").body[0]
    assert isinstance(deeper, ast.If)
    assert ast.parse(PlainCell(code, 1, 0).text).body[-1].value.value == "\x0c\u2028\n f"  # type: ignore[attr-defined]
    assert ast.dump(ast.Module(deeper.body, [])) == ast.dump(ast.Module(ast.parse(code).body, []))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("x = 1\nx", "x = 1\nshow_value(x)"),
        ("x;  # quiet", "x;  # quiet"),
        ("print(1)", "print(1)"),
        ("(a,\n b)", "show_value((a,\n b))"),
    ],
)
def test_the_last_expression_is_printed(code: str, shown: str) -> None:
    assert with_last_value(code) == shown


def test_texts_are_compared_by_words_and_numbers() -> None:
    assert _is_same_text("[1.0,\n     2.5]", "[1.0, 2.50000001]") and _is_same_text(
        "at 0x7f00aa11bb", "at 0x7f00aa11cc"
    )
    assert _is_same_text("at {'gpus': 0/4}", "at {'gpus': 0}") and not _is_same_text("{'gpus': 0}", "{'gpus': 1}")
    assert not _is_same_text("loss 1.0", "loss 1.01") and not _is_same_text("a 1", "b 1") and not _is_same_text("1", "")
