"""The record of one run of a step, so that two runs can be compared, and one be repeated.

    function ──every operator──> StepRecorder ──> of mesh tensors: uses, by the op stream that sends them
                                              └─> of this process's: counters that it writes, and who reads them

Inputs, results and tensors in between are called by negative numbers. Tensors that were there before (parameters, the
state of optimizers) and those left behind (gradients) keep their own. Numbers come of constants, of tensors of this
process without dims, which are read each time, or of torch's generator. A step that cannot be repeated has the reason
noted; the run itself goes on as if nothing watched it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement
from torch.nn.modules.module import register_module_forward_pre_hook

from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor, place
from meshbook.tensors.messages.issued_lines import as_named_line, for_ranks, line_of_caller, name_code_line
from meshbook.tensors.messages.operations import (
    WAIT,
    NumberPlace,
    Recording,
    Template,
    TensorId,
    find_operator,
    is_place,
    is_random,
    written_arguments,
)
from meshbook.tensors.sending.op_failures import WAITS, RepeatedStep
from meshbook.tensors.sending.op_settling import Handle
from meshbook.tensors.sending.op_stream import OpStream
from meshbook.tensors.steps.step_numbers import DoHere, Given, Here, NumberSource, ReadNumbers, Recorded, Seed
from meshbook.torch_internals import Operator, TorchDispatchMode, tree_leaves, tree_map_only

aten = torch.ops.aten


class _Noted(NamedTuple):
    template: Template
    use: tuple[Any, ...]
    issued: tuple[Any, ...]


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of one run."""

    def __init__(self, inputs: Sequence[MeshTensor], scalars: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why = ""
        """The reason why the run cannot be repeated."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.modules: dict[torch.nn.Module, None] = {}
        self.inputs = [tensor._handle.number for tensor in inputs]
        self._scalars = scalars
        self._thread = threading.get_ident()
        self._stream: OpStream | None = None
        self._mesh: Mesh | None = None
        self._noted: list[_Noted] = []
        self._here: list[Here] = []
        self._handles: dict[TensorId, weakref.ref[Handle]] = {}
        self._tensors: dict[TensorId, weakref.ref[torch.Tensor]] = {}
        self._placed: dict[TensorId, tuple[torch.Tensor, Sequence[Placement], Any]] = {}
        self._made: dict[int, tuple[torch.Tensor, bool]] = {}
        """The plain tensors that the step made, by id, and whether they depend on tensors from before."""
        self._sources: list[torch.Tensor] | None = None
        """The plain tensors without dims of the operation of mesh tensors that is being done."""
        self._kept: list[object] = [*scalars]
        self._wait = Template(WAIT, WAITS, (), {})

    def __enter__(self) -> StepRecorder:
        self._hook = register_module_forward_pre_hook(lambda module, _: self.modules.setdefault(module))
        OpStream.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        OpStream.recorder = None
        self._hook.remove()

    # ---- what happens ---------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        if not self.why and threading.get_ident() == self._thread:
            where = name_code_line(line_of_caller())
            self.why = f"{why} ({where})" if where else why

    def note(self, stream: OpStream, template: Template, use: tuple[Any, ...], issued: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        self._stream = self._stream or stream
        if stream is not self._stream:
            self.refuse("it has tensors of two meshes")
        sources = self._numbers(template, use[2])
        if any(isinstance(source, (torch.Tensor, Seed, Given)) for source in sources):
            self._here.append(ReadNumbers(len(self._noted), sources))
        self._noted.append(_Noted(template, use, issued))

    def note_put(self, method: str, number: TensorId, args: Sequence[Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if method != "place":
            self.refuse(f"it asks the ranks to {method} a tensor")
            return
        whole, placements = args
        if self._sources is None and self._depends(whole):
            self.refuse("it sends a tensor of this process that may be another one next time: give it as a mesh tensor")
        self._placed[number] = (whole.clone(), tuple(placements), whole.flatten().view(torch.uint8).numpy().tobytes())

    def note_optimizer(self, optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[TensorId, TensorId]]) -> None:
        self.optimizers.append(optimizer)
        for tensors in ([number for pair in pairs for number in pair], []):  # two waits, see Replays.note_lost
            self._noted.append(_Noted(self._wait, (WAIT, tensors, (), ()), (WAITS, line_of_caller(), (), ())))

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((list(args), list(kwargs.values()))) if isinstance(t, torch.Tensor)]
        plain = [tensor for tensor in tensors if not isinstance(tensor, MeshTensor)]
        if len(plain) == len(tensors):
            return self._note_here(func, args, kwargs, plain)
        if any(tensor.dim() and self._depends(tensor) for tensor in plain):
            self.refuse(f"a tensor of this process takes part in {func}: give it as a mesh tensor")
        self._mesh = self._mesh or next(tensor.mesh for tensor in tensors if isinstance(tensor, MeshTensor))
        self._sources = [tensor for tensor in plain if not tensor.dim()]
        try:
            made = func(*args, **kwargs)
        finally:
            self._sources = None
        self.note_tensors((*tensors, *tree_leaves(made)))
        return made

    def note_tensors(self, tensors: Iterable[object]) -> None:
        for tensor in tensors:
            if isinstance(tensor, MeshTensor):
                self._handles[tensor._handle.number] = weakref.ref(tensor._handle)
                self._tensors[tensor._handle.number] = weakref.ref(tensor)

    def _note_here(
        self, func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Note an operation on tensors of this process."""
        depends = func is not aten.lift_fresh.default and any(map(self._depends, tensors))
        if is_random(func):
            self.refuse(f"{func} draws numbers in this process")
        if func is aten._local_scalar_dense.default and depends:
            counts = "; optimizers do so to count steps, but for SGD, Adam and AdamW as torch makes them by default"
            self.refuse(
                "it takes the value of a tensor of this process, which may be another one next time"
                + counts * _is_in_optimizer()
            )
        targets = [argument.of(args, kwargs) for argument in written_arguments(func)]
        written = [each for each in tree_leaves(targets) if isinstance(each, torch.Tensor)]
        if any(self._depends(tensor) for tensor in written):
            given = [id(scalar) for scalar in self._scalars]
            if any(tensor.dim() or id(tensor) in given for tensor in tensors) or any(
                id(tensor) in self._made for tensor in written
            ):
                self.refuse(f"{func} writes to a tensor of this process")
            self._here.append(DoHere(func, args, kwargs, written))
            self._kept += tensors
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and all(tensor is not each for each in written):
                self._made[id(tensor)] = (tensor, depends)
        return made

    def _depends(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor was there before, or was made of one that was."""
        return self._made.get(id(tensor), (None, True))[1]

    def _numbers(self, template: Template, numbers: Sequence[float]) -> list[NumberSource]:
        sources: list[NumberSource] = list(numbers)
        places = [
            each.at
            for each in tree_leaves((template.args, list(template.kwargs.values())), is_leaf=is_place)
            if type(each) is NumberPlace and each.dtype is not None
        ]
        for at, tensor in zip(places, self._sources or (), strict=False):
            given = next((index for index, scalar in enumerate(self._scalars) if scalar is tensor), None)
            if given is not None:
                sources[at] = Given(given)
            elif id(tensor) not in self._made:
                sources[at] = tensor
                self._kept.append(tensor)
            elif self._depends(tensor):
                self.refuse("a number is computed of a tensor of this process that may be another one next time")
        if is_random(find_operator(template.operator)):
            sources[-1] = Seed()
        return sources

    # ---- what it comes to -----------------------------------------------------------------------------------------

    def finish(self, returned: Sequence[TensorId]) -> Recorded | None:
        """Return the record, or None if there is a reason why not; asked when the step's own variables are gone."""
        made = [number for each in self._noted for number in each.use[3]]
        names: dict[TensorId, TensorId] = {}
        for number in (*self.inputs, *made):
            names.setdefault(number, -1 - len(names))
        alive = {number for number, handle in self._handles.items() if handle() is not None}
        left = [number for number in made if number in alive and number not in returned]
        read = {number: None for each in self._noted for number in each.use[1] if number not in names}
        captured = [number for number in read if number not in self._placed]
        if self._stream is None:
            self.refuse("it does nothing on a mesh")
        elif len(set(self.inputs)) < len(self.inputs):
            self.refuse("it is given one tensor twice")
        elif self._mesh is None or not alive.issuperset(captured):
            self.refuse("it reads a tensor that is not there any more after it")
        if self.why or self._mesh is None:
            return None
        key = self._key(names, left)
        step = self._step(names, captured, left, returned)
        written = {number for each in self._noted for number in each.issued[3]}.intersection(captured)
        held = [self._handles[number] for number in (*captured, *left)]
        return Recorded(
            self._mesh, key, step, self._here, held, [self._tensors[number] for number in written], self._kept
        )

    def _key(self, names: Mapping[TensorId, TensorId], left: Sequence[TensorId]) -> tuple[Any, ...]:
        """Return the key of the run. names: of the tensors within it."""
        constants = {number: -1 - len(names) - index for index, number in enumerate(self._placed)}
        sources = {each.use: each.sources for each in self._here if isinstance(each, ReadNumbers)}
        parts: list[object] = []
        for index, (template, use, _) in enumerate(self._noted):
            read = tuple(constants.get(number) or names.get(number, number) for number in use[1])
            numbers = tuple(self._key_plain(source) for source in sources.get(index, use[2]))
            parts.append((template.number, read, numbers, tuple(names[number] for number in use[3])))
        placed = tuple((each[1], each[2], each[0].dtype, each[0].shape) for each in self._placed.values())
        return tuple(parts), tuple(names[number] for number in left), placed, tuple(map(self._key_here, self._here))

    def _step(
        self,
        names: dict[TensorId, TensorId],
        captured: Sequence[TensorId],
        left: Sequence[TensorId],
        returned: Sequence[TensorId],
    ) -> RepeatedStep:
        assert self._mesh is not None
        names.update((number, number) for number in left)
        for number, (whole, placements, _) in self._placed.items():
            self._kept.append(constant := place(whole, self._mesh, placements))
            names[number] = constant._handle.number
        uses: list[tuple[Any, ...]] = []
        issued: list[tuple[Any, ...]] = []
        last: dict[TensorId, int] = {}
        for index, (_, (template, operands, numbers, made), (operator, line, _, written)) in enumerate(self._noted):
            renamed = [[names.get(number, number) for number in each] for each in (operands, made, written)]
            uses.append((template, renamed[0], numbers, renamed[1]))
            issued.append((operator, line, renamed[1], renamed[2]))
            last.update((number, index) for number in (*renamed[0], *renamed[1]) if number < 0)
        results = [names[number] for number in returned]
        ends: list[list[TensorId]] = [[] for _ in uses]
        for number, index in last.items():
            if number not in results:
                ends[index].append(number)
        templates = {each.template.number: each.template for each in self._noted if each.template is not self._wait}
        number, inputs = self._mesh.stream.new_number(), [names[number] for number in self.inputs]
        recording = Recording(
            number, list(templates.values()), uses, ends, for_ranks(each[1] for each in issued), inputs, results
        )
        return RepeatedStep(recording, issued, as_named_line(issued[0][1]), captured, left)

    def _key_here(self, here: Here) -> object:
        if isinstance(here, ReadNumbers):
            return here.use
        args = tree_map_only(torch.Tensor, self._key_plain, (list(here.args), dict(here.kwargs)))
        return str(here.operator), repr(args)

    def _key_plain(self, source: Any) -> object:
        if not isinstance(source, torch.Tensor):
            return source
        return ("made", source.tolist()) if id(source) in self._made else ("there", id(source))


_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


def _is_in_optimizer() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_OPTIMIZERS):
        frame = frame.f_back
    return frame is not None
