"""The blocks of the README and of pages of docs/ are run, in their order, and give the output that the page shows.

Blocks of ``python`` that begin with a percent sign are cells of the Meshbook kernel, the others of a page are one
program. A block of ``text`` is the output of the one before it, where three dots stand for anything within a line, or
for any lines. Blocks of ``python cluster`` need other machines, and those of ``python fragment`` names of the reader's:
they are only parsed.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import tomllib

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
README = "README.md"
PAGES = (
    README,
    *(
        f"docs/{name}.md"
        for name in ("actors", "elastic", "index", "install", "magics", "settings", "tensors", "watching")
    ),
    *(f"docs/api/{name}.md" for name in ("actor", "meshbook", "meshes", "tensors")),
)
"""Pages whose blocks are run."""
PARSED = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
BLOCK = re.compile(r"^```([\w ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END_OF_BLOCK = "\x1e"
LONG_S = 400
"""For what takes some seconds on a quiet machine."""
LEAVE_S = 60
"""In which the processes of a program that has ended end too."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CHANGES = re.compile(r"\b(\d+ min )?\d+(\.\d+)? (s|ms)\b|\bpid \d+|, pid=\d+|\bprocess \d+")
"""What differs from run to run: times and processes."""


class Example(NamedTuple):
    """A block of Python, and the output that stands below it."""

    code: str
    shown: str


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the blocks of a page with the words behind their fences."""
    return BLOCK.findall((ROOT / page).read_text())


def examples(page: str) -> list[Example]:
    """Return the blocks of Python of a page that are run, with the output shown for them."""
    found: list[Example] = []
    before = ""
    for language, text in blocks(page):
        if language == "python":
            found.append(Example(text, ""))
        elif language == "text" and before == "python":
            found[-1] = Example(found[-1].code, text)
        before = language
    return found


def cells(page: str) -> list[Example]:
    return [example for example in examples(page) if is_cell(example)]


def program(page: str) -> list[Example]:
    return [example for example in examples(page) if not is_cell(example)]


def is_cell(example: Example) -> bool:
    return example.code.startswith("%")


def steady(text: str) -> str:
    """Return a text without colours, times, numbers of processes and spaces at the end of lines."""
    without = _CHANGES.sub("<changes>", _COLOUR.sub("", text))
    return "".join(f"{line.rstrip()}\n" for line in without.strip("\n").splitlines())


def matches(shown: str, came: str) -> bool:
    """Whether an output is what is shown."""
    lines = steady(shown).splitlines()
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(f"{line}\n").replace(re.escape("..."), ".*") for line in lines
    )
    return re.fullmatch(pattern, steady(came)) is not None


def complain(page: str, example: Example, came: str) -> str:
    return f"{page} runs\n\n{example.code}\nand shows\n\n{steady(example.shown)}\nbut this came:\n\n{steady(came)}"


def output_of(cell: Any) -> str:
    """Return all text of a cell as it stands at the end: streams, displays, the value, the traceback."""
    parts: list[str] = []
    places: dict[str, int] = {}
    for kind, content in cell.messages:
        place = content.get("transient", {}).get("display_id")
        if kind == "stream":
            parts.append(content["text"])
        elif kind in ("display_data", "execute_result"):
            places.update({place: len(parts)} if place else {})
            parts.append(content["data"]["text/plain"] + "\n")
        elif kind == "update_display_data" and place in places:
            text = content["data"]["text/plain"]
            parts[places[place]] = f"{text}\n" if text else ""
        elif kind == "error":
            parts.append("\n".join(content["traceback"]) + "\n")
    return "".join(parts)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that work in a folder, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):
                found.append(process)
    return found


def test_each_block_of_the_readme_says_its_language() -> None:
    languages = [language for language, _ in blocks(README)]
    assert set(languages) == {"sh", "python", "text"} and (ROOT / README).read_text().count("```") == 2 * len(languages)
    assert len(cells(README)) >= 5 and len(program(README)) >= 3


@pytest.mark.parametrize("page", PARSED)
def test_each_block_of_python_is_python(page: str) -> None:
    for language, text in blocks(page):
        if language.partition(" ")[0] == "python" and not text.startswith("%"):
            ast.parse(text)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if cells(page)])
def test_cells_show_what_the_page_shows(page: str, start_kernel: Callable[..., Any]) -> None:
    kernel = start_kernel()
    for example in cells(page):
        cell = kernel.run(example.code, LONG_S, is_attended=True)
        came = output_of(cell)
        assert matches(example.shown, came), complain(page, example, came)
        assert cell.ok == ("raised" not in example.shown), complain(page, example, came)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if program(page)])
def test_python_shows_what_the_page_shows(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(
        "".join(f"{example.code}\nprint({END_OF_BLOCK!r}, end='', flush=True)\n" for example in program(page))
    )
    said, complained = tmp_path / "output", tmp_path / "errors"
    with said.open("w") as file, complained.open("w") as errors:  # pipes stay open as long as any process that has them
        ran = subprocess.run([sys.executable, script], stdout=file, stderr=errors, cwd=tmp_path, timeout=LONG_S)
    outputs = said.read_text().split(END_OF_BLOCK)
    for example, came in zip(program(page), outputs, strict=False):
        assert matches(example.shown, came), complain(page, example, came + complained.read_text())
    assert ran.returncode == 0 and len(outputs) == len(program(page)) + 1, complained.read_text()
    _, alive = psutil.wait_procs(processes_in(tmp_path), timeout=LEAVE_S)
    assert not alive, f"these outlive the program of {page}"


def test_commands_are_those_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line for language, text in blocks(README) if language == "sh" for line in text.splitlines()]
    assert len(lines) >= 4
    for line in lines:
        match shlex.split(line, comments=True):
            case ["make", target]:
                assert target in targets, line
            case ["pip", "install", *options, package]:
                assert not options, line
                assert_is_ours(package, project)
            case ["uv", "pip", "install", *options, package]:
                uv = [sys.executable, "-m", "uv", "pip", "install", "--help"]
                known = subprocess.run(uv, capture_output=True, text=True, timeout=60, check=True).stdout
                assert all(option.partition("=")[0] in known for option in options), line
                assert_is_ours(package, project)
            case _:
                pytest.fail(f"README.md has a command that no test knows: {line}")


def assert_is_ours(package: str, project: dict[str, Any]) -> None:
    name, _, extras = package.rstrip("]").partition("[")
    assert name == project["name"], package
    assert not extras or set(extras.split(",")) <= set(project["optional-dependencies"]), package


@pytest.mark.parametrize(
    ("shown", "came", "same"),
    [
        ("ready in 0.25 s\n", "ready in 7.1 s\n", True),
        ("[0] 0\n[1] 1\n", "[0] 0\n[1] 2\n", False),
        ("a\n...\nz\n", "a\nb\nc\nz\n", True),
        ("a\n...\nz\n", "a\nb\n", False),
        ("on ... ended\n", "on a-host ended\n", True),
        ("on ... ended\n", "on a\nhost ended\n", False),
        ("", "more than is shown\n", False),
    ],
)
def test_another_output_than_the_one_shown_is_found(shown: str, came: str, same: bool) -> None:
    assert matches(shown, came) == same
