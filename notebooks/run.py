"""Execute a notebook headless in its own kernel and print what happened, cell by cell.

    python notebooks/run.py notebooks/quickstart.ipynb [--save EXECUTED.ipynb] [--timeout SECONDS]

Cells that ask for input (a debugger's prompt) get the lines of their metadata's ``answers``, one for each prompt.
The exit code is 0 when every cell succeeded, 1 when one failed, 2 when the notebook cannot be run at all.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
END_OF_FILE = "\x04"
QUESTION_S = 0.3
"""A question waits so long for the output that came before it, which takes another road."""
FIGURES = ("image/png", "image/svg+xml", "image/jpeg")


class Narrator(NotebookClient):
    """Runs a notebook and prints each cell's first line, then its output as it comes."""

    def __init__(self, notebook: nbformat.NotebookNode, **options: Any) -> None:
        super().__init__(notebook, **options)
        self.figures = 0
        self._cells = 0
        self._at_line_start = True
        self._completer: asyncio.Task[None] | None = None
        self.on_cell_start = self._introduce
        self.on_cell_execute = self._expect_questions
        self.on_cell_executed = self._stop_typing

    def _introduce(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        self.end_line()
        if cell.cell_type == "code":
            self._cells += 1
            print(f"[{self._cells}] {title_of(cell.source)}")
            return
        headings = [line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("#")]
        if headings:
            print(f"\n## {headings[0]}")

    async def _expect_questions(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        client: Any = self.kc
        answers = cell.metadata.get("answers", [])
        client.allow_stdin = bool(answers)
        if answers:
            self._completer = asyncio.create_task(self._answer(client, cell, answers))

    async def _answer(self, client: Any, cell: nbformat.NotebookNode, answers: Sequence[str]) -> None:
        """Type a line at each prompt; end of file when there is none left. The dialogue is kept as output."""
        lines = iter(answers)
        while True:
            request = await client.stdin_channel.get_msg(timeout=None)
            await asyncio.sleep(QUESTION_S)
            line = next(lines, END_OF_FILE)
            text = f"{request['content']['prompt']}{'' if line == END_OF_FILE else line}\n"
            self._show(text)
            cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=text))
            client.input(line)

    def _stop_typing(self, **_: Any) -> None:
        if self._completer is not None:
            self._completer.cancel()
            self._completer = None

    def output(self, outs: list[Any], msg: dict[str, Any], display_id: str | None, cell_index: int) -> Any:
        """Keep the output as nbclient does, and print it."""
        kept = super().output(outs, msg, display_id, cell_index)
        content = msg["content"]
        if msg["msg_type"] == "stream":
            self._show(content["text"])
        elif msg["msg_type"] in ("display_data", "execute_result"):
            self._show_bundle(content["data"])
        elif msg["msg_type"] == "error":
            self._show("\n".join(content["traceback"]) + "\n")
        return kept

    def _show_bundle(self, data: dict[str, Any]) -> None:
        in_grid = str(data.get("text/html", "")).count('<img src="data:image/')
        for _ in range(1 if any(kind in data for kind in FIGURES) else in_grid):
            self.figures += 1
            self._show(f"<figure {self.figures}>\n")
        if not in_grid and not any(kind in data for kind in FIGURES):
            self._show(str(data.get("text/plain", "")) + "\n")

    def _show(self, text: str) -> None:
        """Print ``text`` indented; streams may bring a line in pieces."""
        for piece in (text if sys.stdout.isatty() else ANSI.sub("", text)).splitlines(keepends=True):
            sys.stdout.write("    " + piece if self._at_line_start else piece)
            self._at_line_start = piece.endswith("\n")
        sys.stdout.flush()

    def end_line(self) -> None:
        """Leave no line open before the next cell."""
        if not self._at_line_start:
            print()
        self._at_line_start = True


def title_of(source: str) -> str:
    """The first line of a cell that says something, and how many follow."""
    lines = [line for line in source.splitlines() if line.strip()]
    if not lines:
        return "(empty)"
    head = lines[0] if not lines[0].startswith("%%") or len(lines) == 1 else f"{lines[0]} | {lines[1].strip()}"
    more = len(lines) - head.count(" | ") - 1
    return f"{head}  (+{more} lines)" if more else head


def narrate(path: Path, *, timeout_s: float) -> tuple[nbformat.NotebookNode, str]:
    """Run the notebook at ``path`` in its folder; return it with its outputs, and why it failed, or "".

    timeout_s: limit for each cell.
    Raises: FileNotFoundError, NoSuchKernel.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:  # else those behind a failure would keep what they said before
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    narrator = Narrator(
        notebook,
        kernel_name=notebook.metadata.get("kernelspec", {}).get("name", "python3"),
        timeout=timeout_s,
        record_timing=False,
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),
        resources={"metadata": {"path": str(path.parent)}},
    )
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    print(f"{path.name}: {cells} cells in the kernel {narrator.kernel_name}")
    began = time.monotonic()
    failure = ""
    try:
        narrator.execute()
    except CellExecutionError:  # shown already, as the cell's output
        failure = "a cell raised an error"
    except (CellTimeoutError, DeadKernelError) as error:
        failure = str(error).strip().partition("\n")[0].rstrip(".")
    narrator.end_line()
    took = f"{time.monotonic() - began:.1f} s, {narrator.figures} figures"
    print(f"\n{path.name} " + (f"failed: {failure}; {took}." if failure else f"passed: {cells} cells in {took}."))
    return notebook, failure


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--save", type=Path, help="write the executed notebook, outputs included, to this file")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="limit for each cell")
    args = parser.parse_args(argv)
    try:
        notebook, failure = narrate(args.notebook, timeout_s=args.timeout)
    except FileNotFoundError as error:
        print(f"There is no notebook {error.filename}.", file=sys.stderr)
    except NoSuchKernel as error:
        print(f"Jupyter has no kernel {error.name!r}; make setup installs it.", file=sys.stderr)
    else:
        if args.save is not None:
            nbformat.write(notebook, args.save)
        return 1 if failure else 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
