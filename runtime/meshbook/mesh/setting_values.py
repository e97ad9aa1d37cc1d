"""What each of Monarch's settings may be, and how it is told: durations in its spelling, transports, encodings."""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Callable

from meshbook.actor.identifiers import BindSpec
from meshbook.errors import UsageError


class SettingTypeError(UsageError, TypeError):
    """A setting was given what is of another type."""


class Encoding(enum.Enum):
    """How Monarch encodes messages; here each has the encoding that fits it."""

    Bincode = "bincode"
    Json = "json"
    Multipart = "multipart"

    def __repr__(self) -> str:
        return f"Encoding.{self.name}"

    __str__ = __repr__


_SECOND_NS = 1_000_000_000
_DAY_NS = 86_400 * _SECOND_NS
_SPELLINGS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (365 * _DAY_NS + _DAY_NS // 4, ("year", "years", "yr", "yrs", "y")),
    (2_630_016 * _SECOND_NS, ("month", "months", "M")),
    (7 * _DAY_NS, ("week", "weeks", "wk", "wks", "w")),
    (_DAY_NS, ("day", "days", "d")),
    (3600 * _SECOND_NS, ("h", "hour", "hours", "hr", "hrs")),
    (60 * _SECOND_NS, ("m", "minute", "minutes", "min", "mins")),
    (_SECOND_NS, ("s", "second", "seconds", "sec", "secs")),
    (1_000_000, ("ms", "millis", "msec")),
    (1_000, ("us", "micros", "usec")),
    (1, ("ns", "nanos", "nsec")),
)
"""Units, the largest first, each with its spellings."""
_UNITS_NS = {spelling: size for size, spellings in _SPELLINGS for spelling in spellings}
_TOLD = tuple((size, spellings[0]) for size, spellings in _SPELLINGS if spellings[0] != "week")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def duration_ns(name: str, value: object) -> int:
    """Read a duration, as in ``1h 30m``. Raises: SettingTypeError."""
    if not isinstance(value, str):
        raise SettingTypeError(f'{name} is a duration, a text as in "30s" or "1m 30s", not {value!r}.')
    parts = _PART.findall(value.strip())
    if not parts or _PART.sub("", value.strip()) or any(unit not in _UNITS_NS for _, unit in parts):
        raise SettingTypeError(
            f"Invalid duration format {value!r} for {name}: give numbers with units (ms, s, m, h, d), "
            'as in "30s" or "1m 30s".'
        )
    return sum(round(float(number) * _UNITS_NS[unit]) for number, unit in parts)


def duration_text(nanoseconds: int) -> str:
    """Spell a duration as Monarch does."""
    texts = []
    for size, unit in _TOLD:
        count, nanoseconds = divmod(nanoseconds, size)
        if count:
            plural = "s" if count > 1 and unit in ("year", "month", "day") else ""
            texts.append(f"{count}{unit}{plural}")
    return " ".join(texts) or "0s"


def checked(name: str, value: object, default: object) -> object:
    """Return the value as it is kept, of the kind that the default is. Raises: UsageError."""
    if name == "default_transport":
        return _transport(name, value)
    if default is None:
        return None if value is None else _count(name, value)
    if isinstance(default, str) and _PART.fullmatch(default):
        return duration_text(duration_ns(name, value))
    return _BY_TYPE[type(default)](name, value)


def _transport(name: str, value: object) -> object:
    try:
        return BindSpec(value)
    except TypeError as error:
        raise SettingTypeError(f"{name}: {error}") from None
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _count(name: str, value: object) -> int:
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SettingTypeError(f"{name} is a count, not {value!r}.") from None
    if count < 0:
        raise SettingTypeError(f"{name} is a count from 0, not {value!r}.")
    return count


def _number(name: str, value: object) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    raise SettingTypeError(f"{name} is a number, not {value!r}.")


def _exactly(kind: type, words: str) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if not isinstance(value, kind):
            raise SettingTypeError(f"{name} is {words}, not {value!r}.")
        return value

    return check


_BY_TYPE: dict[type, Callable[[str, object], object]] = {
    bool: _exactly(bool, "True or False"),
    int: _count,
    float: _number,
    str: _exactly(str, "a text"),
    Encoding: _exactly(Encoding, "an Encoding"),
}
