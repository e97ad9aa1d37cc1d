"""torch's private names that the product uses, all in one place: a new version of torch breaks nothing elsewhere.

The versions tried are 2.8 and 2.11 to 2.15; development is on 2.13. A name that a version may lack is looked for in a
function here, which says how the code does without it. torch itself imports all modules that are imported here at the
beginning, so this costs a rank nothing; DTensor and FSDP are imported by the functions that need them.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.autograd
from torch._C import (
    DisableTorchFunctionSubclass,
    DispatchKey,
    TensorBase,
    _DisableTorchDispatch,
    _get_dispatch_mode,
    _len_torch_dispatch_stack,
    _set_throw_on_mutable_data_ptr,
    _SetExcludeDispatchKeyGuard,
    _TorchDispatchModeKey,
)
from torch._C._distributed_c10d import (
    Backend,
    PrefixStore,
    Store,
    _register_comm_hook,
    _register_process_group,
    _unregister_all_process_groups,
)
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Operator: TypeAlias = "OpOverload[..., Any]"
"""An overload of an operator of the dispatcher, as in ``torch.ops.aten.add.Tensor``."""

# ---- the dispatcher -------------------------------------------------------------------------------------

DisableTorchDispatch = _DisableTorchDispatch
SetExcludeDispatchKeyGuard = _SetExcludeDispatchKeyGuard
count_dispatch_modes = _len_torch_dispatch_stack
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
refuse_pointer = _set_throw_on_mutable_data_ptr
"""Have a tensor without memory raise where its pointer is asked for without asking its class, as ``to_dlpack`` does."""

functional_collectives = torch.ops._c10d_functional
"""The collectives that give a tensor to wait for, as DTensor uses them."""


def is_traced() -> bool:
    """Whether a tracer of torch (``make_fx``, ``torch.export``) or its fake tensors watch operations here."""
    tracers = _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE
    return any(_get_dispatch_mode(tracer) is not None for tracer in tracers)


def never_compile(code: CodeType) -> None:
    """Have ``torch.compile`` run the frames of a function as they are, and those below; older versions try them."""
    with contextlib.suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def forget_traced_rules() -> None:
    """Clear the caches of ``torch.compile`` where it is imported, as torch does before it makes a default group."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.trace_rules.clear_lru_cache()


# ---- backward passes ------------------------------------------------------------------------------------

engine_run_backward: Callable[..., object] = torch.autograd._engine_run_backward  # type: ignore[attr-defined,unused-ignore]
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Add a callback that runs when all gradients of the running pass are there, in the order in which they were added."""

# ---- process groups -------------------------------------------------------------------------------------


register_comm_hook = _register_comm_hook
register_process_group = _register_process_group
unregister_all_process_groups = _unregister_all_process_groups


def fsdp_roots() -> Iterator[FSDPState]:
    """Yield the states of FSDP2's root modules that have run in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    composable = sys.modules.get("torch.distributed._composable_state")
    if fsdp is None or composable is None:
        return
    seen = set()
    for reference in list(composable._module_state_mapping.values()):
        state = reference() if isinstance(reference, weakref.ref) else reference
        if isinstance(state, fsdp.FSDPState) and state._is_root and id(state) not in seen:
            seen.add(id(state))
            yield state


# ---- DTensor --------------------------------------------------------------------------------------------


def make_spec(like: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    """Return the spec of a DTensor of the same shape, strides and dtype that lies in another way."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DTensorSpec(like.mesh, tuple(placements), tensor_meta=like.tensor_meta)


def local_shape_and_offset(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a DTensor, and where it begins in the whole along each dim."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)
