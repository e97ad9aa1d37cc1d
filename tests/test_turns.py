"""The comparison of two checkouts says what is slower, and what noise leaves open."""

from __future__ import annotations

from benchmarks.turns import ratio

QUIET = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0]


def test_what_is_as_fast_has_passed_and_what_is_slower_is_told() -> None:
    assert ratio(QUIET, QUIET[::-1], is_rate=False).verdict == "passed"
    slower = ratio(QUIET, [1.2 * each for each in QUIET], is_rate=False)
    assert slower.verdict == "SLOWER" and slower.low <= slower.median <= slower.high
    assert abs(slower.median - 1.2) < 0.01


def test_fewer_a_second_is_slower() -> None:
    assert ratio(QUIET, [0.8 * each for each in QUIET], is_rate=True).verdict == "SLOWER"
    assert ratio(QUIET, [0.8 * each for each in QUIET], is_rate=False).verdict == "passed"


def test_noise_leaves_it_open() -> None:
    noisy = [0.7, 1.4, 1.0, 0.8, 1.3, 0.9, 1.2, 0.6, 1.5, 1.0, 1.1]
    assert ratio(noisy, noisy[::-1], is_rate=False).verdict == "not decided"
