"""A folder of saves. Each save is a folder inside, which is there whole or not at all.

    DIR/.tmp-8f3c/   a save that is being written; .tmp-8f3c.lock is locked by its writer
    DIR/save-12/     .metadata and __RANK_N.distcp of torch.distributed.checkpoint, or safetensors; manifest.json

A save is written and brought to disk under its first name, and then renamed. A writer that was killed leaves a folder
whose lock is free: the next save removes that. Folders that go, because newer saves are kept in their place, are
renamed before their files are removed, so half a save is never found.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as plain_field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshbook.errors import UsageError
from meshbook.formatting import format_bytes, format_duration, name_ranks
from meshbook.system.os_errors import explain

VERSION = 1
"""The version of `Manifest`; a save of a newer one is refused."""
MANIFEST = "manifest.json"
DCP, SAFETENSORS = FORMATS = "dcp", "safetensors"
TOKEN_TIMEOUT_S = 10.0
"""The longest that a host may take to see what another host has written: network file systems keep old listings."""
_SAVE, _TEMPORARY, _OLD, _LOCK = "save-", ".tmp-", ".old-", ".lock"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a save, as ``manifest.json`` has it."""

    version: int = VERSION
    format: str = DCP
    step: float | None = None
    saved_at: float
    """Seconds since the epoch."""
    world_size: int
    kinds: dict[str, str]
    """The kind of each name: module, optimizer, tensor, DTensor, object, value, random."""
    mixed_kinds: dict[str, list[str]] = {}
    """Names whose kind differs between ranks: the kind on each, empty where a rank has none."""
    copies: dict[str, list[list[int]]] = {}
    """Keys whose values differ between ranks: the ranks of each copy. A copy's key is ``KEY@FIRST_RANK``."""
    of_notebook: list[str] = []
    """The names that the notebook holds on the mesh; the others are variables of ranks."""
    skipped: dict[str, str] = {}
    """Names that were not saved, and why."""
    files: dict[str, int]
    """The size of each file in bytes."""


@dataclass(frozen=True)
class Saved:
    """A save: where it is and what it has."""

    path: Path
    manifest: Manifest
    values: Mapping[str, Any] = plain_field(default_factory=dict)
    """The plain values, such as a step counter, by name; after `meshbook.restore`."""
    notes: tuple[str, ...] = ()
    """Remarks for the person: values that are not restored, and why."""

    @property
    def step(self) -> float | None:
        """The training step, where one is known."""
        return self.manifest.step

    @property
    def skipped(self) -> Mapping[str, str]:
        """Names that were not saved, and why."""
        return self.manifest.skipped

    @property
    def size_bytes(self) -> int:
        return sum(self.manifest.files.values())

    @property
    def title(self) -> str:
        """``save-12, step 1200``."""
        step = self.step
        return self.path.name if step is None else f"{self.path.name}, step {step:g}"

    @property
    def age(self) -> str:
        """``41 s``."""
        return format_duration(max(0.0, time.time() - self.manifest.saved_at))

    def __str__(self) -> str:
        names = ", ".join(name for name, kind in self.manifest.kinds.items() if kind != "random")
        ranks = name_ranks(range(self.manifest.world_size))
        return f"{self.title}: {names} of {ranks}, {format_bytes(self.size_bytes)}, {self.age} ago, in {self.path}"

    __repr__ = __str__


class SavingState(NamedTuple):
    """The progress of a rank with a save that it writes aside."""

    is_over: bool
    error: str = ""
    path: str = ""
    manifest: Manifest | None = None


class TemporaryFolder:
    """The folder of a save that is being written. The process that makes it holds its lock until it is over."""

    def __init__(self, folder: Path, path: Path, lock: int) -> None:
        self.folder, self.path, self._lock = folder, path, lock

    def commit(self) -> Path:
        """Bring the names of the files to disk, and give the save its name. Raises: OSError."""
        _sync(self.path)
        for number in range(max(_numbers(self.folder), default=0) + 1, 1 << 62):
            path = self.folder / f"{_SAVE}{number}"
            try:
                os.rename(self.path, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another session saves to this folder
            break
        _sync(self.folder)
        self.close()
        return path

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):
                self.path.with_suffix(_LOCK).unlink()
            os.close(lock)


def begin(folder: Path) -> TemporaryFolder:
    """Make the folder of a new save, and remove those of writers that ended. Raises: UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        temporary = _new_temporary(folder)
        try:
            temporary.path.mkdir()
        except BaseException:
            temporary.discard()
            raise
    except OSError as error:
        raise UsageError(f"nothing can be saved to {folder}: {explain(error)}") from None
    return temporary


def _new_temporary(folder: Path) -> TemporaryFolder:
    while True:
        path = folder / f"{_TEMPORARY}{secrets.token_hex(4)}"
        lock = os.open(path.with_suffix(_LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # file systems without locks: then an abandoned folder stays
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.with_suffix(_LOCK).exists():
            return TemporaryFolder(folder, path, lock)
        os.close(lock)  # another session has taken it for abandoned, just before it was locked


def _remove_abandoned(folder: Path) -> None:
    for lock in folder.glob(f"{_TEMPORARY}*{_LOCK}"):
        with contextlib.suppress(OSError), _locked(lock):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()
    for path in [*folder.glob(f"{_OLD}*"), *folder.glob(f"{_TEMPORARY}*")]:
        if path.suffix != _LOCK and not path.with_suffix(_LOCK).exists():
            shutil.rmtree(path, ignore_errors=True)  # other ranks may still write when rank 0 removes their folder


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock of a file. Raises: OSError if another process has it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def leave_token(path: Path, name: str) -> str:
    """Write this host's token into the folder of a new save; returns why it cannot, empty if it can."""
    if not _comes(path, time.monotonic() + TOKEN_TIMEOUT_S):
        return f"does not see {path.parent}: save to a folder that all hosts share"
    try:
        (path / f"token-{name}").write_text(name)
    except OSError as error:
        return f"cannot write to {path.parent}: {explain(error)}"
    return ""


def miss_tokens(path: Path, names: list[str]) -> list[str]:
    """Return the hosts whose tokens are not seen, and remove those that are."""
    deadline = time.monotonic() + TOKEN_TIMEOUT_S
    tokens = {name: path / f"token-{name}" for name in names}
    missing = [name for name, token in tokens.items() if not _comes(token, deadline)]
    for token in tokens.values():
        token.unlink(missing_ok=True)
    return sorted(missing)


def _comes(path: Path, deadline: float) -> bool:
    """Wait until another host's file or folder is seen here; return whether it is."""
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def write_manifest(path: Path, **about: Any) -> Manifest:
    """Write ``manifest.json`` beside the files of a save, and bring all to disk. about: fields of `Manifest`."""
    files = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    manifest = Manifest(saved_at=time.time(), files=files, **about)
    (path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for name in (*files, MANIFEST):
        _sync(path / name)
    return manifest


def saves(folder: Path) -> list[Path]:
    """Return the saves in a folder, the oldest first."""
    return [folder / f"{_SAVE}{number}" for number in sorted(_numbers(folder))]


def keep_last(folder: Path, count: int) -> None:
    """Remove the saves in a folder but for the last ``count``. What cannot be removed stays."""
    for path in saves(folder)[:-count]:
        with contextlib.suppress(OSError):
            old = path.with_name(f"{_OLD}{secrets.token_hex(4)}")
            path.rename(old)
            shutil.rmtree(old, ignore_errors=True)


def find(folder: Path, step: float | None = None) -> Saved:
    """Return the last save in a folder, or the last one of a step; the folder may be a save itself.

    Raises: UsageError if there is none, or it is cut short, or newer than this version knows.
    """
    if (folder / MANIFEST).exists():
        return read(folder)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if (folder / ".metadata").exists():
        raise UsageError(f"{folder} was not saved by Meshbook: read it on the ranks, by torch.distributed.checkpoint")
    found = saves(folder)
    if not found:
        raise UsageError(f"there is no save in {folder}")
    if step is None:
        return read(found[-1])
    steps = []
    for path in reversed(found):
        saved = read(path)
        if saved.step == step:
            return saved
        if saved.step is not None:
            steps.append(f"{saved.step:g}")
    known = ", ".join(dict.fromkeys(reversed(steps))) or "none"
    raise UsageError(f"there is no save of step {step:g} in {folder}; there are {known}")


def read(path: Path) -> Saved:
    """Return the save in a folder. Raises: UsageError as `find`."""
    try:
        text = (path / MANIFEST).read_bytes()
        version = msgspec.json.decode(text, type=_Versioned).version
        if version > VERSION:
            raise UsageError(f"{path} was saved by a newer version of Meshbook (format {version}): install that")
        manifest = msgspec.json.decode(text, type=Manifest)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {explain(error)}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path / MANIFEST} is cut short or changed ({error}); restore another save") from None
    for name, size in manifest.files.items():
        try:
            there = (path / name).stat().st_size
        except OSError as error:
            raise UsageError(f"{path} is not whole: {explain(error)}; restore another save") from None
        if there != size:
            raise UsageError(f"{path / name} has {there} bytes instead of {size}; restore another save")
    return Saved(path, manifest)


class _Versioned(msgspec.Struct):
    version: int


def _numbers(folder: Path) -> list[int]:
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {explain(error)}") from None
    return [int(name.removeprefix(_SAVE)) for name in names if name.startswith(_SAVE) and name[len(_SAVE) :].isdigit()]


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
