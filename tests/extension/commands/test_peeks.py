"""%mesh eval --now and pull --now: values of ranks that are busy with a job."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from conftest import Notebook
from patience import wait_until

from meshbook.mesh.peeks import NoValue

LOOP = """\
%%mesh --async
import time
losses, name = [], 'four'
while True:
    losses.append(1.5)
    time.sleep(0.01)
"""


@pytest.fixture
def job(notebook: Notebook) -> Iterator[Notebook]:
    """A job that fills a list on four ranks."""
    notebook.run(LOOP)
    wait_until(lambda: "ValueMesh" in notebook.try_to_run("%mesh pull --now losses name").stdout)
    yield notebook
    notebook.try_to_run("%mesh interrupt")


def test_eval_shows_equal_values_once_and_where_the_ranks_were(job: Notebook) -> None:
    shown = job.run("%mesh eval --now name").stdout
    assert re.fullmatch(r"\[0-3\] 'four'\nat that time: cell \d+, line [456]\n|(?s:.*;.*)", shown), shown
    assert job["_mesh"].values() == ["four"] * 4


def test_one_line_tells_ranks_at_several_places_apart(job: Notebook) -> None:
    shown = job.run("%mesh eval rank=0-1 --now rank").stdout
    assert shown.startswith("[0] 0\n[1] 1\nat that time: ") and shown.count("\n") == 3


def test_pull_binds_names_of_one_moment(job: Notebook) -> None:
    shown = job.run("%mesh pull --now losses name gpus=0").stdout
    assert "losses: ValueMesh of rank 0" in shown and "name: ValueMesh of rank 0" in shown
    assert set(job["losses"].get(0)) == {1.5} and job["name"].values() == ["four"]


def test_ranks_that_fail_are_one_error_beside_the_values_of_the_others(job: Notebook) -> None:
    ran = job.try_to_run("%mesh eval --now 6 // (rank - 1) // (rank - 2)")
    assert ran.stdout.startswith("[0,3] 3\nat that time: ")
    assert ran.stdout.count("ZeroDivisionError") == 1 and "ranks 1,2 raised" in ran.stdout
    assert "NoValue" in type(job["_mesh"].get(1)).__name__
    assert isinstance(job["_mesh"].get(1), NoValue)


def test_a_name_that_no_rank_has_is_one_error_and_binds_nothing(job: Notebook) -> None:
    shown = job.fail("%mesh pull --now nowhere_at_all")
    assert "ranks 0-3 raised NameError: name 'nowhere_at_all' is not defined on the rank" in shown
    assert "nowhere_at_all" not in job.shell.user_ns


def test_a_peek_that_takes_too_long_says_so(job: Notebook) -> None:
    started = time.monotonic()
    shown = job.fail("%mesh eval --now --timeout 0.2 time.sleep(9)")
    assert time.monotonic() - started < 3
    assert "it took longer than 0.2 s (--timeout)" in shown


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--timeout 2 x", "--timeout says how long --now may take"),
        ("--now --timeout 0 x", "more than 0 s"),
        ("--now --timeout 900 x", "up to 60 s"),
        ("--now", "needs EXPR"),
    ],
)
def test_senseless_lines_are_refused(notebook: Notebook, line: str, says: str) -> None:
    assert says in notebook.fail(f"%mesh eval {line}")


def test_idle_ranks_answer_too(notebook: Notebook) -> None:
    notebook.try_to_run("%mesh interrupt")
    assert notebook.run("%mesh eval --now world_size").stdout == "[0-3] 4\nat that time: idle\n"


def test_what_waits_behind_a_cell_says_so_once(notebook: Notebook) -> None:
    ran = notebook.run("%%mesh --async gpus=1:3\nimport time; time.sleep(4)")
    number = notebook.shell.execution_count - 1
    ran = notebook.run("%mesh eval world_size")
    assert ran.stdout == f"waits behind cell {number} on ranks 1,2; --now looks anyway\n[0-3] 4\n"
    notebook.run("words = ['a']")
    notebook.run("%%mesh --async\ntime.sleep(4)")
    number = notebook.shell.execution_count - 1
    shown = notebook.run("%mesh push words").stdout
    assert shown == f"waits behind cell {number} on ranks 0-3; an interrupt drops it\nwords on ranks 0-3\n"
    assert notebook.run("%mesh eval words").stdout == "[0-3] ['a']\n"
