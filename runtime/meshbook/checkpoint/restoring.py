"""A rank's part in restoring a save: everything is checked on all ranks before the first value changes.

Tensors are read into the memory of those that are there, each rank what it holds, whatever the number of ranks and the
layout when they were saved. A value that differed between ranks goes back to its rank; on a mesh of another size the
ranks of a module or an optimizer without a copy of their own take the first one, and other values are left out.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshbook.checkpoint import folder as folders
from meshbook.checkpoint.files import bare_key, key_of_copy
from meshbook.checkpoint.folder import DCP, Saved
from meshbook.checkpoint.saving import check_reasons, explained, from_first_rank, variables
from meshbook.checkpoint.state import (
    DTENSOR,
    RANDOM,
    RANDOM_KIND,
    TENSOR,
    TENSORS,
    VALUE,
    HeldState,
    HeldValue,
    Tensors,
    hold,
    hold_random,
    hold_value,
    keys_of,
    tensor_rest,
)
from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean, group_ranks, name_ranks
from meshbook.groups.rank_groups import own_groups


class _Report(NamedTuple):
    """The word of a rank to the others before anything is restored, and after it."""

    why: str
    notes: list[str]


class SaveDescription(NamedTuple):
    """The part of a save that the notebook is told of; ranks alone can read its tensors."""

    saved: Saved
    forms: dict[str, tuple[torch.Size, torch.dtype]]
    values: dict[str, Any]
    """The pickled values by their keys."""

    @property
    def keys(self) -> Collection[str]:
        return self.forms.keys() | self.values.keys()

    def form(self, key: str) -> tuple[torch.Size, torch.dtype] | None:
        return self.forms.get(key)

    def value(self, key: str) -> Any:
        return self.values[key]


def restore_objects(
    folder: str,
    names: MutableMapping[str, Any],
    *,
    only: Collection[str] = (),
    strict: bool = True,
    step: float | None = None,
) -> Saved:
    """Restore named objects in place; all ranks call it. Plain values are bound in ``names``.

    only: the names to restore, all that were saved by default. strict: all names must have been saved, and no others
    are bound. step: restore the last save of this step. Returns: the save, with the plain values.
    Raises: UsageError, before anything has changed unless it says so.
    """
    own_groups().require()
    saved = from_first_rank(lambda: folders.find(Path(folder), step))
    values: dict[str, Any] = {}
    try:
        folders.read(saved.path)  # as this host sees it
        files, only = SavedFiles(saved), list(names) if strict else only
        plan = Restoring(files, names, values, only=only, random=RANDOM if strict or not only else "")
        told = _Report("", plan.notes)
    except Exception as error:  # of a user's class, or of a file that is not whole
        told = _Report(explained(error), [])
    notes = _agree(told)
    _load(files, plan.sources)
    plan.give()
    return Saved(saved.path, saved.manifest, values, tuple(notes))


def restore_ranks(folder: str, only: Sequence[str], step: float | None) -> Saved:
    """Restore this rank's variables. only: these; all that were saved, and are on the ranks, by default."""
    saved = restore_objects(folder, variables(), only=only, strict=False, step=step)
    vars(sys.modules["__main__"]).update(saved.values)
    told = {name: value for name, value in saved.values.items() if isinstance(value, bool | int | float | str)}
    return Saved(saved.path, saved.manifest, told, saved.notes)  # tensors stay on the ranks


def describe_save(folder: str, step: float | None, names: Collection[str]) -> SaveDescription:
    """Return what a save has of these names, and of those that the notebook held; on any rank. Raises: UsageError."""
    saved = folders.find(Path(folder), step)
    files, wanted = SavedFiles(saved), {*names, *saved.manifest.of_notebook}
    forms, values = {}, {}
    for key in files.keys:
        if bare_key(key, saved.manifest.copies).partition(".")[0] not in wanted:
            continue
        if (form := files.form(key)) is None:
            values[key] = files.value(key)
        else:
            forms[key] = form
    return SaveDescription(saved, forms, values)


def load_tensors(path: str, tensors: Tensors) -> None:
    """Read tensors of a save into place; all ranks that hold them call it. tensors: by their keys in the save."""
    _load(SavedFiles(folders.read(Path(path))), tensors)


def read_tensors(path: str, keys: Sequence[str]) -> Tensors:
    """Read whole tensors of a save; on any rank."""
    files = SavedFiles(folders.read(Path(path)))
    tensors: Tensors = {}
    for key in keys:
        form = files.form(key)
        assert form is not None
        tensors[key] = torch.empty(form[0], dtype=form[1], device="cpu")
    files.load(tensors)
    return tensors


def _load(files: SavedFiles, tensors: Tensors) -> None:
    try:
        with torch.no_grad():
            files.load(tensors)
        told = _Report("", [])
    except Exception as error:  # of a file that was changed, it may be any
        told = _Report(f"{explained(error)}. What is restored is half old and half new now: restore a save again", [])
    _agree(told)


def _agree(mine: _Report) -> list[str]:
    """Tell the other ranks. Returns: the notes of all. Raises: UsageError if one of them cannot go on."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    check_reasons([each.why for each in told])
    notes = group_ranks((rank, note) for rank, each in enumerate(told) for note in each.notes)
    return [note.format(ranks=name_ranks(ranks)) for note, ranks in notes.items()]


class Restoring:
    """The plan for one process: which tensors are read into place, and which values objects are given after that."""

    def __init__(
        self,
        files: SavedFiles | SaveDescription,
        names: MutableMapping[str, Any],
        values: MutableMapping[str, Any],
        *,
        only: Collection[str],
        random: str = RANDOM,
        place: tuple[int, int] | None = None,
    ) -> None:
        """names: objects, which get new values. values: gets plain ones too. only: these names; empty: all of the save.

        random: the name of this process's random states. place: the rank that it restores for, and the number of ranks;
        its own by default. Raises: UsageError.
        """
        self.saved, self.manifest, self.files = files.saved, files.saved.manifest, files
        self.rank, self.world_size = place or (dist.get_rank(), dist.get_world_size())
        self.values = values
        self.sources: Tensors = {}
        """The tensors to be read into, by their keys in the save."""
        self.notes: list[str] = []
        self._keys = {bare_key(key, self.manifest.copies) for key in files.keys}
        self._targets: dict[str, Tensors] = {}
        self._rest: dict[str, Any] = {}

        def bind(name: str, value: object) -> None:
            values[name] = names[name] = value

        kinds = {
            name: kind
            for name in self.manifest.kinds
            if (kind := self._kind_of(name)) and (name in only or not (only or name in self.manifest.of_notebook))
        }
        known = hold({name: value for name, value in names.items() if name in kinds or name in only}, bind=bind)
        aliases = names.keys() - known.held.keys() - known.skipped.keys()
        for name in only:
            if name not in self.manifest.kinds and name not in aliases:  # of parts of others, which are in theirs
                known_names = [each for each in self.manifest.kinds if not each.startswith("_")]
                near = did_you_mean(name, known_names)
                raise UsageError(f"{self.saved.title} has no {name}.{near} It has {', '.join(known_names)}")
        self._held = {name: held for name, held in known.held.items() if name in kinds}
        for name, kind in kinds.items():
            if name not in self._held and kind != RANDOM_KIND and self._is_here(name):
                if kind == DTENSOR and name not in only:
                    self.notes.append(f"{name} of {{ranks}}: not restored, since it is not there; make it again")
                    continue
                if kind not in (TENSOR, VALUE):
                    raise UsageError(
                        f"the save has the {kind} {name}, which is not there: run the cell that makes it, then restore"
                    )
                self._held[name] = hold_value(name, None, bind)
            if name in self._held:
                self._prepare(name, self._held[name], kind)
        if random in self.manifest.kinds:
            self._held[random] = hold_random(random)
            self._prepare(random, self._held[random], RANDOM_KIND)

    def give(self) -> None:
        """Give all objects what was read."""
        for name, targets in self._targets.items():
            self._held[name].give(targets, self._rest.get(name))

    def _kind_of(self, name: str) -> str:
        """Return the kind that a name had on this rank; empty if it had none."""
        kinds = self.manifest.mixed_kinds.get(name, ())
        return kinds[self.rank] if self.rank < len(kinds) else self.manifest.kinds[name]

    def _is_here(self, name: str) -> bool:
        """Whether this rank had the name."""
        keys = [key for key in self._keys if key == name or key.startswith(f"{name}.")]
        return any(key_of_copy(key, self.manifest.copies, self.rank) is not None for key in keys)

    def _prepare(self, name: str, held: HeldState, kind: str) -> None:
        if held.kind != kind and not {held.kind, kind} <= {*TENSORS, VALUE}:  # as best = None at the begin
            raise UsageError(f"{name} is a {held.kind}, and was saved as a {kind}")
        here = held.tensors()
        keys = {key for key in self._keys if key.startswith(f"{name}.")}
        keys |= {name} if kind in TENSORS else set()
        sources = {key: found for key in keys if (found := self._find(key, held)) is not None}
        rest = self._find(name, held) if kind not in TENSORS and name in self._keys else None
        if not sources and rest is None:
            return
        if rest is not None:
            self._rest[name] = self.files.value(rest)
        if kind in TENSORS:
            self._rest[name] = tensor_rest(name)
        if isinstance(held, HeldValue):
            needed = keys_of(self._rest.get(name))
            if name not in self._rest or not needed <= sources.keys():
                return  # a new rank, and a part of it differed between ranks
            sources = {key: sources[key] for key in needed}
        if why := held.check(sources, self._rest.get(name)):
            raise UsageError(why)
        targets: Tensors = {}
        for key, source in sources.items():
            form = self.files.form(source)
            assert form is not None
            size, dtype = form
            there = here.get(key)
            if held.is_strict and there is not None and there.size() != size:
                raise UsageError(f"{key} has shape {tuple(there.size())}, and {tuple(size)} in the save")
            if there is None or not (held.is_strict or _takes(there, size, dtype)):
                there = held.like(key, size, dtype)
            targets[key] = self.sources[source] = there
        self._targets[name] = targets

    def _find(self, key: str, held: HeldState) -> str | None:
        """Return the key of this rank's copy of an entry; None where it is to have none."""
        copies, has_moved = self.manifest.copies, self.world_size != self.manifest.world_size
        found = key_of_copy(key, copies, self.rank)
        if not has_moved or held.kind == RANDOM_KIND:
            return found
        since = "since it differed between ranks when it was saved"
        if found is None and held.is_strict:
            first = copies[key][0][0]
            self.notes.append(f"{held.name} of {{ranks}}: that of rank {first}, {since}")
            found = key_of_copy(key, copies, first)
        elif found is None:
            self.notes.append(f"{held.name} of {{ranks}}: not restored, {since}")
        lost = [rank for group in copies.get(key, ()) for rank in group if rank >= self.world_size]
        if self.rank == 0 and lost and len(copies[key]) > 1:
            self.notes.append(f"{held.name} of {name_ranks(lost)}: not restored, since there are fewer ranks now")
        return found


def _takes(tensor: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> bool:
    """Whether such values can be written into a tensor: each of its elements has memory of its own."""
    is_dense = all(stride or length < 2 for length, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.size() == size and tensor.dtype == dtype and is_dense


class SavedFiles:
    """The files of a save on disk."""

    def __init__(self, saved: Saved) -> None:
        """Raises: UsageError."""
        self.saved = saved
        try:
            if saved.manifest.format == DCP:
                self._reader: Any = FileSystemReader(saved.path)
            else:
                from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

                self._reader = HuggingFaceStorageReader(str(saved.path))
            self._metadata: Metadata = self._reader.read_metadata()
        except ImportError:
            raise UsageError("the save has the format safetensors: pip install safetensors on the ranks") from None
        except Exception as error:  # of a pickle
            raise UsageError(f"{saved.path} cannot be read ({error}); restore another save") from None
        self.keys: Collection[str] = self._metadata.state_dict_metadata.keys()

    def form(self, key: str) -> tuple[torch.Size, torch.dtype] | None:
        """Return the size and the type of a tensor; None for a pickled value."""
        about = self._metadata.state_dict_metadata[key]
        return (about.size, about.properties.dtype) if isinstance(about, TensorStorageMetadata) else None

    def value(self, key: str) -> Any:
        """Return a pickled value. Raises: UsageError."""
        values: dict[str, Any] = {key: io.BytesIO()}
        try:
            self.load(values)
        except Exception as error:  # of a pickle
            raise UsageError(f"{key} in {self.saved.path} cannot be read ({error}); restore another save") from None
        return values[key]

    def load(self, tensors: dict[str, Any]) -> None:
        """Read tensors into place."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, self._metadata, is_coordinator=False)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
