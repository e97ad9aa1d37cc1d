"""What helps, in the words of a notebook: magics, and Python where an error comes of a Python call too.

A module of its own because it is the notebook's one list of words, to be read beside `meshbook.errors.advice`.
"""

from __future__ import annotations

from meshbook.errors.advice import Advice

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
)
