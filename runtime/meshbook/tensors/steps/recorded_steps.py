"""`compile`: a step that does the same each time becomes one message to the ranks.

The first calls run the step as it is, and note its operations (`step_recorder`). When two runs in a row have done the
same, to the same tensors, the next calls are one message each, for as long as no known condition has changed: the
arguments, the plain values that the function refers to, its modules and optimizers, and the tensors that it read and
left behind. A step that cannot be repeated is run as it is, always, with a warning that says why.
"""

from __future__ import annotations

import functools
import gc
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from typing_extensions import ParamSpec

from meshbook.concurrency.interrupts import held_back
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.messages.issued_lines import name_code_line
from meshbook.tensors.messages.operations import NewOutput, TensorId
from meshbook.tensors.sending.op_settling import Handle
from meshbook.tensors.sending.op_stream import OpStream
from meshbook.tensors.steps.step_guards import (
    PLAIN,
    CannotRepeat,
    KnownModules,
    KnownOptimizer,
    modes_of_torch,
    read_argument,
    values_referred_to,
    without_torch_functions,
)
from meshbook.tensors.steps.step_numbers import Recorded, StepNumbers
from meshbook.tensors.steps.step_recorder import StepRecorder
from meshbook.torch_internals import TreeSpec, tree_flatten, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")

TRIED = 6
"""The runs in a row, each different from the last, after which no more are compared."""
UNUSED = 3
"""The recordings in a row without a use after which no more are made."""
SIGNATURES = 16
"""The most signatures of one step."""


_number_of: Callable[[MeshTensor], TensorId] = operator.attrgetter("_handle.number")


class Unrepeatable(UserWarning):
    """A step is run as it is, since it cannot be repeated; the text says why."""


def compile(function: Callable[P, R]) -> CompiledStep[P, R]:
    """Make a step that the ranks repeat by themselves: after a few calls, each is one message to them.

    The function is to work on mesh tensors, modules and optimizers: a step of training. Numbers that differ from call
    to call are given as tensors without dims. Tensors that it returns need no gradient. Its other effects on objects of
    this process happen in the first calls only. A call waits for none before it, so the failure of a step is told by
    later calls, or where its results are needed; steps of that optimizer behind it are not done.
    """
    return CompiledStep(function)


class CompiledStep(Generic[P, R]):
    """A function, and the records of its runs."""

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._names = values_referred_to(function)
        self._known: dict[object, _Signature] = {}
        self.why_not = ""
        """The reason why it is not repeated; empty as long as none is known."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        inputs: list[MeshTensor] = []
        scalars: list[torch.Tensor] = []
        if OpStream.recorder is not None:  # it is a part of a step that is being recorded
            return self._function(*args, **kwargs)
        try:
            with without_torch_functions():
                read = functools.partial(read_argument, inputs=inputs, scalars=scalars)
                given = (*map(read, args), read(kwargs) if kwargs else None)
                signature = (given, self._names(), modes_of_torch())
                known = self._known.get(signature)
                if known is None:
                    if len(self._known) >= SIGNATURES:
                        raise CannotRepeat(
                            f"{SIGNATURES} calls of it were given other arguments, or found other values, each time"
                        )
                    known = self._known[signature] = _Signature()
                step = known.find_current()
        except (CannotRepeat, TypeError) as error:
            self._refuse(str(error))
            return self._function(*args, **kwargs)
        if step is not None:
            return step.repeat(inputs, scalars)  # type: ignore[no-any-return]
        made, recorder, returned = _record(functools.partial(self._function, *args, **kwargs), inputs, scalars)
        known.note(recorder, returned)
        return made  # type: ignore[no-any-return]

    def _refuse(self, why: str) -> None:
        if not self.why_not:
            self.why_not = why
            name = getattr(self._function, "__qualname__", "a step")
            warnings.warn(f"{name} is not repeated by the ranks alone: {why}", Unrepeatable, stacklevel=3)


class _Returned(NamedTuple):
    """The results of a run, with the number of a tensor for each mesh tensor."""

    spec: TreeSpec
    leaves: Sequence[object]
    numbers: Sequence[TensorId]


class _Signature:
    """The runs of a step with equal arguments."""

    def __init__(self) -> None:
        self.step: _RepeatableStep | None = None
        self.why_not = ""
        self._last: Recorded | None = None
        self._key: object = None
        self._runs = self._unused = 0

    def find_current(self) -> _RepeatableStep | None:
        """Return the step to repeat; None where the next run is to be noted. Raises: CannotRepeat."""
        if self.step is not None:
            if self.step.is_current():
                return self.step
            self._unused = 0 if self.step.times else self._unused + 1
            self.step = None
            if self._unused > UNUSED:
                self.why_not = (
                    "what it reads or leaves behind is changed before each call: is zero_grad() within the step?"
                )
        if self.why_not:
            raise CannotRepeat(self.why_not)
        return None

    def note(self, recorder: StepRecorder, returned: _Returned) -> None:
        """Note a run that is over. If it has done the same as the last one, it is the one to repeat."""
        recorded = recorder.finish(returned.numbers)
        self.why_not = recorder.why
        if recorded is None:
            return
        leaves = tuple(each if isinstance(each, (*PLAIN, NewOutput)) else id(each) for each in returned.leaves)
        key = (recorded.key, returned.spec, leaves)
        last, self._last = self._last, recorded
        same, self._key = last is not None and self._key == key, key
        self._runs += 1
        if same:
            self.step, self._last, self._runs = _RepeatableStep(recorded, recorder, returned), None, 0
        elif last is not None and self._runs >= TRIED:
            self.why_not = f"{_difference(last, recorded)}; numbers that change are to be given as torch.tensor(number)"


def _difference(one: Recorded, other: Recorded) -> str:
    for before, now, issued in zip(one.key[0], other.key[0], other.step.issued, strict=False):
        if before != now:
            return f"no two calls do the same: {issued[0]} ({name_code_line(issued[1])}) is another operation each time"
    return "no two calls do, leave behind and return the same"


def _record(
    step: Callable[[], Any], inputs: Sequence[MeshTensor], scalars: Sequence[torch.Tensor]
) -> tuple[Any, StepRecorder, _Returned]:
    """Run a step; return its results, tensors detached, and the notes about it."""
    recorder = StepRecorder(inputs, scalars)
    numbers: list[TensorId] = []
    about: list[object] = []
    with recorder:
        leaves, spec = tree_flatten(step())
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, MeshTensor):
                leaves[index] = leaf.detach()
                numbers.append(leaves[index]._handle.number)
                about.append(leaf._handle.output)
            elif isinstance(leaf, torch.Tensor):
                recorder.refuse("it returns a tensor of this process")
            else:
                about.append(leaf)
    gc.collect()  # what the step has left behind is what is still there
    return tree_unflatten(leaves, spec), recorder, _Returned(spec, about, numbers)


class _RepeatableStep:
    """A recorded step with all objects that must not change."""

    def __init__(self, recorded: Recorded, recorder: StepRecorder, returned: _Returned) -> None:
        self._step, self._mesh, self._written = recorded.step, recorded.mesh, recorded.written
        self._numbers = StepNumbers(recorded.here)
        self._kept, self._returned = recorded.kept, returned
        self._returns_one = returned.spec.is_leaf()
        self._inputs = recorder.inputs
        self._views = self._mesh.stream.find_views(returned.numbers, recorder.inputs)
        """The results that are in the memory of another tensor, with that tensor."""
        self._handle = Handle(self._step.recording.number, self._mesh.stream, NewOutput((), (), torch.float32))
        self._is_gone = any(each() is None for each in recorded.held)
        self._held = [weakref.ref(handle, self._on_gone) for each in recorded.held if (handle := each()) is not None]
        self._modules = KnownModules(recorder.modules)
        self._optimizers = [KnownOptimizer(each) for each in dict.fromkeys(recorder.optimizers)]
        self.times = 0

    def _on_gone(self, _: object) -> None:
        self._is_gone = True

    def is_current(self) -> bool:
        """Whether all objects that it was recorded with are still there."""
        return (
            not self._is_gone
            and self._modules.is_as_it_was()
            and all(map(KnownOptimizer.is_as_it_was, self._optimizers))
        )

    def repeat(self, inputs: Sequence[MeshTensor], scalars: Sequence[torch.Tensor]) -> Any:
        """Repeat the step. Raises: the error of an input, or of the last time where it was not told yet."""
        stream = self._mesh.stream
        given = list(map(_number_of, inputs))
        stream.check_step(self._step, given)
        with held_back():  # what was counted here is under way
            numbers, undo = self._numbers.do(scalars)
            try:
                results = stream.replay(self._step, given, numbers, undo)
            except BaseException:
                undo()
                raise
        if self._written:
            written = [tensor for each in self._written if (tensor := each()) is not None]
            torch.autograd.graph.increment_version(written)
        self.times += 1
        if self._views:
            self._note_views(given, results)
        if self._returns_one:
            return self._returned_now(self._returned.leaves[0], iter(results))
        fresh = iter(results)
        made = [self._returned_now(each, fresh) for each in self._returned.leaves]
        return tree_unflatten(made, self._returned.spec)

    def _returned_now(self, leaf: object, results: Iterator[TensorId]) -> object:
        return MeshTensor._of(self._mesh, leaf, next(results)) if isinstance(leaf, NewOutput) else leaf

    def _note_views(self, inputs: Sequence[TensorId], results: Sequence[TensorId]) -> None:
        """Note the bases of views among the results: an input, another result, or a tensor that stays."""
        stream = self._mesh.stream
        now = dict(zip(self._inputs, inputs, strict=True))
        for at, root in self._views:
            if root not in now:
                now[root] = root if root in stream.held else results[at]
            if now[root] != results[at]:
                stream.note_views([results[at]], now[root])
