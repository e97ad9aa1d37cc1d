"""A short part of the suite under the Pythons that we promise, each in an environment of its own in ``.pythons``.

    python tests/support/other_pythons.py [--install-within SECONDS] [3.10 3.13 ...] [pytest's arguments]

uv makes the environments: it finds the oldest versions that pyproject.toml allows by itself, and environments share
their files, of which each would take 5 GB where wheels of PyTorch bring CUDA along: UV_TORCH_BACKEND=cpu spares most of
that where PyTorch's own index can be reached. They are kept, and made anew when their row or pyproject.toml changes.

A Python that is not on this machine is left out. With ``--install-within`` so is one whose environment takes longer, or
for which there is no room on the disk or no network. The closing lines say which; a test that fails is a failure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ("tests/pythons", "tests/runtime/concurrency/test_thread_interrupts.py")
TOOLS = ("pytest>=9", "pytest-rerunfailures>=16", "pytest-timeout>=2.4", "psutil>=7")
TORCH = "torch==2.13.0"
"""The one that everything else is developed with: of others only the oldest is tried."""
INSTALL_S, TEST_S = 1800, 900
ROOM_BYTES = 8 << 30
"""On the disk, for one environment: PyTorch and CUDA are 7 GB."""
ELSEWHERE = ("No space left on device", "Failed to fetch", "dns error", "error sending request", "Connection")
"""What uv says where an environment cannot be made for reasons that are not ours."""
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
    Row("3.13", "the newest dependencies", ()),
)


class LeftOut(Exception):
    """A row that this machine cannot run, and why."""


def find_python(version: str) -> str:
    """The command of a Python of this version: the one on the path, or one of pyenv's. Raises: LeftOut."""
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
    raise LeftOut("it is not on this machine")


def make(row: Row, command: str, within_s: float) -> Path:
    """The Python of the row's environment, which is made where it is not.

    within_s: 0 for as long as it takes.
    Raises: LeftOut if it cannot be made so quickly, or here; CalledProcessError if it cannot be made.
    """
    folder = ROOT / ".pythons" / row.python
    made_from = repr((row, command, TOOLS)) + (ROOT / "pyproject.toml").read_text()
    mark, stamp = folder / "made-from", hashlib.sha256(made_from.encode()).hexdigest()
    python = folder / "bin" / "python"
    if mark.exists() and mark.read_text() == stamp:
        return python
    uv = [sys.executable, "-m", "uv"]
    if within_s:
        _require_room(Path(_output([*uv, "cache", "dir"])))
    deadline = time.monotonic() + (within_s or INSTALL_S)
    try:
        _run([*uv, "venv", "-q", "--clear", "-p", command, str(folder)], deadline)
        if row.by_pip:
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile"]
            _run([*pip, *row.by_pip], deadline)
        install = [*uv, "pip", "install", "-q", "--compile-bytecode", "-p", str(python), *row.options]
        _run([*install, "-e", ".[notebook]", *row.packages, *TOOLS], deadline)
    except subprocess.TimeoutExpired:
        if not within_s:
            raise
        raise LeftOut(f"its packages were not installed within {within_s:g} s") from None
    except subprocess.CalledProcessError as error:
        if not within_s or not any(reason in error.stderr for reason in ELSEWHERE):
            raise
        raise LeftOut(f"its packages cannot be had here: {error.stderr.strip().splitlines()[-1].strip()}") from None
    mark.write_text(stamp)
    return python


def _run(command: list[str], deadline: float) -> None:
    left_s = max(deadline - time.monotonic(), 1)
    try:
        subprocess.run(command, cwd=ROOT, check=True, timeout=left_s, stderr=subprocess.PIPE, text=True)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr, flush=True)
        raise


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout.strip()


def _require_room(cache: Path) -> None:
    cache = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if (free := min(shutil.disk_usage(folder).free for folder in (ROOT, cache))) < ROOM_BYTES:
        raise LeftOut(f"{free >> 30} GB are free, its packages may need {ROOM_BYTES >> 30}")


def prepare(row: Row, within_s: float) -> Path:
    """The Python of a row, with all that its tests need. Raises: LeftOut, CalledProcessError."""
    command = find_python(row.python)
    began = time.monotonic()
    python = make(row, command, within_s)
    versions = "import torch, IPython; print(f'torch {torch.__version__}, IPython {IPython.__version__}')"
    told = _output([str(python), "-c", versions])
    _say(f"Python {row.python} with {row.what} is there after {time.monotonic() - began:.0f} s: {told}")
    return python


def passes(row: Row, python: Path, arguments: list[str]) -> bool:
    """Run the tests under a row; returns whether they pass."""
    _say(f"Python {row.python}: its tests")
    pytest = [str(python), "-m", "pytest", "-q", "-m", "", "-o", "filterwarnings=", "--timeout=400", *TESTS, *arguments]
    return not subprocess.run(pytest, cwd=ROOT, timeout=TEST_S, check=False).returncode


def _say(text: str) -> None:
    print(f"test-pythons: {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Run the rows that are named, or all; returns the exit code."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    parser.add_argument("--install-within", type=float, default=0)
    options, rest = parser.parse_known_args(arguments)
    named = [argument for argument in rest if argument in {row.python for row in ROWS}]
    rows = [row for row in ROWS if not named or row.python in named]
    rest = [argument for argument in rest if argument not in named]
    outcomes = {}
    with ThreadPoolExecutor(1) as installer:  # of the next row, mostly the network's time, while this one's tests run
        prepared = [(row, installer.submit(prepare, row, options.install_within)) for row in rows]
        for row, python in prepared:
            try:
                there, began = python.result(), time.monotonic()
                good = passes(row, there, rest)
                outcomes[row.python] = f"{'good' if good else 'FAILED'}, {time.monotonic() - began:.0f} s of tests"
            except LeftOut as why:
                outcomes[row.python] = f"LEFT OUT, not tested: {why}"
            except subprocess.SubprocessError as error:
                outcomes[row.python] = f"FAILED: {error}"
            except BaseException:  # Ctrl-C, which uv gets as well
                installer.shutdown(cancel_futures=True)
                raise
    for version, outcome in outcomes.items():
        _say(f"Python {version}: {outcome}")
    return 1 if any(outcome.startswith("FAILED") for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
