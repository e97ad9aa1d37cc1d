"""The name `procs`, which is the current mesh."""

from __future__ import annotations


def test_procs_is_the_current_mesh_until_the_person_binds_the_name(empty_notebook) -> None:
    empty_notebook.run("made = %mesh spawn gpus=2 --name first --no-torch")
    assert empty_notebook["procs"] is empty_notebook["made"]
    empty_notebook.run("%mesh split gpus=dp,tp tp=2")
    assert empty_notebook["procs"].sizes == {"dp": 1, "tp": 2}
    empty_notebook.run("%mesh spawn gpus=1 --name second --no-torch")
    assert empty_notebook["procs"].name == "second"
    assert "procs" not in empty_notebook.run("%who").stdout
    empty_notebook.run("%mesh stop second")
    assert empty_notebook["procs"].name == "first"
    empty_notebook.run("%mesh stop first")
    assert "procs" not in empty_notebook.shell.user_ns
    empty_notebook.run("procs = 5\n%mesh spawn gpus=1 --name first --no-torch")
    assert empty_notebook["procs"] == 5
    empty_notebook.run("%mesh use first --out procs\n%mesh spawn gpus=1 --name second --no-torch")
    assert empty_notebook["procs"].name == "first"
    empty_notebook.run("%mesh stop --all")
    assert empty_notebook["procs"].name == "first"
