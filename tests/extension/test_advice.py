"""What errors advise in a notebook."""

from __future__ import annotations

import linecache
import re
import sys

import pytest
from conftest import Notebook

from meshbook import errors
from meshbook.errors.advice import Advice, advice
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.wiring import NOTEBOOK_ADVICE


def test_what_a_notebook_is_advised_exists() -> None:
    load_all()
    named = [name for text in NOTEBOOK_ADVICE for name in re.findall(r"%mesh (\w+)", text)]
    assert len(named) > 15
    assert set(named) <= COMMANDS.keys()


def test_a_notebook_has_words_for_everything() -> None:
    script = Advice()
    same = [name for name in Advice._fields if getattr(NOTEBOOK_ADVICE, name) == getattr(script, name)]
    assert same == []


def test_errors_and_ranks_name_magics_while_the_extension_is_loaded(notebook: Notebook) -> None:
    assert advice() == NOTEBOOK_ADVICE
    assert "End the ranks with: %mesh stop" in notebook.fail("%%mesh rank=0\nimport sys; sys.exit(3)")
    assert "%mesh push NAME" in notebook.fail("%%mesh rank=0\ninput('?')")


def test_last_words_name_cells_of_the_notebook(empty_notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    name, source = "/tmp/ipykernel_8/1.py", "def crash():\n    pass"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name))
    monkeypatch.setattr(sys.modules["__main__"], "In", ["", source], raising=False)
    words = f"  {name}, line 2, in crash\n  /tmp/ipykernel_9/1.py, line 2, in other"
    lost = errors.WorkerLost(0, "a", "exit code 1", words)
    assert lost.log_tail == words
    assert "cell 1, line 2, in crash\n      /tmp/ipykernel_9/1.py, line 2, in other" in str(lost)
