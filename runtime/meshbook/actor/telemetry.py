"""Spans and measurements of actors and programs: `span`, `traced`, `get_meter`, with Monarch's names.

They go to OpenTelemetry where it is installed and the program, or each process by its bootstrap, has set a provider of
its own; spans go into profiles of PyTorch too. Without either they cost next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from meshbook.actor.context import current_actor_name, current_rank

TFunction = TypeVar("TFunction", bound=Callable[..., Any])

NAME = "meshbook"
"""Of the tracer and the meter, by which exporters tell them from others."""


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """What the block does is one span, which knows the actor and its rank. An error ends it, and is noted in it."""
    with contextlib.ExitStack() as spans:
        torch = sys.modules.get("torch")
        if torch is not None and torch.autograd._profiler_enabled():
            spans.enter_context(torch.profiler.record_function(name))
        if (trace := _opentelemetry("trace")) is not None:
            of_actor = {"meshbook.actor": current_actor_name(), "meshbook.rank": current_rank().rank}
            tracer = trace.get_tracer(NAME)
            spans.enter_context(tracer.start_as_current_span(name, attributes=of_actor))
        yield


@overload
def traced(function: TFunction) -> TFunction: ...
@overload
def traced(*, name: str) -> Callable[[TFunction], TFunction]: ...
def traced(function: Any = None, *, name: str | None = None) -> Any:
    """Make each call of a function, plain or ``async``, a `span`, by its own name or another.

    Above it in a class stands ``@endpoint``.
    """
    if function is None:
        return functools.partial(traced, name=name)
    title = name or function.__name__

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with span(title):
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with span(title):
            return function(*args, **kwargs)

    return called


def get_meter() -> Any:
    """OpenTelemetry's meter of this process: its ``create_counter``, ``create_histogram`` and so on.

    Where OpenTelemetry is not installed, one whose instruments take what they are given, and do nothing.
    """
    metrics = _opentelemetry("metrics")
    return _Nowhere() if metrics is None else metrics.get_meter(NAME)


def _opentelemetry(part: str) -> Any:
    """A module of it; None where it is not installed."""
    try:
        from opentelemetry import metrics, trace
    except ImportError:
        return None
    return {"metrics": metrics, "trace": trace}[part]


class _Instrument:
    def add(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Of counters."""

    def record(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Of histograms."""

    set = add


class _Nowhere:
    """A meter where there is no OpenTelemetry."""

    def _create(self, name: str, *_: object, **__: object) -> _Instrument:
        return _Instrument()

    create_counter = create_up_down_counter = create_histogram = create_gauge = _create
    create_observable_counter = create_observable_up_down_counter = create_observable_gauge = _create
