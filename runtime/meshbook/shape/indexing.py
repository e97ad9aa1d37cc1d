"""What people write to choose along an axis or to split one: as numbers, or as an error that says what fits.

Import `Index` and `Choice` from `meshbook.shape`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from meshbook.errors import LayoutError, RankError, UsageError

Index: TypeAlias = "int | slice"
Choice: TypeAlias = "int | slice | Iterable[int]"


def resolve(chosen: Index, label: str, size: int) -> int | range:
    """An index as a number from 0, a slice as the range of indices that it selects, never an empty one.

    Raises: RankError, and UsageError for what is neither.
    """
    if isinstance(chosen, slice):
        text = _show_slice(chosen)
        try:
            indices = range(size)[chosen]
        except (TypeError, ValueError) as error:
            raise UsageError(f"{label}={text} is no slice: {error}") from None
        if not indices:
            raise RankError(text, label, size)
        return indices
    try:
        index = operator.index(chosen)
    except TypeError:
        raise UsageError(f"{label}={chosen!r} is no index; give a number such as 0, or slice(0, 2)") from None
    if not -size <= index < size:
        raise RankError(index, label, size)
    return index % size


def resolve_list(chosen: Iterable[int], label: str, size: int) -> list[int]:
    """Each index of a list as a number from 0, in the list's order."""
    indices = [resolve(index, label, size) for index in chosen]
    numbers = [index for index in indices if isinstance(index, int)]
    if len(numbers) < len(indices):
        raise UsageError(f"{label}={chosen!r} holds a slice; give numbers, or the slice alone")
    if not numbers:
        raise RankError("[]", label, size)
    refuse_twice(numbers, label)
    return numbers


def infer_sizes(label: str, size: int, names: Sequence[str], given: Mapping[str, int]) -> list[int]:
    """The sizes of the axes ``names`` into which axis ``label`` is split; at most one is not given."""
    unknown = [name for name in names if name not in given]
    known = math.prod(given[name] for name in names if name in given)
    parts = " x ".join(f"{name}={given[name]}" if name in given else name for name in names)
    if len(unknown) > 1:
        raise LayoutError(f"{label}={size} cannot be split into {parts}: give all sizes but one")
    if size % known or (not unknown and size != known):
        reason = f"{size} is not a multiple of {known}" if unknown else f"the sizes make {known}, not {size}"
        raise LayoutError(f"{label}={size} cannot be split into {parts}: {reason}")
    return [given.get(name, size // known) for name in names]


def parse_size(value: object, label: str) -> int:
    """The size that is given for a new axis ``label``."""
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f'{label}={value!r} is neither a size nor a list of names; as in gpus=("dp", "tp"), tp=2'
        ) from None
    if size < 1:
        raise LayoutError(f'axis "{label}" has size {size}; a size is at least 1')
    return size


def refuse_twice(indices: Sequence[int], label: str) -> None:
    """Raises: LayoutError if one of ``indices`` occurs again."""
    if len(set(indices)) < len(indices):
        twice = next(index for position, index in enumerate(indices) if index in indices[:position])
        raise LayoutError(f"{label} {twice} is chosen twice; a mesh has each member once")


def _show_slice(chosen: slice) -> str:
    bounds = [chosen.start, chosen.stop] + ([] if chosen.step is None else [chosen.step])
    return ":".join("" if bound is None else str(bound) for bound in bounds)
