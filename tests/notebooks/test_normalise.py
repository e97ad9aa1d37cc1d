"""The stand-ins that saved outputs get, and what counts as the same."""

from __future__ import annotations

import copy
from typing import Any

import nbformat
import pytest
from executed_notebooks import NOTEBOOKS, differences

from notebooks.normalise import Machine, kinds_of, normalise, says_the_same

MACHINE = Machine(hosts=("sun-7.example.org", "sun-7"), users=("ada",))


def stream(text: str, name: str = "stdout") -> Any:
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(**data: str) -> Any:
    return nbformat.v4.new_output("display_data", {mime.replace("_", "/"): text for mime, text in data.items()})


def notebook_of(*outputs: Any, source: str = "", tags: tuple[str, ...] = ()) -> Any:
    cell = nbformat.v4.new_code_cell(source, id="only", outputs=[*outputs], metadata={"tags": [*tags]} if tags else {})
    return nbformat.v4.new_notebook(cells=[cell])


def outputs_of(*outputs: Any, tags: tuple[str, ...] = ()) -> list[Any]:
    notebook = notebook_of(*outputs, tags=tags)
    normalise(notebook, MACHINE)
    once = copy.deepcopy(notebook)
    normalise(notebook, MACHINE)
    assert notebook == once, "what is normalised stays as it is"
    return list(notebook.cells[0].outputs)


def normal(text: str) -> str:
    (output,) = outputs_of(stream(text))
    return str(output.text)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("rank 1 in process 20417, rank 2 in process 20499", "rank 1 in process 1001, rank 2 in process 1002"),
        ("pid 77 sent to process 78, pid 77 waits", "pid 1001 sent to process 1002, pid 1001 waits"),
        ("open port 41873, tcp://sun-7:41874", "open port 50001, tcp://localhost:50002"),
        ("nodeA 127.0.0.1:41873", "nodeA 127.0.0.1:50001"),
        ("reach each other at 10.0.3.17, 10.0.3.18:8080", "reach each other at 192.0.2.1, 192.0.2.2:50001"),
        ("rank 2 on sun-7 ended", "rank 2 on localhost ended"),
        ("sun-7.example.org, sun-70", "localhost, sun-70"),
        ("ada@sun-7 was let in", "user@localhost was let in"),
        ("<function f at 0x7f2a41b3c040>", "<function f at 0x…>"),
        ("on 2026-03-01 14:10:46.123", "on yyyy-mm-dd hh:mm:ss"),
    ],
)
def test_names_and_numbers_of_the_machine_get_stand_ins(said: str, kept: str) -> None:
    assert normal(said) == kept


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("trace: /tmp/tmpx1/slow.json.gz (88 kB)", "trace: …/slow.json.gz (88 kB)"),
        ("[3] /home/ada/.local/state/meshbook/logs/aec/rank-3.log", "[3] …/rank-3.log"),
        ("File ~/code/meshbook/run.py:12, in f", "File …/run.py:12, in f"),
        ("'/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py'", "'…/torch/nn/functional.py'"),
        ("/usr/lib/python3.12/asyncio/tasks.py", "…/asyncio/tasks.py"),
        ("File \x1b[32m/home/ada/run.py:12\x1b[39m", "File \x1b[32m…/run.py:12\x1b[39m"),
        (
            "open it at https://ui.perfetto.dev/a/b, and/or text/plain",
            "open it at https://ui.perfetto.dev/a/b, and/or text/plain",
        ),
        ("{'gpus': 0/4} 3 / 4", "{'gpus': 0/4} 3 / 4"),
    ],
)
def test_paths_keep_their_ends(said: str, kept: str) -> None:
    assert normal(said) == kept


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("ready in 12.2 s (4 ranks)", "ready in 10 s (4 ranks)"),
        ("freed after 0.057 s, all kept", "freed after 0.06 s, all kept"),
        ("took 9.7 s", "took 10 s"),
        ("took 2 min 5 s", "took 2 min"),
        ("took more than 4 s; lives on for 15 min", "took more than 4 s; lives on for 15 min"),
        ("loss 0.25 -> 0.125 so", "loss 0.25 -> 0.125 so"),
        (
            "  mul      20  644.9 ms  rank 5\n  add      20    0.3 ms",
            "  mul      20    600 ms  rank 5\n  add      20    0.3 ms",
        ),
        ("busy 0.34 s  cpu\nidle        cpu", "busy 0.3 s   cpu\nidle        cpu"),
    ],
)
def test_measured_times_keep_one_digit_and_columns_their_width(said: str, kept: str) -> None:
    assert normal(said) == kept


def test_tables_of_ranks_are_laid_out_anew() -> None:
    table = (
        'mesh "main": gpus=2\n'
        "rank  point   host   pid    device  state  memory  at\n"
        "0     gpus=0  sun-7  20417  cpu     idle   425 MB\n"
        "1     gpus=1  sun-7  20418  cpu     busy   1.34 GB  a.b\n"
    )
    assert normal(table + "\n[0] in process 20417") == (
        'mesh "main": gpus=2\n'
        "rank  point   host       pid   device  state  memory  at\n"
        "0     gpus=0  localhost  1001  cpu     idle   400 MB\n"
        "1     gpus=1  localhost  1002  cpu     busy   1 GB    a.b\n"
        "\n[0] in process 1001"
    )


def test_widgets_keep_what_a_viewer_without_a_kernel_shows() -> None:
    html = "<td>sun-7</td><td>425 MB</td>"
    widget = shown(text_html=html, text_plain="mesh")
    widget.data["application/vnd.jupyter.widget-view+json"] = {"model_id": "1"}
    notebook = notebook_of(widget)
    notebook.metadata.widgets = {"state": {}}
    normalise(notebook, MACHINE)
    assert notebook.cells[0].outputs[0].data == {"text/html": "<td>localhost</td><td>400 MB</td>", "text/plain": "mesh"}
    assert "widgets" not in notebook.metadata


def test_what_is_nothing_without_a_kernel_goes() -> None:
    script = nbformat.v4.new_output("display_data", {"application/javascript": "1"})
    assert outputs_of(shown(text_plain=""), stream("on"), script) == [stream("on")]


def test_pieces_of_a_stream_are_one() -> None:
    outputs = outputs_of(stream("a"), stream("b\n"), stream("oh", "stderr"), stream("c"))
    assert [output.text for output in outputs] == ["ab\n", "oh", "c"]


def test_outputs_in_any_order_have_their_streams_first() -> None:
    value, printed, note = shown(text_plain="12"), stream("now 12"), stream("oh", "stderr")
    assert outputs_of(value, printed, note, tags=("any-order",)) == [note, printed, value]
    assert outputs_of(value, printed) == [value, printed]


def test_notes_of_a_slow_machine_are_left_out_where_none_is_planted() -> None:
    note = stream("ranks 0,2 wait in barrier (cell 6, line 3)\n  look: %mesh stacks    stop: interrupt\n", "stderr")
    outputs = stream("a\n"), note, stream("b\n")
    assert outputs_of(*outputs) == [stream("a\nb\n")]
    assert outputs_of(*outputs, tags=("raises-exception",)) == [*outputs]


def test_a_name_that_the_notebook_itself_uses_stays() -> None:
    notebook = notebook_of(stream("rank 1 on ada"), source="ada = 1")
    normalise(notebook, MACHINE)
    assert notebook.cells[0].outputs[0].text == "rank 1 on ada"


def test_errors_are_normalised_in_their_tracebacks() -> None:
    error = nbformat.v4.new_output("error", ename="E", evalue="on sun-7", traceback=["\x1b[31mE\x1b[39m: on sun-7"])
    (output,) = outputs_of(error)
    assert (output.evalue, output.traceback) == ("on localhost", ["\x1b[31mE\x1b[39m: on localhost"])


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("ready in 10 s", "ready in 0.3 s", True),
        ("[0-2] hello\n[0] in process 1001", "[0] in process 1002\n[1] hello\n[0,2] hello", True),
        ("loss 0.25", "loss 0.26", False),
        ("[0-2] hello", "[0,1] hello", False),
    ],
)
def test_times_pids_and_the_order_of_ranks_make_no_difference(before: str, after: str, same: bool) -> None:
    assert says_the_same(notebook_of(stream(before)), notebook_of(stream(after))) is same


def test_cells_that_vary_are_compared_by_kinds() -> None:
    tags = ("varies",)
    one = notebook_of(stream("0.25"), tags=tags)
    assert says_the_same(one, notebook_of(stream("0.75"), tags=tags))
    assert not says_the_same(one, notebook_of(stream("0.25"), stream("oh", "stderr"), tags=tags))
    assert not says_the_same(one, notebook_of(stream("0.25"), source="other", tags=tags))


# ---- the check that each notebook's test makes ----------------------------------------------------------------------


@pytest.fixture
def saved() -> Any:
    return nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)


def test_a_notebook_is_like_itself(saved: Any) -> None:
    assert differences(saved, copy.deepcopy(saved)) == []


@pytest.mark.parametrize("cell", ["spawn-code", "state-code", "plots-code", "accuracy-code"])
def test_an_output_that_is_removed_is_seen(saved: Any, cell: str) -> None:
    computed = copy.deepcopy(saved)
    (found,) = (each for each in saved.cells if each.id == cell)
    found.outputs.pop()
    (told,) = differences(saved, computed)
    assert told.startswith(f"{cell}: saved are ")


def test_outputs_in_another_order_are_seen(saved: Any) -> None:
    computed = copy.deepcopy(saved)
    (found,) = (cell for cell in saved.cells if cell.id == "accuracy-code")
    assert kinds_of(found) == ["stream stdout", "display_data text/plain"]
    found.outputs.reverse()
    assert len(differences(saved, computed)) == 1


def test_cells_in_another_order_are_seen(saved: Any) -> None:
    computed = copy.deepcopy(saved)
    code = [index for index, cell in enumerate(saved.cells) if cell.cell_type == "code"]
    saved.cells[code[0]], saved.cells[code[1]] = saved.cells[code[1]], saved.cells[code[0]]
    assert len(differences(saved, computed)) == 1
