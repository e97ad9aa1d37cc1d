"""The figures of the product: which docstrings are sentences, and which attributes others set."""

from __future__ import annotations

import ast
from pathlib import Path

import figures
import pytest
from late_attributes import set_from_outside


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


def test_attributes_that_others_set_are_found(tmp_path: Path) -> None:
    (path := tmp_path / "cars.py").write_text(
        "class Car:\n"
        "    def __init__(self):\n"
        "        self.engine: Engine | None = None\n"
        "        self.doors = 4\n"
        "        self.plate: str\n"
        "    def paint(self, other: Car): other.doors = 2\n"
        "class Engine: pass\n"
        "class Order(NamedTuple): price: int = 0\n"
        "def build(car: Car, order: Order):\n"
        "    car.engine = Engine()\n"
        "    car.doors = order.price = 2\n"
    )
    places, parts = set_from_outside([(path, ast.parse(path.read_text()))])
    assert places == ["cars.py:10: Car.engine", "cars.py:11: Car.doors"]
    assert parts == ["Car.engine", "Car.plate"]
