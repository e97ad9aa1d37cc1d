"""Syntax errors of a cell are found before it is sent; what IPython understands passes."""

from __future__ import annotations

import pytest

from meshbook_extension.cells.transformers import CellSyntaxError, check_syntax


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
