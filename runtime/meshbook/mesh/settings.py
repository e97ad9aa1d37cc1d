"""The settings of `meshbook.monarch.config.configure`, under Monarch's names; they hold for this process."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshbook.actor.actor_mesh import ask_controller
from meshbook.actor.identity import message_limit
from meshbook.actor.router import is_rank
from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean

DEFAULTS: dict[str, object] = {
    "codec_max_frame_length": 10 * 2**30,
    "enable_log_forwarding": True,
    "host_spawn_ready_timeout": "1m",
    "mesh_proc_spawn_max_idle": "2m",
}
"""The defaults, in order: the most bytes of the arguments of a call to actors, which holds only once it was set.

Then whether new meshes show the prints of calls; the longest wait for a host agent to dial in; and the longest wait for
workers to answer, which includes the imports of ``preload`` and the bootstrap.
"""

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")

_set: dict[str, object] = {}


class SettingTypeError(UsageError, TypeError):
    """A setting was given a value of another type."""


def configure(**settings: object) -> None:
    """Set limits of waits, and whether prints are shown, for this process.

    settings: durations are texts, as in ``30s`` or ``1h 30m``.
    Raises: UsageError for another name, SettingTypeError, a TypeError too, for a value that does not fit; then nothing
    is set.
    """
    for name, value in settings.items():
        _check(name, value)
    restore({**_set, **settings})


def _check(name: str, value: object) -> None:
    """Raises: UsageError, SettingTypeError."""
    if name not in DEFAULTS:
        raise UsageError(
            f"there is no setting {name}.{did_you_mean(name, tuple(DEFAULTS))} There are {', '.join(DEFAULTS)}."
        )
    default = DEFAULTS[name]
    if isinstance(default, str):
        if not _seconds(name, value):
            raise SettingTypeError(f'{name} is a duration above 0, as in "30s" or "1m 30s", not {value!r}.')
    elif type(value) is not type(default):
        kind = "True or False" if default is True else "a count of bytes"
        raise SettingTypeError(f"{name} is {kind}, not {value!r}.")
    elif isinstance(value, int) and value < 0:
        raise SettingTypeError(f"{name} is a count of bytes from 0, not {value!r}.")


def _seconds(name: str, value: object) -> float:
    """Read a duration, as in ``1h 30m``. Raises: SettingTypeError."""
    if not isinstance(value, str):
        raise SettingTypeError(f'{name} is a duration, a text as in "30s" or "1m 30s", not {value!r}.')
    parts = _PART.findall(value.strip())
    if not parts or _PART.sub("", value.strip()) or any(unit not in _UNITS_S for _, unit in parts):
        raise SettingTypeError(
            f"Invalid duration format {value!r} for {name}: give numbers with units (ms, s, m, h, d), "
            'as in "30s" or "1m 30s".'
        )
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def get_runtime_config() -> dict[str, object]:
    """Return the settings that `configure` has made."""
    return dict(_set)


def get_global_config() -> dict[str, object]:
    """Return the same, with defaults for the rest; on a rank these are the program's settings, if any."""
    told = ask_controller("settings", (), {}, "config").get() if is_rank() else {}
    return {**DEFAULTS, **told, **_set}


def clear_runtime_config() -> None:
    """Go back to the defaults."""
    restore({})


def restore(settings: Mapping[str, object]) -> None:
    """Have exactly these set, which were checked as they were set first."""
    _set.clear()
    _set.update(settings)
    limit = _set.get("codec_max_frame_length")
    message_limit.set(limit if isinstance(limit, int) else None)


def setting_s(name: str) -> float:
    """Return a duration, in seconds."""
    return _seconds(name, _set.get(name, DEFAULTS[name]))


def shows_calls() -> bool:
    """Whether new meshes show the prints of calls."""
    return bool(_set.get("enable_log_forwarding", True))
