"""The notebook about actors, executed headless: what it shows a newcomer is what the docs say."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = pytest.mark.slow

SAID = {
    "counter": ['ActorMesh("counters", Counter, "main", rows=2, cols=2): add'],
    "counter-call": ["ValueMesh: rows=2, cols=2\n  [0-3]  12", "[0-3] now 12"],
    "slices": ["ValueMesh: cols=2\n  [2,3]  115"],
    "wrong-name": ["Counter has no endpoint ad; it has: add."],
    "wrong-arguments": ["unexpected keyword argument 'twice'. Its signature is add(by)"],
    "looking": ["counters    Counter    0-3  idle"],
    "errors-raise": ["rank 2 raised ZeroDivisionError", "in Shard.mean", "ranks 0,1,3 finished"],
    "broadcast": ["shards.mean: rank 2 raised ZeroDivisionError", "the next use of shards raises it"],
    "broadcast-next": ["which nobody waited for", "return sum(values) / len(values)"],
    "repair-dies": [
        "rank 0 raised ActorLostError (cell 20, line 25): rank 1 on ",
        "killed by SIGKILL",
        'the actors "loaders" of rank 1 ended with it',
    ],
    "repair-heal": ["step 45, repaired, step 80: loss"],
    "supervise-run": ["step 5: left out, batch 5 has", "step 10: new loaders, the old ones were killed by SIGKILL"],
    "supervise-told": ["own loaders: rank 0 ended: killed by SIGKILL"],
    "reload": ["[0-3]  0"],
    "stopped": ['the actors "counters" were stopped'],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of(
    "actors.ipynb", SAID, ("wrong-name", "errors-raise", "broadcast-next", "repair-dies", "stopped")
)


def test_an_error_of_an_actor_that_called_another_is_shown_once(cells: dict[str, Any]) -> None:
    assert text_of(cells["repair-dies"]).count("killed by SIGKILL") == 1
