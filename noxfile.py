"""A short part of the suite under the Pythons that we promise, each with other dependencies (`make test-pythons`).

    nox --session python-3.10 python-3.12                   those rows; all of them where none is named
    nox -- --reruns 1                                       with arguments of pytest
    INSTALL_WITHIN=300 nox                                  rows whose packages take longer to come are left out

Environments lie in ``.nox`` and are used again. Where wheels of PyTorch bring CUDA along each takes 5 GB, most of which
they share; UV_TORCH_BACKEND=cpu spares it where PyTorch's own index can be reached. A row is skipped where its Python
is neither on the path nor one of pyenv's, and with INSTALL_WITHIN also where its packages take longer than so many
seconds, or there is no room on the disk or no network for them. Nox's closing lines say which were skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nox

TESTS = ("tests/pythons", "tests/runtime/concurrency/test_thread_interrupts.py")
TOOLS = ("pytest>=9", "pytest-rerunfailures>=16", "pytest-timeout>=2.4", "psutil>=7")
TORCH = "torch==2.13.0"
"""The release that everything else is developed with: of others only the oldest is tried."""
ROWS = {
    "3.10": ("--resolution", "lowest-direct"),  # the oldest dependencies that pyproject.toml allows
    "3.11": ("--resolution", "lowest-direct", TORCH),  # the same but for PyTorch
    "3.12": ("ipykernel==6.17.1", "ipython==7.34.0", TORCH),  # hosted notebooks have these
    "3.13": (),  # the newest dependencies
}
"""The arguments of uv for each Python, beside ourselves and `TOOLS`."""
WITHIN_S = float(os.environ.get("INSTALL_WITHIN", 0))
ROOM_BYTES = 8 << 30
"""On the disk, for one environment: PyTorch and CUDA are 7 GB."""
ELSEWHERE = ("No space left on device", "Failed to fetch", "dns error", "error sending request", "Connection")
"""The words of uv where an environment cannot be made for reasons that are not ours."""

pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *(str(path) for path in pyenv.glob("*/bin"))])

nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"


@nox.session(python=list(ROWS), name="python")
def test_python(session: nox.Session) -> None:
    """Run the short suite under a row."""
    row = ROWS[str(session.python)]
    lacks = session.run("python", "-c", "import ctypes, lzma, sqlite3, ssl", success_codes=[0, 1], silent=True)
    if lacks:  # a traceback; else there is no output
        session.skip("this Python was built without some library of the system")
    if WITHIN_S and shutil.disk_usage(".").free < ROOM_BYTES:
        session.skip(f"its packages may need {ROOM_BYTES >> 30} GB, and so much is not free")
    deadline = time.monotonic() + (WITHIN_S or 1800)
    here = os.path.join(session.bin, "python")
    if TORCH in row:  # from where pip was told to look, which uv does not read
        install(
            session, deadline, sys.executable, "-m", "pip", "--python", here, "install", "-q", "--no-compile", TORCH
        )
    uv = (sys.executable, "-m", "uv", "pip", "install", "-q", "--compile-bytecode", "-p", here)
    install(session, deadline, *uv, "-e", ".[notebook]", *row, *TOOLS)
    session.run(
        "python", "-c", "import torch, IPython; print('torch', torch.__version__, 'IPython', IPython.__version__)"
    )
    session.run(
        "python", "-m", "pytest", "-q", "-m", "", "-o", "filterwarnings=", "--timeout=400", *TESTS, *session.posargs
    )


def install(session: nox.Session, deadline: float, *command: str) -> None:
    """Run a command that installs packages; skip the row where they cannot be had here within its time."""
    try:
        left_s = max(deadline - time.monotonic(), 1)
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        if WITHIN_S:
            session.skip(f"its packages were not installed within {WITHIN_S:g} s")
        raise
    if done.returncode and WITHIN_S and any(words in done.stderr for words in ELSEWHERE):
        session.skip(f"its packages cannot be had here: {done.stderr.strip().splitlines()[-1].strip()}")
    if done.returncode:
        session.error(done.stderr)
