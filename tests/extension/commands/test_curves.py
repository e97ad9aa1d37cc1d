"""``%mesh watch`` and ``%mesh metrics``, and the curves below cells that log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from stock_kernel import StockKernel, with_extension

from tests.extension.conftest import Notebook

LOG = "%%mesh\nimport meshbook\nfor step in range(3): meshbook.log(loss=rank + step, lr=0.5)"


@pytest.fixture(autouse=True)
def nothing_watched(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%mesh watch --stop")


def test_a_name_that_was_never_logged_is_watched_and_named(notebook: Notebook) -> None:
    assert notebook.run("%mesh watch los").stdout == '"los" was not logged yet. Its curve comes with the first value.\n'
    assert "nothing was logged yet" in notebook.run("%mesh metrics").stdout
    notebook.run(LOG)
    said = notebook.run("%mesh watch los").stdout
    assert said.startswith('"los" was not logged yet. Did you mean "loss"? Logged so far: loss, lr. Its curve comes')
    assert 'Did you mean "loss"?' in str(notebook.try_to_run("%mesh metrics los").error)


def test_the_cell_that_logs_shows_the_curves_that_are_watched(notebook: Notebook) -> None:
    assert notebook.run(LOG).displays == []
    (before,) = notebook.run("%mesh watch loss").displays
    (shown,) = notebook.run(LOG).displays
    assert shown["text/plain"] == before["text/plain"] == "loss 3.5 (0-3: 2..5) at step 2"
    assert "<svg" in shown["text/html"]
    notebook.run("%mesh watch")
    (both,) = notebook.run(LOG).displays
    assert [line.split()[0] for line in both["text/plain"].splitlines()] == ["loss", "lr"]
    notebook.run("%mesh watch --stop")
    assert notebook.run(LOG).displays == []


def test_calls_and_actors_show_their_curves(notebook: Notebook) -> None:
    notebook.run("%mesh watch loss")
    notebook.run("from meshbook.mesh.driven import current_procs\nprocs = current_procs()")
    code = "procs.run('meshbook.log(loss=1)').get()"
    assert [shown["text/plain"] for shown in notebook.run(code).displays] == ["loss 1 (0-3: 1) at step 0"]


def test_a_loop_of_the_notebook_shows_its_own_curve(notebook: Notebook) -> None:
    notebook.run("%mesh watch mine")
    (shown,) = notebook.run("import meshbook\nfor n in range(5): meshbook.log(mine=n * n)").displays
    assert shown["text/plain"] == "mine 16 at step 4"
    (again,) = notebook.run("for n in range(2): meshbook.log(mine=n)").displays
    assert again["text/plain"] == "mine 1 at step 1"


def test_an_expression_is_watched_on_busy_ranks(notebook: Notebook) -> None:
    assert notebook.run('%mesh watch --eval "len(seen) + rank" --every 1s').stdout == ""
    code = "%%mesh\nimport time\nseen = []\nfor n in range(30):\n    time.sleep(0.1); seen.append(n)"
    shown = notebook.run(code).displays[-1]["text/plain"]
    assert re.match(r"len\(seen\) \+ rank [\d.]+ \(0-3: \d+\.\.\d+\) at step [1-9]", shown), shown
    notebook.run("%mesh watch --stop")
    assert notebook.run(code.replace("30", "12")).displays == []


def test_an_expression_that_gives_no_number_says_why(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbook_extension.cells.curves.TRIES", 2)
    notebook.run('%mesh watch --eval "unknown" --every 1s')
    said = notebook.run("%%mesh\nimport time\ntime.sleep(4)").stderr
    assert "%mesh watch --eval unknown: no number so far; rank 0: NameError: name 'unknown' is not defined" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('%mesh watch --eval "a +"', "%mesh watch --eval: invalid syntax\n    a +\n       ^"),
        ("%mesh watch loss --every 2s", "--every is the time between two evaluations of --eval EXPR."),
        ("%mesh watch --eval a --every soon", '--every: "soon" is no duration'),
        ("%mesh watch loss --smooth 1", "--smooth takes a weight below 1, not 1"),
        ("%mesh watch loss --smooth much", 'takes a number, not "much"'),
        ("%mesh watch loss --x size", 'takes step or time, not "size"'),
    ],
)
def test_bad_options_are_refused(notebook: Notebook, line: str, words: str) -> None:
    assert words in str(notebook.try_to_run(line).error)


def test_the_options_choose_the_look(notebook: Notebook) -> None:
    notebook.run(LOG)
    (by_rank,) = notebook.run("%mesh watch loss --ranks --smooth 0.5 --log --x time").displays
    assert "<title>rank 3</title>" in by_rank["text/html"]
    assert "log smooth 0.5" in by_rank["text/html"]
    assert ">s</text>" in by_rank["text/html"]


def test_the_table_of_one_name(notebook: Notebook) -> None:
    notebook.run(LOG)
    shown = notebook.run("%mesh metrics lr").stdout
    assert shown.splitlines()[1].split() == ["lr", "0-3", "2", "0.5", "0.5", "0.5", "0.5", "12"]


class Kernel(StockKernel):
    """A kernel with a front end that keeps the pictures of one cell, with the times at which they came."""

    def pictures(self, code: str) -> list[tuple[float, str, dict[str, Any]]]:
        found: list[tuple[float, str, dict[str, Any]]] = []
        began = time.monotonic()

        def take(message: dict[str, Any]) -> None:
            data = message["content"].get("data", {})
            if "image/svg+xml" in data:
                found.append((time.monotonic() - began, message["msg_type"], data))

        reply = self.client.execute_interactive(code, timeout=60, output_hook=take, allow_stdin=True)
        assert reply["content"]["status"] == "ok", reply["content"]
        return found


@pytest.fixture(scope="module")
def kernel(jupyter_loop: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with with_extension(Kernel, tmp_path_factory) as kernel:
        kernel.pictures("%mesh spawn gpus=2 --device cpu")
        yield kernel


@pytest.mark.slow
def test_a_busy_cell_shows_its_curve_within_three_seconds(kernel: Kernel) -> None:
    kernel.pictures("%mesh watch loss")
    code = "%%mesh\nimport meshbook, time\nfor n in range(60):\n    meshbook.log(loss=n)\n    time.sleep(0.1)"
    shown = kernel.pictures(code)
    first, kind, _ = shown[0]
    assert (kind, first < 3) == ("display_data", True), shown[0]
    assert {kind for _, kind, _ in shown[1:]} == {"update_display_data"}
    with_three = next(at for at, _, data in shown if int(data["text/plain"].rpartition(" ")[2]) >= 2)
    assert with_three < 3
    assert len(shown) <= 4 * 6 + 4, "at most three times a second"
    assert shown[-1][2]["text/plain"] == "loss 59 (0,1: 59) at step 59"


@pytest.mark.slow
def test_what_a_job_logs_is_drawn_in_its_own_cell(kernel: Kernel) -> None:
    kernel.pictures("%mesh watch loss")
    job = "%%mesh --async\nimport meshbook, time\nfor n in range(5):\n    meshbook.log(loss=n)\n    time.sleep(0.1)"
    kernel.pictures(job)
    kernel.pictures("%mesh wait")
    (shown,) = kernel.pictures("%mesh watch loss")
    assert shown[2]["text/plain"] == "loss 4 (0,1: 4) at step 4"
