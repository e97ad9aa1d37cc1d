"""How what calls print is shown, and logged; modules that are sent to hosts."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from meshbook import ProcMesh, this_host
from meshbook.errors import UsageError

pytestmark = pytest.mark.monarch

PROGRAM = """
import logging, os
from meshbook.actor import Actor, endpoint, this_host

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


def _answer(code: str, folder: Path, prefix: str) -> str:
    """Run a program that prints "one" and then "two", each shown behind ``prefix`` and told to have come.

    Returns: what it prints after that.
    """
    (folder / "program.py").write_text(code)
    program = [sys.executable, "-u", "program.py"]
    with subprocess.Popen(program, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("one", "two"):
            assert process.stdout.readline() == f"{prefix}{text}\n"
            process.stdin.write(f"{text} came\n")
            process.stdin.flush()
        left = process.stdout.read()
        assert process.wait(60) == 0
    return left


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


def test_equal_lines_of_a_window_are_shown_once_and_none_is_lost_at_the_end(tmp_path: Path) -> None:
    done = _run("stream_to_client=True, aggregate_window_sec=600", tmp_path)
    assert done.stdout.splitlines() == ["[3 similar log lines] [0-2] first", "[6 similar log lines] [0-2] twice"]
    logged = "[0-2] INFO:mine:[actor=<root>.<__main__.Speaker speakers>] logged first"
    assert done.stderr.splitlines() == [f"[3 similar log lines] {logged}"]


def test_another_option_shows_what_waits_for_the_end_of_a_window(tmp_path: Path) -> None:
    code = """
import sys
from meshbook import this_host
if __name__ == "__main__":
    with this_host().spawn_procs({"gpus": 2}, torch=False) as procs:
        procs.logging_option(True, 600).get()
        procs.run("print('one')").get()
        procs.logging_option(True, 600).get()
        assert sys.stdin.readline() == "one came\\n"
        procs.run("print('two')").get()
        procs.logging_option(True).get()
        assert sys.stdin.readline() == "two came\\n"
        procs.run("print('three')").get()
"""
    left = _answer(code, tmp_path, "[2 similar log lines] [0,1] ")
    assert sorted(left.splitlines()) == ["[0] three", "[1] three"]


def test_a_window_ends_and_the_next_one_begins(tmp_path: Path) -> None:
    code = """
import sys
from meshbook import this_host
if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 1}, torch=False)
    procs.logging_option(True, 0.05).get()
    for text in ("one", "two"):
        procs.run(f"print({text!r})").get()
        assert sys.stdin.readline() == f"{text} came\\n"
"""
    assert not _answer(code, tmp_path, "[0] ")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"aggregate_window_sec": 3}, "with stream_to_client=False none are"),
        ({"stream_to_client": True, "aggregate_window_sec": 0}, "a number of seconds above 0"),
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


def test_modules_are_sent_to_all_processes_of_hosts(mesh4: ProcMesh, tmp_path: Path) -> None:
    (tmp_path / "sent_to_hosts.py").write_text("value = 7\n")
    with this_host().spawn_procs({"gpus": 1}, torch=False) as other:
        assert this_host().sync_workspace(tmp_path).get(60) is None
        for procs in (mesh4, other):
            assert set(procs.run("import sent_to_hosts; sent_to_hosts.value").get(60).values()) == {7}
    with pytest.raises(UsageError, match="conda=True: the packages"):
        this_host().sync_workspace(tmp_path, conda=True)
