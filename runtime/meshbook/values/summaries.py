"""Values in a line each, with a hash of their bytes: whether ranks hold the same is seen without sending a tensor."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any, NamedTuple

DEEPEST = 20
MOST_PARTS = 100_000
SHOWN_CHARS = 40
HASHED_BYTES = 64_000_000
"""The largest value that a table hashes; `summarize_parts` hashes all."""
BUDGET_S = 1.0
"""The time for hashing the values of a table."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class ValueSummary(NamedTuple):
    """A value without its contents."""

    kind: str
    """The name of its class."""
    shape: str
    """The shape of a tensor, or the number of entries."""
    dtype: str
    size_bytes: int
    """The bytes of its tensors and arrays."""
    device: str
    text: str
    """The repr of a number or a short text; empty for all else."""
    place: str
    """The part of a DTensor that this rank holds; only ranks with the same one can be compared."""
    digest: str
    """A hash of the contents; empty where there is none."""


def summarize_variables(namespace: Mapping[str, object], hidden: Collection[str]) -> dict[str, ValueSummary]:
    """Return a summary of each variable of a person, but for modules. hidden: names that the shell has defined."""
    deadline = time.monotonic() + BUDGET_S
    found = {}
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in hidden or isinstance(value, ModuleType):
            continue
        try:
            found[name] = _summarize(value, deadline)
        except Exception:  # of a broken object; it is listed with its class
            found[name] = ValueSummary(type(value).__name__, "", "", 0, "", "", "", "")
    return found


def summarize_parts(value: object) -> dict[str, ValueSummary]:
    """Return a summary of each tensor, array and number in a module, an optimizer or containers, by its path."""
    return {path: _summarize_part(part, hashes=True) for path, part in _parts(value)}


def _summarize(value: object, deadline: float) -> ValueSummary:
    kind = type(value).__name__
    if _is_array(value) or isinstance(value, _PLAIN):
        small = not _is_array(value) or _size_of(value) <= HASHED_BYTES
        small = small and time.monotonic() < deadline
        return _summarize_part(value, hashes=small)
    parts = dict(_parts(value))
    if parts.keys() <= {""}:
        return ValueSummary(kind, "", "", 0, "", "", "", "")
    rows = {path: _summarize_part(part, hashes=False) for path, part in parts.items()}
    size = sum(row.size_bytes for row in rows.values())
    digest = hashlib.blake2b(digest_size=8)
    for path, part in parts.items() if size <= HASHED_BYTES else ():
        row = _summarize_part(part, hashes=time.monotonic() < deadline)
        if not row.digest:
            break
        digest.update(f"{path}\0{row.place}\0{row.digest}\0".encode(errors="backslashreplace"))
    else:
        if size <= HASHED_BYTES:
            return _joined(kind, value, rows, size, digest.hexdigest())
    return _joined(kind, value, rows, size, "")


def _joined(kind: str, value: object, rows: Mapping[str, ValueSummary], size: int, digest: str) -> ValueSummary:
    length = f"{len(value)} entries" if isinstance(value, Mapping | Sequence | Set) else f"{len(rows)} parts"
    dtypes, devices, places = (
        ", ".join(sorted({getattr(row, name) for row in rows.values()} - {""})) for name in ("dtype", "device", "place")
    )
    return ValueSummary(kind, length, dtypes[:SHOWN_CHARS], size, devices, "", places, digest)


def _parts(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the tensors, arrays and other values without entries in ``value``, each with its path."""
    torch = sys.modules.get("torch")
    entries: Any = None
    if depth > DEEPEST or _is_array(value) or isinstance(value, str | bytes):
        pass
    elif torch is not None and isinstance(value, torch.nn.Module):
        entries = [*value.named_parameters(), *value.named_buffers()]
    elif torch is not None and isinstance(value, torch.optim.Optimizer):
        entries = value.state_dict().items()
    elif isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    if entries is None:
        yield path, value
        return
    count = 0
    for key, entry in entries:
        for found in _parts(entry, f"{path}.{key}" if path else str(key), depth + 1):
            count += 1
            if count > MOST_PARTS:
                raise ValueError(f"{path or 'the value'} has more than {MOST_PARTS:,} parts")
            yield found


def _is_array(value: object) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)
    )


def _summarize_part(value: Any, *, hashes: bool) -> ValueSummary:
    kind = type(value).__name__
    if isinstance(value, _PLAIN):
        text = repr(value)
        shape = f"{len(value)} characters" if isinstance(value, str) and len(text) > SHOWN_CHARS else ""
        shown = text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
        return ValueSummary(kind, shape, "", 0, "", shown, "", _digest(text.encode(errors="backslashreplace")))
    if not _is_array(value):
        return ValueSummary(kind, "", "", 0, "", "", "", "")
    dtype, shape, place = str(value.dtype).removeprefix("torch."), str(tuple(value.shape)), ""
    if hasattr(value, "to_local"):
        place, value = _place_of(value), value.to_local()
    device = str(value.device) if hasattr(value, "is_meta") else ""
    text = repr(value.item()) if value.shape == () and hashes else ""
    try:
        digest = _digest(f"{dtype}{tuple(value.shape)}".encode(), _bytes_of(value)) if hashes else ""
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # of layouts without bytes of their own
        digest = ""
    return ValueSummary(kind, shape, dtype, _size_of(value), device, text[:SHOWN_CHARS], place, digest)


def _size_of(array: Any) -> int:
    return int(array.numel() * array.element_size() if hasattr(array, "is_meta") else array.nbytes)


def _place_of(tensor: Any) -> str:
    """Write the part of a DTensor that this rank holds: ``dp=0, tp=1``, of the dims that cut it."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
    coordinates = mesh.get_coordinate() or [-1] * mesh.ndim
    each = zip(names, coordinates, tensor.placements, strict=True)
    return ", ".join(f"{name}={index}" for name, index, placement in each if not placement.is_replicate())


def _bytes_of(value: Any) -> Any:
    """Return the bytes of a tensor or an array. Raises: TypeError, RuntimeError where it has none, as on ``meta``."""
    if hasattr(value, "is_meta"):
        import torch

        if value.is_meta or value.layout is not torch.strided:
            raise TypeError
        value = value.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    if value.dtype.hasobject:
        raise TypeError
    return (
        value.tobytes()
        if not value.size or value.ndim == 0 or not value.flags.c_contiguous
        else memoryview(value).cast("B")
    )


def _digest(*texts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text)
    return digest.hexdigest()
