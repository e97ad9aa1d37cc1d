"""IPython, fitted to a rank: no terminal, no history file, no user configuration; output goes to its pipes and sink.

Written against IPython 7.34 to 9: the overridden methods exist, with these signatures, in all of them.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.utils.text import LSString, SList
from traitlets import Type
from traitlets.config import Config

from meshbook.debug.rank_debugger import RankDebugger
from meshbook.errors import UsageError
from meshbook.errors.advice import advice
from meshbook.shell.commands import run_command, run_script
from meshbook.shell.compiler import CellCompiler, RankTransformers, may_await
from meshbook.shell.display import RankDisplayHook, RankDisplayPublisher, describe_large_values
from meshbook.shell.failures import describe_briefly, forget_last_error, format_error, quicken_tracebacks
from meshbook.source.location import drop_own_frames

if TYPE_CHECKING:
    from types import CodeType, TracebackType
    from typing import TypeAlias

    from IPython.core.interactiveshell import ExecutionResult

    ExcInfo: TypeAlias = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


_RUNS = (InteractiveShell.safe_execfile.__code__, InteractiveShell.safe_run_module.__code__)
"""IPython's functions that run a script for ``%run``."""


class CellResult(NamedTuple):
    value: object
    error: BaseException | None
    ran: bool
    """Whether the error, if any, was raised by running code."""


class RankIPython(InteractiveShell):
    """A rank's IPython, which `create_shell` makes; it starts no thread and writes no file."""

    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)
    compiler_class = Type(CellCompiler)

    show_data: Callable[..., None] = staticmethod(lambda *_: None)
    """Hand a bundle to the rank: its data, metadata and transient data, ``update`` and ``is_result``."""
    mark_place: Callable[[], None] = staticmethod(lambda: None)
    """Write out all text, so that the next text comes behind it."""
    _user_code_depth = 0
    _held: list[tuple[BaseException, bool]] | None = None
    """Errors shown outside of the running cell's code, and whether each is its outcome if it has no other."""
    _of_result: list[BaseException] | None = None
    """Errors of the representations of the result that is being formatted, else None."""

    def __init__(self, *, debugger: RankDebugger, **options: object) -> None:
        self.rank_debugger = debugger
        self._rank_names: dict[str, object] = {}
        super().__init__(**options)

    def run_rank_cell(self, code: str, number: int | None, lines_above: int, debug_name: str = "") -> CellResult:
        """Run a cell. Errors come back, none is raised; interrupts in IPython's own code may be."""
        self._user_code_depth = 0
        compiler: Any = self.compile
        publisher: Any = self.display_pub
        compiler.begin(code, number, lines_above, debug_name)
        publisher.begin_cell(code)
        if number is not None:  # ``In``, ``Out`` and ``_7`` count as the notebook does
            self.execution_count = number
            history: Any = self.history_manager
            for inputs in (history.input_hist_parsed, history.input_hist_raw):
                inputs += [""] * (number - len(inputs))
        shown = self._held = []
        try:
            result = self.run_cell(code, store_history=True)
        finally:
            self._held = None
        error = result.error_before_exec or result.error_in_exec
        for held, is_outcome in shown:
            if held is error:
                continue
            if error is None and is_outcome:
                error = held
            else:
                self.print_error(held)
        return CellResult(result.result, error, ran=result.error_before_exec is None)

    def warm_up(self) -> None:
        """Import and compile once, for all ranks, the code that a rank's first cells need."""
        for name in ("time", "timeit", "matplotlib", "cd"):
            self.find_line_magic(name)
        self.transform_cell("!true\n%time 1\nname?\n")
        formatter: Any = self.display_formatter
        formatter.format([1])
        quicken_tracebacks(self)
        self._held = []
        result = self.run_cell("(lambda: 1 / 0)()", silent=True)
        format_error(self, result.error_in_exec)
        forget_last_error(self)
        self._held = None

    def should_run_async(
        self, raw_cell: str, *, transformed_cell: str | None = None, preprocessing_exc_tuple: ExcInfo | None = None
    ) -> bool:
        if transformed_cell is not None and not may_await(transformed_cell):
            return False
        return bool(
            super().should_run_async(
                raw_cell, transformed_cell=transformed_cell, preprocessing_exc_tuple=preprocessing_exc_tuple
            )
        )

    async def run_code(
        self, code_obj: CodeType, result: ExecutionResult | None = None, *, async_: bool = False
    ) -> bool:
        """Run compiled code; returns whether it raised. As IPython's, but exits and debugger quits are errors too."""
        __tracebackhide__ = "__ipython_bottom__"
        try:
            self._user_code_depth += 1
            try:
                if async_:
                    await eval(code_obj, self.user_global_ns, self.user_ns)
                else:
                    exec(code_obj, self.user_global_ns, self.user_ns)
            finally:
                self._user_code_depth -= 1
        except GeneratorExit:
            raise
        except BaseException as error:
            drop_own_frames(error)
            if result is not None:
                result.error_in_exec = error
            if isinstance(error, self.custom_exceptions):
                self.CustomTB(type(error), error, error.__traceback__)
            elif self._user_code_depth and self._held is not None:  # of a cell within the cell, as %%capture makes it
                self._held.append((error, True))
            else:
                self.showtraceback((type(error), error, error.__traceback__))
            return True
        return False

    def showtraceback(self, exc_tuple: ExcInfo | None = None, *args: object, **kwargs: object) -> None:
        """Print an error that user code or a callback shows; the one that ends the cell becomes its outcome.

        An error that ends a script of ``%run`` is raised, where IPython would go on with the next line: other ranks
        would wait for this one, and be told of nothing.
        """
        error = (exc_tuple or sys.exc_info())[1] or getattr(sys, "last_value", None)
        if error is None:
            print("No traceback available to show.", file=sys.stderr)
        elif self._held is not None and sys._getframe(1).f_code in _RUNS:
            raise error
        elif self._of_result is not None:
            self._of_result.append(error)
        elif self._held is None or (self._user_code_depth and not isinstance(error, KeyboardInterrupt)):
            self.print_error(error)
        else:
            self._held.append((error, isinstance(error, KeyboardInterrupt)))

    def showsyntaxerror(self, filename: str | None = None, *args: object, **kwargs: object) -> None:
        self.showtraceback()

    # ---- commands, debuggers, ends ------------------------------------------------------------------------------

    def system(self, cmd: str) -> None:
        """Run ``!cmd``, with its output in its place."""
        command = self.var_expand(cmd, depth=1)
        self.mark_place()
        code, _ = run_command(command)
        self.mark_place()
        self.user_ns["_exit_code"] = code
        if code and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(code, command)

    system_raw = system_piped = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> SList | LSString:
        """Run ``names = !cmd``, and return its output."""
        self.mark_place()
        code, text = run_command(self.var_expand(cmd, depth=depth + 1), capture=True)
        if code and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(code, cmd, text)
        return SList(text.splitlines()) if split else LSString(text)

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> object:
        """Run a cell magic; ``%%bash`` and ``%%sh`` without options run as commands do."""
        if magic_name not in ("bash", "sh") or line.strip():
            result: object = super().run_cell_magic(magic_name, line, cell)
            return result
        self.mark_place()
        code = run_script(magic_name, cell)
        self.mark_place()
        if code:
            raise subprocess.CalledProcessError(code, magic_name)
        return None

    def debugger(self, force: bool = False) -> None:
        """Open the prompt of ``%debug``, for which ``force`` is true."""
        error = getattr(sys, "last_value", None)
        if force and error is not None and error.__traceback__ is not None:
            self.rank_debugger.post_mortem(error.__traceback__, describe_briefly(error))
        elif force:
            raise UsageError(f"this rank has no exception to look at; of all ranks: {advice().postmortem}")

    @property
    def call_pdb(self) -> bool:
        """Whether ``%pdb`` is on; setting it is refused."""
        return False

    @call_pdb.setter
    def call_pdb(self, wanted: bool) -> None:
        if wanted:
            raise UsageError(
                "%pdb is not available on ranks. Look at the last exception of any rank, without it: "
                f"{advice().postmortem}"
            )

    def ask_exit(self) -> None:
        """End the cell; ``exit`` and ``quit`` call this."""
        raise SystemExit

    def enable_gui(self, gui: str | None = None) -> None:
        if gui not in (None, "inline", "agg"):
            raise UsageError(f"ranks have no display for {gui}; figures are drawn inline: %matplotlib inline")

    # ---- what IPython does at start, and we do not --------------------------------------------------------------

    def init_prompts(self) -> None:
        """Set no ``sys.ps1``: libraries take it for a person who types here, and refuse to train on several ranks."""

    def init_virtualenv(self) -> None:
        """Leave ``sys.path`` alone, which the runtime sets."""

    def init_sys_modules(self) -> None:
        """Leave the template's ``__main__`` in place; `enter_main` makes ours the rank's."""

    def init_user_ns(self) -> None:
        super().init_user_ns()
        self.define({"_": "", "__": "", "___": ""})

    def define(self, names: Mapping[str, object]) -> None:
        """Bind names that are not the user's: ``%who`` does not list them, and ``%reset`` brings them back."""
        self._rank_names = {**self._rank_names, **names}
        self.user_ns_hidden.update(self._rank_names)
        self.user_ns.update(self._rank_names)

    def _tee(self, channel: str) -> Any:
        """Keep no copy of all output in memory, as IPython 9 does for its history."""
        return contextlib.nullcontext()

    def _format_exception_for_storage(self, *args: object, **kwargs: object) -> dict[str, object]:
        """Keep no tracebacks in the history either (IPython 9): each costs as much as the one that is shown."""
        return {}

    def enter_main(self, show_data: Callable[..., None], mark_place: Callable[[], None]) -> None:
        """Make the namespace that of ``__main__``, so that its definitions can be pickled, and show output by these."""
        self.show_data, self.mark_place = show_data, mark_place
        sys.modules["__main__"] = self.user_module
        self.init_user_ns()

    # ---- private ------------------------------------------------------------------------------------------------

    def print_error(self, error: BaseException) -> None:
        """Print an error past ``%%capture``, which would hide it, as Jupyter kernels do."""
        drop_own_frames(error)
        print(self.InteractiveTB.stb2text(format_error(self, error)), file=sys.__stderr__)

    @contextlib.contextmanager
    def formatting_result(self) -> Iterator[list[BaseException]]:
        """Keep the errors of representations inside of the block, rather than show them."""
        kept: list[BaseException] = []
        self._of_result = kept
        try:
            yield kept
        finally:
            self._of_result = None


def _refuse_installer(name: str, line: str) -> None:
    """Refuse ``%pip`` and ``%uv``: each rank would run them, in one environment."""
    words = line.removeprefix("pip ").strip()
    raise UsageError(f"%{name} runs once in each environment, not on every rank: {advice().pip} {words}".rstrip())


def create_shell(
    loop_runner: Callable[[Coroutine[object, None, object]], object], debugger: RankDebugger
) -> RankIPython:
    """Make the process's shell. loop_runner: runs cells that await."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.display_page = True  # `name?` is shown as output
    with tempfile.TemporaryDirectory() as folder:  # IPython wants a profile; nothing reads it
        shell: RankIPython = RankIPython.instance(
            config=config, ipython_dir=folder, profile_dir=ProfileDir(location=folder), debugger=debugger
        )
    shell.input_transformer_manager = RankTransformers()
    shell.db = {}  # what %cd and %bookmark remember, for as long as the rank lives
    describe_large_values(shell)
    for installer in ("pip", "uv"):
        shell.magics_manager.register_function(partial(_refuse_installer, installer), "line", installer)
    shell.loop_runner = loop_runner
    return shell
