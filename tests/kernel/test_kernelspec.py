"""How Jupyter finds the kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from meshbook._version import __version__


def test_jupyter_lists_the_kernel_after_install(installed_kernelspec: Path) -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "jupyter", "kernelspec", "list", "--json"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    found = json.loads(listing.stdout)["kernelspecs"]["meshbook"]
    assert Path(found["resource_dir"]) == installed_kernelspec
    assert found["spec"]["display_name"] == "Meshbook"


def test_installed_spec_starts_this_python_and_carries_its_logos(installed_kernelspec: Path) -> None:
    spec = KernelSpecManager().get_kernel_spec("meshbook")
    assert spec.argv == [sys.executable, "-m", "meshbook_kernel", "-f", "{connection_file}"]
    assert spec.interrupt_mode == "signal"
    assert {path.name for path in installed_kernelspec.iterdir()} == {
        "kernel.json",
        "logo-32x32.png",
        "logo-64x64.png",
        "logo-svg.svg",
    }


def test_install_takes_another_name(jupyter_folders: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "meshbook_kernel", "install", "--prefix", str(tmp_path), "--name", "mesh-dev"],
        check=True,
        timeout=60,
    )
    spec = json.loads((tmp_path / "share/jupyter/kernels/mesh-dev/kernel.json").read_text())
    assert spec["display_name"] == "Meshbook (mesh-dev)"


@pytest.mark.parametrize("arguments", [["--name", "no spaces"], ["--prefix", "/proc/nowhere"]])
def test_install_that_cannot_be_done_says_why_and_what_to_do(jupyter_folders: Path, arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "meshbook_kernel", "install", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("The kernelspec was not installed: ")
    assert "--user" in result.stderr
    assert "Traceback" not in result.stderr


def test_distribution_brings_the_kernelspec_and_the_panel_editable_or_not() -> None:
    files = [str(path) for path in metadata.files("meshbook") or []]
    assert any(path.endswith("share/jupyter/kernels/meshbook/kernel.json") for path in files)
    assert any(path.endswith("share/jupyter/labextensions/meshbook/package.json") for path in files)
    assert any(path.endswith("share/jupyter/labextensions/meshbook/static/remoteEntry.js") for path in files)


def test_jupyterlab_finds_the_panel_and_its_version_is_ours() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "jupyter", "labextension", "list"], capture_output=True, text=True, timeout=60
    )
    (line,) = [line for line in (listed.stdout + listed.stderr).splitlines() if " meshbook v" in line]
    assert f"meshbook v{__version__} " in line and "enabled" in line and "OK" in line


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshbook.cli", "kernel", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_installs_and_removes_the_kernel(
    jupyter_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share/jupyter"))
    installed = run_command("install", "--prefix", str(tmp_path), "--name", "mesh-dev")
    folder = tmp_path / "share/jupyter/kernels/mesh-dev"
    assert (installed.returncode, installed.stdout) == (0, f"Installed kernelspec mesh-dev in {folder}\n")
    assert json.loads((folder / "kernel.json").read_text())["argv"][0] == sys.executable
    removed = run_command("remove", "--name", "mesh-dev")
    assert (removed.returncode, removed.stdout) == (0, f"Removed kernelspec mesh-dev from {folder}\n"), removed.stderr
    assert not folder.exists()


@pytest.mark.parametrize(("name", "says"), [("nowhere", "there is no nowhere"), ("python3", "is a kernel of another")])
def test_the_command_removes_kernels_of_meshbook_only(jupyter_folders: Path, name: str, says: str) -> None:
    refused = run_command("remove", "--name", name)
    assert refused.returncode == 1 and says in refused.stderr and "those of Meshbook: " in refused.stderr


def test_the_command_says_why_a_kernel_was_not_installed(jupyter_folders: Path) -> None:
    refused = run_command("install", "--prefix", "/proc/nowhere")
    assert refused.returncode == 1 and refused.stderr.startswith("The kernelspec was not installed: ")


def test_the_module_names_the_command() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "meshbook_kernel", "install", "--help"], capture_output=True, text=True, timeout=60
    )
    assert "meshbook kernel install" in " ".join(told.stdout.split())
