"""What a rank prints or raises is text, whatever it looks like: nothing of ours makes HTML of it."""

from __future__ import annotations

from typing import Any

import pytest

EVIL = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '<button data-commandlinker-command="terminal:create-new" data-commandlinker-args="{}">ok</button>',
    "\x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07",
    "\x1b]52;c;cm0gLXJmIH4=\x07",
    "\x1b[2J\x1b[1;1H[0-3] nothing happened",
    "&lt;b&gt; ${7*7} {{7*7}} \u202e\u2028",
]


@pytest.mark.parametrize("evil", EVIL)
def test_prints_are_text_as_they_are(notebook: Any, evil: str) -> None:
    ran = notebook.run(f"%%mesh\nprint({evil!r})")
    assert ran.displays == []
    assert evil in ran.stdout


@pytest.mark.parametrize("evil", EVIL)
def test_errors_names_and_representations_are_text(notebook: Any, evil: str) -> None:
    ran = notebook.try_to_run(f"%%mesh\nif rank: raise ValueError({evil!r})")
    assert ran.error is not None
    assert not [data for data in ran.displays if set(data) - {"text/plain"}]
    ran = notebook.run(f"%%mesh\nclass C:\n    def __repr__(self): return {evil!r}\nC()")
    assert not [data for data in ran.displays if set(data) - {"text/plain"}]
    job = notebook.try_to_run(f"%%mesh --async\n{evil}")
    assert job.displays == []
    assert not notebook.run("%mesh jobs").displays
    notebook.try_to_run("%mesh wait")


def test_html_is_shown_only_where_the_cell_asked_for_it(notebook: Any) -> None:
    ran = notebook.run("%%mesh\nfrom IPython.display import HTML, display\nif rank == 0: display(HTML('<b>mine</b>'))")
    assert [data["text/html"] for data in ran.displays if "text/html" in data] == ["<b>mine</b>"]
