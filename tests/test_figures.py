"""The figures of the product: which docstrings are sentences."""

from __future__ import annotations

import ast

import figures
import pytest


@pytest.mark.parametrize(
    ("docstring", "has_none"),
    [
        ("Return the ranks that have not answered.", False),
        ("The ranks that have not answered.", False),
        ("Those that are left.", True),
        ("Of its containers, those that come first in front.", True),
        ("``what`` is sent.", True),
        ("", False),
    ],
)
def test_a_docstring_that_begins_with_no_subject_is_counted(docstring: str, has_none: bool) -> None:
    assert figures.has_no_subject(docstring) is has_none


def test_docstrings_of_attributes_count_too() -> None:
    tree = ast.parse('"""The module."""\nclass A:\n    """The class."""\n    x = 1\n    """The number."""\n')
    assert sorted(figures.docstrings(tree)) == ["The class.", "The module.", "The number."]
