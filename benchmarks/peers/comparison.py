"""All peers' answers in one table, with their ratios to meshbook's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.report import aligned, number
from benchmarks.stats import Summary, summarise

OURS = "meshbook"


class Answer(NamedTuple):
    """All samples of one question to one peer, of all rounds."""

    unit: str
    summary: Summary


class Goal(NamedTuple):
    """The peer shall need at least ``times`` as long as meshbook."""

    question: str
    peer: str
    times: float


CALL_GOALS = (
    *(Goal("call one", peer, 3) for peer in ("monarch", "ray")),
    *(Goal("call 8", peer, 5) for peer in ("monarch", "ray")),
    Goal("pipelined calls", "monarch", 4),
    Goal("pipelined calls", "ray", 10),
    Goal("100 MB to 8", "ray", 1),
    Goal("500 MB to 8", "ray", 1),
    Goal("10 MB from each of 8", "ray", 1),
)
ACTOR_GOALS = tuple(
    Goal(question, peer, times)
    for question, times in {
        "call one": 2.5,
        "call 8": 3.0,
        "stream 8": 3.0,
        "pipelined calls": 3.0,
        "actor to actor": 3.0,
        "actor to actor, 2 hosts": 2.0,
        "1 MB to one": 1.0,
        "1 MB to 8": 1.0,
        "100 MB to one": 1.0,
        "100 MB to 8": 1.0,
    }.items()
    for peer in ("monarch", "ray")
)

Results = dict[str, dict[str, Answer]]  # by peer, then by question


def collect(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> Results:
    """Join the rounds: samples of the same question to the same peer count together."""
    results: Results = {}
    for peer, given in answers.items():
        samples: dict[str, list[float]] = {}
        units: dict[str, str] = {}
        for answer in given:
            if "samples" in answer:
                samples.setdefault(answer["question"], []).extend(answer["samples"])
                units[answer["question"]] = answer["unit"]
        results[peer] = {name: Answer(units[name], summarise(values)) for name, values in samples.items()}
    return {peer: answered for peer, answered in results.items() if answered}


def problems(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return one line for each question that a peer could not answer."""
    lines = [
        f"{peer}, {answer['question']}: {answer['problem']}"
        for peer, given in answers.items()
        for answer in given
        if "problem" in answer
    ]
    return list(dict.fromkeys(lines))


def ratio(ours: Answer | None, theirs: Answer) -> float | None:
    """Return how many times slower (or heavier) the other is than meshbook; rates are inverted."""
    if ours is None:
        return None
    if theirs.unit == "per s":
        return ours.summary.median / theirs.summary.median
    return theirs.summary.median / ours.summary.median


def goals(results: Results, wanted: Sequence[Goal]) -> list[str]:
    """Return one line per goal that was measured."""
    lines = []
    for goal in wanted:
        theirs = results.get(goal.peer, {}).get(goal.question)
        times = ratio(results.get(OURS, {}).get(goal.question), theirs) if theirs else None
        if times is not None:
            met = "yes" if times >= goal.times else "NO"
            lines.append(f"{goal.question}: {times:.1f} times as fast as {goal.peer}, goal {goal.times:g}: {met}")
    return lines


def table(results: Results) -> str:
    """Return a line per question and a column per peer: median, p99 in brackets, times meshbook's median."""
    questions = dict.fromkeys(question for answered in results.values() for question in answered)
    rows = [(question, *(_cell(results, peer, question) for peer in results)) for question in questions]
    return aligned([("", *results), *rows])


def _cell(results: Results, peer: str, question: str) -> str:
    answer = results[peer].get(question)
    if answer is None:
        return "-"
    text = f"{number(answer.summary.median)} {answer.unit} ({number(answer.summary.p99)})"
    times = ratio(results.get(OURS, {}).get(question), answer)
    return text if peer == OURS or times is None else f"{text} x{number(times)}"
