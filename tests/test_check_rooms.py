"""The check of the layout finds what it is there for."""

from __future__ import annotations

import re
from pathlib import Path

import check_rooms
import pytest
import tomllib

LONG = '"""A page."""\n' + "\n" * 60


def lay_out(folder: Path, files: dict[str, str]) -> Path:
    """A source folder with the package ``house`` and these modules of it."""
    for name, text in {"__init__.py": '"""A house to look at."""\n', **files}.items():
        path = folder / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def complaints(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the check says of a folder, which it must not pass."""
    assert check_rooms.main([str(folder)]) == 1
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("class Answer: ...", "class Answer: ..."),
        ("class Answer: ...", "Answer: TypeAlias = int | str"),
        ("Answer = dict[str, int]", "if True:\n    class Answer: ..."),
        ("Answer = NewType('Answer', int)", "Answer = int | str"),
    ],
)
def test_a_type_name_has_one_module(tmp_path: Path, capsys: pytest.CaptureFixture[str], one: str, other: str) -> None:
    folder = lay_out(tmp_path, {"one.py": LONG + one, "other.py": LONG + other})
    (line,) = complaints(folder, capsys)
    assert line.startswith("Answer is a type in house.one and in house.other")


def test_a_page_of_a_few_lines_has_users_or_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users = {f"user{i}.py": LONG + "from house import used, alone\n" for i in range(2)}
    users["user2.py"] = LONG + "def later():\n    from house.used import x\n"
    reason = '"""A page.\n\nA module of its own\nbecause it is read alone.\n"""\n'
    folder = lay_out(tmp_path, {**users, "used.py": "x = 1\n", "alone.py": "x = 1\n", "told.py": reason})
    (line,) = complaints(folder, capsys)
    assert line.startswith("house.alone has 1 lines and 2 importers")


def test_a_room_says_what_it_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = lay_out(tmp_path, {"cellar/__init__.py": "", "attic/__init__.py": '"""What is stored."""\n'})
    (line,) = complaints(folder, capsys)
    assert line.startswith("house.cellar:")


def test_names_in_back_quotes_and_links_lead_somewhere(tmp_path: Path) -> None:
    text = '"""As `meshbook.one.Found.member`, `meshbook.one`, `meshbook.one.Lost` and `meshbook.gone`."""\n'
    (tmp_path / "meshbook").mkdir()
    (tmp_path / "meshbook" / "one.py").write_text(f"{text}class Found:\n    member = 1\n")
    page = tmp_path / "page.md"
    page.write_text("`meshbook.one.Found` [one](meshbook/one.py#top) [x](https://x.org/a.py) [two](meshbook/two.py).")
    modules = check_rooms.parse_all([tmp_path])
    told = [*check_rooms.dead_references(modules, [page]), *check_rooms.dead_links([page])]
    assert [line.split()[-5] for line in told] == ["meshbook.one.Lost,", "meshbook.gone,", "meshbook/two.py,"]


def test_what_a_test_replaces_is_there(tmp_path: Path) -> None:
    modules = check_rooms.parse_all([lay_out(tmp_path / "code", {"one.py": "import time\n"})])
    test = tmp_path / "test_it.py"
    for name, told in (("house.one.time.monotonic", 0), ("house.one.sleep", 1)):
        test.write_text(f'patch.setattr("{name}", 1)')
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check_rooms, "PATCHED", re.compile(check_rooms.PATCHED.pattern.replace("meshbook", "house")))
            assert len(list(check_rooms.dead_patches(modules, [test]))) == told


def test_places_that_pages_name_are_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`wire/link.py:Link.send` `docs/conf.py` `tests/conftest.py:Held` `wire/link.py:Chain`")
    told = [line.split()[3] for line in check_rooms.dead_places([page])]
    assert told == ["docs/conf.py,", "wire/link.py:Chain,"]


def test_type_variables_and_constants_may_have_equal_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LONG + 'T = TypeVar("T")\nSelf = TypeVar("Self")\nWAIT_S = 3\n'
    assert check_rooms.main([str(lay_out(tmp_path, {"one.py": text, "other.py": text}))]) == 0
    assert "in order: 3 modules" in capsys.readouterr().out


def test_the_docs_draw_the_order_of_the_contract() -> None:
    contracts = tomllib.loads((check_rooms.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["containers"][0]: contract["layers"] for contract in contracts if "containers" in contract}
    drawn = [line.strip() for line in (check_rooms.ROOT / "docs" / "architecture.md").read_text().splitlines()]
    for package in ("meshbook_extension", "meshbook"):
        places = [next(i for i, line in enumerate(drawn) if line.startswith(f"{layer}  ")) for layer in layers[package]]
        assert places == sorted(places)


def test_no_module_of_a_process_imports_itself_by_way_of_others(tmp_path: Path) -> None:
    typed = "if TYPE_CHECKING:\n    from house.one import x\n"
    folder = lay_out(tmp_path, {"one.py": LONG + "from house import other\n", "other.py": LONG + typed})
    (line,) = check_rooms.cycles(check_rooms.parse_all([folder]), ["house"])
    assert line.startswith("house imports itself: house.")
    lay_out(tmp_path, {"other.py": LONG})
    assert not list(check_rooms.cycles(check_rooms.parse_all([folder]), ["house"]))
