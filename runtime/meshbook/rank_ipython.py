"""IPython, fitted to a rank: no terminal, no history file, no user configuration; output goes to the rank's pipes and sink.

Written against IPython 7.34 to 9: what is overridden here exists, with these signatures, in all of them.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.utils.text import LSString, SList
from traitlets import Type
from traitlets.config import Config

from meshbook.cell_files import add_cell, cell_label
from meshbook.errors import UsageError
from meshbook.rank_failures import cut_text, drop_own_frames, format_error
from meshbook.shell_commands import run_command

TEXT_PLAIN_MAX_CHARS = 100_000
"""Of a representation as plain text; what the notebook shows of more is of no use to anyone."""


class Show(NamedTuple):
    """How the shell reaches its rank."""

    display: Callable[[dict[str, object], dict[str, object], dict[str, object], bool, bool], None]
    """data, metadata, transient, update, is_result"""
    flush_text: Callable[[], None]


class CellResult(NamedTuple):
    value: object
    error: BaseException | None
    ran: bool
    """Whether the error, if any, was raised by running code."""


def refuse_debugger(*args: object, **kwargs: object) -> NoReturn:
    """Where ``breakpoint()``, ``%debug`` and ``%pdb on`` arrive: the one place to build a remote debugger into."""
    raise UsageError(
        "breakpoint() is not available on ranks: nobody could type at its prompt. "
        "Look at values with print() in the cell, or afterwards with: %mesh eval EXPR"
    )


class CellCompiler(CachingCompiler):  # type: ignore[misc, unused-ignore]
    """Compiles cells under their notebook names and line numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._filename_map: dict[str, Any] = {}
        self._code, self._number, self._lines_above = "", None, 0
        self._above: dict[str, str] = {}

    def begin(self, code: str, number: int | None, lines_above: int) -> None:
        """The cell that runs next. lines_above: how many lines stood above ``code`` in the notebook's cell."""
        self._code: str = code
        self._number: int | None = number
        self._lines_above: int = lines_above
        self._above.clear()

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        above = "\n" * self._count_above(transformed_code if raw_code is None else raw_code)
        name = add_cell(above + transformed_code, self._number)
        self._above[name] = above
        self._filename_map[name] = number
        return name

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
        tree: ast.AST = super().ast_parse(self._above.get(filename, "") + source, filename, symbol)
        return tree

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        label = cell_label(name)
        return None if label is None else ("Cell", f"[{label.removeprefix('cell ')}]" if label != "a cell" else "")

    def _count_above(self, code: str) -> int:
        """Lines above ``code``: it is the cell, or the body of a magic such as ``%%capture`` at its end."""
        cell, body = self._code.rstrip("\n"), code.rstrip("\n")
        if not cell.endswith(body):
            return 0
        leading = code[: len(code) - len(code.lstrip())].count("\n")  # IPython strips blank lines
        return self._lines_above + cell[: len(cell) - len(body)].count("\n") + leading


class RankDisplayPublisher(DisplayPublisher):
    """`display()`."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: object,
    ) -> None:
        self.shell.show_data(data, metadata, transient, update=update)

    def clear_output(self, wait: bool = False) -> None:
        """The cell's output is shared with other ranks: it stays."""


class RankDisplayHook(DisplayHook):
    """What becomes of a cell's last expression."""

    def write_output_prompt(self) -> None:
        """The notebook labels results."""

    def compute_format_data(self, result: object) -> Any:
        shown = self.shell.tracebacks_shown
        data, metadata = super().compute_format_data(result)
        if not data and self.shell.tracebacks_shown != shown:
            data = {"text/plain": f"<{type(result).__name__} object, whose representation failed as shown>"}
        return data, metadata

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        self.shell.show_data(format_dict, md_dict, is_result=True)

    def log_output(self, format_dict: object) -> None:
        """No history of outputs: it would hold all of them in memory."""

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankDatabase(dict[str, Any]):
    """What ``%cd``, ``%bookmark`` and ``%store`` remember, for as long as the rank lives."""

    def keys(self, pattern: str = "*") -> Any:
        return [key for key in super().keys() if Path(key).match(pattern)]


class RankIPython(InteractiveShell):
    """The shell. Make it with `create_shell`; starts no thread and writes no file."""

    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)
    compiler_class = Type(CellCompiler)

    show: Show | None = None
    rank_names: Mapping[str, object] = {}
    """What each rank's namespace starts with, and has again after ``%reset``."""
    tracebacks_shown = 0
    _user_code_depth = 0

    def run_rank_cell(self, code: str, number: int | None, lines_above: int) -> CellResult:
        """Run a cell. Errors come back, none is raised; interrupts in IPython's own code may be."""
        self._user_code_depth = 0
        self._held: list[BaseException] = []
        self.compile.begin(code, number, lines_above)
        if number is not None:
            self._continue_history_at(number)
        result = self.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        for held in self._held:
            if held is error:
                continue
            if error is None and isinstance(held, KeyboardInterrupt):
                error = held  # came in an event callback, after the cell's own code
            else:
                self._print_error(held)
        self._held = []
        return CellResult(result.result, error, ran=result.error_before_exec is None)

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run compiled code; returns whether it raised. As IPython's, but exits and debugger quits are errors too."""
        __tracebackhide__ = "__ipython_bottom__"
        try:
            with self._user_code():
                if async_:
                    await eval(code_obj, self.user_global_ns, self.user_ns)
                else:
                    exec(code_obj, self.user_global_ns, self.user_ns)
        except GeneratorExit:
            raise
        except BaseException as error:
            drop_own_frames(error)
            if result is not None:
                result.error_in_exec = error
            if isinstance(error, self.custom_exceptions):
                self.CustomTB(type(error), error, error.__traceback__)
            else:
                self.showtraceback((type(error), error, error.__traceback__))
            return True
        return False

    def showtraceback(self, exc_tuple: Any = None, *args: object, **kwargs: object) -> None:
        """Print an error that user code or a callback shows; the one that ends the cell becomes its outcome."""
        error = (exc_tuple or sys.exc_info())[1] or getattr(sys, "last_value", None)
        if error is None:
            print("No traceback available to show.", file=sys.stderr)
        elif self._user_code_depth:
            self._print_error(error)
        else:
            self._held.append(error)

    def showsyntaxerror(self, filename: str | None = None, *args: object, **kwargs: object) -> None:
        self.showtraceback()

    def show_data(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        transient: Mapping[str, Any] | None = None,
        *,
        update: bool = False,
        is_result: bool = False,
    ) -> None:
        """Hand a MIME bundle to the rank's sink."""
        if self.show is not None:
            sendable = {mimetype: _sendable(mimetype, value) for mimetype, value in data.items()}
            self.show.display(sendable, dict(metadata or {}), dict(transient or {}), update, is_result)

    # ---- commands, debuggers, ends ------------------------------------------------------------------------------

    def system(self, cmd: str) -> None:
        """``!cmd``"""
        command = self.var_expand(cmd, depth=1)
        self._flush_text()
        code, _ = run_command(command)
        self.user_ns["_exit_code"] = code
        if code and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(code, command)

    system_raw = system_piped = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """``names = !cmd``"""
        self._flush_text()
        code, text = run_command(self.var_expand(cmd, depth=depth + 1), capture=True)
        if code and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(code, cmd, text)
        return SList(text.splitlines()) if split else LSString(text)

    def debugger(self, force: bool = False) -> None:
        if force:
            refuse_debugger()

    @property
    def call_pdb(self) -> bool:
        """Set by ``%pdb``."""
        return False

    @call_pdb.setter
    def call_pdb(self, wanted: bool) -> None:
        if wanted:
            refuse_debugger()

    def ask_exit(self) -> None:
        """``exit`` and ``quit``"""
        raise SystemExit

    def enable_gui(self, gui: str | None = None) -> None:
        if gui not in (None, "inline", "agg"):
            raise UsageError(f"ranks have no display for {gui}; figures are drawn inline: %matplotlib inline")

    # ---- what IPython does at start, and we do not --------------------------------------------------------------

    def init_virtualenv(self) -> None:
        """The worker's ``sys.path`` is the runtime's to decide."""

    def init_sys_modules(self) -> None:
        """The template keeps its ``__main__``; `enter_main` makes ours the rank's."""

    def init_user_ns(self) -> None:
        super().init_user_ns()
        names = {**self.rank_names, "_": "", "__": "", "___": ""}
        self.user_ns_hidden.update(names)
        self.user_ns.update(names)

    def _tee(self, channel: str) -> Any:
        """No copy of all output in memory (IPython 9 keeps one for its history)."""
        return contextlib.nullcontext()

    def _format_exception_for_storage(self, *args: object, **kwargs: object) -> dict[str, object]:
        """No tracebacks in the history either (IPython 9): each costs as much as the one that is shown."""
        return {}

    def enter_main(self) -> None:
        """Make the namespace that of ``__main__``, so that what it defines can be pickled."""
        sys.modules["__main__"] = self.user_module
        self.init_user_ns()

    # ---- private ------------------------------------------------------------------------------------------------

    def _continue_history_at(self, number: int) -> None:
        """Have ``In``, ``Out`` and ``_7`` count as the notebook does."""
        self.execution_count = number
        for inputs in (self.history_manager.input_hist_parsed, self.history_manager.input_hist_raw):
            inputs += [""] * (number - len(inputs))

    def _print_error(self, error: BaseException) -> None:
        self.tracebacks_shown += 1
        drop_own_frames(error)
        print(self.InteractiveTB.stb2text(format_error(self, error)), file=sys.stderr)

    @contextlib.contextmanager
    def _user_code(self) -> Iterator[None]:
        self._user_code_depth += 1
        try:
            yield
        finally:
            self._user_code_depth -= 1

    def _flush_text(self) -> None:
        if self.show is not None:
            self.show.flush_text()


def create_shell(loop_runner: Callable[[Coroutine[Any, Any, Any]], Any]) -> RankIPython:
    """Make the process's shell. loop_runner: runs cells that await."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.display_page = True  # `name?` is shown as output
    with tempfile.TemporaryDirectory() as folder:  # IPython wants a profile; nothing reads it
        shell: RankIPython = RankIPython.instance(
            config=config, ipython_dir=folder, profile_dir=ProfileDir(location=folder)
        )
    shell.db = RankDatabase()
    shell.loop_runner = loop_runner
    return shell


def _sendable(mimetype: str, value: Any) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if mimetype == "text/plain" and isinstance(value, str):
        return cut_text(value, TEXT_PLAIN_MAX_CHARS)
    return value
