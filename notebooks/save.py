"""Execute the project's notebooks and keep their outputs in them, normalised, so that a reader of the web sees them.

    python -m notebooks.save [--renew] [NAME ...]        NAME: quickstart, actors, ..., or a file; all without any

A notebook that says the same as before, but for times, is left as it is. --renew writes those too.
The exit code is 0 when each notebook was saved or skipped, 1 when one failed or is too large, 2 for an unknown name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import NoSuchKernel

from notebooks.normalise import Machine, bytes_of_pictures, normalise, says_the_same
from notebooks.run import narrate

FOLDER = Path(__file__).parent
CELL_LIMIT_S = 900.0
PICTURE_BYTES, NOTEBOOK_BYTES = 100_000, 500_000
"""Larger ones make a clone of the repository slow, and each time they are saved again."""


class NotSavedError(Exception):
    """The notebook failed, or is too large for git."""


class SkippedError(Exception):
    """The notebook needs what this machine does not have."""


def save(path: Path, *, renew: bool) -> bool:
    """Execute the notebook at ``path`` and write it back; False when it says the same as before and stays as it is.

    renew: write it anyway.
    Raises: NotSavedError, SkippedError. The file is as it was then.
    """
    before = nbformat.read(path, as_version=4)
    after, failure = narrate(path, timeout_s=CELL_LIMIT_S)
    if failure:
        raise why_not(after, failure)
    normalise(after, Machine.here())
    check_sizes(after, path.name)
    if not renew and says_the_same(before, after):
        return False
    nbformat.write(after, path)
    return True


def why_not(notebook: Any, failure: str) -> Exception:
    """Return the error that says why a notebook did not come to its end."""
    errors = [output for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "error"]
    if errors and errors[-1].ename == "NoDaemonError":  # of benchmarks.ssh_hosts, by which the notebook makes its hosts
        return SkippedError(errors[-1].evalue)
    return NotSavedError(f"it failed, as shown above: {failure}. The file is as it was")


def check_sizes(notebook: Any, name: str) -> None:
    """Raise NotSavedError where a picture or the whole notebook is larger than git should keep."""
    for cell in notebook.cells:
        for size in bytes_of_pictures(cell):
            if size > PICTURE_BYTES:
                raise NotSavedError(
                    f"cell {cell.id} of {name} has a picture of {size / 1000:.0f} kB, and at most "
                    f"{PICTURE_BYTES // 1000} kB go into git: make the figure smaller (figsize, dpi), "
                    "or draw fewer points"
                )
    size = len(nbformat.writes(notebook).encode())
    if size > NOTEBOOK_BYTES:
        raise NotSavedError(
            f"{name} would have {size / 1000:.0f} kB, and at most {NOTEBOOK_BYTES // 1000} kB go into git: "
            "print less, or draw fewer pictures"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="quickstart, actors, ..., or a file; all without any")
    parser.add_argument("--renew", action="store_true", help="write notebooks that say the same as before, too")
    args = parser.parse_args(argv)
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    chosen = [known.get(name, Path(name)) for name in args.names] or [*known.values()]
    if unknown := [str(path) for path in chosen if path.suffix != ".ipynb" or not path.exists()]:
        print(f"There is no notebook {', '.join(unknown)}; there are {', '.join(known)}.", file=sys.stderr)
        return 2
    told = {}
    for path in chosen:
        try:
            told[path.name] = "saved" if save(path, renew=args.renew) else "says the same as before"
        except SkippedError as error:
            told[path.name] = f"skipped: {error}"
        except (NotSavedError, NoSuchKernel) as error:
            told[path.name] = f"NOT SAVED: {error}"
        print()
    for name, what in told.items():
        print(f"{name}  {what}")
    return int(any(what.startswith("NOT SAVED") for what in told.values()))


if __name__ == "__main__":
    sys.exit(main())
