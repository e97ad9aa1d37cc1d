"""Environments with another version of ipykernel on top of the one that runs this, to test that version.

    python tests/support/other_ipykernel.py 6.29.5 [pytest's arguments]

Only ipykernel itself is installed anew; all other packages are found where they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/extension/widget/test_in_kernel.py",
    "tests/extension/cells/test_in_kernel.py",
    "tests/extension/completion/test_in_kernel.py",
)
"""What depends on how the kernel takes its messages: live updates, buttons and Tab in a busy cell, prompts, order."""


def make(version: str, folder: Path) -> Path:
    """Make an environment in ``folder``; returns its Python. Raises: CalledProcessError if pip fails."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import site; print(site.getsitepackages()[0])"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        f"ipykernel=={version}",
    ]
    subprocess.run(install, check=True, timeout=300)
    below = [path for path in sys.path if path.endswith("site-packages")]
    (site / "below.pth").write_text("".join(f"{path}\n" for path in below))
    return python


def main(version: str, *arguments: str) -> int:
    """Run the tests under ``version``; returns pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="ipykernel-") as folder:
        python = make(version, Path(folder))
        sources = os.pathsep.join(str(ROOT / name) for name in ("runtime", "extension", "kernel"))
        environment = {**os.environ, "PYTHONPATH": sources}
        command = [str(python), "-m", "pytest", *TESTS, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=3600).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
