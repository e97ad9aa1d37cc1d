"""The commands of ``%mesh`` on real ranks, and what they answer to mistakes."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults.texts import strange_text
from meshbook import errors
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.sessions.folder import SavedMesh
from meshbook.sessions.listing import SavedSession
from meshbook.sessions.words import KEY
from meshbook.system.user_folders import write_private
from meshbook_extension.commands.meshes import describe_age
from meshbook_extension.reattach.notebook_state import NotebookState, encode


def test_importing_and_loading_the_extension_is_light() -> None:
    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell as S; s = S()\n"
        "import meshbook_extension as m; m.load_ipython_extension(s); s.run_cell('%mesh help')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%mesh\nx", "no mesh yet. Start one: %mesh spawn gpus=4"),
        ("%mesh auto on", "no mesh yet. Start one: %mesh spawn gpus=4"),
        ("%mesh stop", "no mesh yet. Start one: %mesh spawn gpus=4"),
        ("%mesh use main", 'there is no mesh "main".\n  start one: %mesh spawn gpus=4'),
        ("%mesh wait 1", "no job yet. Start one: %%mesh --async above a cell"),
        ("%mesh spwan gpus=4", 'unknown command "spwan". Did you mean "spawn"?\n  for example: %mesh spawn gpus=4'),
        ("%mesh gpus=4", 'unknown command "gpus=4". Did you mean %mesh spawn gpus=4, or %%mesh gpus=4 above a cell?'),
        ("%mesh heal", "no mesh yet. Start one: %mesh spawn gpus=4"),
        ("%mesh postmortem", "no mesh yet. Start one: %mesh spawn gpus=4"),
        ("%mesh spawn", "say how many ranks, along an axis that you name."),
        ("%mesh spawn gpus", '"gpus" has no size; write it as gpus=4.'),
        ("%mesh spawn tp=2 4", "name the axis of the 4 ranks, too; write it as gpus=4."),
        ("%mesh spawn 0", "gpus=0: the size of an axis is a whole number of at least 1."),
        ("%mesh kill", 'unknown command "kill". Did you mean "stop"?'),
        ("%mesh restart", 'unknown command "restart". Did you mean "respawn"?'),
        ("%mesh ps", 'unknown command "ps". Did you mean "status"?'),
        ("%mesh stp", 'unknown command "stp". Did you mean "top"?'),
        ("%mesh exec x", 'unknown command "exec". A cell runs on the ranks below %%mesh:\n  %%mesh\n  x = rank'),
        ("%mesh spawn gpus=zero", "gpus=zero: the size of an axis is a whole number of at least 1."),
        ("%mesh spawn gpus=0", "gpus=0: the size of an axis is a whole number of at least 1."),
        ("%mesh spawn rank=4", '"rank" means the number of a rank everywhere; name the axis otherwise.'),
        ("%mesh spawn gpus=4 --on ssh:nodeA, nodeB", "write ssh:nodeA,nodeB without a space after the comma."),
        ("%mesh spawn gpus=4 --interface eth77", "--interface: this machine has no eth77; it has "),
        ("%mesh spawn gpus=4 --device gpu", '--device takes cpu or cuda, not "gpu". Did you mean "cpu"?'),
        ("%mesh spawn gpus=4 --nmae x", 'unknown option "--nmae" of %mesh spawn. Did you mean "--name"?'),
        ("%mesh spawn gpus=4 --name 2x", '--name: "2x" cannot be the name of a variable.'),
        ("%%mesh --asinc\nx", 'unknown option "--asinc" of %%mesh. Did you mean "--async"?'),
        ("%%mesh --out 1x\nx", '--out: "1x" cannot be the name of a variable.'),
        ("%%mesh\n\n  \n", "the cell is empty: write code below the %%mesh line."),
    ],
)
def test_without_a_mesh_each_mistake_is_answered_on_one_screen(empty_notebook, cell: str, message: str) -> None:
    text = empty_notebook.fail(cell)
    assert text.startswith(f"UsageError: {message}")
    assert len(text.splitlines()) <= 4


def test_without_a_mesh_the_status_is_a_welcome(empty_notebook, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meshbook.toml").write_text('[spawn]\nbig = "hosts=4 gpus=8"')
    for line in ("%mesh", "%mesh status"):
        told = empty_notebook.run(line)
        assert told.stdout.splitlines() == [
            "no mesh yet",
            "  %mesh spawn gpus=4  start 4 ranks on this machine",
            "  %%mesh              above a cell: run it on all of them",
            "  %mesh spawn @big    hosts=4 gpus=8",
            "  %mesh help          all commands",
        ]
        assert told.stderr == ""


def test_words_for_commands_name_commands_and_help_has_each_once(empty_notebook) -> None:
    from meshbook_extension.commands import COMMANDS, DESTRUCTIVE, MODULES, ON_RANKS, SYNONYMS

    words = [word for several in SYNONYMS.values() for word in several.split()] + list(ON_RANKS)
    assert len(words) == len(set(words))
    assert not set(words) & COMMANDS.keys()
    assert COMMANDS.keys() >= SYNONYMS.keys() | DESTRUCTIVE
    shown = empty_notebook.run("%mesh help").stdout.splitlines()
    assert [line for line in shown if line in MODULES.values()] == ["Start", "Run", "Data", "Look", "Repair"]
    assert sorted(line.split()[1] for line in shown if line.startswith("  %mesh ")) == sorted(COMMANDS)


def test_every_command_has_help_with_examples(empty_notebook) -> None:
    from meshbook_extension.commands import COMMANDS

    for name in COMMANDS:
        text = empty_notebook.run(f"%mesh {name} --help").stdout
        assert f"  %mesh {name}" in text and "Examples:" in text
        assert empty_notebook.run(f"%mesh {name}?").stdout == text
    assert "--no-collective" in empty_notebook.run("%%mesh --help\nx").stdout
    assert "--no-collective" in empty_notebook.run("%%mesh --help").stdout
    assert "unknown command" in empty_notebook.fail("%mesh help spwan")


def test_examples_of_the_help_are_understood(empty_notebook) -> None:
    from meshbook_extension.cells.run import MESH_CELL
    from meshbook_extension.commands import COMMANDS
    from meshbook_extension.notebook.grammar import parse

    for grammar in [MESH_CELL, *(command for command, _ in COMMANDS.values())]:
        for example in grammar.examples:
            if example.startswith(grammar.name):
                assert not parse(grammar, example.removeprefix(grammar.name)).wants_help


def test_the_docstrings_are_the_help(empty_notebook) -> None:
    assert "%mesh spawn" in empty_notebook.shell.magics_manager.magics["line"]["mesh"].__doc__
    assert "world_size" in empty_notebook.shell.magics_manager.magics["cell"]["mesh"].__doc__


# ---- meshes --------------------------------------------------------------------------------------------------------


def test_spawn_says_what_there_is_and_how_long_it_took(empty_notebook) -> None:
    assert empty_notebook.run("%mesh spawn 1 --no-torch --name none").stdout.startswith('mesh "none": gpus=1, cpu, ')
    empty_notebook.run("%mesh stop")
    text = empty_notebook.run("%mesh spawn hosts=1 gpus=2 --device cpu --name one --out procs").stdout
    assert text.startswith('mesh "one": hosts=1, gpus=2, cpu, gloo; ready in ')
    assert text.endswith(" s (2 ranks on 1 host)\n")
    assert isinstance(empty_notebook["procs"], ProcMesh)
    assert empty_notebook.run("%mesh stop").stdout == 'mesh "one" stopped\n'
    text = empty_notebook.fail("%%mesh\nx")
    assert text.startswith('MeshStoppedError: mesh "one" was stopped. Start another: %mesh spawn gpus=4')
    assert empty_notebook.run("%mesh").stdout.startswith('mesh "one" was stopped\n  %mesh spawn gpus=4 ')


def test_several_meshes_and_one_current(notebook) -> None:
    assert 'mesh "main" runs already (gpus=4).' in notebook.fail("%mesh spawn gpus=4")
    notebook.run("%mesh spawn gpus=1 --device cpu --name other --no-group")
    notebook.run("%%mesh\nrank")
    assert notebook["_mesh"].ranks == (0,)
    listed = notebook.run("%mesh list").stdout  # what other kernels of this user have may follow
    age = r"up \d+ (s|min)"
    rows = [rf"   main   gpus=4  cpu  4 ranks, {age}", rf"\*  other  gpus=1  cpu  1 rank, {age}"]
    assert re.match("\n".join([*rows, ""]), listed), listed
    notebook.run("%%mesh main\nrank")
    assert len(notebook["_mesh"]) == 4
    assert notebook.run("%mesh use main").stdout == 'mesh "main" is current: gpus=4\n'
    assert 'there is no mesh "othr". Did you mean "other"?' in notebook.fail("%mesh use othr")
    assert notebook.run("%mesh stop other").stdout == 'mesh "other" stopped\nmesh "main" is current now\n'


def test_a_mesh_of_the_python_api_can_be_adopted(notebook) -> None:
    notebook.run("from meshbook import this_host\nmine = this_host().spawn_procs({'gpus': 1}, name='api', group=False)")
    assert notebook.run("%mesh use mine").stdout == 'mesh "api" is current: gpus=1\n'
    notebook.run("mine.stop()")
    assert "MeshStoppedError" in notebook.fail("%%mesh\n1")
    notebook.run("%mesh stop api")


def test_too_many_devices_is_an_error_that_says_how_many_there_are(notebook) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    ran = notebook.try_to_run("%mesh spawn gpus=2 --device cuda --name two")
    assert isinstance(ran.error, errors.DeviceError)
    assert "2 ranks were asked for" in ran.stdout and "--device cpu" in ran.stdout


# ---- views ---------------------------------------------------------------------------------------------------------


def test_a_slice_has_a_name_and_is_a_target(notebook) -> None:
    text = notebook.run("%mesh slice left gpus=0:2").stdout
    assert text == 'slice "left": ranks 0,1 (gpus=2); use it: %%mesh left\n'
    notebook.run("%%mesh left\nrank")
    assert notebook["_mesh"].values() == [0, 1]
    notebook.run("%%mesh left gpus=1\nrank")
    assert notebook["_mesh"].values() == [1]
    assert re.search(r"^   left  gpus=2 +slice of main$", notebook.run("%mesh list").stdout, re.M)
    text = notebook.fail("%%mesh lefft\nrank")
    assert 'there is no slice "lefft". Did you mean "left"?' in text


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%mesh gpu=0\nx", 'unknown axis "gpu"; this mesh has gpus=4. Did you mean gpus=0?'),
        ("%%mesh gpus=7\nx", "gpus=7 selects nothing; gpus runs from 0 to 3."),
        ("%%mesh gpus=3:\n", "the cell is empty: write code below the %%mesh line."),
        ("%%mesh", "the cell is empty: write code below the %%mesh line."),
        ("%%mesh gpus=4:\nx", "gpus=4: selects nothing; gpus runs from 0 to 3."),
        ("%%mesh gpus\nx", "say which: gpus=0, gpus=0:2, gpus=0,2 or gpus=: (all of it)."),
        ("%mesh slice gpus gpus=0", '"gpus" is an axis already; choose another name for the slice.'),
        ("%mesh slice main gpus=0", '"main" is a mesh already; choose another name for the slice.'),
        ("%mesh slice part", "say which part.\n  for example: %mesh slice part gpus=0"),
        ("%mesh slice", "%mesh slice needs NAME."),
        ("%mesh split", "say which axis becomes which."),
        ("%mesh split gpus=dp,tp tp=3", "gpus=4 cannot be split into dp x tp=3: 4 is not a multiple of 3"),
        ("%mesh rename", "say which axis, and its new name."),
        ("%mesh rename gpus=rank", '"rank" means the number of a rank everywhere'),
        ("%mesh rename gpu=tp", 'unknown axis "gpu"; this mesh has gpus=4.'),
        ("%mesh status gpu=0", 'unknown axis "gpu"; this mesh has gpus=4. Did you mean gpus=0?'),
    ],
)
def test_a_wrong_target_is_answered_on_one_screen(notebook, cell: str, message: str) -> None:
    text = notebook.fail(cell)
    assert message in text and len(text.splitlines()) <= 4


def test_axes_change_for_the_ranks_too(notebook) -> None:
    assert notebook.run("%mesh split gpus=dp,tp tp=2").stdout == 'mesh "main": dp=2, tp=2\n'
    notebook.run("%%mesh dp=1\npoint['tp'], mesh.mesh_dim_names")
    assert notebook["_mesh"].values() == [(0, ("dp", "tp")), (1, ("dp", "tp"))]
    assert notebook.run("%mesh rename dp=replica").stdout == 'mesh "main": replica=2, tp=2\n'
    assert notebook.run("%mesh flatten gpus").stdout == 'mesh "main": gpus=4\n'
    notebook.run("%%mesh gpus=3\nrank")
    assert notebook["_mesh"].values() == [3]


# ---- values --------------------------------------------------------------------------------------------------------


def test_eval_shows_equal_values_once(notebook) -> None:
    notebook.run("%%mesh\nx = rank")
    assert notebook.run("%mesh eval x // 2").stdout == "[0,1] 0\n[2,3] 1\n"
    assert notebook.run("%mesh eval gpus=3 {'a': x}['a']").stdout == "[3] 3\n"
    assert notebook["_mesh"].values() == [3]
    text = notebook.fail("%mesh eval nonsense + 1")
    assert "NameError: name 'nonsense' is not defined" in text and len(text.splitlines()) <= 2


def test_eval_takes_variables_of_the_notebook(notebook) -> None:
    notebook.shell.user_ns.update(step=3, where={"lr": [0.5]}, odd=object())
    assert notebook.run("%mesh eval $step + rank * 0").stdout == "[0-3] 3\n"
    assert (
        notebook.run("%mesh eval $where['lr'][0], 'it is $step', \"$\"").stdout == "[0-3] (0.5, 'it is $step', '$')\n"
    )
    assert "the notebook has no stepp, which $stepp stands for" in notebook.fail("%mesh eval $stepp")
    assert "$odd is a object, which no expression can hold: %mesh push odd first" in notebook.fail("%mesh eval $odd")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("rank +", "invalid syntax\n    rank +\n          ^"),
        ("(rank", "'(' was never closed\n    (rank\n    ^"),
        ("odd rank", "\n  the ranks of a slice: %mesh eval --at odd rank"),
        ("rank * 2 gpus=0", "\n  ranks come first: %mesh eval gpus=0 rank * 2"),
        ("", "%mesh eval needs EXPR."),
    ],
)
def test_eval_shows_where_a_text_is_no_expression(notebook, expression: str, message: str) -> None:
    notebook.run("%mesh slice odd rank=1,3")
    text = notebook.fail(f"%mesh eval {expression}")
    assert message in text and len(text.splitlines()) <= 4


def test_commands_give_their_values_and_show_them_once(notebook) -> None:
    assert notebook.run("v = %mesh eval rank * 2").stdout == "[0] 0\n[1] 2\n[2] 4\n[3] 6\n"
    assert notebook["v"] is notebook["_mesh"] and notebook["v"][3] == 6
    assert notebook.run("%mesh eval rank * 0").stdout == "[0-3] 0\n"
    assert notebook.run("for i in range(2):\n    %mesh eval rank * $i * 0").stdout == "[0-3] 0\n[0-3] 0\n"
    assert "Out" not in notebook.run("%%time\n%mesh eval rank * 0").stdout
    assert "ValueMesh" not in notebook.run("%time %mesh eval rank * 0").stdout
    notebook.run("%%time\ntimed = %mesh eval rank")
    assert notebook["timed"][3] == 3
    notebook.run("%%mesh\npulled, other = rank, 1")
    notebook.run("one = %mesh pull pulled\ntwo = %mesh pull pulled other")
    assert notebook["one"][2] == 2 and notebook["two"]["other"].values() == [1] * 4
    here = notebook.run("get_ipython().run_line_magic('mesh', 'eval rank').values()").stdout
    assert here.endswith("[0, 1, 2, 3]\n")


@pytest.mark.parametrize("seed", range(4))
def test_eval_takes_and_shows_strange_texts(notebook, seed: int) -> None:
    text = strange_text(random.Random(seed))
    shown = notebook.run(f"%mesh eval {text!r} + str(rank * 0)").stdout
    assert shown.startswith("[0-3] ") and ast.literal_eval(shown.removeprefix("[0-3] ")) == f"{text}0"
    assert "ZeroDivisionError" in notebook.fail(f"%mesh eval 1 / 0, {text!r}")


def test_push_and_pull(notebook) -> None:
    notebook.run("a, b = 5, {'k': [1]}\ndef double(x): return 2 * x")
    assert notebook.run("%mesh push a b double").stdout == "a, b, double on ranks 0-3\n"
    notebook.run("%%mesh\nc = double(a) + rank")
    text = notebook.run("%mesh pull c").stdout
    assert text == "c: ValueMesh of ranks 0-3; one of them: c[0]\n"
    assert notebook["c"].values() == [10, 11, 12, 13]
    notebook.run("%mesh pull c gpus=1:3 --out some")
    assert notebook["some"].values() == [11, 12]
    notebook.run("%mesh slice left gpus=0:2")
    notebook.run("a = 6\n%mesh push a --at left")
    assert notebook.run("%mesh eval a").stdout == "[0,1] 6\n[2,3] 5\n"


def test_a_model_that_is_bound_to_process_groups_says_what_to_pull(notebook) -> None:
    notebook.run("%%mesh\nnet = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    notebook.run("%mesh pull net")
    with pytest.raises(errors.LoadError, match=r"take what it wraps, as in model\.module"):
        notebook["net"].get(0)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%mesh push", "%mesh push needs NAME [NAME ...]."),
        ("alpha = 1\n%mesh push alhpa", 'the notebook has no "alhpa". Did you mean "alpha"?'),
        ("%mesh push 1x", '%mesh push: "1x" cannot be the name of a variable.'),
        ("import threading\nbad = {'k': [threading.Lock()]}\n%mesh push bad", "bad['k'][0] is a _thread.lock"),
        ("%mesh pull nonsense", "name 'nonsense' is not defined on the rank"),
        ("%mesh pull a b --out c", "--out names one variable, but several are pulled."),
        ("%mesh scatter alpha", "a int cannot be scattered"),
        ("t = [1]\n%mesh scatter t dim=x", "dim=x is no dim of a tensor; give a number."),
        ("t = [1]\n%mesh scatter t axis=gpu", 'unknown axis "gpu"; this mesh has gpus=4.'),
        ("import torch\nt = torch.eye(3).to_sparse()\n%mesh scatter t", "layout torch.sparse_coo cannot be scattered"),
        (
            "%mesh eval globals().update(g=torch.ones(2, 2 + rank // 3))\n%mesh gather g",
            "(2, 2), (2, 3) differ beside dim=0",
        ),
        ("%mesh broadcast x --from rank=9", "is no rank of this mesh, which has ranks 0-3."),
        ("%mesh broadcast x --from first", "is no rank of this mesh, which has ranks 0-3."),
        ("%mesh broadcast x --from rank=0:2", '"rank=0:2" is no rank of this mesh'),
    ],
)
def test_a_wrong_value_is_answered_on_one_screen(notebook, cell: str, message: str) -> None:
    text = notebook.fail(cell)
    assert message in text and len(text.splitlines()) <= 4


def test_scatter_gather_and_broadcast(notebook) -> None:
    notebook.run("items = list(range(8))")
    assert notebook.run("%mesh scatter items").stdout == "items: 4 pieces along gpus, on ranks 0-3\n"
    notebook.run("%%mesh\nitems = [10 * i for i in items]\nt = torch.full((2, 1), float(rank))")
    assert notebook.run("%mesh gather items --out back").stdout == "back: list, 8 items, from ranks 0-3\n"
    assert notebook["back"] == [0, 10, 20, 30, 40, 50, 60, 70]
    notebook.run("%mesh gather t dim=1")
    assert notebook["t"].shape == (2, 4)
    notebook.run("%%mesh\nw = torch.tensor([float(rank)])")
    assert notebook.run("%mesh broadcast w --from rank=2").stdout == "w of rank 2 on ranks 0-3\n"
    assert notebook.run("%mesh eval w.item()").stdout == "[0-3] 2.0\n"


# ---- looking, auto -------------------------------------------------------------------------------------------------


def test_status_has_a_row_per_rank(notebook) -> None:
    head, columns, *rows = notebook.run("%mesh").stdout.splitlines()
    assert head.startswith('mesh "main": gpus=4, cpu; 4 ranks on 1 host')
    assert columns.split()[:4] == ["rank", "point", "host", "pid"]
    assert [row.split()[:2] for row in rows] == [[str(rank), f"gpus={rank}"] for rank in range(4)]
    assert len(notebook.run("%mesh status gpus=1:3").stdout.splitlines()) == 4


def test_auto_sends_cells_to_the_mesh_until_off(notebook) -> None:
    try:
        assert "every cell runs on ranks 0-3" in notebook.run("%mesh auto on").stdout
        assert notebook.run("%mesh auto").stdout == "auto is on\n"
        notebook.run("auto_x = rank")
        assert "auto_x" not in notebook.shell.user_ns
        notebook.run("%%local\nhere = 1")
        assert notebook["here"] == 1
        assert "say on or off" in notebook.fail("%mesh auto of")
    finally:
        assert notebook.run("%mesh auto off").stdout == "auto is off\n"
    notebook.run("there = 2")
    assert notebook["there"] == 2
    notebook.run("%%local\nalso = 3")
    assert notebook["also"] == 3


def test_a_reloaded_extension_finds_its_meshes(notebook) -> None:
    import meshbook_extension

    meshbook_extension.load_ipython_extension(notebook.shell)  # twice is once
    meshbook_extension.unload_ipython_extension(notebook.shell)
    assert "not found" in notebook.try_to_run("%mesh").stderr
    meshbook_extension.load_ipython_extension(notebook.shell)
    notebook.run("%%mesh\nrank")
    assert notebook["_mesh"].ranks == (0, 1, 2, 3)


SLOTTED = """
import dataclasses
@dataclasses.dataclass(slots=True)
class Point:
    x: int = 1
class Private:
    __slots__ = "__value", "__weakref__"
    def __init__(self, value): self.__value = value
    def read(self): return self.__value
class Open(Private):
    pass
"""


def test_values_of_classes_with_slots_make_the_round_trip(notebook) -> None:
    notebook.run(f"{SLOTTED}\nopen_one = Open(4)\nopen_one.more = 5\nsent = [Point(3), Private(2), open_one]")
    notebook.run("%mesh push sent")
    notebook.run("%mesh pull sent")
    notebook.run("first = sent.get(0)\nfirst[0] == Point(3), first[1].read(), first[2].read(), first[2].more")
    assert notebook["_"] == (True, 2, 4, 5)
    error = notebook.try_to_run("%%mesh\nsent[0].other = 1").error
    assert "AttributeError" in str(error)


def test_names_that_are_pulled_together_share_what_they_share_on_the_ranks(notebook) -> None:
    notebook.run(
        "%%mesh\nmodel = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        "a = torch.arange(4.); part = a[1:3]"
    )
    notebook.run("%mesh pull model opt a part")
    notebook.run("opt.get(1).param_groups[0]['params'][0] is model.get(1).weight")
    assert notebook["_"] is True
    notebook.run("a.get(0)[1] = 9; part.get(0).tolist(), a.get(1).tolist()")
    assert notebook["_"] == ([9.0, 2.0], [0.0, 1.0, 2.0, 3.0])
    notebook.run("%%mesh\nimport threading; held = [threading.Lock()]")
    assert "held[0] is a _thread.lock" in notebook.fail("%mesh pull a held")


def test_functions_that_keep_their_results_can_be_sent(notebook) -> None:
    notebook.run(
        "import functools\n"
        "@functools.cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "class Table:\n"
        "    def __init__(self, n): self.n = n\n"
        "    @functools.lru_cache(maxsize=7)\n    def at(self, i): return self.n * i\n"
        "    @functools.cached_property\n    def twice(self): return 2 * self.n\n"
        "table = Table(3)\ndef use(n): return fib(n)"
    )
    notebook.run("%mesh push fib use table")
    notebook.run(
        "%%mesh\nfib(30), use(20), table.at(4), table.twice, vars(table)['twice'], type(table).at.cache_info().maxsize"
    )
    assert notebook["_mesh"].values() == [(832040, 6765, 12, 6, 6, 7)] * 4


def test_a_default_device_of_the_user_is_for_the_users_tensors_alone(notebook) -> None:
    """The device "meta" stands for "cuda", which is not here."""
    notebook.run("import torch\nw = torch.arange(4.)\ntorch.set_default_device('meta')")
    notebook.run("%%mesh\ntorch.set_default_device('meta')")
    try:
        notebook.run("%mesh push w\n%mesh pull w --out back")
        notebook.run("back.get(3).tolist()")
        assert notebook["_"] == [0.0, 1.0, 2.0, 3.0]
        notebook.run("%mesh scatter w\n%mesh gather w --out whole")
        notebook.run("whole.tolist()")
        assert notebook["_"] == [0.0, 1.0, 2.0, 3.0]
        notebook.fail("%%mesh\nx = torch.ones(2, device='cpu')\nif rank == 1: 1 / 0\ndist.all_reduce(x)")
        notebook.run("%%mesh\nx = torch.ones(2, device='cpu'); dist.all_reduce(x); x.tolist()")
        assert notebook["_mesh"].values() == [[4.0, 4.0]] * 4
        notebook.run("%mesh respawn gpus=1")
        notebook.run("%%mesh\nx = torch.ones(2, device='cpu'); dist.all_reduce(x); x.tolist()")
        assert notebook["_mesh"].values() == [[4.0, 4.0]] * 4
        notebook.run("%%mesh\ntorch.set_default_device(None)")
        notebook.run(
            "import meshbook\nfrom meshbook.distributed import Mesh\nmesh = Mesh(meshbook.current_mesh())\n"
            "t = meshbook.distribute(w, mesh, ['gpus'])\n"
            "t.sum().item(), meshbook.randn(6, mesh=mesh, sharding_spec=['gpus']).mul(0).sum().item()"
        )
        assert notebook["_"] == (6.0, 0.0)
    finally:
        notebook.run("torch.set_default_device(None)")
        notebook.run("%%mesh\ntorch.set_default_device(None)")


@pytest.mark.parametrize(
    "hosts, jobs, expected",
    [
        (["a"], [], "up 3 h"),
        (["a", "a"], [], "up 3 h"),
        (["a", "b"], [], "up 3 h (6 h of hosts)"),
        (["a", "b", "c"], ["12"], "up 3 h (9 h of hosts), job 12"),
    ],
)
def test_hosts_count_each_and_jobs_are_named(hosts: list[str], jobs: list[str], expected: str) -> None:
    mesh = SavedMesh("main", {"gpus": 4}, hosts, began=time.time() - 3 * 3600, jobs=jobs)
    assert describe_age(mesh) == expected


def test_what_is_replaced_is_named(notebook) -> None:
    assert "current" not in notebook.run("%mesh use main").stdout.partition("is current")[2]
    spawned = notebook.run("%mesh spawn gpus=1 --no-torch --name second").stdout
    assert spawned.endswith(' on 1 host); current in place of "main"\n')
    notebook.run("loss = 0.5")
    notebook.run("%%mesh\nloss = 0.25")
    assert notebook.run("%mesh pull loss").stdout.startswith(
        "loss: ValueMesh of rank 0 in place of the notebook's float;"
    )
    assert "in place of" not in notebook.run("%mesh pull loss").stdout
    notebook.run("%mesh stop second")


def test_a_long_list_has_what_this_notebook_left_first(notebook, monkeypatch, tmp_path) -> None:
    session = notebook.shell._meshbook_session
    saved = [_saved(tmp_path / f"{number}", "theirs.ipynb", owner=1) for number in range(6)]
    saved += [_saved(tmp_path / "waits", "theirs.ipynb"), _saved(tmp_path / "own", "mine.ipynb")]
    monkeypatch.setattr(session, "notebook", "mine.ipynb")
    monkeypatch.setattr(sys.modules[SavedSession.__module__], "sessions", lambda: saved)
    lines = notebook.run("%mesh list").stdout.partition("elsewhere:\n")[2].splitlines()
    assert lines[1] == "      %mesh attach own" and lines[3] == "      %mesh attach waits"
    assert lines[-1] == "  and 3 more: %mesh list --all" and len(lines) == 8
    assert notebook.run("%mesh list --all").stdout.count("belongs to theirs.ipynb (process 1)") == 6


def _saved(folder: Path, notebook: str, owner: int | None = None) -> SavedSession:
    """A session that a notebook has, or has left."""
    state = NotebookState(notebook, None, {}, {}, (), {}, 1)
    (folder / "memory").mkdir(0o700, parents=True)
    write_private(folder / "memory" / KEY, encode(state))
    mesh = SavedMesh(folder.name, {"gpus": 1}, [], began=time.time())
    return SavedSession(folder.name, folder, (mesh,), owner, time.time(), 600.0, 1.0)
