"""What is changed in a cell before IPython reads it."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from meshbook_extension.cells.transformers import TRANSFORMERS, AutoMode, CellSyntaxError, check_syntax, drop_local


class Shell:
    """The part of a shell that input transformers live in."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        self.input_transformer_manager: Any = TransformerManager()  # type: ignore[no-untyped-call]
        self.input_transformer_manager.cleanup_transforms.extend(TRANSFORMERS)
        if content is not None:
            self.kernel = self
            self.get_parent = lambda channel: {"content": content}

    @property
    def input_transformers_cleanup(self) -> list[Any]:
        return self.input_transformer_manager.cleanup_transforms  # type: ignore[no-any-return]

    def transform(self, cell: str) -> str:
        return str(self.input_transformer_manager.transform_cell(cell))


def line(text: str) -> str:
    return f"get_ipython().run_line_magic('mesh', '{text}')\n"


@pytest.mark.parametrize("cell", ["%mesh spawn?", " %mesh spawn ?\n", "%mesh spawn??"])
def test_a_question_mark_behind_a_command_shows_its_help(cell: str) -> None:
    assert Shell().transform(cell) == line("help spawn")


def test_help_without_a_cell_is_no_error() -> None:
    assert Shell().transform("%%mesh --help") == line("help cell")
    assert Shell().transform("%%mesh --help\nx") == "get_ipython().run_cell_magic('mesh', '--help', 'x\\n')\n"


def test_a_cell_without_code_reaches_the_magic_but_does_not_end_in_a_console() -> None:
    shell = Shell()
    assert shell.transform("%%mesh gpus=0") == "get_ipython().run_cell_magic('mesh', 'gpus=0', '\\n')\n"
    assert shell.input_transformer_manager.check_complete("%%mesh gpus=0")[0] == "incomplete"
    assert "pinfo" in shell.transform("%%mesh?")


def test_comments_may_stand_above_the_magic() -> None:
    assert Shell().transform("# train\n\n%%mesh gpus=0\nx") == Shell().transform("%%mesh gpus=0\nx")
    assert Shell().transform("# help\n%%mesh --help") == line("help cell")


def test_other_cells_are_left_alone() -> None:
    for cell in ("# note\nx = 1\n", "x = 1\n", "%time x\n", "# %mesh spawn?\n", ""):
        assert Shell().transform(cell) == TransformerManager().transform_cell(cell)  # type: ignore[no-untyped-call]


def test_local_is_dropped_and_line_numbers_hold() -> None:
    assert Shell().transform("%%local\nx = 1\n") == "\nx = 1\n"
    assert drop_local(["# note\n", "%%local\n", "x\n"]) == ["# note\n", "\n", "x\n"]


def test_auto_mode_sends_cells_until_it_is_switched_off() -> None:
    shell = Shell()
    mode = AutoMode.of(shell)
    assert not mode.is_on
    mode.switch_on(lambda: None)
    mode.switch_on(lambda: None)
    assert AutoMode.of(shell) is mode
    assert shell.transform("x = 1\n") == "get_ipython().run_cell_magic('mesh', '', 'x = 1\\n')\n"
    mode.switch_off()
    mode.switch_off()
    assert shell.transform("x = 1\n") == "x = 1\n"


@pytest.mark.parametrize(
    "cell", ["%mesh auto off\n", "# off again\n%mesh auto off\n", "%%local\nx = 1\n", "%%bash\nls\n", "\n", "# note\n"]
)
def test_auto_mode_leaves_mesh_commands_and_cell_magics_here(cell: str) -> None:
    shell = Shell()
    usual = shell.transform(cell)
    AutoMode.of(shell).switch_on(lambda: None)
    assert shell.transform(cell) == usual


def test_auto_mode_sends_magics_of_a_line_and_shell_commands() -> None:
    shell = Shell()
    AutoMode.of(shell).switch_on(lambda: None)
    assert shell.transform("!ls\n").startswith("get_ipython().run_cell_magic('mesh', '', '!ls")
    assert shell.transform("%timeit x\n").startswith("get_ipython().run_cell_magic('mesh', '', '%timeit")


def test_auto_mode_does_not_make_a_console_wait_for_an_empty_line() -> None:
    shell = Shell()
    AutoMode.of(shell).switch_on(lambda: None)
    assert shell.input_transformer_manager.check_complete("x = 1") == ("complete", None)


@pytest.mark.parametrize("content", [{"silent": True}, {"store_history": False}])
def test_auto_mode_leaves_the_front_ends_own_code_here(content: dict[str, Any]) -> None:
    shell = Shell(content)
    AutoMode.of(shell).switch_on(lambda: None)
    assert shell.transform("_inspect()\n") == "_inspect()\n"


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\nx\n",
        "await asyncio.sleep(0)",
        "async with a as b:\n    pass\nasync for i in b: print(i)",
        "%timeit -n1 1 + 1",
        "files = !ls\n!echo {files}",
        "%%timeit\nx = 1",
        "%%bash\nif [ 1 ]; then echo yes; fi",
        "torch.ones?",
        "\n\n  x = 1",
        ">>> x = 1\n",
        "x = 1;",
    ],
)
def test_what_a_rank_can_run_passes(code: str) -> None:
    check_syntax(code, 7, 1)


def test_the_error_names_the_cell_and_the_line_that_the_person_sees() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_syntax("a = 1\nb = = 2\n", 7, 1)
    lines = caught.value._render_traceback_()
    assert lines[0] == '  File "cell 7", line 3'
    assert lines[1].strip() == "b = = 2"
    assert lines[-2] == "SyntaxError: invalid syntax"
    assert lines[-1] == "  nothing was run on the ranks"


def test_blank_lines_above_count() -> None:
    with pytest.raises(CellSyntaxError, match='File "cell 7", line 5'):
        check_syntax("\n\na = 1\nb = = 2\n", 7, 1)


@pytest.mark.parametrize("code", ["def f(:\n  pass", "x = (1,", "'unclosed", "  x = 1\n y = 2", "if x:\npass", "a b"])
def test_any_syntax_error_fits_a_screen(code: str) -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_syntax(code, 7, 1)
    assert 'File "cell 7", line' in str(caught.value)
    assert len(caught.value._render_traceback_()) <= 6
