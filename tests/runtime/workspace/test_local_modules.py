"""Modules beside the notebook are found, named, and ordered by what they import."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshbook.errors import UsageError
from meshbook.workspace import local_modules
from meshbook.workspace.local_modules import find_modules


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
    monkeypatch.setattr(local_modules, "MOST_BYTES", 20)
    with pytest.raises(UsageError, match="has 1 modules, 50 B in all, and 20 B are the most; name the file"):
        find_modules(tmp_path)
