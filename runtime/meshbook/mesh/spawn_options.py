"""The options of a spawn, checked before any process starts."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence

from meshbook.errors import UsageError
from meshbook.shape.members import Extent, Point
from meshbook.system.devices import check_binding
from meshbook.values.pickling import dumps
from meshbook.wire.messages import StartCommand

NAME_MAX_CHARS = 60
"""The longest name of a mesh: with the mesh's number, in UTF-8, it names a folder."""

_ARGS = ("-m", "meshbook.worker.template")


class BootstrapCommand:
    """The command that starts processes: an interpreter and an environment. See `default_bootstrap_cmd`."""

    def __init__(
        self,
        program: str,
        arg0: str | None = None,
        args: Sequence[str] = _ARGS,
        env: Mapping[str, str | None] | None = None,
        inherit_env: bool = True,
    ) -> None:
        """program: a Python that has meshbook, on every host. env: None removes a variable.

        inherit_env: False starts from an empty environment. Raises: UsageError for other arguments than the default
        command's: processes are forked from one of this interpreter, so no other program runs them.
        """
        if arg0 is not None or tuple(args) != _ARGS:
            raise UsageError(
                f"a bootstrap command runs PYTHON {' '.join(_ARGS)}, not {[arg0, *args]!r}: change the default one by "
                "with_env(); to bind processes give proc_bind; to run something in each first give bootstrap."
            )
        self.program, self.arg0, self.args = checked_python(program), arg0, list(args)
        self.env = checked_changes(env)
        self.inherit_env = inherit_env

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """The same command with more of an environment. Raises: UsageError."""
        return BootstrapCommand(self.program, env={**self.env, **env}, inherit_env=self.inherit_env)

    def __repr__(self) -> str:
        return f"BootstrapCommand({self.program!r}, env={self.env!r}, inherit_env={self.inherit_env})"


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the default command of processes; change it by `BootstrapCommand.with_env`, or by its fields."""
    return BootstrapCommand(sys.executable)


def commands_of(
    asked: BootstrapCommand | Callable[[Point], BootstrapCommand] | None, extent: Extent, python: str, anew: bool
) -> tuple[StartCommand, ...]:
    """Return one command for all ranks or one for each; none where the defaults hold. Raises: UsageError.

    python: the interpreter of the hosts, where the command has the default one. anew: as `StartCommand` has it.
    """
    if asked is None:
        return (StartCommand(python, anew=anew),) if python else ()
    if isinstance(asked, BootstrapCommand):
        return (_command(asked, python, anew),)
    if not callable(asked):
        raise UsageError(
            f"bootstrap_command is a BootstrapCommand, or a function of a Point that gives one; got {asked!r}."
        )
    each = []
    for point in extent.points():
        if not isinstance(command := asked(point), BootstrapCommand):
            raise UsageError(f"bootstrap_command({dict(point)}) gave {command!r}, which is no BootstrapCommand.")
        each.append(_command(command, python, anew))
    return tuple(each) if len(set(map(repr, each))) > 1 else tuple(each[:1])


def _command(asked: BootstrapCommand, python: str, anew: bool) -> StartCommand:
    program = checked_python(asked.program)
    environment = checked_changes(asked.env)
    return StartCommand(python if program == sys.executable else program, environment, bool(asked.inherit_env), anew)


def checked_bindings(proc_bind: Sequence[Mapping[str, str]] | None, per_host: int) -> tuple[dict[str, str], ...]:
    """Return the bindings, one for each process of a host. Raises: UsageError."""
    if proc_bind is None:
        return ()
    if isinstance(proc_bind, str | Mapping) or len(proc_bind) != per_host:
        raise UsageError(
            f"proc_bind has a mapping for each of the {per_host} processes of a host, as in "
            f'[{{"cpus": "0-3"}}, {{"cpus": "4-7"}}]; got {reprlib.repr(proc_bind)}.'
        )
    return tuple(check_binding(binding) for binding in proc_bind)


def checked_python(python: str | os.PathLike[str]) -> str:
    """Raises: UsageError."""
    found = os.fspath(python) if isinstance(python, str | os.PathLike) else ""
    if not found or "\0" in found:
        raise UsageError(f"a Python interpreter is named by its path on the hosts, not by {python!r}.")
    return found


def check_bootstrap(bootstrap: object) -> None:
    """Refuse a function that cannot run on ranks before there are any. Raises: UsageError, SerializationError."""
    if not callable(bootstrap):
        raise UsageError(f"bootstrap must be a function without arguments; got {bootstrap!r}.")
    dumps(bootstrap, what="bootstrap")


def checked_sizes(per_host: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(per_host, Mapping):
        raise UsageError(f'per_host maps axes to sizes, as in {{"gpus": 4}}; it is {per_host!r}.')
    return dict(per_host)


def checked_name(name: object) -> str:
    """Hosts name folders by it, and people read it. Raises: UsageError."""
    if not isinstance(name, str) or not name or not name.isprintable() or "/" in name or len(name) > NAME_MAX_CHARS:
        raise UsageError(
            f'a mesh is named by a text of 1 to {NAME_MAX_CHARS} printable characters without "/", not by '
            f"{reprlib.repr(name)}; None, the default, names it for you."
        )
    return name


def checked_modules(preload: Sequence[str]) -> tuple[str, ...]:
    modules = () if isinstance(preload, str) else tuple(preload)
    if isinstance(preload, str) or not all(
        isinstance(module, str) and all(part.isidentifier() for part in module.split(".")) for module in modules
    ):
        raise UsageError(f'preload lists names of modules, as in preload=("json", "my.module"); it is {preload!r}.')
    return modules


def checked_folder(cwd: str | os.PathLike[str] | None) -> str:
    """Raises: UsageError."""
    folder = "" if cwd is None else os.fspath(cwd)
    if not isinstance(folder, str) or (cwd is not None and not folder.startswith(("/", "~"))) or "\0" in folder:
        raise UsageError(f"cwd is a folder from / or ~ that every host has, not {cwd!r}.")
    return folder


def checked_variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Raises: UsageError."""
    variables = {} if env is None else dict(env)
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise UsageError(f'env maps names to texts, as in {{"NCCL_DEBUG": "INFO"}}; {name!r}: {value!r} is none.')
    return variables


def checked_changes(env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return the changes, checked by `checked_variables`; None removes a variable. Raises: UsageError."""
    changes = {} if env is None else dict(env)
    checked_variables({name: "" if value is None else value for name, value in changes.items()})
    return changes
