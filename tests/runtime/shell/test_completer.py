"""Attributes of living objects, and what must not run to find them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from meshbook.shell.completer import attribute_names, import_names


class Loud:
    """Says when its code runs."""

    plain = {"key": [1.0]}

    @property
    def asked(self) -> str:
        pytest.fail("a property was asked")

    @functools.cached_property
    def cached(self) -> str:
        pytest.fail("a cached property was asked")

    def __getitem__(self, key: object) -> str:
        pytest.fail("__getitem__ was called")


class Dynamic:
    def __getattr__(self, name: str) -> str:
        pytest.fail("__getattr__ was called")


class Raising:
    def __dir__(self) -> list[str]:
        raise ValueError("no")

    def method(self) -> None: ...


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 3)])


NAMES: dict[str, Any] = {
    "loud": Loud(),
    "dynamic": Dynamic(),
    "raising": Raising(),
    "net": Net(),
    "x": torch.zeros(2),
    "torch": torch,
}


def names(before: str) -> list[str] | None:
    found = attribute_names(before, NAMES)
    return None if found is None else found[1]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("x.resh", "reshape"),
        ("y = (x.resh", "reshape"),
        ("torch.nn.functional.rel", "relu"),
        ("net.layers[0].wei", "weight"),
        ("net.layers[0].weight.grad", "grad_fn"),
        ("loud.plain['key'][0].is_", "is_integer"),
        ("raising.met", "method"),
        ("len.__na", "__name__"),
    ],
)
def test_a_chain_of_names_is_followed(before: str, expected: str) -> None:
    assert expected in (names(before) or [])


@pytest.mark.parametrize(
    "before",
    [
        "loud.asked.",
        "loud.cached.",
        "loud[0].",
        "dynamic.any.",
        "x.T.",
        "x[0].",
        "nothing.",
        "f(x).",
        "1.",
        "x",
        "x['a",
    ],
)
def test_what_would_run_code_is_left_alone(before: str) -> None:
    assert names(before) is None


def test_private_names_come_when_they_are_asked_for() -> None:
    assert not [name for name in names("net.") or [] if name.startswith("_")]
    assert "_modules" in (names("net._mod") or [])


def test_imports_are_completed_without_importing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_nobody_has"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit\n")
    (package / "part.py").write_text("raise SystemExit\nLIMIT: int = 1\nfirst, second = 1, 2\ndef work(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    def after(line: str) -> list[str]:
        found = import_names(line)
        assert found is not None
        return found[1]

    assert after("import os, package_nobody_h") == ["package_nobody_has"]
    assert after("import package_nobody_has.p") == ["part"]
    assert after("from package_nobody_has.part import ") == ["LIMIT", "first", "second", "work"]
    assert after("from package_nobody_has.part import work, f") == ["first"]
    assert after("from package_nobody_has i") == ["import"]
    assert "Linear" in after("from torch.nn import (Lin")
    assert import_names("x = 1") is None
    assert import_names("important") is None
