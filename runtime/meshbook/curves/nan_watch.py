"""The watch of a rank for NaN and infinities, in the outputs of its modules and in its gradients, by torch's own hooks.

While it is on, each output of a module is reduced to its largest magnitude, which is not finite where any number is
not. On a CPU that is looked at at once; on a GPU, those of a step together, as the optimizer is about to use the
gradients. The first find of a call travels as a logged scalar, under a name that says where and when it was.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from meshbook.curves.recorder import NAME_CHARS, recorder
from meshbook.source.location import is_users_code, users_place

OUTPUT, GRADIENT = "output of ", "gradient of "
"""The beginnings of the names of finds."""
PENDING_MAX = 4096
"""The most outputs that are not looked at yet, of code that makes no step."""
_DEPTH = 4


class NanWatch:
    """The watch of this process; `begin` and `end` may be called on any thread."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self.is_on = False
        """Whether modules are watched; each call asks."""
        self._call: int | None = None
        """The call whose finds and steps are counted."""
        self._steps: int | None = None
        """The steps that optimizers have made in this call; None before one begins."""
        self._has_found = False
        self._pending: list[tuple[Any, str, Any]] = []
        """Modules and parameters, each with the moment and a magnitude on a GPU that was not looked at yet."""

    def begin(self) -> bool:
        """Watch from now on; returns False where torch is not loaded."""
        torch = sys.modules.get("torch")
        if torch is None or self._hooks:
            return torch is not None
        from torch.nn.modules.module import register_module_forward_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        outputs = register_module_forward_hook(self._on_output)
        self._hooks = [outputs, register_optimizer_step_pre_hook(self._on_step)]
        self.is_on = True
        return True

    def end(self) -> None:
        """Watch no more."""
        hooks, self._hooks, self.is_on = self._hooks, [], False
        for hook in hooks:
            hook.remove()
        self._pending = []

    def settle(self) -> None:
        """Look at everything that a device has still to tell, as at the end of a call."""
        pending, self._pending = self._pending, []
        torch: Any = sys.modules.get("torch")
        with contextlib.suppress(RuntimeError):  # of a device that has failed: the call tells it
            magnitudes = [magnitude.to(pending[0][2].device) for _, _, magnitude in pending]
            numbers = torch.stack(magnitudes).tolist() if pending else []
            for (owner, moment, _), number in zip(pending, numbers, strict=True):
                if not math.isfinite(number):
                    self._tell(owner, moment, number)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _on_output(self, module: Any, arguments: object, output: object) -> None:
        torch: Any = sys.modules["torch"]
        if torch.compiler.is_compiling() or self._is_done():
            return
        for tensor in _tensors(output):
            self._look(module, tensor)

    def _on_step(self, optimizer: Any, arguments: object, keywords: object) -> None:
        torch: Any = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return
        is_done = self._is_done()
        self._steps = self._steps or 0
        if not is_done:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    self._look(parameter, parameter.grad)
            self.settle()
        self._steps += 1

    def _is_done(self) -> bool:
        """Whether this call has found something; another call begins anew."""
        if (call := recorder.origin()) != self._call:
            self._call, self._steps, self._has_found = call, None, False
        return self._has_found

    def _look(self, owner: Any, tensor: Any) -> None:
        torch: Any = sys.modules["torch"]
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        if tensor.dtype not in kinds or not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta:
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        try:
            magnitude = torch.linalg.vector_norm(tensor.detach(), math.inf)
            if not tensor.is_cuda:
                if not math.isfinite(number := float(magnitude)):
                    self._tell(owner, self._moment(), number)
                return
        except RuntimeError:  # of a tensor that stands for many, as within vmap
            return
        self._pending.append((owner, self._moment(), magnitude.float()))
        if len(self._pending) >= PENDING_MAX:
            self.settle()

    def _moment(self) -> str:
        """Return the moment by the last step that was logged, else by the optimizer's steps, else by the line of code.

        Returns: ``after step 3``, since a program logs a step that it has made; ``at step 3``; ``at cell 7, line 5``.
        """
        if recorder.stepped is not None and recorder.stepped[0] == self._call:
            return f"after step {recorder.stepped[1]:.10g}"
        if self._steps is not None:
            return f"at step {self._steps}"
        place = users_place(sys._getframe())
        return f"at {place}" if place else ""

    def _tell(self, owner: Any, moment: str, number: float) -> None:
        if self._has_found:
            return
        self._has_found = True
        torch: Any = sys.modules["torch"]
        path, kind = _name_of(owner), type(owner).__name__
        if isinstance(owner, torch.nn.Module):
            name = f"{OUTPUT}{path} ({kind})" if path else f"{OUTPUT}{kind}"
        else:
            name = f"{GRADIENT}{path or 'a parameter'}"
        name = f"{name[: NAME_CHARS // 2]} {moment[: NAME_CHARS // 2 - 1]}".rstrip()
        recorder.points.append((self._call or 0, name, self._steps or 0, time.time(), number))
        if not recorder.is_due:
            recorder.wake()


nan_watch = NanWatch()


def place_of(name: str) -> str:
    """Return the name of a find without its moment, which ranks that log no steps tell otherwise; or another name."""
    return re.split(" at | after ", name)[0] if name.startswith((OUTPUT, GRADIENT)) else name


def _tensors(value: object, depth: int = 0) -> Iterator[Any]:
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH and isinstance(value, list | tuple | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each, depth + 1)


def _name_of(owner: Any) -> str:
    """Return the path of a module or a parameter: from a variable of the user's, or from the outermost module."""
    frame: FrameType | None = sys._getframe()
    outer, scopes = "", [vars(sys.modules["__main__"])]
    while frame is not None:
        if is_users_code(frame.f_code):
            scopes.append(frame.f_locals)
        if (path := _path_within(owner, frame.f_locals.get("self"))) is not None:
            outer = path
        frame = frame.f_back
    for variable, value in [item for scope in reversed(scopes) for item in list(scope.items())]:
        is_users = not variable.startswith("_") and variable != "self"
        if is_users and (path := _path_within(owner, value)) is not None:
            return f"{variable}.{path}".rstrip(".")
    return outer


def _path_within(owner: Any, value: object) -> str | None:
    torch: Any = sys.modules["torch"]
    if not isinstance(value, torch.nn.Module):
        return None
    parts = value.named_modules() if isinstance(owner, torch.nn.Module) else value.named_parameters()
    return next((path for path, part in parts if part is owner), None)
