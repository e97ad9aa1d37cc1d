"""Monarch's names for settings of the process: ``from meshbook.monarch.config import configure, configured``.

    @parametrize_config(enable_log_forwarding={True, False})
    async def test_steps() -> None: ...

A module of its own because programs import it by this name, as they import ``monarch.config``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from meshbook.errors import UsageError
from meshbook.mesh.settings import clear_runtime_config, configure, get_global_config, get_runtime_config, restore

__all__ = [
    "clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config",
    "parametrize_config", "parametrize_config_pointwise",
]  # fmt: skip

_ARGUMENT = "_settings"


@contextlib.contextmanager
def configured(**overrides: object) -> Iterator[dict[str, object]]:
    """Apply settings, as `configure` does, inside the block only. Gives `get_global_config`."""
    before = get_runtime_config()
    try:
        configure(**overrides)
        yield get_global_config()
    finally:
        restore(before)


def parametrize_config(**options: Collection[object]) -> Callable[[Callable[..., Any]], Any]:
    """Have a test of pytest run with every combination of settings, each within `configured`.

    options: by setting, the values to try. Raises: UsageError for none.
    """
    return _parametrized(options, itertools.product(*options.values()))


def parametrize_config_pointwise(**options: Sequence[object]) -> Callable[[Callable[..., Any]], Any]:
    """Run a test with the first values of all, then the second, and so on. Raises: UsageError if some have more."""
    counts = {name: len(values) for name, values in options.items()}
    if len(set(counts.values())) > 1:
        raise UsageError(f"give every setting as many values, not {counts}.")
    return _parametrized(options, zip(*options.values(), strict=True))


def _parametrized(names: Collection[str], values: Iterator[tuple[object, ...]]) -> Callable[[Callable[..., Any]], Any]:
    if not names:
        raise UsageError("name a setting and the values to try: enable_log_forwarding={True, False}.")
    settings = [dict(zip(names, each, strict=True)) for each in values]

    def decorate(test: Callable[..., Any]) -> Any:
        import pytest  # only tests use this

        if inspect.iscoroutinefunction(test):

            async def run_async(_settings: dict[str, object], *args: Any, **kwargs: Any) -> Any:
                with configured(**_settings):
                    return await test(*args, **kwargs)

            wrapped: Callable[..., Any] = functools.update_wrapper(run_async, test)
        else:

            def run(_settings: dict[str, object], *args: Any, **kwargs: Any) -> Any:
                with configured(**_settings):
                    return test(*args, **kwargs)

            wrapped = functools.update_wrapper(run, test)
        first = inspect.Parameter(_ARGUMENT, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(test)
        wrapped.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()]
        )
        ids = ["-".join(f"{name}={value}" for name, value in each.items()) for each in settings]
        return pytest.mark.parametrize(_ARGUMENT, settings, ids=ids)(wrapped)

    return decorate
