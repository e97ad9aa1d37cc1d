"""The command that takes the work out of the notebook: export."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from meshbook.errors import UsageError
from meshbook_extension.cells.record import CellRecord, target_of
from meshbook_extension.cells.run import TIMEOUT
from meshbook_extension.commands import COMMANDS, Command
from meshbook_extension.export.program import RecordedProgram, choose_cells
from meshbook_extension.export.script import write_script
from meshbook_extension.export.top import MARK
from meshbook_extension.export.verification import verify
from meshbook_extension.notebook.grammar import Arguments, Option, parse
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import count

LIMIT_S = 600.0
"""The time that each of the two runs of a proof may take by default."""


@Command(
    name="%mesh export",
    summary="Write the executed cells of the mesh, and the notebook's cells that feed them, as a script for torchrun.",
    words="FILE [CELLS]",
    options=(
        Option("--verify", "run the cells on a fresh mesh and the script by torchrun, and compare prints and values"),
        Option("--as-run", "cells that were run again count each time, not once at their last place"),
        Option("--force", "overwrite a file that export has not written"),
        Option("--timeout", f"with --verify: the longest that each of the two may take ({LIMIT_S:g} s)", float, "S"),
    ),
    examples=(
        "%mesh export train.py",
        "%mesh export train.py 3-9,12",
        "%mesh export train.py --verify",
        "%mesh export train.py --as-run",
        "%mesh export train.py --force",
        "%mesh export train.py --verify --timeout 60",
    ),
    notes="""
CELLS are numbers of executed cells. A cell that has failed is left out. Lines that a script cannot have, such as
input(), are listed, each with a way to write it otherwise; then nothing is written.
--verify needs room for another mesh of this size; the mesh of the notebook is not touched.""",
)
def export(session: Session, arguments: Arguments) -> None:
    if arguments.number(TIMEOUT.name) is not None and not arguments.flag("--verify"):
        raise arguments.grammar.refuse("--timeout says how long --verify may take.", "--timeout")
    path = Path(arguments.words[0]).expanduser()
    _check_place(path, force=arguments.flag("--force"))
    numbers = arguments.words[1] if len(arguments.words) > 1 else ""
    recorded = session.part(CellRecord).cells
    cells = choose_cells(recorded, numbers, as_run=arguments.flag("--as-run"))
    others = [cell for cell in recorded if not any(cell is each for each in cells)]
    procs = session.meshes.get(session.current or "")
    current = target_of(session, (), {}, procs) if procs is not None else None
    program = RecordedProgram(cells, others, _read, current, chosen=bool(numbers))
    notebook = Path(session.notebook).name if session.notebook.endswith(".ipynb") else "a notebook"
    text = write_script(program, f"The cells of {notebook}.", shlex.quote(path.name))
    if problems := program.all_problems():
        told = "".join(f"\n  {problem}" for problem in problems)
        raise UsageError(f"{path} is not written: {count(len(problems), 'line')} cannot be exported.{told}")
    _write(path, text)
    exported = len({id(part.cell) for part in program.parts})
    print(f"{path}: {count(exported, 'cell')}, {count(len(text.splitlines()), 'line')}")
    print("\n".join([*program.notes, f"run it: {program.command} {shlex.quote(str(path))}"]))
    if arguments.flag("--verify"):
        timeout_s = arguments.number(TIMEOUT.name)
        print(verify(program, text, path, LIMIT_S if timeout_s is None else timeout_s))


def _read(line: str) -> Arguments | None:
    name, _, rest = line.strip().partition(" ")
    return parse(COMMANDS[name][0], rest) if name in COMMANDS else None


def _check_place(path: Path, *, force: bool) -> None:
    """Raises: UsageError where no file can be written, or one lies that is somebody's own."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the file: %mesh export {path / 'train.py'}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}. Make it, or name another file.")
    try:
        is_ours = not path.exists() or MARK in path.read_text(errors="replace")[:2000]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not is_ours and not force:
        raise UsageError(f"{path} is there, and export has not written it. Name another file, or add --force.")


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises: UsageError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Name a file in another folder.") from None
    finally:
        new.unlink(missing_ok=True)
