"""%mesh run: scripts that were written for torchrun, on the ranks of a mesh."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Notebook
from patience import wait_until

from meshbook import errors
from meshbook.mesh.rank_calls import start_cell
from meshbook.shell.scripts import Script

TRAIN = """\
import argparse, os, sys
import torch
import torch.distributed as dist
import shards

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--fails", type=int, default=-1)
args = parser.parse_args()

def main():
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    if dist.get_rank() == args.fails:
        raise ValueError("bad shard")
    dist.all_reduce(total)
    print(total.item(), args.lr, shards.COUNT, os.environ["LOCAL_RANK"] == str(dist.get_rank()))
    dist.destroy_process_group()
    os.environ["LEFT_BEHIND"] = "yes"
    os.chdir("/")
    sys.exit(args.exit)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The notebook's folder, with a script and a module beside it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN)
    (folder / "shards.py").write_text("COUNT = 3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def notebook(folder: Path, notebook: Notebook) -> Notebook:
    """Four ranks; the folder is the notebook's."""
    return notebook


def test_a_script_runs_on_all_ranks_as_by_torchrun(notebook: Notebook, folder: Path) -> None:
    shown = notebook.run("%mesh run train.py --lr 0.5").stdout
    assert shown == "[0-3] 6.0 0.5 3 True\n"


def test_what_it_changes_of_its_interpreter_is_put_back(notebook: Notebook) -> None:
    state = (
        "%%mesh\nimport os, sys\n"
        "os.environ.get('LEFT_BEHIND'), os.getcwd(), sys.argv, sys.path, 'shards' in sys.modules, 'args' in globals()"
    )
    notebook.run(state)
    before = notebook["_mesh"].values()
    notebook.run("%mesh run train.py")
    notebook.run(state)
    assert notebook["_mesh"].values() == before
    assert {(each[0], each[4], each[5]) for each in before} == {(None, False, False)}


def test_the_process_groups_are_there_again_after_it(notebook: Notebook) -> None:
    notebook.run("%mesh run train.py")
    notebook.run("%%mesh\nx = torch.ones(1); dist.all_reduce(x); x.item()")
    assert notebook["_mesh"].values() == [4.0] * 4


def test_a_module_beside_it_is_imported_as_it_is_by_then(notebook: Notebook, folder: Path) -> None:
    notebook.run("%mesh run train.py")
    (folder / "shards.py").write_text("COUNT = 12345\n")
    assert "12345" in notebook.run("%mesh run train.py").stdout
    (folder / "shards.py").write_text("COUNT = 3\n")


def test_its_names_are_kept_when_asked(notebook: Notebook, folder: Path) -> None:
    (folder / "classes.py").write_text("class Net: pass\nnet = Net()\ndef make():\n    return Net()\n")
    notebook.run("%mesh run --keep classes.py")
    notebook.run("%%mesh\nimport pickle\ntype(pickle.loads(pickle.dumps(make()))) is Net and type(net) is Net")
    assert notebook["_mesh"].values() == [True] * 4
    notebook.run("%mesh run classes.py")
    notebook.run("%%mesh\ndel Net, net, make")
    assert notebook.run("%mesh run classes.py").stdout == ""
    notebook.run("%%mesh\n'Net' in globals()")
    assert notebook["_mesh"].values() == [False] * 4


def test_an_exit_code_fails_the_cell(notebook: Notebook) -> None:
    ran = notebook.try_to_run("%mesh run train.py --exit 3")
    assert isinstance(ran.error, errors.CallFailed)
    assert str(ran.error) == "ranks 0-3 raised ScriptExit: train.py ended with exit code 3 (train.py, line 22)"
    error = ran.error.failures[0].load()
    assert isinstance(error, errors.ScriptExit) and error.code == 3
    assert notebook.run("%mesh run train.py --exit 0").stdout.endswith("True\n")


def test_a_text_as_exit_code_is_shown_and_counts_as_1(notebook: Notebook, folder: Path) -> None:
    (folder / "gives_up.py").write_text("import sys\nsys.exit('no data')\n")
    ran = notebook.try_to_run("%mesh run gives_up.py")
    assert "gives_up.py ended with exit code 1: no data" in str(ran.error)


def test_a_script_that_fails_on_one_rank_frees_the_others(notebook: Notebook) -> None:
    ran = notebook.try_to_run("%mesh run train.py --fails 1")
    assert isinstance(ran.error, errors.CallFailed) and ran.error.ranks == (1,)
    assert "rank 1 raised ValueError: bad shard (train.py, line 16)" in str(ran.error)
    assert "ranks 0,2,3 were waiting in all_reduce (train.py, line 17)" in str(ran.error)
    assert re.search(r"File \S*train.py:16", ran.stdout) and "scripts.py" not in ran.stdout


def test_percent_run_in_a_cell_gives_the_same(notebook: Notebook) -> None:
    by_command = notebook.run("%mesh run train.py --lr 0.25").stdout
    assert "6.0 0.25 3 True" in by_command
    ran = notebook.try_to_run("%%mesh\nimport os\nfolder = os.getcwd()\n%run train.py --lr 0.25")
    assert "6.0 0.25 3 True" in ran.stdout
    notebook.run("%%mesh\nos.chdir(folder)")


def test_a_module_runs_with_its_package(notebook: Notebook, folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "parts.py").write_text("PART = 'a part'\n")
    (folder / "package" / "__main__.py").write_text("import sys\nfrom .parts import PART\nprint(sys.argv[1:], PART)\n")
    (folder / "package" / "train.py").write_text("print(__name__, __package__, __file__.rpartition('/')[2])\n")
    assert notebook.run("%mesh run -m package --fast").stdout == "[0-3] ['--fast'] a part\n"
    assert notebook.run("%mesh run -m package.train").stdout == "[0-3] __main__ package train.py\n"
    assert "there is no module package.none that can be run" in str(
        notebook.try_to_run("%mesh run -m package.none").error
    )
    assert "there is no module none_at_all" in str(notebook.try_to_run("%mesh run -m none_at_all").error)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%mesh run", "%mesh run needs SCRIPT [ARGS]."),
        ("%mesh run tran.py", 'there is no tran.py in {folder}. Did you mean "train.py"?'),
        ("%mesh run none/train.py", "there is no none/train.py in {folder}/none."),
        ("%mesh run .", ". is a folder; name the file to run, or a module"),
        ("%mesh run gpus=0 train.py", '%mesh run takes no axis, but got "gpus=0".'),
        ("%mesh run train.py 'lr", "a quote is not closed"),
        ("%mesh run --kep train.py", 'unknown option "--kep" of %mesh run. Did you mean "--keep"?'),
        ("%mesh run --profile --async train.py", "--profile does not go with --async."),
    ],
)
def test_a_line_that_names_no_program_is_refused(notebook: Notebook, folder: Path, line: str, says: str) -> None:
    ran = notebook.try_to_run(line)
    assert isinstance(ran.error, errors.UsageError) and says.format(folder=folder) in str(ran.error)


def test_a_syntax_error_is_found_before_anything_is_sent(notebook: Notebook, folder: Path) -> None:
    (folder / "wrong.py").write_text("print('begun')\ndef (\n")
    ran = notebook.try_to_run("%mesh run wrong.py")
    assert isinstance(ran.error, SyntaxError) and ran.error.lineno == 2
    assert "begun" not in ran.stdout and "wrong.py" in ran.stdout
    (folder / "wrong.py").write_bytes(b"print('begun')\0\n")
    ran = notebook.try_to_run("%mesh run wrong.py")
    assert isinstance(ran.error, (SyntaxError, errors.UsageError)) and "null bytes" in str(ran.error)


def test_processes_that_it_starts_find_its_definitions(notebook: Notebook, folder: Path) -> None:
    (folder / "workers.py").write_text(
        "import multiprocessing, torch\nfrom torch.utils.data import DataLoader\n"
        "class Numbers:\n    def __len__(self): return 8\n    def __getitem__(self, at): return torch.tensor(at)\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(square, [2, 3]))\n"
        "    for how in ('fork', 'spawn'):\n"
        "        loader = DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context=how)\n"
        "        print(sum(int(batch.sum()) for batch in loader))\n"
    )
    shown = notebook.run("%mesh run --group none workers.py").stdout
    assert sorted(line.partition(" ")[2] for line in shown.splitlines()) == [*["28"] * 8, *["[4, 9]"] * 4]


def test_bytes_that_are_no_text_are_shown(notebook: Notebook, folder: Path) -> None:
    (folder / "binary.py").write_text("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\n')\nsys.stdout.flush()\n")
    assert notebook.run("%mesh run binary.py").stdout == "[0-3] \\xff\\xfe\n"


def test_threads_of_a_script_end_before_it(notebook: Notebook, folder: Path) -> None:
    (folder / "thread.py").write_text(
        "import threading, time\n"
        "def late():\n    time.sleep(0.3)\n    print('the thread has ended')\n"
        "threading.Thread(target=late).start()\n"
    )
    assert notebook.run("%mesh run thread.py").stdout == "[0-3] the thread has ended\n"


def test_a_running_script_is_a_job_that_one_looks_into_and_stops(notebook: Notebook, folder: Path) -> None:
    (folder / "loop.py").write_text("import time\nstep = 0\nwhile True:\n    step += 1\n    time.sleep(0.01)\n")
    assert re.fullmatch(r"job \d+ runs on ranks 0-3; .*\n", notebook.run("%mesh run --async loop.py").stdout)

    def looked() -> bool:
        shown = notebook.try_to_run("%mesh eval --now step > 5").stdout
        return "loop.py, line" in shown and "NameError" not in shown and notebook["_mesh"].values() == [True] * 4

    wait_until(looked)
    notebook.try_to_run("%mesh interrupt")
    notebook.run("%%mesh\n'step' in globals()")
    assert notebook["_mesh"].values() == [False] * 4


@pytest.mark.parametrize(
    ("script", "prints"),
    [
        ("import multiprocessing\nmultiprocessing.set_start_method('spawn')\nprint('set')", "set"),
        ("import sys\nprint('led away')\nsys.stdout = sys.stderr = open('log.txt', 'a')\nprint('unseen')", "led away"),
        ("import sys\nprint('closed')\nsys.stdout.close()", "closed"),
        (
            "import os\nprint('led away', flush=True)\n"
            "with open('log.txt', 'a') as file: os.dup2(file.fileno(), 1); os.dup2(1, 2)\nprint('unseen', flush=True)",
            "led away",
        ),
        ("import builtins\nprint('silenced')\nbuiltins.print = lambda *texts: None\nprint('unseen')", "silenced"),
        (
            "import logging, sys\n"
            "for name in ('', 'train', '__main__'):\n"
            "    logging.getLogger(name).addHandler(logging.StreamHandler(sys.stdout))\n"
            "logging.getLogger('train').propagate = False\nlogging.getLogger('train').warning('logged')",
            "logged",
        ),
        (
            "import warnings\nwith warnings.catch_warnings(record=True) as seen: warnings.warn('careful')\n"
            "print(len(seen))\nwarnings.simplefilter('error')",
            "1",
        ),
        (
            "import gc, torch\n"
            "print(gc.isenabled(), torch.is_grad_enabled(), torch.zeros(1).dtype, torch.ones(1).device)\n"
            "gc.disable()\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n"
            "torch.set_default_device('meta')",
            "True True torch.float32 cpu",
        ),
        (
            "import signal, subprocess\nprint(subprocess.run(['false']).returncode)\n"
            "signal.signal(signal.SIGALRM, lambda *_: print('rang'))\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\n"
            "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)",
            "1",
        ),
        ("import json, sys\nprint(json.dumps(1))\nsys.modules['json'] = None", "1"),
    ],
    ids=[
        "start method",
        "streams",
        "closed",
        "descriptors",
        "print",
        "loggers",
        "warnings",
        "torch",
        "signals",
        "modules",
    ],
)
def test_what_belongs_to_the_process_is_put_back(notebook: Notebook, folder: Path, script: str, prints: str) -> None:
    (folder / "changes.py").write_text(f"{script}\n")
    for _ in range(2):
        assert notebook.run("%mesh run changes.py").stdout == f"[0-3] {prints}\n"
    assert notebook.run("%%mesh\nimport time\ntime.sleep(0.1)\nprint('here')").stdout == "[0-3] here\n"


def test_it_begins_in_the_folder_of_the_notebook(notebook: Notebook, folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "words.txt").write_text("found")
    (folder / "reads.py").write_text("print(open('words.txt').read())\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "data")
        assert notebook.run("%mesh run ../reads.py").stdout == "[0-3] found\n"
    notebook.run("%%mesh\nimport os\nos.getcwd()")
    assert notebook["_mesh"].values() == [str(folder)] * 4


def test_its_processes_end_before_it(notebook: Notebook, folder: Path) -> None:
    (folder / "children.py").write_text(
        "import multiprocessing, os, sys, time\n"
        "def late():\n    time.sleep(0.3)\n    print('the child has ended', flush=True)\n"
        "fork = multiprocessing.get_context('fork')\n"
        "fork.Process(target=late).start()\n"
        "fork.Process(target=time.sleep, args=(600,), daemon=True).start()\n"
        "sys.exit()\n"
    )
    assert notebook.run("%mesh run children.py").stdout == "[0-3] the child has ended\n"
    notebook.run("%%mesh\nimport multiprocessing\nlen(multiprocessing.active_children())")
    assert notebook["_mesh"].values() == [0] * 4


def test_pools_that_it_leaves_open_end(notebook: Notebook, folder: Path) -> None:
    (folder / "pools.py").write_text(
        "from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
        "threads, processes = ThreadPoolExecutor(2), ProcessPoolExecutor(1)\n"
        "threads.submit(print, 'submitted')\nassert processes.submit(abs, -3).result() == 3\n"
    )
    assert notebook.run("%mesh run --timeout 60 pools.py").stdout == "[0-3] submitted\n"


@pytest.mark.parametrize("ends", ["", "raise ValueError('bad')"], ids=["ended", "failed"])
def test_workers_of_a_loader_do_not_hold_the_rank(notebook: Notebook, folder: Path, ends: str) -> None:
    (folder / "loader.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(range(8), 2, num_workers=4, persistent_workers=True)\n"
        f"print(sum(int(batch.sum()) for batch in loader))\n{ends}\n"
    )
    assert "[0] 28\n" in notebook.try_to_run("%mesh run --only 0 loader.py").stdout
    (folder / "fails.py").write_text("raise ValueError('another error')\n")
    notebook.try_to_run("%mesh run --only 0 fails.py")
    began = time.monotonic()
    notebook.run("%%mesh\nimport multiprocessing\nlen(multiprocessing.active_children())")
    assert notebook["_mesh"].values() == [0] * 4
    assert time.monotonic() - began < 15  # each worker would be waited for 5 s


def test_handlers_of_signals_are_put_back(notebook: Notebook, folder: Path) -> None:
    (folder / "handler.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n")
    notebook.run("%mesh run handler.py")
    notebook.run("%%mesh\nimport signal\nsignal.getsignal(signal.SIGTERM) is signal.SIG_IGN")
    assert notebook["_mesh"].values() == [False] * 4


def test_a_rank_without_the_file_runs_it_all_the_same(notebook: Notebook) -> None:
    source = b"import os\nprint(__file__ != '/nowhere/far.py', os.path.exists(__file__), 1 / 0)\n"
    shown: list[str] = []
    procs = notebook["procs"]
    script = Script("far.py", (), "/nowhere/far.py", source)
    run = start_cell(procs, script, on_output=lambda event: shown.append(getattr(event, "text", "")))
    with pytest.raises(errors.CallFailed, match=r"ZeroDivisionError: division by zero \(far.py, line 2\)"):
        run.future.get(60)
    script = script._replace(source=source.replace(b", 1 / 0", b""))
    start_cell(procs, script, on_output=lambda event: shown.append(getattr(event, "text", ""))).future.get(60)
    assert "".join(shown).count("True True") == 4
