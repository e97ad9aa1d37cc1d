"""``%mesh sync``: ranks run the modules that lie beside the notebook, in the notebook's version."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside the notebook; ranks do not have it on their path, as on another machine."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "sync_base.py").write_text("def base(): return 10\n")
    (folder / "sync_helpers.py").write_text(
        "from sync_base import base\n\ndef f():\n    return base() + 1\n\ndef fail():\n    raise OSError(base())\n"
    )
    return folder


@pytest.fixture
def mesh(empty_notebook: Any, folder: Path) -> Iterator[Any]:
    empty_notebook.run("%mesh spawn gpus=2 --no-torch --out procs")
    yield empty_notebook
    empty_notebook.run("%mesh stop --all")


def value(mesh: Any, code: str) -> str:
    return mesh.run(f"%%mesh\n{code}").plain.strip()


def test_ranks_import_what_was_sent(mesh: Any, folder: Path) -> None:
    assert "No module named 'sync_helpers'" in mesh.fail("%%mesh\nimport sync_helpers")
    assert mesh.run("%mesh sync src").stdout == "2 modules sent; not in use yet: sync_base, sync_helpers\n"
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "sync_helpers.py").unlink()
    assert value(mesh, "import sync_helpers; sync_helpers.f()") == "[0,1] 11"
    assert "raise OSError(base())" in mesh.fail("%%mesh\nsync_helpers.fail()")


def test_an_edited_module_and_what_imports_it_are_reloaded(mesh: Any, folder: Path) -> None:
    mesh.run("%mesh sync src")
    assert value(mesh, "from sync_helpers import f\nkept = f\nf()") == "[0,1] 11"
    mesh.run("%%mesh rank=1\nbefore = f")
    (folder / "sync_base.py").write_text("def base(): return 20\n")
    told = mesh.run("%mesh sync src/sync_base.py").stdout
    assert "sync_base" in told and ": reloaded on ranks 0,1, not imported yet in the notebook\n" in told
    told = mesh.run("%mesh sync src").stdout
    assert "unchanged: sync_base" in told and "sync_helpers" in told
    (folder / "sync_base.py").write_text("def base(): return 30\n")
    told = mesh.run("%mesh sync src").stdout.splitlines()
    assert [line.split()[0] for line in told] == ["sync_base", "sync_helpers", "2"]
    assert value(mesh, "f(), kept()") == "[0,1] (31, 31)"


def test_names_are_those_of_the_module_where_ranks_autoreload_too(mesh: Any, tmp_path: Path) -> None:
    file, edits = tmp_path / "sync_auto.py", iter(range(1, 100))

    def edit(value: int, ends: str = "):") -> None:
        file.write_text(f"VALUE = {value}\ndef f({ends} return {value}\nclass K:\n    def get(self): return {value}\n")
        later = 2_000_000_000 + next(edits)
        os.utime(file, (later, later))  # autoreload looks at nothing else

    show = "f(), K().get(), k.get(), sync_auto.f(), sync_auto.VALUE"
    edit(1)
    mesh.run(f"%%mesh\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\n%load_ext autoreload\n%autoreload 2")
    mesh.run("%%mesh\nimport sync_auto\nfrom sync_auto import f, K\nk = K()")
    for number in (2, 4, 6):
        edit(number, " what?")
        mesh.run("%%mesh\nf()")  # autoreload says what is wrong, and goes on
        edit(number)
        assert value(mesh, show) == f"[0,1] ({', '.join(5 * [str(number)])})"
        edit(number + 1)
        assert "reloaded on ranks 0,1" in mesh.run("%mesh sync sync_auto.py").stdout
        assert value(mesh, show) == f"[0,1] ({', '.join(5 * [str(number + 1)])})"


def test_the_notebook_has_the_same_version(mesh: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "sync_here.py").write_text("def g(): return 1\n")
    mesh.run("from sync_here import g")
    (folder / "sync_here.py").write_text("def g(): return 2\n")
    told = mesh.run("%mesh sync src/sync_here.py").stdout
    assert ": not imported yet on ranks 0,1, reloaded in the notebook" in told
    mesh.run("values = procs.execute(g).get().values()\nassert g() == 2 and list(values) == [2, 2]")


def test_a_module_that_fails_to_reload_keeps_the_version_before(mesh: Any, folder: Path) -> None:
    mesh.run("%mesh sync src")
    value(mesh, "import sync_base, sync_helpers\n0")
    (folder / "sync_base.py").write_text("def base(): return 20\n\n1 / 0\n")
    said = mesh.fail("%mesh sync src")
    assert (
        "MeshError: sync_base could not be reloaded on ranks 0,1, where the version before stays: "
        "sync_base.py, line 3: ZeroDivisionError: division by zero\n"
    ) in said
    assert value(mesh, "sync_helpers.f()") == "[0,1] 11"
    (folder / "sync_base.py").write_text("def base(: return 20\n")
    told = mesh.run("%mesh sync src").stdout
    assert told.startswith(f"sync_base is left out, it does not parse: {folder}/sync_base.py, line 1: ")
    (folder / "sync_base.py").write_text("def base(): return 40\n")
    mesh.run("%mesh sync src")
    assert value(mesh, "sync_helpers.f()") == "[0,1] 41"


def test_ranks_that_come_later_get_what_was_sent(mesh: Any, folder: Path) -> None:
    mesh.run("%mesh sync src")
    (folder / "sync_base.py").write_text("def base(): return 50\n")
    assert "rank 2 got 2 modules of %mesh sync\n" in mesh.run("%mesh grow gpus=1").stdout
    assert value(mesh, "import sync_helpers; sync_helpers.f()") == "[0-2] 11"
    assert "rank 0 got 2 modules of %mesh sync\n" in mesh.run("%mesh respawn rank=0").stdout
    assert value(mesh, "import sync_helpers; sync_helpers.f()") == "[0-2] 11"


def test_names_of_pythons_own_modules_are_not_touched(mesh: Any, folder: Path) -> None:
    value(mesh, "import random; 0")
    (folder / "random.py").write_text("seed = None\n")
    said = mesh.fail("%mesh sync src/random.py")
    assert "random is not used on ranks 0,1 and in the notebook: the name is that of " in said
    assert value(mesh, "import random; callable(random.seed)") == "[0,1] True"


def test_packages_come_whole(mesh: Any, folder: Path) -> None:
    package = folder / "sync_package"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("from .one import x\n")
    (package / "one.py").write_text("from .parts.two import x\n")
    (package / "parts" / "two.py").write_text("x = 7\n")
    mesh.run("%mesh sync src/sync_package")
    shutil.rmtree(package)
    assert value(mesh, "import sync_package\nimport sync_package.parts.two as two\nsync_package.x, two.__name__") == (
        "[0,1] (7, 'sync_package.parts.two')"
    )


def test_a_path_that_has_nothing_is_told(mesh: Any) -> None:
    assert "UsageError: there is no " in mesh.fail("%mesh sync nowhere")
    assert f"UsageError: {Path.cwd()} has no Python modules" in mesh.fail("%mesh sync")
    assert "does not parse" in mesh.fail(
        "import pathlib; pathlib.Path('sync_bad.py').write_text('(')\nprocs.sync_workspace('sync_bad.py')"
    )
