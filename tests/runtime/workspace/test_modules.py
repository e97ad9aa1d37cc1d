"""Modules beside the notebook are found, named, and ordered by their imports; a process asks for those it lacks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshbook.errors import UsageError
from meshbook.workspace import modules
from meshbook.workspace.modules import FoundModules, ask_for_missing, find_module, find_modules


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(path: Path) -> list[str]:
    return [module.name for module in find_modules(path).modules]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "net"
    (folder / "parts").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .model import Model\n")
    (folder / "model.py").write_text("from .parts.layers import Layer\nfrom . import sizes\n")
    (folder / "sizes.py").write_text("WIDTH = 3\n")
    (folder / "parts" / "layers.py").write_text("from ..sizes import WIDTH\n")
    (folder / "__main__.py").write_text("print('a program')\n")
    return folder


def test_those_that_others_import_come_first(tmp_path: Path) -> None:
    write(tmp_path, a="import b\nfrom c import x", b="def later():\n    import c", c="x = 1", d="import a")
    assert names(tmp_path) == ["c", "b", "a", "d"]


def test_a_package_is_whole_whatever_part_is_named(package: Path) -> None:
    expected = ["net.sizes", "net.parts.layers", "net.model", "net"]
    for path in (package, package / "model.py", package.parent):
        assert names(path) == expected
    module = find_modules(package).modules[-1]
    assert module.is_package and module.root == str(package.parent)


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    write(tmp_path, a="import b", b="import a")
    assert sorted(names(tmp_path)) == ["a", "b"]


def test_what_is_no_module_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, good="", __main__="", **{"not-a-name": "", "folder/without_init": "", ".hidden/mod": ""})
    (tmp_path / "text.txt").write_text("import this")
    assert names(tmp_path) == ["good"]


def test_what_does_not_parse_is_told_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, good="", bad="x = 1\ny = (", null="x = '\0'")
    found = find_modules(tmp_path)
    assert [module.name for module in found.modules] == ["good"]
    assert sorted(found.broken) == ["bad", "null"]
    assert "bad.py, line 2: '(' was never closed" in found.broken["bad"]
    assert "null" in found.broken["null"]


def test_the_version_is_that_of_the_text(tmp_path: Path) -> None:
    write(tmp_path, a="x = 1", b="x = 1", c="x = 2")
    a, b, c = find_modules(tmp_path).modules
    assert a.version == b.version != c.version and len(a.version) == 7


def test_nothing_there_and_too_much_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"there is no .*nowhere: name a module's file, a package, or a folder"):
        find_modules(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no Python modules: name a \.py file"):
        find_modules(tmp_path)
    write(tmp_path, a="x = 1" * 10)
    monkeypatch.setattr(modules, "MOST_BYTES", 20)
    with pytest.raises(UsageError, match="has 1 modules, 50 B in all, and 20 B are the most; name the file"):
        find_modules(tmp_path)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names that were asked for; modules of a folder are found, ``asked_silent`` gets no answer."""
    names: list[str] = []

    def ask(name: str) -> FoundModules | None:
        names.append(name)
        if name == "asked_silent":
            raise ModuleNotFoundError("nobody answers", name=name)
        path = tmp_path / f"{name}.py"
        return find_modules(path) if path.exists() else None

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    ask_for_missing(ask)
    yield names
    for name in [name for name in sys.modules if name.startswith("asked_")]:
        del sys.modules[name]


def test_what_is_there_is_not_asked_for(asked: list[str]) -> None:
    importlib.import_module("json.tool")
    assert asked == []


def test_a_module_is_asked_for_once(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "asked_one.py").write_text("x = 1\n")
    assert importlib.import_module("asked_one").x == 1
    del sys.modules["asked_one"]
    assert importlib.import_module("asked_one").x == 1
    assert asked == ["asked_one"]


def test_one_that_nobody_has_is_not_asked_for_again_at_once(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with pytest.raises(ModuleNotFoundError, match="No module named 'asked_none'"):
            importlib.import_module("asked_none")
    assert asked == ["asked_none"]
    (tmp_path / "asked_none.py").write_text("x = 2\n")
    monkeypatch.setattr(modules, "MISSING_S", 0.0)
    assert importlib.import_module("asked_none").x == 2


def test_after_a_question_without_answer_nothing_is_asked(asked: list[str]) -> None:
    with pytest.raises(ModuleNotFoundError, match="nobody answers"):
        importlib.import_module("asked_silent")
    with pytest.raises(ModuleNotFoundError, match="No module named 'asked_other'"):
        importlib.import_module("asked_other")
    assert asked == ["asked_silent"]


def test_installed_modules_are_not_given_away() -> None:
    assert find_module("pytest") is None
    assert find_module("json") is None
