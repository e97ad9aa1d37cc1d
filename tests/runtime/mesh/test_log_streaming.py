"""How what calls print is shown, and logged; modules that are sent to hosts."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from meshbook import ProcMesh
from meshbook.errors import UsageError

pytestmark = pytest.mark.monarch

PROGRAM = """
import logging, os
from meshbook import this_host
from meshbook.actor import Actor, endpoint

class Speaker(Actor):
    @endpoint
    def say(self, text):
        print(text)
        print("twice"); print("twice")
        logging.getLogger("mine").info("logged " + text)

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 3}, torch=False)
    speakers = procs.spawn("speakers", Speaker)
    procs.logging_option(%s).get()
    speakers.say.call("first").get()
    if %s:
        procs.respawn(0)
        procs.slice(gpus=0).spawn("again", Speaker).say.call_one("second").get()
    procs.stop()
"""


def _run(options: str, folder: Path, again: bool = False) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM % (options, again))
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=True
    )


def test_nothing_is_streamed_by_default_of_the_option(tmp_path: Path) -> None:
    done = _run("", tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_lines_are_streamed_and_logged_from_the_level_on_also_of_ranks_that_are_started_again(tmp_path: Path) -> None:
    done = _run("stream_to_client=True", tmp_path, again=True)
    assert done.stdout.splitlines().count("[1] first") == 1
    assert sorted(line.partition("] ")[0] for line in done.stderr.splitlines() if "logged first" in line) == [
        "[0",
        "[1",
        "[2",
    ]
    second = "[0] INFO:mine:[actor=<root>.<__main__.Speaker again>] logged second"
    assert [line for line in done.stderr.splitlines() if "logged second" in line] == [second]
    done = _run("stream_to_client=True, level=logging.WARNING", tmp_path)
    assert "[2] first" in done.stdout
    assert "logged" not in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"level": "INFO"}, "one of logging's"),
        ({"level": 256}, "from 0 to 255"),
    ],
)
def test_options_that_cannot_be_are_refused(mesh4: ProcMesh, options: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        mesh4.logging_option(**options)  # type: ignore[arg-type]


def test_the_last_option_holds(tmp_path: Path) -> None:
    done = _run("level=logging.ERROR).get(); procs.logging_option(True", tmp_path)
    assert "[2] first" in done.stdout
    assert "logged first" in done.stderr


def test_an_option_can_be_awaited(mesh4: ProcMesh) -> None:
    async def choose() -> None:
        await mesh4.logging_option(True, level=logging.ERROR)

    asyncio.run(choose())
    assert set(mesh4.run("import logging; logging.getLogger().level").get(60).values()) == {logging.ERROR}
