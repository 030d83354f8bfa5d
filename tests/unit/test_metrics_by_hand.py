"""Metrics of sessions, tiers and fleets of a few rows, each worked out by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics import fleet, sessions, tiers
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.window import Window
from schedlab.sim.record.columns import REJECTED
from schedlab.sim.record.copies import TierFacts
from schedlab.sim.record.fleet import STILL


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
    run = SimpleNamespace(sessions=table, leaving_sessions=table, duration_s=8.0)
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
    run = SimpleNamespace(sessions=nobody, leaving_sessions=nobody, duration_s=8.0)
    assert sessions.completed_sessions(run) == sessions.session_throughput(run) == 0
    assert sessions.mean_session_requests(run) == 7.0
    for name in ("mean_session_s", "p50_session_s", "mean_session_away_s", "session_makespan_s"):
        assert math.isnan(getattr(sessions, name)(run))
    with pytest.raises(SpecError, match="there are no sessions"):
        sessions.num_sessions(SimpleNamespace(sessions={}))


def test_rate_of_sessions_is_of_those_that_end_in_the_window_whenever_they_began():
    # a and e begin before the window, c begins and ends in it; b ends after it, d lacks an answer.
    requests = {
        "id": whole(*range(7)), "turn": whole(*range(7)),
        "session": np.array(["a", "a", "e", "b", "c", "d", "d"]),
        "status": whole(0, 0, 0, 0, 0, 0, REJECTED),
        "arrival_ns": ns(0, 3, 1, 2, 3, 3, 4), "first_scheduled_ns": ns(0, 3, 1, 2, 3, 3, 4),
        "last_token_ns": ns(1, 4, 2, 9, 5, 4, 4), "finish_ns": ns(1, 4, 2, 9, 5, 4, -1e-9),
        **{name: whole(*[1] * 7) for name in
           ("prompt_tokens", "generated_tokens", "prefix_hit_tokens")},
    }  # fmt: skip
    result = SimpleNamespace(
        requests=requests, log=Log(), window=Window(*ns(2, 6)), kv_capacity_tokens=1, num_engines=1,
        engines=(), tiers=(), copies={}, copy_waits={},
    )  # fmt: skip
    run = Observation(result)
    assert sessions.session_throughput(run) == 3 / 4.0
    assert sessions.completed_sessions(run) == 2  # of those that began in it: b and c
    some = run.only(np.isin(requests["session"], ["a", "b", "d"]))
    assert sessions.session_throughput(some) == 1 / 4.0
    whole_run = Observation(SimpleNamespace(**{**vars(result), "window": None}))
    assert sessions.session_throughput(whole_run) == 4 / whole_run.duration_s


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
        TierFacts(name, num, block_bytes=1000, block_tokens=16)
        for name, num in (("host", 100), ("disk", 40))
    ]
    told = {
        "tiers": facts, "copies": COPIES, "window": Window(ns(2)[0], ns(9)[0]),
        "requests": {"id": whole(1, 2, 3), "prompt_tokens": whole(100, 300, 400)},
        "copy_waits": {"start_ns": ns(1, 2, 8.9, 9), "wait_ns": ns(100, 0.5, 0.25, 100)},
    }  # fmt: skip
    return SimpleNamespace(**told | changes)


def test_bytes_of_tiers_are_those_of_the_engine_that_each_block_is_of():
    (host, disk), engine = tiered().tiers, whole(1, 0, 0, 1, 0, 0, 1, 1, 0)
    run = tiered(
        tiers=[facts._replace(engine_block_bytes=(1000, 250)) for facts in (host, disk)],
        copies={**COPIES, "engine": engine},
    )
    # Blocks that count, as in the test below: 2 and 17 of the engine of small blocks, 3 and 19 of
    # the other; stored 5 of the first, 7 and 11 of the other.
    assert tiers.loaded_bytes(run) == 250 * (2 + 17) + 1000 * (3 + 19)
    assert tiers.loaded_bytes(run, "disk") == 250 * 17 + 1000 * 19
    assert tiers.stored_bytes(run) == 250 * 5 + 1000 * (7 + 11)


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


def engine(num_gpus, price, paid=(), served=()):
    """Return what is known of an engine, its spans in seconds."""
    spans = [
        [(ns(a)[0], STILL if b is None else ns(b)[0]) for a, b in times] for times in (paid, served)
    ]
    return SimpleNamespace(
        num_gpus=num_gpus, usd_per_gpu_hour=price, paid=spans[0], served=spans[1]
    )  # fmt: skip


def fleet_run(*engines, **changes):
    told = {
        "engines": engines, "num_engines": 3, "begin_ns": ns(10)[0], "duration_s": 20.0,
        "steps": {
            "engine": whole(0, 1, 0), "num_decodes": whole(3, 5, 7),
            "prefill_tokens": whole(10, 100, 0),
        },
        "engine_busy_ns": np.array([7e9, 2e9, 0.0]),
        "requests": {
            "id": whole(1, 2, 3, 4), "engine": whole(1, 1, 1, 0), "num_losses": whole(0, 2, 1, 0),
            "lost_tokens": whole(0, 40, 2, 0), "transferred_bytes": whole(5, 0, 7, 0),
            "transfer_end_ns": ns(3, -1e-9, 5, 9), "first_token_ns": ns(2.75, 1, 4, 8.5),
            "num_moves": whole(2, 0, 1, 0), "moved_stop_ns": ns(0.25, 0, 0.125, 0),
            "generated_tokens": whole(100, 300, 50, 0),  # the third failed midway
        },
        "window": None, "completed": np.array([True, True, False, False]),
    }  # fmt: skip
    return SimpleNamespace(**told | changes)


def test_metrics_of_a_fleet_are_of_its_engines_requests_and_devices():
    # From 10 to 30 s: two devices at 36 dollars an hour for 15 s, four at 9 from 25 s on.
    run = fleet_run(
        engine(2, 36.0, paid=[(0, 18), (20, 27)], served=[(12, 18), (22, 27)]),
        engine(4, 9.0, paid=[(25, None)], served=[(28, None), (40, 50)]), engine(1, 0.0),
    )  # fmt: skip
    usd = (2 * 36.0 * 15 + 4 * 9.0 * 5) / 3600
    found = {
        "num_engines": 3, "load_imbalance": 7 / 3, "request_imbalance": 3 / (4 / 3),
        "token_imbalance": 105 / (125 / 3), "min_engine_busy_share": 0.0,
        "max_engine_busy_share": 7 / 20, "gpu_seconds": 2 * 15 + 4 * 5, "cost_usd": usd,
        "availability_share": (11 + 2) / (15 + 5), "mean_engines_up": 13 / 20,
        "requests_retried": 2, "lost_tokens": 42, "transferred_bytes": 12,
        "usd_per_million_output_tokens": usd * 1e6 / 400,
        # 250, 1000 and 500 ms; the second went nowhere.
        "mean_handover_ms": 1750 / 3, "num_moves": 3, "mean_move_stop_ms": 125.0,
    }  # fmt: skip
    assert {name: getattr(fleet, name)(run) for name in found} == pytest.approx(found)
    assert [fleet.busy_share_of(run, i) for i in range(3)] == pytest.approx([7 / 20, 0.1, 0])
    for number in (-1, 3):
        with pytest.raises(SpecError, match=f"there are engines 0 to 2, got {number}"):
            fleet.busy_share_of(run, number)


def test_metrics_of_a_fleet_that_is_always_there_count_the_whole_run():
    run = fleet_run(engine(2, 36.0), engine(4, 9.0))
    assert fleet.gpu_seconds(run) == 6 * 20.0
    assert fleet.cost_usd(run) == pytest.approx((72 + 36) * 20 / 3600)
    assert (fleet.availability_share(run), fleet.mean_engines_up(run)) == (1.0, 3.0)
    assert math.isnan(fleet.cost_usd(fleet_run(engine(2, 36.0), engine(4, None))))
    alone = fleet_run(
        requests={"id": whole(1, 2, 3, 4)}, num_engines=1, engine_busy_ns=np.array([3e9]),
        steps={"num_decodes": whole(3, 5), "prefill_tokens": whole(10, 100)},
    )  # fmt: skip
    assert math.isnan(fleet.gpu_seconds(alone))
    assert math.isnan(fleet.cost_usd(alone))
    assert fleet.max_engine_busy_share(alone) == 3 / 20
    assert fleet.load_imbalance(alone) == fleet.request_imbalance(alone) == 1.0
    assert fleet.token_imbalance(alone) == 1.0
    counts = (fleet.requests_retried, fleet.lost_tokens, fleet.transferred_bytes, fleet.num_moves)
    assert [count(alone) for count in counts] == [0] * 4
    assert math.isnan(fleet.mean_handover_ms(alone))
    assert math.isnan(fleet.mean_move_stop_ms(alone))


class Log:
    """Tables of a run, which notes of whom it is asked."""

    def __init__(self):
        self.asked = []

    def steps(self):
        return {"start_ns": ns(1, 2, 5), "end_ns": ns(2, 4.5, 6), "num_decodes": whole(1, 2, 3)}

    def token_counts(self, ids):
        self.asked.append(("counts", ids if ids is None else ids.tolist()))
        return {"end_ns": ns(2, 4.5, 6), "count": whole(10, 20, 30)}

    def token_gaps(self, ids):
        self.asked.append(("gaps", ids if ids is None else ids.tolist()))
        return {"gap_ns": ns(0.5, 1.5), "count": whole(3, 1)}

    def preemptions(self):
        return {"id": whole(7, 5, 7), "evicted_ns": ns(1, 2, 3), "resumed_ns": ns(4, 5, 6)}


def observed(window=None, chosen=None, lost=0):
    requests = {
        "id": whole(5, 6, 7, 8), "arrival_ns": ns(1, 2, 3, 4), "finish_ns": ns(5, 2.5, 3.5, -1e-9),
        "status": np.array([0, 0, 0, 1], dtype=np.int8), "generated_tokens": whole(3, 1, 2, lost),
        "tenant": np.array(["a", "b", "a", "b"], dtype=object),
    }  # fmt: skip
    result = SimpleNamespace(
        requests=requests, log=Log(), window=window, kv_capacity_tokens=100, num_engines=2,
        frontend=None,
        engines=("e",), tiers=("t",), copies={"c": 1}, copy_waits={"w": 2},
    )  # fmt: skip
    return Observation(result, chosen), result.log


def test_length_of_a_step_is_told_to_the_nanosecond():
    run, log = observed()
    start_ns, length_ns = 3 * 10**12, 2**24 + 1
    log.steps = lambda: {"start_ns": whole(start_ns), "end_ns": whole(start_ns + length_ns)}
    assert run.step_ns.tolist() == [length_ns]


def test_busy_time_of_engines_in_a_window_is_of_what_lies_inside_of_steps():
    # Steps from 1 to 2, 2 to 4.5 and 5 to 6 s; both ends of the window lie in one.
    run, _ = observed(Window(*ns(1.5, 5.75)))
    assert run.engine_busy_ns.tolist() == [(0.5 + 2.5 + 0.75) * 1e9, 0]
    assert fleet.max_engine_busy_share(run) == pytest.approx(3.75 / 4.25)
    # Of the whole run, which ends with the last answer, at 5 s.
    run, _ = observed()
    assert run.engine_busy_ns.tolist() == [3.5e9, 0]


def test_busy_time_of_a_pipeline_counts_steps_that_overlap_once():
    run, log = observed()
    log.steps = lambda: {
        "engine": whole(1, 0, 1, 1), "start_ns": ns(1, 1, 1.5, 4), "end_ns": ns(2, 2.5, 3, 4.5),
        "stage_0_ns": ns(0.5, 0, 1, 0.5), "stage_1_ns": ns(0.5, 0, 0.5, 0),
    }  # fmt: skip
    assert run.engine_busy_ns.tolist() == [1.5e9, 2.5e9]


def test_observation_of_a_whole_run_has_all_of_it():
    run, log = observed()
    assert run.requests["id"].tolist() == run.leaving["id"].tolist() == [5, 6, 7, 8]
    assert run.completed.tolist() == [True, True, True, False]
    # From the first arrival to the last finish of an answer.
    assert (run.duration_s, run.begin_ns, run.first_arrival_ns) == (4.0, 10**9, 10**9)
    assert [one.tolist() for one in run.token_counts] == [ns(2, 4.5, 6).tolist(), [10, 20, 30]]
    assert [one.tolist() for one in run.token_gaps] == [ns(0.5, 1.5).tolist(), [3, 1]]
    assert log.asked == [("counts", None), ("gaps", None)]
    assert run.preemptions["evicted_ns"].tolist() == ns(1, 2, 3).tolist()
    assert run.step_ns.tolist() == [1e9, 2.5e9, 1e9]
    assert run.step_totals.sums["num_decodes"] == 6
    assert run.column("tenant").tolist() == ["a", "b", "a", "b"]
    told = (run.kv_capacity_tokens, run.num_engines, run.engines, run.tiers, run.copies)
    assert (*told, run.copy_waits) == (100, 2, ("e",), ("t",), {"c": 1}, {"w": 2})
    with pytest.raises(SpecError, match="column: no 'tenent'; did you mean tenant"):
        run.column("tenent")


def test_observation_of_a_window_holds_its_beginning_and_not_its_end():
    run, log = observed(Window(ns(2)[0], ns(5)[0]))
    assert run.requests["id"].tolist() == [6, 7, 8]
    assert run.leaving["id"].tolist() == [6, 7]
    assert (run.duration_s, run.begin_ns, run.first_arrival_ns) == (3.0, 2 * 10**9, 2 * 10**9)
    assert [one.tolist() for one in run.token_counts] == [ns(2, 4.5).tolist(), [10, 20]]
    assert [one.tolist() for one in run.token_gaps] == [ns(0.5, 1.5).tolist(), [3, 1]]
    assert log.asked == [("counts", None), ("gaps", [6, 7])]
    assert run.preemptions["evicted_ns"].tolist() == ns(1, 3).tolist()
    assert run.steps["num_decodes"].tolist() == [2]
    assert [some["num_decodes"].tolist() for some in run.step_batches()] == [[2]]
    assert run.step_ns.tolist() == [2.5e9]
    assert run.column("id").tolist() == [5, 6, 7, 8], "also those outside"


def test_observation_where_somebody_failed_midway_asks_for_tokens_of_the_others():
    run, log = observed(lost=1)
    assert run.token_gaps[1].tolist() == [3, 1]
    answered = list(run.token_count_batches(answered=True))
    assert [tokens.tolist() for _, tokens in answered] == [[10, 20, 30]]
    assert run.token_counts[1].tolist() == [10, 20, 30], "everybody's, where nobody says"
    assert log.asked == [("gaps", [5, 6, 7]), ("counts", [5, 6, 7]), ("counts", None)]
    b_alone = run.only(run.column("tenant") == "b")
    assert (b_alone.token_gaps, list(b_alone.token_count_batches(answered=True))) != ()
    assert log.asked[3:] == [("gaps", [6]), ("counts", [6])]
    of_all, log = observed()
    assert list(of_all.token_count_batches(answered=True))
    assert log.asked == [("counts", None)], "nobody else has any"


def test_observation_of_a_class_is_of_its_requests_and_of_the_same_time():
    run, log = observed(chosen=np.array([True, False, True, True]))
    some = run.only(run.column("tenant") == "a")
    assert some.requests["id"].tolist() == [5, 7]
    assert (some.duration_s, some.begin_ns, some.first_arrival_ns) == (4.0, 10**9, 10**9)
    others = run.only(run.column("tenant") == "b")
    assert others.requests["id"].tolist() == [8]
    assert others.first_arrival_ns == 4 * 10**9
    assert [one.tolist() for one in some.token_counts][1] == [10, 20, 30]
    assert some.token_gaps[1].tolist() == [3, 1]
    assert log.asked == [("counts", [5, 7]), ("gaps", [5, 7])]
    assert others.preemptions["id"].tolist() == []
    with pytest.raises(SpecError, match="they are not told of a class"):
        assert some.steps
    nobody = run.only(run.column("tenant") == "c")
    assert nobody.first_arrival_ns == 0
