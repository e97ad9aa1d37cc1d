"""`procs.map` in a notebook."""

from __future__ import annotations

from fakes import RecordingSink

from meshbook_extension.output import publisher


def test_a_cell_maps_a_function_of_its_own_over_items(notebook, monkeypatch) -> None:
    sink = RecordingSink()
    monkeypatch.setattr(publisher, "sink_for", lambda shell: sink)
    ran = notebook.run(
        "import time\nscale = 10\ndef slowly(x):\n  time.sleep(0.1)\n  return x * scale\nprocs.map(slowly, range(8))"
    )
    assert notebook["_"] == [0, 10, 20, 30, 40, 50, 60, 70]
    assert ran.stdout.count("\n") == 1 and ran.stderr == ""
    bars = [lines[0] for kind, lines in sink.messages if kind == "bars" and lines]
    assert bars and all(bar.startswith("slowly ") and "/8" in bar for bar in bars), sink.messages
    assert sink.messages[-1] == ("bars", [])


def test_an_error_names_the_item_and_shows_the_line_of_the_cell(notebook) -> None:
    shown = notebook.fail("def bad(x):\n    return 1 / (x - 2)\nprocs.map(bad, range(4))")
    assert "item 2 (2):" in shown and "ZeroDivisionError" in shown and "return 1 / (x - 2)" in shown
    assert "item_map.py" not in shown, shown
