"""The command itself: help, mistakes, exit codes, completion, and how little it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from controllers import Zygote

from meshbook.cli import COMMANDS, main
from tests.runtime.cli.conftest import COMMAND, Run


@pytest.mark.parametrize("words", [(), ("--help",), ("help",)])
def test_the_overview_has_an_example_of_each_command(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    lines = capsys.readouterr().out
    assert all(command.example in lines and command.summary in lines for command in COMMANDS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: meshbook {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lst"], 'unknown command "lst". Did you mean "list"?'),
        (["frobnicate"], 'unknown command "frobnicate". All of them: meshbook --help'),
        (["list", "--jsno"], 'unknown argument "--jsno". Did you mean "--json"?'),
        (["list", "main"], 'unknown argument "main"'),
        (["stop"], "the following arguments are required: NAME"),
        (["kernel", "instal"], 'Did you mean "install"?'),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
        (["logs", "-n", "many"], "invalid int value: 'many'"),
        (["logs", "--json", "--follow"], "leave --follow out"),
    ],
)
def test_bad_usage_is_one_clear_line_and_an_example(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    first, second = shown.err.splitlines()
    assert shown.out == "" and first.startswith("meshbook") and says in first
    assert second.startswith("  for example: meshbook ")


def test_the_list_needs_neither_torch_nor_jupyter_nor_zeromq(zygote: Zygote) -> None:
    code = (
        "import sys; from meshbook.cli import main; main(['list']); "
        "print([name for name in ('torch', 'IPython', 'zmq', 'jupyter_client', 'numpy') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.stdout.splitlines() == ["no mesh on this machine. Start one in a notebook: %mesh spawn gpus=4", "[]"]


def test_without_a_session_each_look_is_one_helpful_line(zygote: Zygote, meshbook: Run) -> None:
    for words in (["logs"], ["stacks"]):
        told = meshbook(*words)
        assert (told.returncode, told.stdout) == (1, "")
        assert (
            told.stderr
            == f"meshbook {words[0]}: no mesh on this machine. Start one in a notebook: %mesh spawn gpus=4\n"
        )
    told = meshbook("stop", "main")
    assert told.returncode == 1 and 'there is no session or mesh "main" here' in told.stderr
    assert meshbook("list", "--json").stdout == "[]\n"


def test_a_reader_that_goes_away_gets_no_traceback(zygote: Zygote) -> None:
    reader = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert reader.stdout is not None
    reader.stdout.close()
    assert reader.stderr is not None
    assert reader.stderr.read() == b"" and reader.wait(60) == 141
    reader.stderr.close()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_each_command_and_its_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS) and "--follow" in script and "install remove" in script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("meshbook st", "stacks\nstop"), ("meshbook stop --f", "--force"), ("meshbook logs ", "mesh1")],
)
def test_bash_completes(typed: str, offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    words = typed.split(" ")
    ask = f"""meshbook() {{ echo mesh1; }}
{script}
COMP_WORDS=({" ".join(words)} "") COMP_CWORD={len(words) - 1}
_meshbook
printf '%s\\n' "${{COMPREPLY[@]}}" | sort"""
    told = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60)
    assert offered in told.stdout and told.stderr == ""


def test_a_command_whose_packages_are_missing_says_what_to_install(meshbook: Run) -> None:
    code = (
        "import sys; sys.modules['meshbook_kernel'] = None; "
        "from meshbook.cli import main; sys.exit(main(['kernel', 'install']))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1 and 'pip install "meshbook[notebook]"' in told.stderr


def test_join_is_the_same_as_the_module(meshbook: Run) -> None:
    told = meshbook("join")
    assert told.returncode == 2 and "a ticket is the whole line beginning with mb1-" in told.stderr
    module = subprocess.run(
        [sys.executable, "-m", "meshbook.join", "--help"], capture_output=True, text=True, timeout=60
    )
    assert "the same: meshbook join" in module.stdout
