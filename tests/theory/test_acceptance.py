"""Numbers that decide which drafted tokens are right: as if of a coin each, whoever asks when."""

import random

import numpy as np
import pytest

from schedlab.sim.request import Request
from schedlab.sim.speculation.acceptance import DrawnAcceptance

REQUESTS, PLACES = 100, 1_200


def right(rates, seed=0, num_requests=REQUESTS, places=PLACES, spread=0.0):
    """Return by request and place whether a single drafted token is right."""
    acceptance = DrawnAcceptance(rates, spread, seed)
    found = np.zeros((num_requests, places))
    for number in range(num_requests):
        outcome = acceptance.outcome(Request(number, 0, 1, places), places)
        found[number] = [outcome.verify(place, 1)[1] for place in range(places)]
    return found


def correlation(one, other):
    return np.corrcoef(one.ravel(), other.ravel())[0, 1] * np.sqrt(one.size)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.003, 0.3, 0.7, 0.999])
def test_tokens_are_right_as_often_as_the_rate_says(rate):
    found = right([rate])
    sigma = np.sqrt(rate * (1 - rate) / found.size)
    assert abs(found.mean() - rate) < 3 * sigma
    assert abs(found[:, 512:1024].mean() - rate) < 4 * sigma * np.sqrt(PLACES / 512)


@pytest.mark.slow
def test_tokens_are_right_independently_of_those_beside_them():
    found = right([0.7])
    for apart in (1, 2, 3, 8, 32, 64, 512):
        assert abs(correlation(found[:, apart:], found[:, :-apart])) < 3.5, apart
    for apart in (1, 2, 8, 16, 32):
        assert abs(correlation(found[apart:], found[:-apart])) < 3.5, apart
    for seed in (1, 2, 2**31):
        assert abs(correlation(found, right([0.7], seed))) < 3.5, seed


def test_eight_places_are_right_in_all_ways_as_often():
    found = right([0.5]).reshape(-1, 8) @ (1 << np.arange(8))
    counts = np.bincount(found.astype(int), minlength=256)
    expected = found.size / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 3.5 * np.sqrt(2 * 255)


def test_requests_have_ones_as_spread_as_those_of_coins():
    ones = right([0.7]).sum(axis=1)
    assert ones.var() == pytest.approx(PLACES * 0.21, rel=3.5 * np.sqrt(2 / REQUESTS))


def test_token_right_at_a_rate_is_right_at_a_higher_one():
    lower, higher = right([0.4], num_requests=20), right([0.41], num_requests=20)
    assert (higher >= lower).all()
    assert higher.sum() > lower.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("rates", "spread"), [([0.7], 0.0), ([0.7], 0.1), ([0.9, 0.5], 0.0)])
def test_what_becomes_of_a_request_does_not_depend_on_who_else_was_asked_for(rates, spread):
    draw = random.Random(2)
    every = DrawnAcceptance(rates, spread, seed=4)
    numbers = [draw.randrange(6_000) for _ in range(600)]  # so many that some are forgotten
    told = {}
    for number in [*numbers, *numbers]:
        length = draw.choice((40, 511, 512, 513, 1_300))
        outcome = every.outcome(Request(number, 0, 1, length), length)
        bursts, _ = outcome.verify_on(0, 3, length - 3)
        told.setdefault(number, []).append(bursts)
    for number, answers in told.items():
        longest = max(answers, key=len)
        assert all(longest.startswith(bursts) for bursts in answers)
        alone = DrawnAcceptance(rates, spread, seed=4).outcome(Request(number, 0, 1, 1_300), 1_300)
        assert alone.verify_on(0, 3, 1_297)[0].startswith(longest)
