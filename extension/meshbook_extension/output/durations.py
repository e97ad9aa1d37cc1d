"""Durations as people write them: ``90s``, ``30m``, ``2h``, ``1d``, ``1h30m``. Pure."""

from __future__ import annotations

import re

from meshbook.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def parse_duration(text: str, option: str) -> float:
    """Seconds. Raises: UsageError that shows what would be one."""
    if not _WHOLE.fullmatch(text):
        unit = f" {text} what? For example" if text.replace(".", "", 1).isdigit() else " Write it as"
        number = text if text.isdigit() else "90"
        raise UsageError(f'{option}: "{text}" is no duration.{unit} {number}s, 30m, 2h or 1h30m.')
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    if not seconds:
        instead = "; to end a mesh: %mesh stop" if option == "--lease" else ""
        raise UsageError(f"{option}: {text} is no time at all{instead}")
    return seconds


def format_duration(seconds: float) -> str:
    """``45 s``, ``10 min``, ``1 h 58 min``, ``3 d 2 h``: rounded to what matters."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"
