"""The meshes of tensors that a process is a part of: what the controller calls there, by the name of a mesh."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshbook.errors import UsageError
from meshbook.groups.rank_groups import own_groups
from meshbook.tensors.messages.issued_lines import CodeLine, frame_at
from meshbook.tensors.messages.operations import TensorId, TensorReference
from meshbook.tensors.ranks.named_operations import NotMade
from meshbook.tensors.ranks.rank_tensors import RankTensors

meshes: dict[str, RankTensors] = {}
"""By the names that the controller has given them."""


def open_mesh(name: str, axes: Mapping[str, int], ranks: Sequence[int], kind: type[RankTensors], decided: int) -> None:
    """Make the device mesh of these ranks with these axes, or make it again; all of them do.

    decided: as in `ask`.
    """
    for advises in ("_redistribute", "_collective_utils"):  # users of DTensor
        logging.getLogger(f"torch.distributed.tensor.{advises}").setLevel(logging.ERROR)
    groups = own_groups()
    groups.on_new_controller = meshes.clear
    mesh = groups.device_mesh(tuple(axes), tuple(axes.values()), ranks)  # whose groups new ranks find again
    controller = name.rpartition("/")[0]
    for other in [other for other in meshes if other.rpartition("/")[0] != controller]:
        del meshes[other]  # of a former controller, whose handles are gone
    if (known := meshes.get(name)) is not None:
        known.move_to(mesh)
    else:
        meshes[name] = kind(mesh)
    meshes[name].position = list(ranks).index(dist.get_rank())
    meshes[name].give_up_below(decided)


def resolve(reference: TensorReference) -> DTensor:
    """A mesh tensor as code on a rank sees it. Raises: UsageError where it is not."""
    if (found := meshes.get(reference.mesh)) is None:
        raise UsageError(f"a tensor on {reference.shown} is not in this process: send tensor.full_tensor()")
    return found.reference(reference.number)


def ask_at(place: CodeLine, name: str, decided: int, method: str, *args: Any) -> Any:
    """`ask`, for a line of the notebook."""
    return frame_at(place, f"tensor.{method}")(ask, name, decided, method, *args)


def replay_at(place: CodeLine, name: str, asked: tuple[int, tuple[Any, ...]]) -> Any:
    """`ask_at` for a recorded step. asked: as in `ask`, what is decided; and the fields of a `Replay`."""
    decided, fields = asked
    return ask_at(place, name, decided, "replay", fields)


def ask(name: str, decided: int, method: str, *args: Any) -> Any:
    """Call a method of a mesh's `RankTensors`. decided: what operations below this number cost has been told."""
    if (found := meshes.get(name)) is None:
        raise UsageError("this process does not know the mesh of these tensors: heal the mesh, or make another Mesh")
    found.give_up_below(decided)
    if (why := found.why_halted) and method not in ALWAYS:
        raise NotMade(why)  # others wait in an earlier call
    return getattr(found, method)(*args)


def position_in(name: str) -> int | None:
    """Where this process stands in a mesh, whatever its rank is called now; None where it is not in it."""
    return meshes[name].position if name in meshes else None


def free(name: str, numbers: Sequence[TensorId]) -> None:
    """Free tensors of a mesh whose ranks have other numbers now, so that nothing else can be asked of it."""
    if (found := meshes.get(name)) is not None:
        found._free(numbers)


ALWAYS = ("run", "replay", "progress", "undone", "resume", "take", "place", "make", "stepped")
"""Methods that do not wait for ranks, or know what to do when this one has halted."""
