"""A rank's part in a save: a moment on the main thread, the writing aside.

    main thread   1. rank 0 makes the folder; each host shows that it sees it
                  2. all tell the others a hash of each value: equal ones are written once, others once for each value
                  3. rank 0 plans who writes what, as torch.distributed.checkpoint does
                  4. each rank copies its own share: now the ranks are free
    aside         5. each writes its copy and tells rank 0, by the runtime's store
                  6. rank 0 writes the metadata, renames the folder and tells the others

Collectives run on the main thread only, where an interrupt and a failed rank end them. What happens aside ends with an
error if the process groups are formed again meanwhile, as after the death of a rank; the folder is removed then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshbook.checkpoint import folder as folders
from meshbook.checkpoint.files import SavedEntry, SaveFiles
from meshbook.checkpoint.folder import DCP, SAFETENSORS, Saved, SavedLayout, SavingState, TemporaryFolder
from meshbook.checkpoint.state import RANDOM, HeldModule, HeldRandom, HeldTensor, hold
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.curves.recorder import recorder
from meshbook.errors import GroupAborted, SaveFailed, UsageError
from meshbook.formatting import did_you_mean, group_ranks, name_ranks
from meshbook.groups.rank_groups import own_groups
from meshbook.groups.store_client import LinkStore
from meshbook.system.os_errors import explain

V = TypeVar("V")

WRITE_TIMEOUT_S = 24 * 3600.0
"""The longest that ranks wait for each other's files. A rank that ends is known at once."""


class SavingJob:
    """A save, on one rank, from its begin to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held_s = 0.0
        """The time that the main thread was held."""
        self.copied_bytes = 0
        self.is_dropped = False
        """Whether this rank has given it up before its part was written, and may have changed that since."""
        self.written: Future[Saved] = Future()
        """Done when it is on disk under its name. Raises: SaveFailed."""

    @property
    def state(self) -> SavingState:
        """The progress of the save; from any thread."""
        if not self.written.done():
            return SavingState(False)
        if (error := self.written.exception(0)) is not None:
            return SavingState(True, str(error))
        saved = self.written.result(0)
        return SavingState(True, "", str(saved.path), saved.manifest)


last: SavingJob | None = None
"""The last save of this process, and the last one that was written."""
last_written: Saved | None = None
_calls: dict[tuple[str, str], int] = {}
_saved_at: dict[str, float] = {}
"""The calls of `save_here` with ``every``, and the time of the last save, by folder. Ranks count from 0 again when
their groups are formed, since one of them may be new then."""


def progress(name: str) -> SavingState:
    """Return how far this rank is with a save; from any thread. name: empty for the last one that was written."""
    if not name:
        known = last_written
        return SavingState(True, "", str(known.path), known.manifest) if known else SavingState(True, "no save")
    job = last
    if job is None or job.name != name:
        return SavingState(True, "nothing was saved: the rank was started again meanwhile")
    return job.state


def save_here(
    folder: str,
    state: MutableMapping[str, Any],
    *,
    step: float | None = None,
    keep: int | None = None,
    every: int | timedelta | None = None,
    wait: bool = True,
    format: str = DCP,
) -> Saved | Future[Saved] | None:
    """Do `meshbook.save` on a rank: a collective of all ranks."""
    if every is not None and not _is_due(folder, every):
        return None
    content = functools.partial(collect, state, strict=True, format=format)
    job = save_content(folder, content, step=step, keep=keep, format=format, copies=not wait)
    if not wait:
        return job.written
    try:
        return job.written.result()
    except BaseException:
        job.is_dropped = True  # the values may change from now on
        raise


def _is_due(folder: str, every: int | timedelta) -> bool:
    """Whether this call is to save. every: so many calls, or a time by rank 0's clock. Raises: UsageError."""
    if isinstance(every, int):
        if every < 1:
            raise UsageError(f"every={every}: a number of calls from 1 on, or a timedelta")
        key = folder, own_groups().scope
        _calls[key] = _calls.get(key, 0) + 1
        return _calls[key] % every == 0
    own_groups().require()
    now = time.monotonic()
    is_due = now - _saved_at.setdefault(folder, now) >= every.total_seconds()
    due = torch.tensor([is_due], device="cpu", dtype=torch.uint8)
    dist.broadcast(due, src=0)
    if due.item():
        _saved_at[folder] = now
    return bool(due.item())


def save_ranks(
    folder: str,
    only: Sequence[str] | None,
    sent: SaveContent | None,
    step: float | None,
    keep: int | None,
    format: str,
) -> tuple[str, float, int]:
    """Begin a save of this rank's variables, and of what the notebook holds on the mesh.

    only: these variables; empty: all of the person's; None: none of them. sent: the notebook's content.
    Returns: the save's name, the seconds that it held the rank, and the bytes that were copied.
    """

    def everything() -> SaveContent:
        own = SaveContent()
        if only is not None:
            known = variables()
            there = {name: known[name] for name in only if name in known} if only else known
            lacks = {name: f"the ranks have no variable {name}.{did_you_mean(name, known)}" for name in only}
            own = collect(there, strict=bool(only), format=format)
            own = own._replace(lacks={name: why for name, why in lacks.items() if name not in there})
        return own if sent is None else own.with_sent(sent)

    names = list(sent.kinds) if sent else []
    job = save_content(folder, everything, step=step, keep=keep, format=format, of_notebook=names)
    return job.name, job.held_s, job.copied_bytes


def variables() -> MutableMapping[str, Any]:
    """Return the person's variables on this rank by name."""
    main = vars(sys.modules["__main__"])
    hidden = main["get_ipython"]().user_ns_hidden
    return {name: value for name, value in main.items() if not name.startswith("_") and name not in hidden}


def save_content(
    folder: str,
    collect: Callable[[], SaveContent],
    *,
    step: float | None,
    keep: int | None,
    format: str,
    of_notebook: Sequence[str] = (),
    copies: bool = True,
) -> SavingJob:
    """Begin a save. All ranks call it, and have their main threads back when it returns.

    of_notebook: the names that the notebook holds. copies: write copies; else the values stay until they are written.
    Raises: UsageError, SaveFailed.
    """
    groups = own_groups()
    groups.require()
    if last is not None:
        last.written.wait()
    began = time.monotonic()
    rank = dist.get_rank()
    temporary, word = _begin(folder) if rank == 0 else (None, None)
    box: list[Any] = [word]
    try:
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], UsageError):
            raise box[0]
        path, name = Path(box[0][0]), box[0][1]
        job = SavingJob(name)
        content, files, told = _agree(path, collect, format)
        fields = {
            "format": format,
            "step": content.step if step is None else step,
            "world_size": len(told),
            "kinds": _merged([each.kinds for each in told]),
            "mixed_kinds": _mixed_kinds(told),
            "layouts": _merged([each.layouts for each in told]),
            "skipped": _merged([each.skipped for each in told]),
            "of_notebook": list(of_notebook),
        }
        writing = _Writing(rank, job, files, groups.store, f"{groups.scope}/save/{name}", temporary, fields, keep)
        _copy(writing, told, copies)
    except BaseException:
        if temporary is not None:
            temporary.discard()
        raise
    job.held_s = time.monotonic() - began
    return job


def _agree(
    path: Path, collect: Callable[[], SaveContent], format: str
) -> tuple[SaveContent, SaveFiles, Sequence[_Told]]:
    """Return this rank's content and its files, and what each rank has told. Raises: UsageError, on all ranks alike."""
    place, content, why = own_groups().place, SaveContent(), ""
    hashes: dict[str, str] = {}
    try:
        content = collect()
        files = SaveFiles(path, content.entries, format)
        hashes = files.hashes()
    except UsageError as error:
        why = str(error)
    except Exception as error:  # of a user's class
        why = f"{type(error).__name__}: {error}"
    if place.local_rank == 0 and (unseen := folders.leave_token(path, str(place.host_rank))):
        why = f"{place.host} {unseen}"
    told: list[Any] = [None] * dist.get_world_size()
    about = content.lacks, content.kinds, content.layouts, content.skipped
    dist.all_gather_object(told, _Told(why, place.host_rank, place.host, hashes, *about))
    _check(told, path)
    return content, files, told


def _copy(writing: _Writing, told: Sequence[_Told], copies: bool) -> None:
    """Copy this rank's share, and begin to write it; the others are told if it is interrupted meanwhile."""
    global last
    try:
        writing.about["copies"] = writing.files.plan([each.hashes for each in told])
        writing.job.copied_bytes = writing.files.stage(copies=copies)
        last = writing.job
        run_in_background(writing.run)
    except BaseException as error:
        with contextlib.suppress(Exception):
            writing.tell(f"rank {writing.rank} did not copy its part: {type(error).__name__} {error}".rstrip())
        raise


def _begin(folder: str) -> tuple[TemporaryFolder | None, UsageError | tuple[str, str]]:
    """Make the folder, and return it with the word of rank 0 to the others: where it is, and the save's name."""
    try:
        temporary = folders.begin(Path(folder))
    except UsageError as error:
        return None, error
    return temporary, (str(temporary.path), secrets.token_hex(6))


class _Told(NamedTuple):
    """The word of a rank to the others before anything is written."""

    why: str
    """The reason why it cannot take part; empty if it can."""
    host: int
    host_name: str
    hashes: dict[str, str]
    lacks: dict[str, str]
    kinds: dict[str, str]
    layouts: dict[str, SavedLayout]
    skipped: dict[str, str]


class SaveContent(NamedTuple):
    """The content of a save, as one process has it."""

    entries: dict[str, SavedEntry] = {}
    kinds: dict[str, str] = {}
    layouts: dict[str, SavedLayout] = {}
    skipped: dict[str, str] = {}
    step: float | None = None
    lacks: dict[str, str] = {}
    """Wanted names that are not on this rank, and what to say if no rank has them."""

    def with_sent(self, sent: SaveContent) -> SaveContent:
        """Return this rank's content with that of the notebook. Raises: UsageError for a name that both have."""
        if both := [name for name in sent.kinds if name in self.kinds]:
            raise UsageError(
                f"the notebook and the ranks both have {both[0]}: rename one, or save one of the two alone"
            )
        return SaveContent(
            {**self.entries, **sent.entries},
            {**self.kinds, **sent.kinds},
            {**self.layouts, **sent.layouts},
            {**self.skipped, **sent.skipped},
            sent.step if self.step is None else self.step,
            self.lacks,
        )


def collect(names: MutableMapping[str, Any], *, strict: bool, format: str, random: str = RANDOM) -> SaveContent:
    """Return the content for a save of named objects. strict: as of `hold`. random: the name of the random states.

    Raises: UsageError.
    """
    if format == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise UsageError("the format safetensors needs that package: pip install safetensors")
    kinds_kept = (HeldModule.kind, HeldTensor.kind) if format == SAFETENSORS else ()
    found = hold(names, strict=strict, kinds=kinds_kept)
    if format == DCP:
        found.held[random] = HeldRandom(random)
    entries: dict[str, SavedEntry] = {}
    layouts = {}
    for name, held in list(found.held.items()):
        try:
            tensors, rest = held.tensors(), held.rest() if format == DCP else None
            pickled = {} if rest is None else {name: _pickled(rest)}
        except Exception as error:  # of a user's class
            if strict:
                raise UsageError(f"{name} cannot be saved: {type(error).__name__}: {error}") from None
            found.skipped[name] = f"{type(error).__name__}: {error}"
            del found.held[name]
            continue
        entries.update({**tensors, **pickled})
        if isinstance(held, HeldTensor) and (layout := _layout_of(tensors[name])):
            layouts[name] = layout
    kinds = {name: held.kind for name, held in found.held.items()}
    return SaveContent(entries, kinds, layouts, found.skipped, _step_of(names))


def _merged(parts: Sequence[dict[str, V]]) -> dict[str, V]:
    """Return the entries of all; of the first that has one."""
    return {name: value for part in reversed(parts) for name, value in part.items()}


def _mixed_kinds(told: Sequence[_Told]) -> dict[str, list[str]]:
    """Return the kinds on each rank of the names that have several; empty where a rank has no such name."""
    names = dict.fromkeys(name for each in told for name in each.kinds)
    kinds = {name: [each.kinds.get(name, "") for each in told] for name in names}
    return {name: of_ranks for name, of_ranks in kinds.items() if len({*of_ranks} - {""}) > 1}


def _pickled(value: object) -> bytes:
    """Pickle a value as torch.distributed.checkpoint does."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _layout_of(tensor: torch.Tensor) -> SavedLayout | None:
    if not isinstance(tensor, DTensor) or tensor.device_mesh.mesh_dim_names is None:
        return None
    dims = [each.dim if isinstance(each, Shard) else None for each in tensor.placements]
    return SavedLayout(list(tensor.device_mesh.mesh_dim_names), dims)


def _step_of(names: MutableMapping[str, Any]) -> float | None:
    """Return the value called ``step``, else the last step that `meshbook.log` was told."""
    step = names.get("step")
    if isinstance(step, int | float) and not isinstance(step, bool):
        return float(step)
    return None if recorder.stepped is None else recorder.stepped[1]


class _Writing(NamedTuple):
    """The part of a save that happens aside."""

    rank: int
    job: SavingJob
    files: SaveFiles
    store: LinkStore
    scope: str
    """The prefix of the keys by which the ranks tell each other that they have written."""
    temporary: TemporaryFolder | None
    """The folder on rank 0, its content, and how many saves are kept."""
    about: dict[str, Any]
    keep: int | None

    def run(self) -> None:
        """Write this rank's part, and end the job when all have written theirs; raise nothing."""
        try:
            path, why = self._write()
        except GroupAborted:
            path, why = "", "a rank ended, or the process groups were formed again, before it was written"
        except Exception as fault:  # of ours: the save must end
            path, why = "", f"{type(fault).__name__}: {fault}"
        if why:
            if self.temporary is not None:
                self.temporary.discard()
            self.job.written.set_exception(SaveFailed(why))
            return
        global last_written
        try:
            last_written = folders.read(Path(path))
            self.job.written.set_result(last_written)
        except UsageError as error:  # it was removed meanwhile
            self.job.written.set_exception(error)

    def _write(self) -> tuple[str, str]:
        try:
            word = pickle.dumps(("", self.files.write()))
            if self.job.is_dropped:
                word = pickle.dumps((f"rank {self.rank} was interrupted before its part was written", None))
        except Exception as fault:
            word = pickle.dumps((f"rank {self.rank} could not write its part: {_explained(fault)}", None))
        self.store.set(f"{self.scope}/{self.rank}", word)
        if self.temporary is None:
            self.store.wait([f"{self.scope}/end"], timedelta(seconds=WRITE_TIMEOUT_S))
            path, error = pickle.loads(self.store.get(f"{self.scope}/end"))
            return path, error
        try:
            end = self._finish(self.temporary), ""
        except GroupAborted:
            raise
        except Exception as fault:
            end = "", _explained(fault)
        with contextlib.suppress(GroupAborted):  # a rank has ended since: the save is there all the same
            self.store.set(f"{self.scope}/end", pickle.dumps(end))
        return end

    def tell(self, why: str) -> None:
        """Have the other ranks, which may write already, end the save: this one writes nothing."""
        key, word = ("end", ("", why)) if self.rank == 0 else (str(self.rank), (why, None))
        self.store.set(f"{self.scope}/{key}", pickle.dumps(word))

    def _finish(self, temporary: TemporaryFolder) -> str:
        keys = [f"{self.scope}/{rank}" for rank in range(self.about["world_size"])]
        self.store.wait(keys, timedelta(seconds=WRITE_TIMEOUT_S))
        words = [pickle.loads(each) for each in self.store.multi_get(keys)]
        self.store.delete_keys(keys)
        for why, _ in words:
            if why:
                raise SaveFailed(why)
        self.files.finish([written for _, written in words])
        folders.write_manifest(temporary.path, **self.about)
        path = temporary.commit()
        if self.keep:
            folders.keep_last(temporary.folder, self.keep)
        return str(path)


def _explained(error: Exception) -> str:
    if isinstance(error, SaveFailed):
        return error.why
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__  # torch's writer fails once more as it closes its file
    return f"{type(error).__name__}: {error}" if cause is None else explain(cause)


def join_reasons(whys: Mapping[str, Sequence[int]], world_size: int) -> str:
    """Return the reasons of ranks as one text; without the ranks where all have the same."""
    if len(whys) == 1 and len(next(iter(whys.values()))) == world_size:
        return next(iter(whys))
    return "; ".join(f"{name_ranks(ranks)}: {why}" for why, ranks in whys.items())


def _check(told: Sequence[_Told], path: Path) -> None:
    """Raises: UsageError if a rank cannot take part, on all ranks alike."""
    whys = group_ranks((rank, each.why) for rank, each in enumerate(told) if each.why)
    if whys:
        raise UsageError(join_reasons(whys, len(told)))
    for name, why in told[0].lacks.items():
        if all(name in each.lacks for each in told):
            raise UsageError(why)
    names = {str(each.host): each.host_name for each in told}
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        box = [[names[host] for host in folders.miss_tokens(path, list(names))]]
    if len(names) > 1:  # a host sees its own folder
        dist.broadcast_object_list(box, src=0)
    if box[0]:
        raise UsageError(
            f"{path.parent} is not the same folder everywhere: what {', '.join(box[0])} writes there is not seen from "
            f"{told[0].host_name}. Save to a folder that all hosts share."
        )
