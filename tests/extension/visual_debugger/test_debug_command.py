"""``%mesh debug`` in a shell without a kernel: there is no panel, and editors can come in."""

from __future__ import annotations

import json
import re

import pytest
from debug_client import DebugClient

from meshbook.mesh.dap import TOKEN

CELL = "%%mesh\nif rank == 2:\n    breakpoint()\nrank"


def launch_lines(text: str) -> dict[str, object]:
    """What is to be copied to launch.json, trailing comma and all."""
    found = re.search(r"\{.*\}", text, re.DOTALL)
    assert found
    return dict(json.loads(re.sub(r",\s*\}$", "}", found[0])))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%mesh debug", "say which rank, by its number."),
        ("%mesh debug one", '"one" is no rank of this mesh, which has '),
        ("%mesh debug 9", "is no rank of this mesh, which has ranks 0-3."),
        ("%mesh debug 1 2", "one word"),
    ],
)
def test_what_is_no_rank_is_answered(notebook, line: str, message: str) -> None:
    assert message in notebook.fail(line)


def test_an_editor_comes_in_with_the_lines_that_are_printed(notebook) -> None:
    text = notebook.run("%mesh debug 2").stdout
    assert text.startswith("rank 2 (")
    assert "no debugger panel here" in text
    launch = launch_lines(text)
    connect = launch["connect"]
    assert isinstance(connect, dict)
    assert (launch["type"], launch["request"], connect["host"]) == ("debugpy", "attach", "127.0.0.1")
    client = DebugClient(connect["port"])
    client.attach(**{TOKEN: launch[TOKEN]})
    client.ask("configurationDone")
    notebook.run("%%mesh --async\nif rank == 2:\n    breakpoint()\nrank")
    client.event("stopped")
    again = launch_lines(notebook.run("%mesh debug 2").stdout)
    assert client.closes()
    assert again[TOKEN] != launch[TOKEN] and again["connect"] != connect
    notebook.run("%mesh wait")
    assert notebook["_mesh"].values() == [0, 1, 2, 3]
    assert "rank 2 is no longer under the debugger" in notebook.run("%mesh debug --off").stdout
    assert notebook.run("%mesh debug --off").stdout == "no rank is under the debugger\n"
    client.close()


def test_a_rank_without_debugpy_says_how_to_install_it(notebook) -> None:
    notebook.run("%%mesh rank=3\nimport sys\nsys.modules['debugpy'] = None")
    text = notebook.fail("%mesh debug 3")
    assert "rank 3 is not under the debugger: no debugpy" in text
    assert " -m pip install debugpy" in text
    notebook.run("%%mesh rank=3\ndel sys.modules['debugpy']")


def test_a_dead_rank_cannot_be_debugged(notebook) -> None:
    notebook.try_to_run("%%mesh rank=3\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    text = notebook.fail("%mesh debug 3")
    assert "rank 3" in text and "%mesh heal" in text
    notebook.run("%mesh heal")
    assert notebook.run("%mesh debug 3").stdout.startswith("rank 3 (")
    notebook.run("%mesh debug --off")
