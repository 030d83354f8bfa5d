"""Metrics of sessions and of tiers of a few rows, each worked out by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics import sessions, tiers
from schedlab.sim.metrics.window import Window


def ns(*seconds):
    return np.array([round(s * 1e9) for s in seconds], dtype=np.int64)


def whole(*values):
    return np.array(values, dtype=np.int64)


def test_metrics_of_sessions_are_of_those_that_got_all_their_answers():
    # The third has no last answer; it counts as a session of seven requests, and for nothing else.
    table = {
        "num_requests": whole(1, 4, 7), "start_ns": ns(10, 11, 5),
        "finish_ns": whole(14e9, 31e9, -1),
        "away_ns": ns(1, 8, 99), "queue_ns": ns(0.5, 1, 99), "running_ns": ns(2.5, 11, 99),
        "generated_tokens": whole(6, 0, 99),
    }  # fmt: skip
    run = SimpleNamespace(sessions=table, duration_s=8.0)
    found = {
        "num_sessions": 3, "completed_sessions": 2, "session_throughput": 2 / 8.0,
        "mean_session_requests": 4.0, "mean_session_s": (4 + 20) / 2, "p50_session_s": 12.0,
        "p90_session_s": 4 + 0.9 * 16, "p99_session_s": 4 + 0.99 * 16,
        "mean_session_away_s": 4.5, "mean_session_queue_s": 0.75, "mean_session_running_s": 6.75,
        # (4 - 1) / 6 tokens and (20 - 8) over none, which counts as one.
        "mean_session_normalized_s": (0.5 + 12) / 2, "session_makespan_s": 31 - 10.0,
    }  # fmt: skip
    assert {name: getattr(sessions, name)(run) for name in found} == pytest.approx(found)
    nobody = {name: column[2:] for name, column in table.items()}
    run = SimpleNamespace(sessions=nobody, duration_s=8.0)
    assert sessions.completed_sessions(run) == sessions.session_throughput(run) == 0
    assert sessions.mean_session_requests(run) == 7.0
    for name in ("mean_session_s", "p50_session_s", "mean_session_away_s", "session_makespan_s"):
        assert math.isnan(getattr(sessions, name)(run))
    with pytest.raises(SpecError, match="there are no sessions"):
        sessions.num_sessions(SimpleNamespace(sessions={}))


# Of tier 0 three loads, of which one of a request that is not measured and one of swapped blocks,
# and two stores; of tier 1 a load in two parts. A store of nobody's is at 3 s, another at 9 s.
COPIES = {
    "id": whole(1, 9, 2, 1, 2, -1, -1, 3, 3), "tier": whole(0, 0, 0, 0, 0, 0, 1, 1, 1),
    "is_load": whole(1, 1, 1, 0, 0, 0, 0, 1, 1), "is_swap": whole(0, 0, 1, 0, 1, 0, 0, 0, 0),
    "num_blocks": whole(2, 500, 3, 5, 7, 11, 13, 17, 19),
    "issued_ns": ns(1, 1, 2, 1, 1, 3, 9, 4, 4), "done_ns": ns(1.5, 9, 4, 2, 3, 4, 9.5, 6, 5),
    "used_blocks": whole(20, 90, 10, 15, 25, 60, 30, 5, 8),
}  # fmt: skip


def tiered(**changes):
    facts = [
        SimpleNamespace(name=name, num_blocks=num, block_tokens=16, block_bytes=1000)
        for name, num in (("host", 100), ("disk", 40))
    ]
    told = {
        "tiers": facts, "copies": COPIES, "window": Window(ns(2)[0], ns(9)[0]),
        "requests": {"id": whole(1, 2, 3), "prompt_tokens": whole(100, 300, 400)},
        "copy_waits": {"start_ns": ns(1, 2, 8.9, 9), "wait_ns": ns(100, 0.5, 0.25, 100)},
    }  # fmt: skip
    return SimpleNamespace(**told | changes)


def test_metrics_of_tiers_are_of_copies_of_measured_requests_and_of_nobodys_in_the_window():
    run = tiered()
    hits = [tiers.tier_hit_tokens(run, name) for name in ("all", "host", "disk")]
    assert hits == [16 * (2 + 17 + 19), 16 * 2, 16 * (17 + 19)]
    assert tiers.tier_hit_share(run) == 16 * 38 / 800
    assert tiers.tier_hit_share(run, "host") == 32 / 800
    loaded = [tiers.loaded_bytes(run, name) for name in ("all", "host", "disk")]
    assert loaded == [41_000, 5_000, 36_000]
    stored = [tiers.stored_bytes(run, name) for name in ("all", "host", "disk")]
    assert stored == [23_000, 23_000, 0]
    # 0.5 s, 2 s, and of the load in two parts the longer, 2 s.
    assert tiers.num_waits_for_load(run) == 3
    assert tiers.mean_load_wait_s(run) == pytest.approx(1.5)
    assert tiers.p99_load_wait_s(run) == pytest.approx(2.0)
    assert tiers.copy_wait_s(run) == 0.75
    peaks = [tiers.tier_peak_share(run, name) for name in ("all", "host", "disk")]
    assert peaks == [0.6, 0.6, 0.2]
    whole_run = tiered(window=None)
    assert tiers.stored_bytes(whole_run, "disk") == 13_000
    assert tiers.copy_wait_s(whole_run) == pytest.approx(200.75)
    assert tiers.tier_peak_share(whole_run, "disk") == 0.75
    with pytest.raises(SpecError, match="tier: no 'dusk'; did you mean disk"):
        tiers.loaded_bytes(run, "dusk")


def test_metrics_of_a_run_without_copies_or_tiers_are_zero_or_no_number():
    none = {name: column[:0] for name, column in COPIES.items()}
    run = tiered(copies=none)
    assert tiers.num_waits_for_load(run) == tiers.tier_hit_tokens(run) == 0
    assert math.isnan(tiers.mean_load_wait_s(run))
    assert math.isnan(tiers.p99_load_wait_s(run))
    assert tiers.tier_peak_share(run) == 0.0
    bare = tiered(copies=none, tiers=[])
    assert tiers.tier_hit_tokens(bare) == tiers.loaded_bytes(bare) == tiers.stored_bytes(bare) == 0
    assert math.isnan(tiers.tier_peak_share(bare))
    two = {name: column[[0, 2]] for name, column in COPIES.items()}
    waits = tiered(copies=two | {"done_ns": ns(2, 12)})
    assert tiers.p99_load_wait_s(waits) == pytest.approx(1 + 0.99 * 9)
