"""``%mesh pip``: once in each environment, and what goes wrong is told."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.workspace.packages import run_pip
from meshbook_extension.commands.packages import print_results


@pytest.fixture(scope="module")
def mesh(empty_notebook: Any) -> Iterator[Any]:
    """Two hosts, which share this machine's environment."""
    empty_notebook.run("%mesh spawn hosts=2 gpus=1 --no-torch --on local")
    yield empty_notebook
    empty_notebook.run("%mesh stop --all")


def wheel(folder: Path, version: str) -> Path:
    """A package of one module, as pip installs it."""
    path = folder / f"far_package-{version}-py3-none-any.whl"
    info = f"far_package-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("far_installed.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: far-package\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_a_package_is_installed_once_for_hosts_that_share_their_environment(mesh: Any, tmp_path: Path) -> None:
    there = tmp_path / "there"
    ran = mesh.run(f"%mesh pip install --no-index --target {there} {wheel(tmp_path, '1.0')}")
    assert ran.stdout.count("Successfully installed far-package-1.0") == 1
    assert ran.stdout.endswith("done in 1 environment\n")
    mesh.run(f"%%mesh\nimport sys; sys.path.append({str(there)!r})")
    assert mesh.run("%%mesh\nimport far_installed; far_installed.version").plain.strip() == "[0,1] '1.0'"


@pytest.mark.slow
def test_what_pip_refuses_is_an_error_below_its_words(mesh: Any) -> None:
    said = mesh.fail("%mesh pip install --no-index far-package-that-is-nowhere")
    assert "No matching distribution found for far-package-that-is-nowhere" in said
    assert "MeshError: rank 0: pip ended with exit code 1, its words are above\n" in said


def test_hosts_that_say_the_same_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    done = "Collecting einops\nInstalling collected packages: einops\nSuccessfully installed einops-0.8\n"
    there = "Requirement already satisfied: einops in /env\n"
    print_results({"host a": done, "host b": f"  WARNING: einops 0.8 has a conflict\n{done}", "host c": there})
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "host a, host b: Successfully installed einops-0.8",
        "host b: WARNING: einops 0.8 has a conflict",
        "host c: Requirement already satisfied: einops",
    ]
    print_results({"host a": done, "host b": done})
    assert capsys.readouterr().out == "Successfully installed einops-0.8\n"


def test_nothing_to_do_shows_an_example(mesh: Any) -> None:
    assert "%mesh pip needs COMMAND." in mesh.fail("%mesh pip")


@pytest.mark.slow
def test_setuptools_is_whole_afterwards() -> None:
    """Which takes a process that looks for pip for pip itself, before Python 3.12."""
    code = "from meshbook.workspace.packages import run_pip; assert run_pip(['list']).code == 0; import setuptools"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "torch" in done.stdout


@pytest.mark.slow
def test_a_replaced_version_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Here, in an environment of our own: nothing of the developer's is touched."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True, timeout=100)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    for version, replaced in (("1.0", ()), ("1.1", ("far-package",))):
        result = run_pip(["install", "--no-index", str(wheel(tmp_path, version))])
        assert (result.code, result.replaced, result.problem) == (0, replaced, "")
    assert "Successfully installed far-package-1.1" in capsys.readouterr().out
