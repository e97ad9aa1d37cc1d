"""Tracebacks that are drawn quickly look as IPython's own do."""

from __future__ import annotations

import subprocess
import sys

DRAW = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from meshbook.shell.failures import format_error
from meshbook.shell.failures import quicken_tracebacks
from meshbook.source.location import add_cell

shell = InteractiveShell.instance(colors="Linux")
shell.InteractiveTB.long_header = False
if "quick" in sys.argv:
    quicken_tracebacks(shell)
source = '''
def part(number):
    text = "a longer line"
    return {number: text}[
        number + 1  # no such key
    ]


def whole(numbers):
    return [part(number) for number in numbers]


try:
    whole([1, 2])
except KeyError as error:
    raise ValueError(f"again: {whole.__name__}") from error
'''
for number in (1, 2):
    try:
        exec(compile(source, add_cell(source, number), "exec"), {})
    except ValueError as error:
        print("\\n".join(format_error(shell, error)))
try:
    import json
    json.loads("{")
except ValueError as error:
    print("\\n".join(format_error(shell, error)))
"""


def draw(*args: str) -> str:
    return subprocess.run([sys.executable, "-c", DRAW, *args], check=True, capture_output=True, text=True).stdout


def test_what_is_drawn_quickly_is_what_ipython_draws() -> None:
    theirs = draw()
    assert "\x1b[" in theirs and "no such key" in theirs
    assert draw("quick") == theirs
