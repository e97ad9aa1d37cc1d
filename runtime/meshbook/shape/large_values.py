"""Large tensors, arrays and data frames in a line: shape, the range of their numbers, a fingerprint of their bits.

Ranks with equal lines hold equal bits. A tensor on a GPU is copied once, so that its device is waited for once.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

from meshbook.formatting import Table

LARGE = 1000
"""The number of elements up to which torch and NumPy print all of them, unless a person has chosen another one."""
LARGE_ROWS = 60
"""The number of rows up to which pandas prints all of them."""
COLUMNS = 30
LOOKED_AT = 1 << 26
"""The most elements that are looked at: a quarter of a gigabyte of float32."""
_NUMBERS = "biufc"
"""The kinds of dtypes that hold numbers."""


def describe_large(value: object) -> str | None:
    """Describe a tensor, an array or a data frame that would not be printed whole; return None for all else."""
    library = type(value).__module__.partition(".")[0]
    if type(value).__name__ == "DataFrame" and library in ("pandas", "polars"):
        return _describe_frame(value) if is_long(value) else None
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        has_bits = value.layout is torch.strided and not value.is_meta
        return _describe_array(value) if has_bits and value.numel() > LARGE and "..." in repr(value) else None
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in _NUMBERS:
        return _describe_array(value) if value.size > LARGE and "..." in repr(value) else None
    return None


def is_long(frame: Any) -> bool:
    """Whether a data frame has more rows than are printed."""
    return bool(frame.shape[0] > LARGE_ROWS)


def _describe_frame(frame: Any) -> str:
    rows, columns = frame.shape
    names = list(frame.columns)[:COLUMNS]
    lines = [(str(name), str(frame[name].dtype), _describe_column(frame[name])) for name in names]
    more = [f"  and {columns - COLUMNS} more columns"] if columns > COLUMNS else []
    return str(Table((), lines, title=f"DataFrame ({rows}, {columns})", notes=more))


def _describe_column(column: Any) -> str:
    try:
        array = column.to_numpy()
        return describe_numbers(array) if array.dtype.kind in _NUMBERS else ""
    except Exception:  # of a type of column that its library cannot convert
        return ""


def _describe_array(value: Any) -> str:
    kind = "tensor" if type(value).__name__ == "Tensor" else type(value).__name__
    where = f" {value.device}" if hasattr(value, "is_meta") else ""
    head = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"
    if hasattr(value, "to_local"):
        placements = ", ".join(map(str, value.placements))
        value = value.to_local()
        head = f"{head} [{placements}], this rank's part {tuple(value.shape)}"
    try:
        return f"{head}: {describe_numbers(value)}" if value.shape.count(0) == 0 else head
    except Exception:  # of a dtype without numbers, or where there is no room left
        return head


def describe_numbers(value: Any) -> str:
    """Write the least, the mean and the greatest number, how many are not finite, and the fingerprint.

    Raises: errors of the value's library, for dtypes that have no numbers.
    """
    import numpy

    flat = value.reshape(-1)[:LOOKED_AT]
    if hasattr(value, "is_meta"):
        torch = sys.modules["torch"]
        flat = flat.detach().resolve_conj().resolve_neg().cpu()
        words = flat.contiguous().view(torch.uint8).numpy()
        has_twin = str(flat.dtype).removeprefix("torch.") in numpy.sctypeDict
        numbers = (flat if has_twin else flat.float()).numpy()
    else:
        words = numbers = numpy.ascontiguousarray(flat)
    bits = f"bits {zlib.crc32(memoryview(words).cast('B')):08x}"
    numbers = abs(numbers) if numbers.dtype.kind == "c" else numbers
    odd = []
    if not numpy.isfinite(numbers.min() + numbers.max() if numbers.dtype.kind == "f" else 0):
        counts = ((int(numpy.isnan(numbers).sum()), "NaN"), (int(numpy.isinf(numbers).sum()), "inf"))
        odd = [", ".join(f"{count:,} {name}" for count, name in counts if count)]
        numbers = numbers[numpy.isfinite(numbers)]
    shown = "no finite number"
    if numbers.size:
        low, mean, high = (float(each) for each in (numbers.min(), numbers.mean(dtype="float64"), numbers.max()))
        shown = f"min {low:.4g}, mean {mean:.4g}, max {high:.4g}"
    part = [f"of the first {len(flat):,}"] if len(flat) == LOOKED_AT else []
    return "; ".join([shown, *odd, *part, bits])
