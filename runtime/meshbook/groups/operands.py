"""The description of an operation of a process group: all that must be equal on its members.

    all_reduce, broadcast, reduce           the tensor
    all_gather, reduce_scatter              the list of all parts, so parts of different sizes are fine
    all_gather_into_tensor, gather          the input of this rank
    reduce_scatter_tensor, scatter          its output
    all_to_all, barrier                     no shape: each pair of ranks has sizes of its own, see below

Of a message between two ranks its number of elements and dtype are described, equal for the sender and the receiver.

The part that rank i gives to rank j in an all_to_all must be the part that j takes from i. So each rank weighs its
parts: the sizes that it gives, each times a number that belongs to the pair, minus those that it takes, likewise. The
weights of all ranks add up to 0 where all parts match, and so do their sums over many operations, multiplied before
each is added.

Shapes that differ in dims of size 1 only are equal: the numbers come out right. A description is made once for equal
operations, then found by a key that is quick to read: this runs for every operation.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from meshbook.groups.collectives_off import public_name
from meshbook.groups.progress import Parts

MAX_KNOWN = 4096
"""Descriptions that are kept; shapes may be new at each step."""


class _NoData:
    """The stand-in for the dtype of tensors on the meta device: for them torch ends an operation without the others."""

    itemsize = 0

    def __str__(self) -> str:
        return "no data (meta device)"


NO_DATA = _NoData()

MASK = (1 << 64) - 1
FACTOR = 1_000_003
"""The factor by which a digest of operations is multiplied before the next one is added."""

TorchArgs: TypeAlias = tuple[Any, ...]
"""The arguments that torch hands to an operation of a process group."""
_Shapes: TypeAlias = "torch.Size | tuple[torch.Size, ...]"
_Dtype: TypeAlias = "torch.dtype | _NoData"
_OperationKey: TypeAlias = tuple[str, _Shapes, "_Dtype | None", "int | None", "int | None"]
"""Method, shapes, dtype, reduction, root."""
_MessageKey: TypeAlias = tuple[str, int, _Dtype]
_K = TypeVar("_K", _OperationKey, _MessageKey)
_Factors: TypeAlias = npt.NDArray[np.int64]


class Description(NamedTuple):
    """An operation with the properties that must be equal on all members of its group."""

    code: int
    """Equal for equal descriptions, in every process."""
    operation: str
    values: tuple[str, ...]
    """Shape, dtype, reduction, root; in words, empty where it has none."""
    size_bytes: int
    """The size of the tensors that are described."""


def describe_message(operation: str, tensor: torch.Tensor) -> Description:
    """Return the description of a send or a receive of this tensor; the code is the same for both."""
    key = (operation, tensor.numel(), _dtype(tensor))
    return _known_messages.get(key) or _learn_message(key)


def describe(method: str, args: TorchArgs) -> Description:
    """Return the description of an operation with these arguments; ``method`` is torch's name within process groups."""
    try:
        if method == "allreduce" and len(args[0]) == 1:  # by far the most frequent, so kept short
            tensor = args[0][0]
            dtype = NO_DATA if tensor.is_meta else tensor.dtype
            key: _OperationKey = (method, tensor.shape, dtype, hash(args[1].reduceOp), None)
        else:
            key = _key_of(method, args)
    except (IndexError, AttributeError, TypeError):  # arguments that torch will refuse, or that are new to us
        key = (method, (), None, None, None)
    return _known.get(key) or _learn(key)


def parts_of(args: TorchArgs, members: int) -> Parts | None:
    """Return the parts that an all_to_all gives and takes; None for arguments that torch will refuse."""
    try:
        if isinstance(args[0], torch.Tensor):
            parts = Parts(_split(args[1], args[3], members), _split(args[0], args[2], members))
        else:
            parts = Parts(tuple([each.numel() for each in args[1]]), tuple([each.numel() for each in args[0]]))
    except (IndexError, AttributeError, TypeError, OverflowError):
        return None
    return parts if len(parts.given) == len(parts.taken) == members else None


IN_ONE_PIECE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"})
"""The operations for which gloo takes the memory from a tensor's first element on, and ignores its strides."""

Landing: TypeAlias = "Sequence[tuple[torch.Tensor, torch.Tensor]]"
"""Tensors of the caller, each with the copy that an operation writes in its place."""


def lies_in_one_piece(value: object) -> bool:
    """Tell whether all (nested) tensors have their elements in memory as in a list of them."""
    if isinstance(value, torch.Tensor):
        return value.layout is not torch.strided or (value.is_contiguous() and not value.is_neg())
    if isinstance(value, (list, tuple)):
        for each in value:
            if not lies_in_one_piece(each):
                return False
    return True


def laid_in_one_piece(operation: str, args: TorchArgs) -> tuple[TorchArgs, Landing]:
    """Replace tensors that do not lie in one piece by copies; the copies of outputs are to be copied back.

    Raises: ValueError for a tensor that is written and has several elements in one place.
    """
    landing: list[tuple[torch.Tensor, torch.Tensor]] = []

    def laid(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [laid(each) for each in value]
        if not isinstance(value, torch.Tensor) or lies_in_one_piece(value):
            return value
        return value.detach().resolve_neg().contiguous()

    def written(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [written(each) for each in value]
        copy = laid(value)
        if copy is not value:
            if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)):
                raise ValueError(
                    f"{operation} writes to its tensor, and this one of {tuple(value.shape)} is expanded: several "
                    "of its elements are one in memory. Give tensor.contiguous()"
                )
            landing.append((value, copy))
        return copy

    return (written(args[0]), *(laid(each) for each in args[1:])), landing


def payload_bytes(arguments: Iterable[object]) -> int:
    """Return the size of an operation with these (nested) tensors: the larger of input and output.

    As NCCL's tests count: gathering 1 MB from each of 8 ranks is 8 MB on every rank, summing 1 MB is 1 MB.
    """
    return max(map(_bytes_of, arguments), default=0)


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def _split(tensor: torch.Tensor, sizes: Sequence[int], members: int) -> tuple[int, ...]:
    if not sizes:
        return (tensor.numel() // members,) * members
    row = tensor.numel() // (tensor.shape[0] or 1)
    return tuple(array("q", sizes if row == 1 else [size * row for size in sizes]))


def weigh(parts: Parts, rank: int) -> int:
    """The weight of the parts of ``rank``, its number in the group; see above."""
    to, by = _factors(rank, len(parts.given))
    return int(to @ np.array(parts.given, np.int64)) - int(by @ np.array(parts.taken, np.int64))  # modulo 2 ** 64


@functools.lru_cache(64)
def _factors(rank: int, members: int) -> tuple[_Factors, _Factors]:
    """The numbers that belong to the pairs of which a rank is the sender, and to those of which it is the receiver."""
    pairs = [(rank, other) for other in range(members)], [(other, rank) for other in range(members)]
    to, by = (np.array(list(map(_code_of, each)), np.uint64).view(np.int64) for each in pairs)
    return to, by


_known: dict[_OperationKey, Description] = {}
_known_messages: dict[_MessageKey, Description] = {}


def _learn(key: _OperationKey) -> Description:
    method, shapes, dtype, reduction, root = key
    operation = public_name(method)
    shapes = (shapes,) if isinstance(shapes, torch.Size) else shapes
    texts = list(map(str, map(tuple, shapes)))
    values = (
        texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]" if texts else "",
        str(dtype).removeprefix("torch.") if dtype is not None else "",
        _REDUCTIONS.get(reduction, f"reduction {reduction}") if reduction is not None else "",
        f"root {root}" if root is not None else "",
    )
    if len(texts) > 1 and len(set(texts)) == 1:
        values = (f"{len(texts)} x {values[0]}", *values[1:])
    compared = ([[size for size in shape if size != 1] for shape in shapes], *values[1:])
    size_bytes = sum(shape.numel() for shape in shapes) * (dtype.itemsize if dtype is not None else 0)
    return _keep(_known, key, Description(_code_of((operation, compared)), operation, values, size_bytes))


def _learn_message(key: _MessageKey) -> Description:
    operation, numel, dtype = key
    values = (f"{numel} x {str(dtype).removeprefix('torch.')}",)
    return _keep(_known_messages, key, Description(_code_of(values), operation, values, numel * dtype.itemsize))


def _code_of(compared: object) -> int:
    return int.from_bytes(blake2b(repr(compared).encode(), digest_size=8).digest(), "little")


def _keep(known: dict[_K, Description], key: _K, description: Description) -> Description:
    if len(known) >= MAX_KNOWN:
        known.clear()
    known[key] = description
    return description


def _reduction_names() -> dict[int, str]:
    kinds = torch.distributed.ReduceOp.RedOpType.__members__.items()
    return {hash(torch.distributed.ReduceOp(kind)): name.lower() for name, kind in kinds if name != "PREMUL_SUM"}


_REDUCTIONS = _reduction_names() if torch.distributed.is_available() else {}


class _Described(NamedTuple):
    """The arguments of a method that are described; torch hands its options over as the last one."""

    at: int = 0
    """The argument with the tensors."""
    in_lists: bool = False
    """Whether that is a list of lists, of which the first is described."""
    reduction: bool = False
    root: bool = False


_DESCRIBED: dict[str, _Described] = {
    "allreduce": _Described(reduction=True),
    "allreduce_coalesced": _Described(reduction=True),
    "broadcast": _Described(root=True),
    "reduce": _Described(reduction=True, root=True),
    "gather": _Described(1, root=True),
    "scatter": _Described(root=True),
    "allgather": _Described(0, in_lists=True),
    "_allgather_base": _Described(1),
    "all_gather_single": _Described(1),
    "allgather_coalesced": _Described(1),
    "allgather_into_tensor_coalesced": _Described(1),
    "all_gather_single_coalesced": _Described(1),
    "reduce_scatter": _Described(1, in_lists=True, reduction=True),
    "_reduce_scatter_base": _Described(reduction=True),
    "reduce_scatter_single": _Described(reduction=True),
    "reduce_scatter_tensor_coalesced": _Described(reduction=True),
    "reduce_scatter_single_coalesced": _Described(reduction=True),
}
_WITHOUT_SHAPES = frozenset({"alltoall", "alltoall_base", "all_to_all_single"})
"""Methods of whose tensors the dtype alone is described; methods that stand nowhere here have no tensors."""


def _key_of(method: str, args: TorchArgs) -> _OperationKey:
    """Raises: IndexError, AttributeError, TypeError for arguments that torch will refuse, or that are new to us."""
    described = _DESCRIBED.get(method)
    if described is None:
        if method not in _WITHOUT_SHAPES:
            return (method, (), None, None, None)
        return (method, (), _dtype(args[0] if isinstance(args[0], torch.Tensor) else args[0][0]), None, None)
    tensors, options = args[described.at], args[-1]
    if described.in_lists:
        tensors = tensors[0]
    if isinstance(tensors, torch.Tensor):
        tensors = (tensors,)
    shapes = tensors[0].shape if len(tensors) == 1 else tuple([tensor.shape for tensor in tensors])
    reduction = hash(options.reduceOp) if described.reduction else None
    return (method, shapes, _dtype(tensors[0]), reduction, options.rootRank if described.root else None)


def _dtype(tensor: torch.Tensor) -> _Dtype:
    return NO_DATA if tensor.is_meta else tensor.dtype
