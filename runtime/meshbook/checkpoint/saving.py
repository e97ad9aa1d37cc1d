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
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from meshbook.checkpoint import folder as folders
from meshbook.checkpoint.files import SavedEntry, SaveFiles
from meshbook.checkpoint.folder import DCP, SAFETENSORS, Saved, SavingState, TemporaryFolder
from meshbook.checkpoint.state import RANDOM, TENSORS, HeldModule, hold, hold_random
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.curves.recorder import recorder
from meshbook.errors import GroupAborted, SaveFailed, UsageError
from meshbook.formatting import did_you_mean, group_ranks, name_ranks
from meshbook.groups.rank_groups import own_groups
from meshbook.system.os_errors import explain

T = TypeVar("T")

WRITE_TIMEOUT_S = 24 * 3600.0
"""The longest that ranks wait for each other's files. A rank that ends is known at once."""


class SavingJob:
    """A save, on one rank: `begin` is a call of all ranks' main threads, the rest happens aside."""

    def __init__(
        self, path: Path, files: SaveFiles, temporary: TemporaryFolder | None, about: dict[str, Any], keep: int | None
    ) -> None:
        """temporary: the folder on rank 0. about: fields of its `Manifest`. keep: so many saves stay."""
        self.name = path.name
        self.held_s = 0.0
        """The time that the main thread was held."""
        self.copied_bytes = 0
        self.is_dropped = False
        """Whether this rank has given it up before its part was written, and may have changed that since."""
        self.written: Future[Saved] = Future()
        """Done when it is on disk under its name. Raises: SaveFailed."""
        self._rank = dist.get_rank()
        self._files = files
        self._store = own_groups().store
        self._scope = f"{own_groups().scope}/save/{self.name}"
        self._temporary = temporary
        self._about = about
        self._keep = keep

    @property
    def state(self) -> SavingState:
        """The progress of the save; from any thread."""
        if not self.written.done():
            return SavingState(False)
        if isinstance(error := self.written.exception(0), Exception):
            return SavingState(True, explained(error))
        saved = self.written.result(0)
        return SavingState(True, "", str(saved.path), saved.manifest)

    def begin(self, hashes: Sequence[Mapping[str, str]], copies: bool) -> None:
        """Copy this rank's share, and begin to write it; the others are told if it is interrupted meanwhile."""
        try:
            self._about["copies"] = self._files.plan(hashes)
            self.copied_bytes = self._files.stage(copies=copies)
            _saves.note_begun(self)
            run_in_background(self._run)
        except BaseException as error:
            why = f"rank {self._rank} did not copy its part: {type(error).__name__} {error}".rstrip()
            with contextlib.suppress(Exception):
                self._tell(*(("end", ("", why)) if self._rank == 0 else (str(self._rank), (why, None))))
            raise

    def _run(self) -> None:
        """Write this rank's part, and end the job when all have written theirs; raise nothing."""
        try:
            self._tell(str(self._rank), self._write_part())
            self.written.set_result(_saves.note_written(folders.read(Path(self._await_end()))))
            return
        except GroupAborted:
            error = SaveFailed("a rank ended, or the process groups were formed again, before it was written")
        except Exception as fault:  # of ours too: the save must end
            error = SaveFailed(explained(fault))
        if self._temporary is not None:
            self._temporary.discard()
        self.written.set_exception(error)

    def _tell(self, key: str, word: tuple[str, Any]) -> None:
        self._store.set(f"{self._scope}/{key}", pickle.dumps(word))

    def _write_part(self) -> tuple[str, Any]:
        """Return the word to rank 0: why it is not written, and where everything is."""
        try:
            written = self._files.write()
        except Exception as fault:
            return f"rank {self._rank} could not write its part: {explained(fault)}", None
        why = f"rank {self._rank} was interrupted before its part was written" if self.is_dropped else ""
        return why, written

    def _await_end(self) -> str:
        """Return the path of the save when all is written. Raises: SaveFailed, GroupAborted."""
        if self._temporary is None:
            self._store.wait([f"{self._scope}/end"], timedelta(seconds=WRITE_TIMEOUT_S))
            path, why = pickle.loads(self._store.get(f"{self._scope}/end"))
        else:
            path, why = "", ""
            try:
                path = self._finish(self._temporary)
            except GroupAborted:
                raise
            except Exception as fault:
                why = explained(fault)
            with contextlib.suppress(GroupAborted):  # a rank has ended since: the save is there all the same
                self._tell("end", (path, why))
        if why:
            raise SaveFailed(why)
        return str(path)

    def _finish(self, temporary: TemporaryFolder) -> str:
        keys = [f"{self._scope}/{rank}" for rank in range(self._about["world_size"])]
        self._store.wait(keys, timedelta(seconds=WRITE_TIMEOUT_S))
        words = [pickle.loads(each) for each in self._store.multi_get(keys)]
        self._store.delete_keys(keys)
        for why, _ in words:
            if why:
                raise SaveFailed(why)
        self._files.finish([written for _, written in words])
        folders.write_manifest(temporary.path, **self._about)
        path = temporary.commit()
        if self._keep:
            folders.keep_last(temporary.folder, self._keep)
        return str(path)


class RankSaves:
    """The saves of this rank so far."""

    def __init__(self) -> None:
        self.last: SavingJob | None = None
        self.last_written: Saved | None = None
        self._calls: dict[tuple[str, str], int] = {}
        self._saved_at: dict[str, float] = {}
        """The calls of `save_here` with ``every``, and the time of the last save, by folder. Ranks count from 0 again
        when their groups are formed, since one of them may be new then."""

    def note_begun(self, job: SavingJob) -> None:
        self.last = job

    def note_written(self, saved: Saved) -> Saved:
        self.last_written = saved
        return saved

    def is_due(self, folder: str, every: int | timedelta) -> bool:
        """Whether this call is to save. every: so many calls, or a time by rank 0's clock. Raises: UsageError."""
        if isinstance(every, int):
            if every < 1:
                raise UsageError(f"every={every}: a number of calls from 1 on, or a timedelta")
            key = folder, own_groups().scope
            self._calls[key] = self._calls.get(key, 0) + 1
            return self._calls[key] % every == 0
        own_groups().require()
        now = time.monotonic()
        is_due = from_first_rank(lambda: now - self._saved_at.setdefault(folder, now) >= every.total_seconds())
        if is_due:
            self._saved_at[folder] = now
        return is_due


_saves = RankSaves()


def progress(name: str) -> SavingState:
    """Return how far this rank is with a save; from any thread. name: empty for the last one that was written."""
    if not name:
        known = _saves.last_written
        return SavingState(True, "", str(known.path), known.manifest) if known else SavingState(True, "no save")
    job = _saves.last
    if job is None or job.name != name:
        return SavingState(True, "the rank was started again meanwhile")
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
    if every is not None and not _saves.is_due(folder, every):
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
    own_groups().require()
    if _saves.last is not None:
        _saves.last.written.wait()
    began = time.monotonic()
    temporary = None

    def begin() -> Path:
        nonlocal temporary
        temporary = folders.begin(Path(folder))
        return temporary.path

    try:
        path = from_first_rank(begin)
        content, files, told = _agree(path, collect, format)
        about = {
            "format": format,
            "step": content.step if step is None else step,
            "world_size": len(told),
            "kinds": _merged([each.content.kinds for each in told]),
            "mixed_kinds": _mixed_kinds([each.content.kinds for each in told]),
            "skipped": _merged([each.content.skipped for each in told]),
            "of_notebook": list(of_notebook),
        }
        job = SavingJob(path, files, temporary, about, keep)
        job.begin([each.hashes for each in told], copies)
    except BaseException:
        if temporary is not None:
            temporary.discard()
        raise
    job.held_s = time.monotonic() - began
    return job


def from_first_rank(make: Callable[[], T]) -> T:
    """Return on all ranks what rank 0 makes. Raises: UsageError, that of rank 0 on all."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except UsageError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UsageError):
        raise box[0]
    made: T = box[0]
    return made


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
    except Exception as error:  # of a user's class, it may be any
        why = explained(error)
    if place.local_rank == 0 and (unseen := folders.leave_token(path, str(place.host_rank))):
        why = f"{place.host} {unseen}"
    told: list[Any] = [None] * dist.get_world_size()
    about = content._replace(entries={})
    dist.all_gather_object(told, _Told(why, place.host_rank, place.host, hashes, about))
    _check(told, path)
    return content, files, told


class _Told(NamedTuple):
    """The word of a rank to the others before anything is written."""

    why: str
    """The reason why it cannot take part; empty if it can."""
    host: int
    host_name: str
    hashes: dict[str, str]
    content: SaveContent
    """The content without its entries."""


class SaveContent(NamedTuple):
    """The content of a save, as one process has it."""

    entries: dict[str, SavedEntry] = {}
    kinds: dict[str, str] = {}
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
    kinds_kept = (HeldModule.kind, *TENSORS) if format == SAFETENSORS else ()
    found = hold(names, strict=strict, kinds=kinds_kept)
    if format == DCP:
        found.held[random] = hold_random(random)
    entries: dict[str, SavedEntry] = {}
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
    kinds = {name: held.kind for name, held in found.held.items()}
    return SaveContent(entries, kinds, found.skipped, _step_of(names))


def _merged(parts: Sequence[dict[str, T]]) -> dict[str, T]:
    """Return the entries of all; of the first that has one."""
    return {name: value for part in reversed(parts) for name, value in part.items()}


def _mixed_kinds(kinds: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the kinds on each rank of the names that have several; empty where a rank has no such name."""
    of_ranks = {name: [each.get(name, "") for each in kinds] for each in kinds for name in each}
    return {name: found for name, found in of_ranks.items() if len({*found} - {""}) > 1}


def _pickled(value: object) -> bytes:
    """Pickle a value as torch.distributed.checkpoint does."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _step_of(names: MutableMapping[str, Any]) -> float | None:
    """Return the value called ``step``, else the last step that `meshbook.log` was told."""
    step = names.get("step")
    if isinstance(step, int | float) and not isinstance(step, bool):
        return float(step)
    return None if recorder.stepped is None else recorder.stepped[1]


def explained(error: Exception) -> str:
    """Return why a rank cannot go on, in words."""
    if isinstance(error, SaveFailed):
        return error.why
    if isinstance(error, UsageError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__  # torch's writer fails once more as it closes its file
    return f"{type(error).__name__}: {error}" if cause is None else explain(cause)


def check_reasons(whys: Sequence[str]) -> None:
    """Raises: UsageError if a rank cannot go on, on all ranks alike. whys: the reason of each, empty if it can."""
    groups = group_ranks((rank, why) for rank, why in enumerate(whys) if why)
    if any(len(ranks) == len(whys) for ranks in groups.values()):
        raise UsageError(whys[0])
    if groups:
        raise UsageError("; ".join(f"{name_ranks(ranks)}: {why}" for why, ranks in groups.items()))


def _check(told: Sequence[_Told], path: Path) -> None:
    """Raises: UsageError if a rank cannot take part, on all ranks alike."""
    check_reasons([each.why for each in told])
    for name, why in told[0].content.lacks.items():
        if all(name in each.content.lacks for each in told):
            raise UsageError(why)
    names = {str(each.host): each.host_name for each in told}
    unseen = from_first_rank(lambda: folders.miss_tokens(path, list(names)))
    if unseen:
        raise UsageError(
            f"{path.parent} is not the same folder everywhere: what {', '.join(names[host] for host in unseen)} writes "
            f"there is not seen from {told[0].host_name}. Save to a folder that all hosts share."
        )
