"""The registration of the kernelspec with Jupyter.

A wheel puts the folder ``kernelspec`` under ``share/jupyter/kernels`` of its environment by itself. This
command is for every other place, and names this Python, so that a Jupyter of another environment finds it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KERNEL_NAME = "meshbook"
RESOURCES = Path(__file__).parent / "kernelspec"


def install(
    *, name: str = KERNEL_NAME, display_name: str | None = None, user: bool = False, prefix: str | None = None
) -> Path:
    """Write the kernelspec where Jupyter looks for it.

    user: the current user's Jupyter folder; else ``prefix``, which is this Python's own when it is None.
    Returns: the folder that holds ``kernel.json``.
    Raises: OSError where that folder cannot be written; ValueError for a name that Jupyter does not allow.
    """
    from ipykernel.kernelapp import IPKernelApp
    from jupyter_client.kernelspec import KernelSpecManager

    spec: dict[str, Any] = json.loads((RESOURCES / "kernel.json").read_text())
    if not hasattr(IPKernelApp, "curve_secretkey"):  # ipykernel below 7.3
        del spec["metadata"]["supported_encryption"]
    spec["argv"][0] = sys.executable
    spec["display_name"] = display_name or (spec["display_name"] if name == KERNEL_NAME else f"Meshbook ({name})")
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder) / "kernelspec"
        shutil.copytree(RESOURCES, staged)
        (staged / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n")
        where = KernelSpecManager().install_kernel_spec(
            str(staged), kernel_name=name, user=user, prefix=None if user else prefix or sys.prefix
        )
    return Path(where)


def main(argv: Sequence[str]) -> int:
    """Run ``python -m meshbook_kernel install [...]``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m meshbook_kernel install", description="Register the Meshbook kernel with Jupyter."
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for the current user, in any environment")
    place.add_argument("--prefix", help="under this folder, as share/jupyter/kernels/NAME")
    place.add_argument("--sys-prefix", action="store_true", help=f"under {sys.prefix} (the default)")
    parser.add_argument("--name", default=KERNEL_NAME, help="the kernelspec's name (default: %(default)s)")
    parser.add_argument("--display-name", help="what Jupyter's launcher shows")
    args = parser.parse_args(argv)
    try:
        where = install(name=args.name, display_name=args.display_name, user=args.user, prefix=args.prefix)
    except (OSError, ValueError) as error:
        print(f"The kernelspec was not installed: {error}\nTry --user, or --prefix FOLDER.", file=sys.stderr)
        return 1
    print(f"Installed kernelspec {args.name} in {where}")
    return 0
