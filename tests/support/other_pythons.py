"""A short part of the suite under the Pythons that we promise, each in an environment of its own in ``.pythons``.

    python tests/support/other_pythons.py [--light] [3.10 3.13 ...] [pytest's arguments]

A Python that is not on this machine is left out, with a word. uv makes the environments: it finds the oldest versions
that pyproject.toml allows by itself, and environments share their files, of which each would take 5 GB where wheels of
PyTorch bring CUDA along. They are kept between runs, and made anew when their row or pyproject.toml changes.

``--light`` downloads no other PyTorch than `make setup` does: 3.11 has the wheel that pip finds for that, and another
row is left out, with a word, where uv has not kept all that it needs since an earlier run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ("tests/pythons", "tests/runtime/test_thread_interrupts.py")
TOOLS = ("pytest>=9", "pytest-rerunfailures>=16", "pytest-timeout>=2.4", "psutil>=7")
TORCH = "torch==2.13.0"
"""The one that everything else is developed with: of others only the oldest is tried."""
INSTALL_S, TEST_S = 1800, 900
MODULES = "ctypes, lzma, sqlite3, ssl"
"""What a Python that was built without their libraries lacks."""


class Row(NamedTuple):
    """A Python and what is installed for it, beside ourselves."""

    python: str
    what: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of uv's."""
    by_pip: tuple[str, ...] = ()
    """Installed first, from where pip was told to look."""


OLDEST = ("--resolution", "lowest-direct")
ROWS = (
    Row("3.10", "the oldest dependencies that pyproject.toml allows", (), OLDEST),
    Row("3.11", "the oldest dependencies but for PyTorch", (TORCH,), OLDEST, by_pip=(TORCH,)),
    Row("3.12", "what hosted notebooks have", ("ipykernel==6.17.1", "ipython==7.34.0", TORCH)),
    Row("3.13", "the newest dependencies but for PyTorch", (TORCH,)),
)


def find_python(version: str) -> str | None:
    """The command of a Python of this version: the one on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for command in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        ask = [command, "-c", f"import sys, {MODULES}; print('%d.%d' % sys.version_info[:2])"]
        if shutil.which(command) is None:
            continue
        told = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        if told.stdout.strip() == version:
            return command
        if "No module" in told.stderr:
            _say(f"{command} is passed over: {told.stderr.strip().splitlines()[-1]}")
    return None


def make(row: Row, command: str, light: bool = False) -> Path:
    """The Python of the row's environment, which is made where it is not. Raises: CalledProcessError if that fails."""
    folder = ROOT / ".pythons" / row.python
    made_from = repr((row, command, TOOLS)) + (ROOT / "pyproject.toml").read_text()
    mark, stamp = folder / "made-from", hashlib.sha256(made_from.encode()).hexdigest()
    python = folder / "bin" / "python"
    if not mark.exists() or mark.read_text() != stamp:
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "-q", "--clear", "-p", command, str(folder)], check=True, timeout=60)
        if row.by_pip:
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile"]
            subprocess.run([*pip, *row.by_pip], check=True, timeout=INSTALL_S)
        options = [*row.options, *(["--offline"] if light and not row.by_pip else [])]
        install = [*uv, "pip", "install", "-q", "--compile-bytecode", "-p", str(python), *options]
        subprocess.run([*install, "-e", ".[notebook]", *row.packages, *TOOLS], cwd=ROOT, check=True, timeout=INSTALL_S)
        mark.write_text(stamp)
    return python


def run(row: Row, arguments: list[str], light: bool) -> bool:
    """Whether the tests pass under a row; also where its Python is not here."""
    command = find_python(row.python)
    if command is None:
        _say(f"Python {row.python} is not on this machine: left out")
        return True
    began = time.monotonic()
    _say(f"Python {row.python} with {row.what}")
    try:
        python = make(row, command, light)
    except subprocess.CalledProcessError:
        if not light or row.by_pip:
            raise
        _say(f"Python {row.python}: uv has not kept all that it needs: left out")
        return True
    made_s = time.monotonic() - began
    pytest = [str(python), "-m", "pytest", "-q", "-o", "filterwarnings=", "--timeout=400", *TESTS, *arguments]
    code = subprocess.run(pytest, cwd=ROOT, timeout=TEST_S, check=False).returncode
    tested_s = time.monotonic() - began - made_s
    _say(f"Python {row.python}: {'failed' if code else 'good'}; made in {made_s:.0f} s, tested in {tested_s:.0f} s")
    return not code


def _say(text: str) -> None:
    print(f"test-pythons: {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Run the rows that are named, or all; returns the exit code."""
    named = [argument for argument in arguments if argument in {row.python for row in ROWS}]
    rest = [argument for argument in arguments if argument not in (*named, "--light")]
    good = [run(row, rest, "--light" in arguments) for row in ROWS if not named or row.python in named]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
