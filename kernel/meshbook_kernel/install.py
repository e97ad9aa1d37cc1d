"""The registration of the kernelspec with Jupyter.

A wheel puts the folder ``kernelspec`` under ``share/jupyter/kernels`` of its environment by itself. ``meshbook kernel
install`` is for every other place, and names this Python, so that a Jupyter of another environment finds it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
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


def remove(name: str) -> str:
    """Remove a kernelspec of this kernel; returns its folder.

    Raises: OSError where the folder cannot be removed; ValueError if there is none of this name, or it is another's.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    manager = KernelSpecManager()
    known = manager.get_all_specs()
    ours = [each for each, found in known.items() if "meshbook_kernel" in found["spec"]["argv"]]
    if name not in known:
        raise ValueError(f"there is no {name}; those of Meshbook: {', '.join(ours) or 'none'}")
    if name not in ours:
        raise ValueError(f"{name} is a kernel of another program; those of Meshbook: {', '.join(ours) or 'none'}")
    return str(manager.remove_kernel_spec(name))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of ``meshbook kernel``."""
    about = "Register the Meshbook kernel with Jupyter, or remove it."
    command = subparsers.add_parser("kernel", description=about, allow_abbrev=False)
    actions = command.add_subparsers(dest="action", metavar="install|remove", required=True)
    parser = actions.add_parser("install", description="Register the Meshbook kernel, run by this Python.")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for the current user, in any environment")
    place.add_argument("--prefix", help="under this folder, as share/jupyter/kernels/NAME")
    place.add_argument("--sys-prefix", action="store_true", help=f"under {sys.prefix} (the default)")
    parser.add_argument("--name", default=KERNEL_NAME, help="the kernelspec's name (default: %(default)s)")
    parser.add_argument("--display-name", help="what Jupyter's launcher shows")
    removal = actions.add_parser("remove", description="Remove a kernelspec of the Meshbook kernel.")
    removal.add_argument("--name", default=KERNEL_NAME, help="the kernelspec's name (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Run ``meshbook kernel install`` or ``remove``; returns the exit code."""
    if args.action == "remove":
        try:
            print(f"Removed kernelspec {args.name} from {remove(args.name)}")
        except (OSError, ValueError) as error:
            print(f"The kernelspec was not removed: {error}", file=sys.stderr)
            return 1
        return 0
    try:
        where = install(name=args.name, display_name=args.display_name, user=args.user, prefix=args.prefix)
    except (OSError, ValueError) as error:
        print(f"The kernelspec was not installed: {error}\nTry --user, or --prefix FOLDER.", file=sys.stderr)
        return 1
    print(f"Installed kernelspec {args.name} in {where}")
    return 0
