"""``meshbook attach``: a terminal's IPython with the magics, on a mesh that waits, or is taken from its notebook."""

from __future__ import annotations

import argparse
import time

from meshbook.cli import FAILED
from meshbook.cli.meshes import ANSWER_S, ask_owner, confirm
from meshbook.errors import AttachError, MeshError
from meshbook.sessions.folder import living_owner
from meshbook.sessions.listing import SavedSession
from meshbook.sessions.words import find_session, names_of, owner_of
from meshbook.wire.visits import VisitQuestion

LEAVE_S = 10.0
"""The time that a notebook has to leave its meshes."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    about = "Go on with a mesh, and all of its session, in IPython with the magics. It waits again when you leave."
    parser = subparsers.add_parser("attach", description=about, allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="a mesh, or the id of its session")
    parser.add_argument("--take", action="store_true", help="take it from the notebook that has it, after a question")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def main(args: argparse.Namespace) -> int:
    """Attach the mesh in IPython; returns when the person leaves it. Raises: MeshError."""
    saved = find_session(args.name)
    which = f'mesh "{names_of(saved)[0] if args.name == saved.id else args.name}"'
    if saved.owner_pid is not None:
        holder = f"{which} belongs to {owner_of(saved)}, which is alive"
        if not args.take:
            how = f"take it over: meshbook attach {args.name} --take    or run %mesh detach there"
            raise AttachError(f"{holder}.\n  {how}")
        again = f"{holder}. Take it all the same: meshbook attach {args.name} --take --yes"
        if not args.yes and not confirm(f"{holder}, and loses {', '.join(names_of(saved))}. Take it?", again):
            print("nothing was taken")
            return FAILED
        _take(saved)
    from IPython import start_ipython
    from traitlets.config import Config

    config = Config()
    config.TerminalIPythonApp.display_banner = False
    config.InteractiveShellApp.exec_lines = ["%load_ext meshbook", f"%mesh attach {saved.id}"]
    start_ipython(argv=[], config=config)
    return 0


def _take(saved: SavedSession) -> None:
    """Have the notebook leave its session. Raises: MeshError."""
    end_it = f"end that process, which leaves the mesh too: kill {saved.owner_pid}"
    ask_owner(saved, VisitQuestion("leave"), ANSWER_S, end_it)
    deadline = time.monotonic() + LEAVE_S
    while living_owner(saved.path) is not None:
        if time.monotonic() > deadline:
            raise MeshError(f"{owner_of(saved)} has not left its meshes within {LEAVE_S:g} s.\n  {end_it}")
        time.sleep(0.02)  # its signature goes last
