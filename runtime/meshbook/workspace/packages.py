"""pip on a rank: for the environment that the rank runs in, which the ranks of a host share."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import NamedTuple

from meshbook.workspace.modules import file_system

_UNINSTALLED = re.compile(r"^ *(?:Attempting uninstall: | - )([\w.-]+)")
"""A package of which another version was there, in the words of pip and of uv."""

_PIP_OPTIONS = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
"""Options of pip by the environment, since not every command has each of them."""


class PipResult(NamedTuple):
    """The outcome of a command of pip."""

    code: int
    replaced: tuple[str, ...]
    """Packages of which another version was there: a process that has imported that keeps it."""
    problem: str = ""
    """The reason why it did not run."""


def environment() -> tuple[str, str]:
    """Return a pair that is equal on two processes exactly when both use the same installed packages."""
    return file_system(), sys.prefix


def run_pip(arguments: Sequence[str]) -> PipResult:
    """Run ``pip``, or ``uv pip`` in an environment without it, and print its lines as they come.

    Only folders are asked for pip: setuptools has a finder which, asked for it, takes this process for pip and hides
    its own distutils from then on.
    """
    if PathFinder.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *arguments]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", *arguments[:1], "--python", sys.executable, *arguments[1:]]
    else:
        return PipResult(1, (), f"{sys.executable} has no pip, and there is no uv: install one of them there")
    replaced = []
    with subprocess.Popen(
        command,
        env={**os.environ, **_PIP_OPTIONS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                print(line, end="")
                if found := _UNINSTALLED.match(line):
                    replaced.append(found[1])
        except BaseException:  # an interrupt
            process.terminate()
            raise
    importlib.invalidate_caches()
    return PipResult(process.returncode, tuple(dict.fromkeys(replaced)))
