"""A tensor whose values are on the ranks of a mesh. To torch it is a tensor: autograd and optimizers run here.

    torch function ──autograd──> __torch_dispatch__ ──> shapes of the results (metadata) ──> the op stream

No values are computed here. They are fetched where they are needed: by ``item``, ``tolist``, printing, and operations
whose shapes depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.utils.dlpack
from torch.distributed.tensor import Placement, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshbook.concurrency.patches import patch
from meshbook.errors import MeshError, UsageError
from meshbook.formatting import format_bytes
from meshbook.source.location import show_without_own_frames
from meshbook.tensors.handles.early_operators import meet_early_operators
from meshbook.tensors.handles.metadata import (
    DependsOnValues,
    Metadata,
    NotOnMesh,
    OutputOf,
    ViewInPlace,
    learn,
    read_arguments,
)
from meshbook.tensors.handles.tensor_values import TensorOnRanks
from meshbook.tensors.messages.layouts import ShardingSpec
from meshbook.tensors.messages.operations import Factory, NewOutput, written_arguments
from meshbook.tensors.sending.op_settling import Handle
from meshbook.tensors.sending.op_stream import OpStream
from meshbook.torch_internals import (
    DisableTorchDispatch,
    Operator,
    TensorBase,
    count_dispatch_modes,
    is_traced,
    make_wrapper_subclass,
    never_compile,
    refuse_pointer,
    tree_leaves,
    tree_map_only,
)

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.shape.extent import Index
    from meshbook.tensors.handles.distributed_mesh import Mesh

aten = torch.ops.aten

SMALL_BYTES = 1 << 20
"""The size up to which a tensor of this process is sent to the ranks when it takes part in an operation."""

INSTEAD = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
}
"""Other operators with the same result, where torch would put one off, or where DTensor gets it wrong."""


def _become(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Do the work of ``set_``. Raises: UsageError unless both are of one mesh."""
    tensor.data = other
    return tensor


def _check_and_unscale(gradients: Sequence[Any], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply gradients by a number, as `torch.amp.GradScaler` has it, and set ``found_inf`` if one is not finite.

    This waits for the ranks: whether an optimizer steps depends on the answer.
    """
    finite: dict[object, list[torch.Tensor]] = {}
    for gradient in gradients:
        finite.setdefault(gradient.mesh, []).append(gradient.isfinite().all())
    aten._foreach_mul_.Scalar(list(gradients), float(inverse_scale))
    if not all(torch.stack(each).all().item() for each in finite.values()):
        found_inf.fill_(1.0)


ANSWERED: Mapping[Any, Callable[..., Any]] = {
    aten.is_same_size.default: lambda one, other: one.shape == other.shape,
    aten._has_same_storage_numel.default: lambda one, other: one.numel() == other.numel(),
    aten._has_compatible_shallow_copy_type.default: lambda *both: all(isinstance(each, MeshTensor) for each in both),
    aten.is_pinned.default: lambda *_, **__: False,
    aten.set_.source_Tensor: _become,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
}
"""Questions that torch asks about tensors, and changes to a tensor alone: both are answered here."""

_CPU = torch.device("cpu")
_DATA = vars(TensorBase)["data"]


class MeshTensor(TensorOnRanks):
    """A tensor on a mesh; made by `distribute`, the factories, and operations on others."""

    _viewed = False
    """Whether there was a view of this tensor."""

    @staticmethod
    def _of(mesh: Mesh, output: NewOutput, number: int) -> MeshTensor:
        made = make_wrapper_subclass(MeshTensor, output.shape, strides=output.strides, dtype=output.dtype, device=_CPU)
        refuse_pointer(made)
        made.mesh, made._handle = mesh, Handle(number, mesh.stream, output)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return dispatch(func, args, kwargs or {})
        except (MeshError, IndexError, RuntimeError) as error:
            # a person wants to see the line that asked for the operation, and not our frames
            if not isinstance(error, MeshError):
                show_without_own_frames(error)
            raise error.with_traceback(None) from error.__cause__

    # ---- layout ---------------------------------------------------------------------------------------------------

    def redistribute(
        self, sharding_spec: ShardingSpec | None = None, *, placements: Sequence[Placement] | None = None
    ) -> MeshTensor:
        """Return a tensor with the same values that is laid out in another way."""
        return self.mesh.move(self, self.mesh, sharding_spec, placements)

    def to_mesh(
        self,
        mesh: Mesh | ProcMesh,
        sharding_spec: ShardingSpec | None = None,
        *,
        placements: Sequence[Placement] | None = None,
    ) -> MeshTensor:
        """Return the same values on another mesh of the same processes: other axes, a part of them, other ranks.

        Ranks send each other the parts that they lack, and the gradient comes back in that way. The layout is as for
        `distribute`. Raises: UsageError for a mesh of other processes.
        """
        return self.mesh.move(self, mesh, sharding_spec, placements)

    # ---- the local view: of tensors of each rank's own --------------------------------------------------------------

    def reduce(
        self, dims: str | Sequence[str] | None = None, reduction: str = "sum", *, scatter: bool = False
    ) -> MeshTensor:
        """Reduce the ranks' own tensors along axes of the mesh, along all of them by default.

        reduction: sum, avg, product, min, max, or stack, which puts them along new dims, before the others.
        scatter: each rank gets its part of the result, along the first dim.
        """
        return self.mesh.reduce(self, dims, reduction, scatter)

    def reduce_(self, dims: str | Sequence[str] | None = None, reduction: str = "sum") -> MeshTensor:
        """Do `reduce` in place."""
        return cast("MeshTensor", self.copy_(self.reduce(dims, reduction)))

    def slice_mesh(self, **axes: Index) -> MeshTensor:
        """Return the tensors of a part of the ranks, in the same memory, chosen as by `ProcMesh.slice`."""
        return self.mesh.part(self, **axes)

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor, in this process; autograd takes its gradient back to the ranks.

        Raises: the error of an operation that this tensor needed.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return cast("torch.Tensor", _BroughtHere.apply(self))  # type: ignore[no-untyped-call]
        return self._whole()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements on the axes of the mesh, as the ranks have them. Raises: the error of a failed operation."""
        return tuple(self.mesh.stream.fetch("placements", self._handle.number))

    @property
    def data(self) -> torch.Tensor:
        """The same values without autograd's history."""
        return cast("torch.Tensor", _DATA.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Make this tensor ``value`` from now on, as ``module.double()`` has its parameters become others."""
        if not isinstance(value, MeshTensor) or value.mesh is not self.mesh:
            raise UsageError(f"the data of a tensor of {self.mesh} can only be a tensor there: use meshbook.distribute")
        _DATA.__set__(self, value)  # shape, strides and dtype
        self._handle = value._handle

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows; the error, for a tensor whose mesh has ended."""
        from meshbook.tensors.handles.displays import to_html  # it reads tensors

        return to_html(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    def __copy__(self) -> torch.Tensor:
        return self.detach().requires_grad_(self.requires_grad)


class _BroughtHere(torch.autograd.Function):
    """The operation of autograd behind `MeshTensor.full_tensor`."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor) -> torch.Tensor:
        ctx.mesh = tensor.mesh
        return tensor._whole()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return place(gradient, ctx.mesh, [Replicate()] * len(ctx.mesh.axes))


never_compile(vars(MeshTensor)["__torch_dispatch__"].__func__.__code__)  # it would take one call's shapes for all


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse a mesh tensor for a plain one, which would read memory that is not there: torch itself does not ask."""
    if isinstance(value, MeshTensor):
        raise UsageError(
            f"a tensor of this process cannot become one of {value.mesh} by its data: use meshbook.module_to_mesh for "
            "a module, or put torch.nn.Parameter(mesh_tensor) in the place of a parameter"
        )
    _DATA.__set__(tensor, value)


patch(torch.Tensor, "data", property(_DATA.__get__, _set_data, _DATA.__delete__))


def place(whole: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> MeshTensor:
    """Put a tensor of this process on the ranks. Raises: UsageError for one that is not dense."""
    if whole.layout is not torch.strided or whole.is_nested:
        kind, way = ("nested", "to_padded_tensor") if whole.is_nested else ("sparse", "to_dense")
        raise UsageError(
            f"a {kind} tensor ({whole.layout}) cannot be on {mesh}: use {way}(), or take tensor.full_tensor() first"
        )
    number = mesh.stream.new_number()
    whole = whole.detach().contiguous()
    mesh.stream.put("place", number, whole, placements)
    return MeshTensor._of(mesh, NewOutput.of(whole), number)


def make(factory: Factory, shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> MeshTensor:
    """Have each rank make its part of a tensor."""
    number = mesh.stream.new_number()
    mesh.stream.put("make", number, factory, placements)
    return MeshTensor._of(mesh, NewOutput.in_order(shape, factory.dtype), number)


def _await_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Wait for the gradients before a step: if a rank ends before they are there, no process does the step.

    The gradients then lie as their parameters do, so that the step needs no other rank, and its state is on as many
    ranks: if one ends meanwhile the others go on to the end of the step.
    Raises: the error of a gradient that could not be made.
    """
    needed: dict[OpStream, list[tuple[int, int]]] = {}
    for group in optimizer.param_groups:
        _choose_fused(optimizer, group)
        for parameter in group["params"]:
            if isinstance(parameter, MeshTensor) and isinstance(parameter.grad, MeshTensor):
                pair = parameter.grad._handle.number, parameter._handle.number
                needed.setdefault(parameter.mesh.stream, []).append(pair)
    for stream, pairs in needed.items():
        stream.ask_with(stream.send, [number for pair in pairs for number in pair], "lay_like", pairs)
        if OpStream.recorder is not None:
            OpStream.recorder.note_optimizer(optimizer, pairs)


def _choose_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Have Adam update a group's parameters by one operation, if the program leaves it to torch how to do so.

    torch would take them one by one, for it knows no other way for a subclass, and read each one's count of steps.
    """
    if group.get("fused", True) is not None or not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return
    is_chosen = group.get("foreach") is not None or group.get("differentiable") or group.get("capturable")
    if is_chosen or any(each in optimizer.state for each in group["params"]):
        return
    if all(isinstance(each, MeshTensor) and each.is_floating_point() for each in group["params"]):
        group["fused"] = True


register_optimizer_step_pre_hook(_await_gradients)
meet_early_operators()


# ---- operations ---------------------------------------------------------------------------------------------------

_known: dict[object, Metadata] = {}
"""The metadata of operations, by their signature."""
_KEPT = 100_000


def dispatch(
    operator: Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Issue an operation to the ranks and return handles of its results.

    mesh: for an operation without tensors. generator: the one that seeds the numbers that the ranks draw.
    """
    if count_dispatch_modes():
        _refuse_tracers(operator)
    if operator is aten._local_scalar_dense.default:
        return _few_of(args[0]).item()
    if operator in ANSWERED:
        return ANSWERED[operator](*args, **kwargs)
    operator = INSTEAD.get(operator, operator)
    if (drawing := kwargs.get("generator")) is not None:
        if OpStream.recorder is not None:
            OpStream.recorder.refuse("it draws numbers with a generator of its own")
        return dispatch(operator, args, {**kwargs, "generator": None}, mesh, drawing)
    tensors: list[Any] = []
    numbers: list[float] = []
    try:
        read = tuple([read_arguments(each, tensors, numbers, MeshTensor) for each in args])
        named = tuple([(name, read_arguments(v, tensors, numbers, MeshTensor)) for name, v in kwargs.items()])
    except NotOnMesh:
        return dispatch(operator, *_all_on_mesh(operator, args, kwargs), generator=generator)
    known = _known.get((operator, read, named))
    if known is None:
        try:
            known = learn(operator, args, kwargs, tensors, numbers)
        except DependsOnValues:
            return _with_values(operator, args, kwargs, _mesh_of(tensors))
        except ViewInPlace as view:
            return _view_in_place(operator, view.operator, args, kwargs)
        if len(_known) >= _KEPT:
            _known.clear()
        _known[operator, read, named] = known
    mesh = mesh or _mesh_of(tensors)
    if known.is_view:
        tensors[0]._viewed = True
    if known.draws:
        numbers.append(float(new_seed(generator)))
    return _issue(mesh, known, tensors, numbers)


def _refuse_tracers(operator: Operator) -> None:
    """Refuse an operation that a tracer watches: it would take the tensor for a constant, or ask for memory."""
    if is_traced():
        raise UsageError(
            f"{operator} of a mesh tensor cannot be traced (torch.func.linearize, make_fx, torch.export): use "
            "torch.func.jvp for a derivative, meshbook.compile for a step that is repeated"
        )


def _all_on_mesh(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with small tensors of this process on the mesh as well, whole on each rank.

    Raises: UsageError for one that is large, or that would be written to.
    """
    mesh = next(each.mesh for each in tree_leaves((args, kwargs)) if isinstance(each, MeshTensor))
    for argument in written_arguments(operator):
        target = argument.of(args, kwargs)
        if isinstance(target, torch.Tensor) and not isinstance(target, MeshTensor):
            raise UsageError(
                f"{operator} would write values of {mesh} to a tensor of this process: take tensor.full_tensor() first"
            )

    def bring(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, MeshTensor) or not tensor.dim():
            return tensor
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes > SMALL_BYTES and operator is not aten.copy_.default:  # which asks for it
            raise UsageError(
                f"a tensor of this process takes part in {operator} with one of {mesh}, and is too large to be sent "
                f"without being asked ({format_bytes(size_bytes)}): use meshbook.distribute(tensor, mesh) once"
            )
        return place(tensor, mesh, [Replicate()] * len(mesh.axes))

    brought = tree_map_only(torch.Tensor, bring, (list(args), dict(kwargs)))
    return brought[0], brought[1]


def _issue(mesh: Mesh, known: Metadata, tensors: Sequence[MeshTensor], numbers: Sequence[float]) -> Any:
    stream = mesh.stream
    results: list[int] = []
    given: list[Any] = []
    for output in known.outputs:
        if output is None:
            given.append(None)
        elif isinstance(output, OutputOf):
            given.append(tensors[output.at])
        else:
            results.append(number := stream.new_number())
            given.append(MeshTensor._of(mesh, output, number))
    read = [tensor._handle.number for tensor in tensors]
    if known.aliases:
        stream.note_views(results, read[0])
    stream.issue(known.template, read, numbers, results, [read[index] for index in known.writes])
    if known.form is torch.Tensor:
        return given[0]
    return None if known.form is None else given if known.form is list else tuple(given)


def new_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed by a generator of this process, torch's own by default: its seed rules over the mesh as well."""
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(1, 1 << 52, (), device=device, generator=generator))


def _mesh_of(tensors: Sequence[MeshTensor]) -> Mesh:
    """Return the mesh of the tensors. Raises: UsageError unless it is one for all."""
    mesh = tensors[0].mesh
    for tensor in tensors:
        if type(tensor.mesh) is not type(mesh):
            raise UsageError(
                "a tensor that each rank has of its own (procs.activate()) and one in parts cannot take part in one "
                'operation: name the first, procs.push({"x": tensor}), and take Mesh(procs).from_ranks("x", '
                "placements=...)"
            )
        if tensor.mesh is not mesh:
            raise UsageError(
                f"tensors of two meshes cannot take part in one operation: {mesh} and {tensor.mesh}. "
                "Bring one of them over: tensor.to_mesh(other_mesh)."
            )
    return mesh


def _few_of(value: Any) -> Any:
    return value._few() if isinstance(value, MeshTensor) else value


def _view_in_place(operator: Operator, view: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the tensor a view of its former self.

    Raises: UsageError if autograd knows views of it, or a base: gradients, now or later, would go astray.
    """
    if not args[0].is_inference() and (args[0]._viewed or args[0]._is_view()):
        raise UsageError(f"{operator} of a tensor that is a view, or has views, would spoil gradients: use {view}")
    made = dispatch(view, args, kwargs)
    args[0]._viewed = False  # by this one: there is no other
    with DisableTorchDispatch():
        operator(*args, **kwargs)  # its shape and strides: there is nothing else here
    args[0]._handle = made._handle
    return args[0]


def _with_values(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh) -> Any:
    """Do an operation here whose result has a shape that depends on values, and send the results to the ranks."""
    if written_arguments(operator):
        raise UsageError(f"{operator} writes what depends on values to a tensor of {mesh}: use one that returns it")
    here = tree_map_only(MeshTensor, _few_of, (list(args), dict(kwargs)))
    made = operator(*here[0], **here[1])
    tensors = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
    if layouts := {str(each.layout) for each in tensors if each.layout is not torch.strided}:
        raise UsageError(
            f"{operator} makes a tensor that is not dense ({', '.join(layouts)}), which {mesh} cannot have: "
            "take tensor.full_tensor() first, and make it of that"
        )
    everywhere = [Replicate()] * len(mesh.axes)
    return tree_map_only(torch.Tensor, lambda each: place(each, mesh, everywhere), made)
