"""Cells of plain Python are left as they are without a look at their tokens; all others become what IPython makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from meshbook.shell.compiler import RankTransformers

PLAIN = [
    "x = 1",
    "x = 1\n",
    "def f(a, *, b=2):\n    return [a, b]\n\nf(1)",
    'text = """\n  indented\n"""',
    "for i in range(3):\n\tprint(i)\n",
    "a = (1,\n     2)",
    "# a remark",
    "x = \\\n  1",
    "é = 'ü'",
]
SPECIAL = [
    "", "\n", "  ", "\n\nx = 1", "  x = 1\n  y = 2", "%time x", "%%time\nx", "x = %who", "!ls", "x = !ls", "x?",
    "??x.y", ">>> x = 1\n>>> x", "In [1]: x = 1\n   ...: y = 2", "[nav] In [1]: x", ",f a b", ";f a b", "/f a",
    "x = 1\n   \ny = 2", "x = 1\r\ny = 2", "x = 1\x0c\ny", "x = 7 % 3", "x != 1", "'''\n   \n'''", "...", "x = (1\n/2)",
    "if x:\n    !ls", "doc = '''\n    >>> f()\n'''",
]  # fmt: skip
PARTS = [*"x1\n%!?,/;\t\r", " = ", "    ", "if x:", ">>> ", "... ", "In [1]: ", "'''"]


@pytest.mark.parametrize("cell", PLAIN)
def test_plain_python_is_not_taken_apart(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TransformerManager().transform_cell(cell)
    monkeypatch.setattr(TransformerManager, "transform_cell", None)
    assert RankTransformers().transform_cell(cell) == expected


@pytest.mark.parametrize("cell", [*PLAIN, *SPECIAL])
def test_cells_become_what_ipython_makes_of_them(cell: str) -> None:
    assert RankTransformers().transform_cell(cell) == TransformerManager().transform_cell(cell)


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_so_does_whatever_is_put_together(cell: str) -> None:
    try:
        expected = TransformerManager().transform_cell(cell)
    except SyntaxError:
        with pytest.raises(SyntaxError):
            RankTransformers().transform_cell(cell)
    else:
        assert RankTransformers().transform_cell(cell) == expected


@pytest.mark.parametrize("kind", ["cleanup_transforms", "line_transforms"])
def test_a_users_own_transformers_are_called(kind: str) -> None:
    transformers = RankTransformers()
    getattr(transformers, kind).append(lambda lines: [*lines, "y = 2\n"])
    assert transformers.transform_cell("x = 1") == "x = 1\ny = 2\n"
