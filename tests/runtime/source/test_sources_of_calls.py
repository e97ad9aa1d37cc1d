"""Ranks know the text of functions that only their caller has, from the first call on."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import pytest

from meshbook import ProcMesh


def _function(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], str], str]:
    """One of a file that is not there, which returns what is known of its text; and that text."""
    text = f"def read():\n    import linecache\n    return ''.join(linecache.getlines({name!r}))\n"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    names: dict[str, Callable[[], str]] = {"__name__": "__main__"}  # type: ignore[dict-item]
    exec(compile(text, name, "exec"), names)
    return names["read"], text


def test_the_first_call_of_a_function_finds_its_text(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):  # a call goes past the agent, by which a text would come, and may be the quicker
        read, text = _function(f"<cell of nobody {number}>", monkeypatch)
        assert mesh4.execute(read).get(60).values() == [text] * 4


def test_others_know_it_too_and_an_argument_that_cannot_be_sent_is_named(
    mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, text = _function("<cell of one>", monkeypatch)
    with pytest.raises(Exception, match="argument 1"):
        mesh4.slice(gpus=0).execute(read, (each for each in "ab")).get(60)  # type: ignore[call-arg]
    assert mesh4.execute(read).get(60).values() == [text] * 4
