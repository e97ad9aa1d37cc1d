"""``%mesh spawn --on ray`` in a notebook: what it says when it makes no sense."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpus=2 --on ray", "say how many nodes of Ray: hosts=N"),
        ("hosts=2 gpus=2 --on ray -- --nodes 3", "unrecognized arguments: --nodes 3. Options of Ray are"),
        ("hosts=2 gpus=2 --on rya", 'unknown engine "rya". Did you mean "ray"?'),
    ],
)
def test_lines_that_make_no_sense(empty_notebook, line: str, said: str) -> None:
    assert said in empty_notebook.fail(f"%mesh spawn --name none {line}")


def test_no_cluster_at_the_address(empty_notebook) -> None:
    pytest.importorskip("ray")
    said = empty_notebook.fail("%mesh spawn --name none hosts=2 gpus=1 --on ray:127.0.0.1:1")
    assert "there is no Ray cluster at 127.0.0.1:1: Connection refused" in said
