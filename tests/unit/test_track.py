"""Verifications to come, laid out in lots, against going through them one by one."""

from random import Random

import pytest

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.track import Track


def drawn(draw, most):
    """Draw verifications in lots: tokens that come out of each, and tokens drafted."""
    lots = []
    for _ in range(draw.randint(1, 6)):
        alike = draw.random() < 0.6
        drafted = [draw.randint(0, most)] * draw.randint(1, 5)
        if not alike:
            drafted = [draw.randint(0, most) for _ in drafted]
        lots.append(([draw.randint(1, one + 1) for one in drafted], drafted))
    return lots


@pytest.mark.parametrize(("plans_ahead", "lasts"), [(False, 4), (True, 8)])
def test_track_holds_slots_of_rejected_drafts_until_answers_have_passed_them(plans_ahead, lasts):
    # Four drafts, all rejected, twice: planned ahead the second lot lies behind the first.
    config = EngineConfig(
        num_blocks=99, max_model_len=99, block_size=1, num_speculative_tokens=4,
        async_scheduling=plans_ahead,
    )  # fmt: skip
    track = Track(config, 10, 0)
    track.extend(b"\1\1", b"\4\4")
    track.extend(bytes([1] * 14), bytes(14))
    most = 11 + 1 + 4 + (4 if plans_ahead else 0)
    # Each token behind them needs a slot of its own from then on, and one planned ahead none more.
    assert track.held(2) == most
    found = [track.held(i) - (10 + i) for i in range(2, 16)]
    assert found == [max(most - 10 - i, 0) for i in range(2, 16)]
    assert found.index(0) == lasts


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_track_holds_opens_and_counts_what_each_verification_does(seed, plans_ahead):
    draw = Random(seed)
    most, size, ahead = draw.randint(1, 4), draw.choice([1, 3, 4]), draw.choice([0, 2])
    context, spare = draw.randint(5, 20), draw.randint(0, 3)
    unresolved = draw.randint(0, 3) if plans_ahead else 0
    longest = context + draw.randint(8, 60)
    config = EngineConfig(
        num_blocks=99, max_model_len=longest, block_size=size, num_speculative_tokens=most,
        num_lookahead_tokens=ahead, async_scheduling=plans_ahead,
    )  # fmt: skip
    track = Track(config, context, spare, unresolved)
    lots = drawn(draw, most)
    for bursts, drafted in lots:
        track.extend(bytes(bursts), bytes(drafted))
    bursts = [one for lot, _ in lots for one in lot]
    drafted = [one for _, lot in lots for one in lot]
    came, blocks = 0, -(-(context + spare) // size)
    held, openings, befores = [context + spare], [], []
    for i, (burst, drafts) in enumerate(zip(bursts, drafted, strict=True)):
        befores.append(came)
        # An engine that plans ahead puts it behind all that the one before may leave.
        left = 0
        if plans_ahead:
            left = drafted[i - 1] + 1 - bursts[i - 1] if i else unresolved
        assert track.unresolved_before(i) == left
        end = min(context + came + left + 1 + drafts + ahead, longest)
        held.append(max(held[-1], end))
        while blocks * size < end:
            openings.append(i)
            blocks += 1
        came += burst
    assert list(track.bursts) == bursts
    assert list(track.drafted) == drafted
    assert track.openings == openings
    assert track.turns == [i for i in range(1, len(drafted)) if drafted[i] != drafted[i - 1]]
    assert track.num_tokens == came
    befores.append(came)
    asked = [draw.randrange(len(befores)) for _ in range(60)] + list(range(len(befores)))
    assert [track.tokens_before(i) for i in asked] == [befores[i] for i in asked]
    assert [track.held(i) for i in range(len(held))] == held
    assert [track.cut_short(i) for i in range(len(bursts))] == [
        burst <= drafts for burst, drafts in zip(bursts, drafted, strict=True)
    ]


def track_of(bursts, drafted):
    config = EngineConfig(num_blocks=99, max_model_len=99, num_speculative_tokens=5)
    track = Track(config, 10, 0)
    track.extend(bytes(bursts), bytes(drafted))
    return track


def test_track_whose_last_verification_is_cut_yields_less_and_was_not_cut_short():
    track = track_of([3, 2, 5], [2, 4, 4])
    assert [track.cut_short(i) for i in range(3)] == [False, True, False]
    track.cut(3)
    assert (list(track.bursts), track.num_tokens, track.cut_off) == ([3, 2, 2], 7, 3)
    assert not track.cut_short(2), "all of the draft were right"
    assert track.tokens_before(2) == 5
    assert track.tokens_before(3) == 7


@pytest.mark.parametrize(
    ("came", "accepted", "cut_off", "is_cut_short"),
    [(4, 3, 0, True), (5, 4, 0, False), (2, 4, 3, False), (2, 3, 2, True), (1, 0, 0, True)],
)
def test_track_is_settled_by_what_came_and_what_was_right(came, accepted, cut_off, is_cut_short):
    track = track_of([3, 1], [2, 4])
    track.settle(came, accepted)
    assert (list(track.bursts), track.num_tokens) == ([3, came], 3 + came)
    assert track.cut_off == cut_off
    assert track.cut_short(1) == is_cut_short
    assert not track.cut_short(0)
