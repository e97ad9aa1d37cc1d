"""Folders of a program that hosts have copies of: which files differ there, by the hash of what they hold.

    program                                            each host
    `list_folder`  ── marks: path, hash, mode ──>      `missing_there`: hashes of which it has no file
                   ── the bytes of those, once ──>     `write_there`: writes, renames, and removes what is no more

A copy keeps a list of what was written, so files that others have put beside them stay.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

import msgspec

from meshbook.errors import UsageError
from meshbook.formatting import format_bytes
from meshbook.system.user_folders import state_base

MOST_BYTES = 1 << 30
"""Of a folder: more is data, which belongs where all hosts see it."""
RECORD = ".meshbook-workspace"
"""The list of what was written, in the copy itself."""
VARIABLE = "WORKSPACE_DIR"
"""In the environment of hosts: where copies lie there."""
_LEFT_OUT = frozenset({"__pycache__", RECORD})
_PIECE = 1 << 20

Folders: TypeAlias = "Sequence[str | os.PathLike[str]] | Mapping[str | os.PathLike[str], str]"


class Workspace:
    """Folders with a person's projects, as hosts are to have them; Monarch's name."""

    def __init__(self, dirs: Folders | None = None, env: object = None) -> None:
        """dirs: each under its own name, or under the one that a mapping gives, ``""`` for the top.

        env: accepted, since Monarch has it: environments are not copied.
        Raises: UsageError.
        """
        if isinstance(dirs, str | os.PathLike):
            raise UsageError(f"dirs is a list of folders, or a mapping of them to names, not {dirs!r}.")
        named = dirs if isinstance(dirs, Mapping) else {each: Path(each).name for each in dirs or ()}
        if not all(map(str, named)):
            raise UsageError('a folder is named by its path; "" would be the one in which the program was started.')
        self.dirs = {Path(source).expanduser(): name for source, name in named.items()}
        """By where they lie here."""
        self.env = env

    @staticmethod
    def null() -> Workspace:
        """One without folders."""
        return Workspace()

    def merge(self, outdir: str | os.PathLike[str]) -> None:
        """Copy the folders into one, as hosts have them. Raises: OSError."""
        Path(outdir).mkdir(parents=True, exist_ok=True)
        for source, name in self.dirs.items():
            shutil.copytree(source, Path(outdir) / name, dirs_exist_ok=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workspace) and (self.dirs, self.env) == (other.dirs, other.env)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Workspace({', '.join(map(str, self.dirs))})"


class FileMark(NamedTuple):
    """A file, or a symbolic link, of a folder."""

    path: str
    """Within the folder."""
    version: str
    """The hash of what it holds; of a link, where it leads."""
    size: int
    mode: int
    is_link: bool = False


def list_folder(folder: Path) -> list[FileMark]:
    """All of it but caches of Python. Raises: UsageError, OSError."""
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}; a workspace has folders, and sync_workspace(path) sends modules"
        )
    marks = [_mark(folder, path) for path in _files(folder)]
    size = sum(mark.size for mark in marks)
    if size > MOST_BYTES:
        raise UsageError(
            f"{folder} has {len(marks):,} files, {format_bytes(size)} in all, and {format_bytes(MOST_BYTES)} are the "
            "most; name the folders in it that the hosts need"
        )
    return marks


def _files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name in _LEFT_OUT:
            continue
        if entry.is_symlink() or entry.is_file():
            yield entry
        elif entry.is_dir():
            yield from _files(entry)


def _mark(folder: Path, path: Path) -> FileMark:
    name, told = str(path.relative_to(folder)), path.lstat()
    if path.is_symlink():
        return FileMark(name, os.readlink(path), 0, 0, is_link=True)
    return FileMark(name, _version(path), told.st_size, told.st_mode & 0o777)


def _version(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def checked_name(name: object) -> str:
    """What a copy is called on hosts. Raises: UsageError for what leads elsewhere."""
    path = PurePosixPath(str(name))
    if not isinstance(name, str) or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise UsageError(
            f"a copy lies within the workspace of the host, under a name as in github/project; not {name!r}"
        )
    return name


# ---- on a host ------------------------------------------------------------------------------------------------------


def folder_there(name: str) -> str:
    """Where a copy lies on this host."""
    base = os.environ.get(VARIABLE) or str(state_base() / "workspace")
    return os.path.normpath(os.path.join(os.path.expanduser(base), name))


def missing_there(name: str, marks: Sequence[FileMark]) -> list[str]:
    """The versions that no file of the copy has where it should."""
    folder = Path(folder_there(name))
    return sorted({mark.version for mark in marks if not mark.is_link and not _has(folder, mark)})


def _has(folder: Path, mark: FileMark) -> bool:
    path = folder / mark.path
    try:
        told = path.lstat()
        return not path.is_symlink() and told.st_size == mark.size and _version(path) == mark.version
    except OSError:
        return False


def write_there(name: str, contents: Mapping[str, bytes], marks: Sequence[FileMark]) -> None:
    """Write the files whose versions have come; each is there as a whole or as it was. Raises: OSError."""
    folder = Path(folder_there(name))
    folder.mkdir(parents=True, exist_ok=True)
    for mark in marks:
        path = folder / mark.path
        if mark.is_link:
            if not (path.is_symlink() and os.readlink(path) == mark.version):
                _put(folder, mark.path, functools.partial(os.symlink, mark.version))
        elif mark.version in contents and not _has(folder, mark):
            _put(folder, mark.path, functools.partial(_write, contents[mark.version], mark.mode))


def _write(content: bytes, mode: int, path: Path) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def _put(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    """Have a new file take the place of whatever is there; no link on the way to it is followed."""
    path = folder
    *above, last = PurePosixPath(name).parts
    for part in above:
        path /= part
        if path.is_symlink() or path.is_file():
            path.unlink()
        path.mkdir(exist_ok=True)
    new = path / f".{secrets.token_hex(8)}"
    path /= last
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    try:
        write(new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def tidy_there(name: str, marks: Sequence[FileMark]) -> str:
    """Remove what was written before and is not there any more; returns the folder. Raises: OSError."""
    folder = Path(folder_there(name))
    folder.mkdir(parents=True, exist_ok=True)
    record, now = folder / RECORD, [mark.path for mark in marks]
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        _remove(folder, set(msgspec.json.decode(record.read_bytes(), type=list[str])).difference(now))
    _put(folder, RECORD, functools.partial(_write, msgspec.json.encode(now), 0o600))
    for mark in marks:
        if not mark.is_link:
            (folder / mark.path).chmod(mark.mode)
    return str(folder)


def _remove(folder: Path, paths: Iterable[str]) -> None:
    """And the folders that are empty then; what a link leads to stays."""
    for path in paths:
        above = [folder / each for each in PurePosixPath(path).parents if each.name]
        if any(each.is_symlink() for each in above):
            continue
        with contextlib.suppress(OSError):  # somebody else was quicker, or has put something in its place
            (folder / path).unlink()
            for each in above:
                each.rmdir()
