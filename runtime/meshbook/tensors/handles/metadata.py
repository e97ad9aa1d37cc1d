"""The results of an operation by shapes alone: found once per signature, by running it on tensors without memory.

A signature is the operator, the shapes, strides and dtypes of its tensors, and its other arguments but for floats. It
is found in a microsecond or two; a run on the meta device takes some hundred.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from meshbook.concurrency.interrupts import held_back
from meshbook.errors import UsageError
from meshbook.tensors.messages.operations import (
    NewOutput,
    NumberPlace,
    Template,
    TensorPlace,
    fill_places,
    gives_alias,
    is_place,
    is_random,
    written_arguments,
)
from meshbook.torch_internals import Operator, tree_leaves

aten = torch.ops.aten

REFUSED = frozenset(
    {
        aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default, aten.resize_.default,
        aten.set_.source_Storage, aten.set_.source_Storage_storage_offset,
    }
)  # fmt: skip
"""Operators that name places in memory, of which a tensor in parts has no one order."""


LACKING = {
    aten._grouped_mm.default: "a product per group, torch.split and matmul (transformers does so after "
    'model.set_experts_implementation("eager"))'
}
"""Operators whose shapes torch cannot compute, and operators to use instead."""
FORWARD_MODE = "torch.func.jacrev(torch.func.jacrev(f)) for hessian, torch.func.jacrev for jacfwd"


class OutputOf(NamedTuple):
    """A result that is one of the operation's own tensors, written in place."""

    at: int


class Metadata(NamedTuple):
    """The effects of operations with one signature."""

    template: Template
    outputs: tuple[OutputOf | NewOutput | None, ...]
    form: type | None
    """The type that holds the results: ``list``, ``tuple``, `torch.Tensor` for a single result, None for none."""
    draws: bool
    writes: tuple[int, ...]
    """The places of the tensors that the operation writes to."""
    aliases: bool
    """Whether the results are in the memory of the first tensor."""
    is_view: bool
    """Whether the results are views, which autograd keeps account of."""


class NotOnMesh(Exception):
    """Raised where a tensor with dims takes part that is no mesh tensor."""


class DependsOnValues(Exception):
    """Raised where the shapes of the results depend on values."""


def read_arguments(value: Any, tensors: list[torch.Tensor], numbers: list[float], kind: type) -> Any:
    """Return the part of a signature for one argument; tensors of ``kind``, and floats, are put into the lists."""
    is_a = type(value)
    if is_a is kind or isinstance(value, kind):
        tensors.append(value)
        return value._handle.output
    if is_a is float:
        numbers.append(value)
        return float
    if is_a is list or is_a is tuple:
        return tuple([read_arguments(each, tensors, numbers, kind) for each in value])
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise NotOnMesh
        numbers.append(value.item())
        return ("number", value.dtype)
    return (is_a, value)


class ViewInPlace(Exception):
    """Raised where a tensor is to become a view of itself, which ``operator`` gives."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(operator)
        self.operator = operator


def _view_of(operator: Operator) -> Operator:
    """Return the operator that gives a view: ``transpose`` for ``transpose_``. Raises: UsageError."""
    packet = getattr(aten, operator._schema.name.removeprefix("aten::").removesuffix("_"), None)
    for overload in packet.overloads() if packet is not None else ():
        view: Operator = getattr(packet, overload)
        if gives_alias(view) and _types(view) == _types(operator):
            return view
    raise UsageError(f"{operator} has no meaning for a tensor in parts: use tensor.full_tensor()")


def _types(operator: Operator) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]


_numbers_of_templates = itertools.count()


def new_template(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Template:
    return Template(next(_numbers_of_templates), str(operator), args, kwargs)


def learn(
    operator: Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
) -> Metadata:
    """Find out the results of an operation.

    Raises: DependsOnValues; UsageError for an operator that mesh tensors lack; the operator's error for wrong shapes.
    """
    if operator in REFUSED:
        users = ", which stft is made of," if operator is aten.as_strided.default else ""
        raise UsageError(f"{operator}{users} has no meaning for a tensor in parts: use tensor.full_tensor()")
    if torch.Tag.inplace_view in operator.tags:
        raise ViewInPlace(_view_of(operator))
    metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    places = _Places()
    template_args = [places.put(argument, tensors) for argument in _with_dims_from_the_first(operator, args)]
    template_kwargs = {name: places.put(value, tensors) for name, value in kwargs.items()}
    written = _written(operator, template_args, template_kwargs)

    def on_meta(value: Any) -> Any:
        is_device = isinstance(value, torch.device)
        return torch.device("meta") if is_device else fill_places(value, metas, numbers, "meta")

    try:
        with held_back():  # torch may import parts of itself for it, and stays broken where that is cut off
            named = {name: on_meta(value) for name, value in template_kwargs.items()}
            made = operator(*map(on_meta, template_args), **named)
    except Exception as error:
        if way_round := FORWARD_MODE if operator.namespace == "prims" else LACKING.get(operator):
            raise UsageError(f"{operator} has no way for such mesh tensors: use {way_round} ({error})") from None
        if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
            raise error.with_traceback(None) from None  # of what torch does on the meta device nobody wants to know
        if operator._schema.returns:
            raise DependsOnValues from error
        made = None  # it writes to its arguments, and that is all
    if not isinstance(made, (torch.Tensor, list, tuple, type(None))):
        raise UsageError(f"{operator} is about memory of this process, where a mesh tensor has none: use full_tensor()")
    results = [made] if isinstance(made, torch.Tensor) else [] if made is None else list(made)
    outputs: list[OutputOf | NewOutput | None] = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            outputs.append(None)
            continue
        if result.layout is not torch.strided:
            raise UsageError(
                f"{operator} gives a sparse tensor, which a mesh tensor cannot be: take tensor.full_tensor() first, or "
                "sparse=False for the gradient of an embedding"
            )
        same = [index for index, meta in enumerate(metas) if result is meta]
        outputs.append(OutputOf(same[0]) if same else NewOutput.of(result))
    template = new_template(operator, template_args, template_kwargs)
    form = torch.Tensor if isinstance(made, torch.Tensor) else None if made is None else type(made)
    aliases = not written and gives_alias(operator)
    is_view = aliases and operator is not aten.detach.default
    return Metadata(template, tuple(outputs), form, is_random(operator), written, aliases, is_view)


def _written(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the places of the tensors that the operation writes to.

    Raises: UsageError for a tensor of this process, of which the ranks have but its number.
    """
    targets = tree_leaves([argument.of(args, kwargs) for argument in written_arguments(operator)], is_leaf=is_place)
    # fused steps write to the counters of steps by their schemas, and torch has counted before
    if any(type(each) is NumberPlace for each in targets) and not operator._schema.name.startswith("aten::_fused_"):
        raise UsageError(
            f"{operator} would write values of a mesh to a tensor of this process: take tensor.full_tensor() first"
        )
    return tuple(each.at for each in targets if type(each) is TensorPlace)


_OF_OTHER_DIMS = ("unsqueeze", "diag_embed", "input_sizes")
"""Operators and arguments whose dims are not dims of the first tensor."""


def _with_dims_from_the_first(operator: Operator, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments with dims counted from the first: DTensor 2.13 misreads some negative ones."""
    named = operator._schema.arguments
    if not args or not isinstance(args[0], torch.Tensor) or not (count := args[0].dim()):
        return args
    if any(each in str(operator) or any(argument.name == each for argument in named) for each in _OF_OTHER_DIMS):
        return args
    return [
        _from_the_first(value, count) if argument.name == "dim" else value
        for argument, value in zip(named, args, strict=False)
    ]


def _from_the_first(dims: Any, count: int) -> Any:
    if isinstance(dims, (list, tuple)):
        return [_from_the_first(dim, count) for dim in dims]
    return dims + count if type(dims) is int and -count <= dims < 0 else dims


class _Places:
    """A walk over arguments that replaces tensors and numbers by places, in the order of `read_arguments`."""

    def __init__(self) -> None:
        self._tensors = self._numbers = 0

    def put(self, value: Any, tensors: Sequence[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if self._tensors < len(tensors) and value is tensors[self._tensors]:
                self._tensors += 1
                return TensorPlace(self._tensors - 1)
            self._numbers += 1
            return NumberPlace(self._numbers - 1, value.dtype)
        if type(value) is float:
            self._numbers += 1
            return NumberPlace(self._numbers - 1, None)
        if isinstance(value, (list, tuple)):
            return [self.put(each, tensors) for each in value]
        return value
