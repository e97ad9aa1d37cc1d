"""Large tensors, arrays and data frames in a line: shape, the range of their numbers, a fingerprint of their bits.

Ranks with equal lines hold equal bits. A tensor on a GPU is measured there, a stretch at a time, and waited for once;
its fingerprint is a sum, modulo 2**64, of scrambled words and places, so the order of the additions does not matter.
"""

from __future__ import annotations

import math
import sys
import zlib
from typing import Any

LARGE = 1000
"""The number of elements up to which torch and NumPy print all of them, unless a person has chosen another one."""
LARGE_ROWS = 60
"""The number of rows up to which pandas prints all of them."""
COLUMNS = 30
LOOKED_AT = 1 << 27
"""The most elements that are looked at: half a gigabyte of float32."""
_STRETCH = 1 << 20
_NUMBERS = "biufc"
"""The kinds of dtypes that hold numbers."""
_ODD = 0x2545F4914F6CDD1D
"""A factor that scrambles 64 bits."""


def describe_large(value: object) -> str | None:
    """Describe a tensor, an array or a data frame that would not be printed whole; return None for all else."""
    library = type(value).__module__.partition(".")[0]
    if type(value).__name__ == "DataFrame" and library in ("pandas", "polars"):
        return _describe_frame(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        has_bits = value.layout is torch.strided and not value.is_meta
        return _describe_array(torch, value) if has_bits and value.numel() > LARGE and "..." in repr(value) else None
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in _NUMBERS:
        return _describe_array(numpy, value) if value.size > LARGE and "..." in repr(value) else None
    return None


def _describe_frame(frame: Any) -> str | None:
    rows, columns = frame.shape
    if rows <= LARGE_ROWS:
        return None
    names = list(frame.columns)[:COLUMNS]
    lines = [(str(name), str(frame[name].dtype), _describe_column(frame[name])) for name in names]
    widths = [max(len(line[at]) for line in lines) if lines else 0 for at in (0, 1)]
    shown = ["  ".join(["", line[0].ljust(widths[0]), line[1].ljust(widths[1]), line[2]]).rstrip() for line in lines]
    more = [f"  and {columns - COLUMNS} more columns"] if columns > COLUMNS else []
    return "\n".join([f"DataFrame ({rows}, {columns})", *shown, *more])


def _describe_column(column: Any) -> str:
    import numpy

    try:
        array = column.to_numpy()
        return describe_numbers(numpy, array) if array.dtype.kind in _NUMBERS else ""
    except Exception:  # of a type of column that its library cannot convert
        return ""


def _describe_array(library: Any, value: Any) -> str:
    kind = "tensor" if type(value).__name__ == "Tensor" else type(value).__name__
    where = f" {value.device}" if library.__name__ == "torch" else ""
    head = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"
    if hasattr(value, "to_local"):
        placements = ", ".join(map(str, value.placements))
        value = value.to_local()
        head = f"{head} [{placements}], this rank's part {tuple(value.shape)}"
    try:
        numbers = describe_numbers(library, value)
    except Exception:  # of a dtype without numbers, or where the device has no room left
        return head
    return f"{head}: {numbers}" if numbers else head


def describe_numbers(library: Any, value: Any) -> str:
    """Write the least, the mean and the greatest number, how many are not finite, and the fingerprint.

    library: torch or NumPy. Raises: the library's errors for dtypes that have no numbers.
    """
    size = value.numel() if library.__name__ == "torch" else value.size
    if not size:
        return ""
    if library.__name__ == "torch":
        value = value.detach().resolve_conj().resolve_neg()
    flat = value.reshape(-1)[:LOOKED_AT]
    figures = _measure_here(flat) if _is_here(flat) else _measure_on_device(library, flat)
    low, high, total, nan, infinite, bits = figures
    finite = len(flat) - nan - infinite
    shown = [f"min {low:.4g}, mean {total / finite:.4g}, max {high:.4g}" if finite else "no finite number"]
    odd = [f"{int(count):,} {name}" for count, name in ((nan, "NaN"), (infinite, "inf")) if count]
    part = [f"of the first {len(flat):,}"] if len(flat) < size else []
    return "; ".join([*shown, *([", ".join(odd)] if odd else []), *part, f"bits {bits:08x}"])


def _is_here(flat: Any) -> bool:
    return not hasattr(flat, "is_meta") or bool(flat.device.type == "cpu")


def _measure_here(flat: Any) -> tuple[float, float, float, int, int, int]:
    """Return the low, high and sum of the finite numbers, the numbers of NaN and infinities, and the fingerprint."""
    import numpy

    if hasattr(flat, "is_meta"):
        torch = sys.modules["torch"]
        words = flat.contiguous().view(torch.uint8).numpy()
        is_known = str(flat.dtype).removeprefix("torch.") in numpy.sctypeDict
        numbers = (flat if is_known else flat.float()).numpy()
    else:
        words = numbers = numpy.ascontiguousarray(flat)
    bits = zlib.crc32(memoryview(words).cast("B"))
    if numbers.dtype.kind == "c":
        numbers = abs(numbers)
    low, high = float(numbers.min()), float(numbers.max())
    if math.isfinite(low) and math.isfinite(high):
        return low, high, float(numbers.sum(dtype="float64")), 0, 0, bits
    nan, infinite = int(numpy.isnan(numbers).sum()), int(numpy.isinf(numbers).sum())
    numbers = numbers[numpy.isfinite(numbers)]
    if not numbers.size:
        return 0.0, 0.0, 0.0, nan, infinite, bits
    return float(numbers.min()), float(numbers.max()), float(numbers.sum(dtype="float64")), nan, infinite, bits


def _measure_on_device(torch: Any, flat: Any) -> tuple[float, float, float, int, int, int]:
    """Return the same of a tensor on a device, which is waited for once."""
    stretches = [_measure_stretch(torch, flat[at : at + _STRETCH], at) for at in range(0, len(flat), _STRETCH)]
    lows, highs, sums, nans, infinities, bits = map(torch.stack, zip(*stretches, strict=True))
    word = bits.sum()
    figures = [lows.min(), highs.max(), sums.sum(), nans.sum(), infinities.sum(), word >> 32, word & 0xFFFFFFFF]
    low, high, total, nan, infinite, upper, lower = torch.stack([each.double() for each in figures]).tolist()
    return low, high, total, int(nan), int(infinite), (int(upper) ^ int(lower)) & 0xFFFFFFFF


def _measure_stretch(torch: Any, part: Any, begin: int) -> tuple[Any, ...]:
    words = part.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(part.itemsize, torch.int64)).long()
    mixed = (words ^ ((torch.ones_like(words).cumsum(0) + begin) * _ODD)) * _ODD
    bits = ((mixed ^ (mixed >> 32)) * _ODD).sum()
    numbers = part.abs() if part.is_complex() else part
    numbers = numbers if numbers.dtype in (torch.float32, torch.float64) else numbers.float()
    is_nan, is_infinite = numbers.isnan(), numbers.isinf()
    is_odd = is_nan | is_infinite
    low, high = (numbers.masked_fill(is_odd, bound) for bound in (math.inf, -math.inf))
    total = numbers.masked_fill(is_odd, 0.0).sum(dtype=torch.float64)
    return low.min(), high.max(), total, is_nan.sum(), is_infinite.sum(), bits
