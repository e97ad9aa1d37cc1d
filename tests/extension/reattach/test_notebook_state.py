"""What a notebook leaves for its next kernel, where its text is not UTF-8."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshbook_extension.reattach.notebook_state import NotebookState, Trace, _trace_path, decode, encode


def test_a_keepsake_with_any_text_is_kept() -> None:
    made = NotebookState("caf\udce9.ipynb", "\ud83d", {}, {}, (), {}, 1)
    kept = decode(encode(made))
    assert kept is not None and (kept.notebook, kept.current) == ("caf\\udce9.ipynb", "\\ud83d")


def test_a_trace_of_a_notebook_with_any_name_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert _trace_path("caf\udce9.ipynb") != _trace_path("cafe.ipynb")
    assert b"caf" in encode([Trace("caf\udce9", {})])
