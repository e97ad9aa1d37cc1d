"""A process that modules were sent to: what it asks for, and how often."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshbook.workspace import synced_modules
from meshbook.workspace.local_modules import FoundModules, find_module, find_modules
from meshbook.workspace.synced_modules import ask_for_missing


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
    monkeypatch.setattr(synced_modules, "MISSING_S", 0.0)
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
