"""``meshbook`` beside a notebook that is alive: each block of docs/command.md, and a mesh that is taken from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshbook import sessions
from tests.kernel.test_pages import blocks, complain, examples, matches, output_of

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600), pytest.mark.usefixtures("own_folders")]

StartKernel = Callable[..., Any]
PAGE = "docs/command.md"


def notebook(start_kernel: StartKernel) -> Any:
    return start_kernel(env={**os.environ, "JPY_SESSION_NAME": "/home/ann/train.ipynb"})


def shell(command: str) -> subprocess.CompletedProcess[str]:
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, env=environment)


def even(text: str) -> str:
    """Return a text whose columns have no width."""
    return re.sub(" {2,}", "  ", text)


def test_the_page_shows_what_the_command_shows(start_kernel: StartKernel) -> None:
    kernel, cells = notebook(start_kernel), iter(examples(PAGE))
    page = blocks(PAGE)
    for (language, text), (after, shown) in zip(page, [*page[1:], ("", "")], strict=True):
        if language == "python":
            example = next(cells)
            cell = kernel.run(example.code)
            assert cell.ok and matches(example.shown, output_of(cell)), complain(PAGE, example, output_of(cell))
            if "--async" in example.code:
                held_up(kernel)
        elif language == "sh":
            told = shell(text)
            assert after == "text" and told.returncode == 0, told.stderr
            assert matches(even(shown), even(told.stdout)), f"{text}shows\n{told.stdout}"


def held_up(kernel: Any) -> None:
    """Wait until rank 1 waits for rank 0."""
    for _ in range(100):
        if "waits in all_reduce" in shell("meshbook stacks main").stdout:
            return
    raise AssertionError("not in time")


def test_a_mesh_is_taken_while_its_cell_waits_and_comes_back(start_kernel: StartKernel) -> None:
    kernel = notebook(start_kernel)
    assert kernel.run("%mesh spawn gpus=2 --device cpu").ok
    waiting = kernel.start("%%mesh\nimport time\nprint('begun', flush=True)\ntime.sleep(600)")
    kernel.wait_for_text("begun")
    assert "belongs to train.ipynb (process" in shell("meshbook list").stdout
    refused = shell("meshbook attach main")
    assert refused.returncode == 1 and 'mesh "main" belongs to train.ipynb' in refused.stderr
    taken = shell("echo %mesh interrupt | meshbook attach main --take --yes")
    assert taken.returncode == 0 and "left by train.ipynb" in taken.stdout, taken.stderr
    reply = kernel.client.get_shell_msg(timeout=60)
    assert reply["parent_header"]["msg_id"] == waiting and reply["content"]["ename"] == "MeshDetachedError"
    (session,) = sessions()
    assert session.owner_pid is None
    back = kernel.run("%mesh attach main")
    assert back.ok, back.reply
    assert "[0,1] True" in kernel.run("%mesh eval rank < 2").text()
    assert kernel.run("%mesh stop").ok
