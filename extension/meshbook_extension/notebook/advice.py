"""What helps, in the words of a notebook: magics, and Python where an error comes of a Python call too."""

from __future__ import annotations

import linecache
import re

from meshbook.errors.advice import Advice
from meshbook.source.cells import number_of_input

NOTEBOOK_ADVICE = Advice(
    heal="%mesh heal",
    heal_call="%mesh heal, or procs.heal()",
    rebuild="%mesh heal (procs.rebuild_groups() in Python)",
    elsewhere="where it is not the current mesh: %mesh use NAME first, or procs.heal()",
    shrink="%mesh shrink",
    change="%mesh {verb} {sizes}",
    respawn="%mesh respawn rank={ranks}",
    insist="%mesh respawn rank={ranks} --force",
    spawn="%mesh spawn gpus=4",
    spawn_call="%mesh spawn gpus=4, or this_host().spawn_procs(...)",
    spawn_hosts="%mesh spawn hosts=3 gpus=4",
    grow_hosts="%mesh grow hosts=1 --on ENGINE",
    shared_network="spawn with --interface of a network that they share",
    no_groups="with --no-group",
    heal_elsewhere="%mesh heal --on ENGINE",
    stop="%mesh stop",
    detach="%mesh detach, or meshbook.detach()",
    whole="base(), or %mesh use",
    fresh_view="slice that; or: %mesh use NAME --out VAR",
    interrupt="%mesh interrupt",
    wait="%mesh wait",
    stacks="%mesh stacks",
    stacks_call="%mesh stacks; mesh.stacks() in Python",
    stacks_of="%mesh stacks rank={rank}",
    logs="%mesh logs rank={ranks}",
    prompt="%mesh pdb",
    postmortem="%mesh postmortem",
    free="%mesh free",
    pull="%mesh pull",
    ask="Ask in the notebook, and send the answer with: %mesh push NAME",
    cpu='--device cpu (device="cpu" in Python)',
    invite="%mesh spawn hosts=2 gpus=8 --on manual",
    within="--within 10m (within_s=600 in Python)",
)

_NOTEBOOK_FILE = re.compile(r"(\S*/ipykernel_\d+/\d+\.py)(?=, line \d)")
"""What ipykernel calls the file of a cell, in the last words of a rank."""


def name_notebook_cells(text: str) -> str:
    """``/tmp/ipykernel_8/19.py, line 3`` in ``text`` as ``cell 7, line 3``, in the process of that notebook."""

    def label(found: re.Match[str]) -> str:
        source = "".join(linecache.getlines(found[1]))
        if not source:
            return found[0]
        number = number_of_input(source)
        return "a cell" if number is None else f"cell {number}"

    return _NOTEBOOK_FILE.sub(label, text)
