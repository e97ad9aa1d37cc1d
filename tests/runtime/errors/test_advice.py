"""What errors advise: Python calls in a script, and whatever the front end says in place of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshbook
from meshbook import ProcMesh, errors, this_host
from meshbook.errors.advice import Advice, advice, set_advice

LEAVE = "import sys; sys.exit(3)"


@pytest.fixture
def other_words() -> Iterator[Advice]:
    """A front end that has words of its own for two things."""
    words = Advice(stop=":stop", heal_call=":heal")
    set_advice(words)
    yield words
    set_advice(None)


def test_no_source_of_the_runtime_names_a_magic() -> None:
    folder = Path(meshbook.__file__).parent
    sources = [path for path in folder.rglob("*.py") if path.parent != folder / "cli"]  # a terminal, beside notebooks
    assert len(sources) > 100
    assert [str(path.relative_to(folder)) for path in sources if "%mesh" in path.read_text("utf-8")] == []


def test_what_a_script_is_advised_exists() -> None:
    calls = [call for text in Advice() for call in re.findall(r"(\w+)\.(\w+)\(", text)]
    assert ("mesh", "heal") in calls
    for owner, name in calls:
        assert hasattr(meshbook if owner == "meshbook" else ProcMesh, name) or owner == "launcher", (owner, name)


def test_errors_take_the_words_of_the_front_end(other_words: Advice) -> None:
    assert str(errors.HostLost("a", "gone")).endswith("Start them again: :heal.")
    set_advice(None)
    assert str(errors.HostLost("a", "gone")).endswith("Start them again: mesh.heal().")
    assert advice() == Advice()


def test_ranks_say_what_their_front_end_says(other_words: Advice) -> None:
    with this_host().spawn_procs({"gpus": 1}, device="cpu") as mesh:
        with pytest.raises(errors.CallFailed, match="End the ranks with: :stop"):
            mesh.run(LEAVE).get(60)
        mesh.respawn(0)
        with pytest.raises(errors.CallFailed, match="End the ranks with: :stop"):
            mesh.run(LEAVE).get(60)
    set_advice(None)
    with (
        this_host().spawn_procs({"gpus": 1}, device="cpu") as mesh,
        pytest.raises(errors.CallFailed, match=r"End the ranks with: mesh\.stop\(\)"),
    ):
        mesh.run(LEAVE).get(60)
