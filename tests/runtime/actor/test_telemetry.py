"""Spans and measurements, with OpenTelemetry in every process and without it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, endpoint, get_meter, span, traced

pytestmark = pytest.mark.monarch

pytest.importorskip("opentelemetry.sdk")

WITHOUT = """
import asyncio, sys
sys.modules["opentelemetry"] = None
from meshbook.actor import get_meter, span, traced

@traced
def plain(value):
    return value

@traced(name="other")
async def later(value):
    return value

with span("block"):
    print(plain(1), asyncio.run(later(2)), plain.__name__)
meter = get_meter()
meter.create_counter("steps", unit="1").add(1, {"rank": 0})
meter.create_histogram("seconds").record(0.5)
meter.create_up_down_counter("open").add(-1)
meter.create_observable_gauge("depth", [])
"""


def set_providers() -> None:
    """The bootstrap of processes whose spans and measurements are kept in memory."""
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    global spans, measured
    spans, measured = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([measured]))


class Worker(Actor):
    def __init__(self) -> None:
        set_providers()
        self.steps = get_meter().create_counter("steps")

    @endpoint
    @traced
    def step(self, by: int) -> int:
        self.steps.add(by)
        with span("inner"):
            return by

    @endpoint
    @traced(name="awaited")
    async def step_later(self) -> int:
        await asyncio.sleep(0)
        return 7

    @endpoint
    @traced
    def fail(self) -> None:
        raise ValueError("broken")

    @endpoint
    def told(self) -> list[tuple[str, object, object, str, bool]]:
        return [
            (one.name, one.attributes["meshbook.actor"], one.attributes["meshbook.rank"], one.status.status_code.name,
             one.parent is not None)
            for one in spans.get_finished_spans()
        ]  # fmt: skip

    @endpoint
    def counted(self) -> int:
        data = measured.get_metrics_data()
        (point,) = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
        return int(point.value)


@pytest.fixture(scope="module")
def procs(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="told", torch=False) as mesh:
        yield mesh


def test_endpoints_are_spans_that_know_their_actor(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", Worker)
    assert workers.step.call(3).get(60).values() == [3, 3]
    assert workers.step_later.call().get(60).values() == [7, 7]
    with pytest.raises(Exception, match="broken"):
        workers.fail.call().get(60)
    for rank, told in enumerate(workers.told.call().get(60).values()):
        name = f"told.workers[{rank}]"
        assert told == [
            ("inner", name, rank, "UNSET", True),
            ("step", name, rank, "UNSET", False),
            ("awaited", name, rank, "UNSET", False),
            ("fail", name, rank, "ERROR", False),
        ]
    assert workers.counted.call().get(60).values() == [3, 3]


def test_spans_are_in_profiles() -> None:
    with torch.profiler.profile() as profile, span("a block of ours"):
        torch.ones(1)
    assert "a block of ours" in {event.key for event in profile.key_averages()}


def test_without_opentelemetry_nothing_happens(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1 2 plain\n", "")
