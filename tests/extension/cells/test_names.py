"""A NameError of one side ends with the way to the name on the other."""

from __future__ import annotations

import time


def test_a_name_that_only_the_notebook_has_says_how_to_push_it(notebook) -> None:
    notebook.run("class Net: pass\nimport json\n_own = lr = 0.5")
    text = notebook.fail("%%mesh\nNet()")
    assert text.endswith(", line 2)\n  Net is defined in the notebook: %mesh push Net\n"), text
    text = notebook.fail("%%mesh\nlr if rank < 2 else json")
    assert text.endswith(
        "  lr is defined in the notebook: %mesh push lr\n"
        "  json is a module in the notebook: import it in a cell of the ranks\n"
    )
    for cell in ("%mesh eval [lr, 2]", "%mesh eval lr", "%mesh pull lr"):
        assert notebook.fail(cell).endswith("\n  lr is defined in the notebook: %mesh push lr\n")
    for hidden in ("_own", "procs", "nowhere"):
        assert "in the notebook" not in notebook.fail(f"%%mesh\n{hidden}")


def test_a_name_that_only_ranks_have_says_how_to_pull_it(notebook) -> None:
    notebook.run("%%mesh\nxr, files = rank, 1\nimport pickle as pickled\ndef step(): inner = 1")
    notebook.run("%%mesh gpus=2\nalone = !echo 1")
    assert notebook.fail("xr").endswith("\nxr is on ranks 0-3: %mesh pull xr, or %%mesh above the cell\n")
    assert "pickled is on ranks 0-3" in notebook.fail("pickled")
    assert "step is on ranks 0-3" in notebook.fail("def f(): return step\nf()")
    assert "\nalone is on rank 2: %mesh pull alone" in notebook.fail("alone")
    assert "world_size is on ranks 0-3" in notebook.fail("world_size")
    assert 'the notebook has no "xr"; xr is on ranks 0-3: %mesh pull xr\n' in notebook.fail("%mesh push xr")
    for unknown in ("inner", "nowhere", "_dh_"):
        assert "%mesh pull" not in notebook.fail(unknown)
    try:
        notebook.run("%mesh spawn gpus=1 --name bare --no-torch")
        assert "%mesh pull" not in notebook.fail("xr")  # the current mesh was never sent it
    finally:
        notebook.run("%mesh stop bare")


def test_busy_ranks_are_not_asked_for_names(notebook) -> None:
    notebook.run("%%mesh --async\nimport time\nbusy_name = 1\ntime.sleep(4)")
    began = time.monotonic()
    assert "busy_name is on ranks 0-3" in notebook.fail("busy_name")
    assert time.monotonic() - began < 3
    notebook.run("%mesh wait")


def test_another_handler_of_errors_stays(notebook) -> None:
    shell = notebook.shell
    handled = []
    ours = shell.custom_exceptions, shell.CustomTB
    try:
        shell.set_custom_exc((ValueError,), lambda *args, **_options: handled.append(args[1]))
        notebook.fail("raise ValueError")
        assert handled == [ValueError]
        notebook.run("%reload_ext meshbook_extension")
        assert shell.custom_exceptions == (ValueError,)
    finally:
        shell.custom_exceptions, shell.CustomTB = ours


def test_commands_do_not_offer_what_each_shell_has(notebook) -> None:
    assert notebook.fail("%mesh push quitt") == 'UsageError: the notebook has no "quitt".\n'
    assert "Did you mean" not in notebook.fail("%mesh pull quitt")
