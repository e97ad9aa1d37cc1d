"""What is described of an operation of a process group: all that must be equal on its members.

    all_reduce, broadcast, reduce           the tensor
    all_gather, reduce_scatter              the list of all parts, so parts of different sizes are fine
    all_gather_into_tensor, gather          what this rank gives
    reduce_scatter_tensor, scatter          what it gets
    all_to_all, barrier                     no shape: each pair of ranks has sizes of its own, see below

Of a message between two ranks its number of elements and dtype are described, equal for the sender and the receiver.

What rank i gives to rank j in an all_to_all must be what j takes from i. So each rank weighs its parts: the sizes that
it gives, each times a number that belongs to the pair, minus those that it takes, likewise. The weights of all ranks
add up to 0 where all parts match, and so do their sums over many operations, multiplied before each is added.

Shapes that differ in dims of size 1 only are equal: the numbers come out right. A description is made once for equal
operations, then found by what is quick to read: this runs for every operation.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from meshbook.groups.collectives_off import public_name
from meshbook.groups.progress import Parts

MAX_KNOWN = 4096
"""Descriptions that are kept; shapes may be new at each step."""


class _NoData:
    """In the place of the dtype of tensors on the meta device: for them torch ends an operation without the others."""

    itemsize = 0

    def __str__(self) -> str:
        return "no data (meta device)"


NO_DATA = _NoData()

MASK = (1 << 64) - 1
FACTOR = 1_000_003
"""What digests of operations are multiplied by before each is added."""

TorchArgs: TypeAlias = tuple[Any, ...]
"""What torch hands to an operation of a process group."""
_Shapes: TypeAlias = "torch.Size | tuple[torch.Size, ...]"
_Dtype: TypeAlias = "torch.dtype | _NoData"
_OperationKey: TypeAlias = tuple[str, _Shapes, "_Dtype | None", "int | None", "int | None"]
"""Method, shapes, dtype, reduction, root."""
_MessageKey: TypeAlias = tuple[str, int, _Dtype]
_K = TypeVar("_K", _OperationKey, _MessageKey)
_Factors: TypeAlias = npt.NDArray[np.int64]


class Description(NamedTuple):
    """An operation with what must be equal on all members of its group."""

    code: int
    """Equal for equal descriptions, in every process."""
    operation: str
    values: tuple[str, ...]
    """Shape, dtype, reduction, root; in words, empty where it has none."""
    size_bytes: int
    """Of the tensors that are described."""


def describe_message(operation: str, tensor: torch.Tensor) -> Description:
    """What a send or a receive of this tensor is; the code is the same for both."""
    key = (operation, tensor.numel(), NO_DATA if tensor.is_meta else tensor.dtype)
    return _known_messages.get(key) or _learn_message(key)


def describe(method: str, args: TorchArgs) -> Description:
    """What an operation with these arguments is; ``method`` is torch's name of it within process groups."""
    try:
        if method == "allreduce" and len(args[0]) == 1:  # as `_reduced`: by far the most frequent, so kept short
            tensor = args[0][0]
            dtype = NO_DATA if tensor.is_meta else tensor.dtype
            key: _OperationKey = (method, tensor.shape, dtype, hash(args[1].reduceOp), None)
        else:
            key = _KEYS[method](method, *args)
    except (IndexError, AttributeError, TypeError, KeyError):  # arguments that torch will refuse, or that are new to us
        key = _bare(method)
    return _known.get(key) or _learn(key)


def parts_of(args: TorchArgs, members: int) -> Parts | None:
    """What an all_to_all with these arguments gives and takes; None for arguments that torch will refuse."""
    try:
        if isinstance(args[0], torch.Tensor):
            parts = Parts(_split(args[1], args[3], members), _split(args[0], args[2], members))
        else:
            parts = Parts(tuple([each.numel() for each in args[1]]), tuple([each.numel() for each in args[0]]))
    except (IndexError, AttributeError, TypeError, OverflowError):
        return None
    return parts if len(parts.given) == len(parts.taken) == members else None


IN_ONE_PIECE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"})
"""Operations for which gloo takes the memory from a tensor's first element on, whatever its strides."""

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
    """Put copies in the place of tensors that do not lie in one piece; of what is written they are to be copied back.

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
    """The size of an operation with these (nested) tensors: the larger of what goes in and what comes out.

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


# ---- what is read of the arguments, per method -----------------------------------------------------------------------

_Tensors: TypeAlias = Sequence[torch.Tensor]


def _key(
    method: str, tensors: torch.Tensor | _Tensors, reduction: int | None = None, root: int | None = None
) -> _OperationKey:
    if isinstance(tensors, torch.Tensor):
        tensors = (tensors,)
    shapes = tensors[0].shape if len(tensors) == 1 else tuple([tensor.shape for tensor in tensors])
    return (method, shapes, _dtype(tensors), reduction, root)


def _reduced(method: str, tensors: _Tensors, opts: dist.AllreduceOptions) -> _OperationKey:
    return _key(method, tensors, hash(opts.reduceOp))


def _rooted(method: str, tensors: _Tensors, opts: dist.BroadcastOptions) -> _OperationKey:
    return _key(method, tensors, root=opts.rootRank)


def _reduced_to_root(method: str, tensors: _Tensors, opts: dist.ReduceOptions) -> _OperationKey:
    return _key(method, tensors, hash(opts.reduceOp), opts.rootRank)


def _given_to_root(method: str, _outputs: object, tensors: _Tensors, opts: dist.GatherOptions) -> _OperationKey:
    return _key(method, tensors, root=opts.rootRank)


def _got_from_root(method: str, tensors: _Tensors, _inputs: object, opts: dist.ScatterOptions) -> _OperationKey:
    return _key(method, tensors, root=opts.rootRank)


def _gathered(method: str, outputs: Sequence[_Tensors], *_more: object) -> _OperationKey:
    return _key(method, outputs[0])


def _given(method: str, _output: object, given: torch.Tensor | _Tensors, *_more: object) -> _OperationKey:
    return _key(method, given)


def _scattered(
    method: str, _outputs: object, inputs: Sequence[_Tensors], opts: dist.ReduceScatterOptions
) -> _OperationKey:
    return _key(method, inputs[0], hash(opts.reduceOp))


def _got_reduced(
    method: str, got: torch.Tensor | _Tensors, _given: object, opts: dist.ReduceScatterOptions
) -> _OperationKey:
    return _key(method, got, hash(opts.reduceOp))


def _typed(method: str, outputs: torch.Tensor | _Tensors, *_more: object) -> _OperationKey:
    return (method, (), _dtype((outputs,) if isinstance(outputs, torch.Tensor) else outputs), None, None)


def _bare(method: str, *_args: object) -> _OperationKey:
    return (method, (), None, None, None)


def _dtype(tensors: _Tensors) -> _Dtype:
    return NO_DATA if tensors[0].is_meta else tensors[0].dtype


_KEYS: dict[str, Callable[..., _OperationKey]] = {
    "allreduce": _reduced,
    "allreduce_coalesced": _reduced,
    "broadcast": _rooted,
    "reduce": _reduced_to_root,
    "gather": _given_to_root,
    "scatter": _got_from_root,
    "allgather": _gathered,
    "_allgather_base": _given,
    "all_gather_single": _given,
    "allgather_coalesced": _given,
    "allgather_into_tensor_coalesced": _given,
    "all_gather_single_coalesced": _given,
    "reduce_scatter": _scattered,
    "_reduce_scatter_base": _got_reduced,
    "reduce_scatter_single": _got_reduced,
    "reduce_scatter_tensor_coalesced": _got_reduced,
    "reduce_scatter_single_coalesced": _got_reduced,
    "alltoall": _typed,
    "alltoall_base": _typed,
    "all_to_all_single": _typed,
    "barrier": _bare,
    "monitored_barrier": _bare,
    "_end_coalescing": _bare,
}
