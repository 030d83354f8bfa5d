"""Latencies of single requests."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.analysis.latencies import alone_s, latencies_s, slowdowns, spread
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sweep import points
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.record.columns import FINISHED, REJECTED


def result(finish_s, prompt_tokens=(10, 10, 10), output_tokens=(1, 5, 5)):
    seconds = {
        "arrival_ns": (0.0, 1.0, 2.0),
        "first_scheduled_ns": (0.5, 1.0, 2.0),
        "first_token_ns": (1.0, 2.0, 3.0),
        "finish_ns": finish_s,
    }
    columns = {name: np.array([round(v * 1e9) for v in values]) for name, values in seconds.items()}
    columns |= {
        "prompt_tokens": np.array(prompt_tokens),
        "output_tokens": np.array(output_tokens),
        "generated_tokens": np.array(output_tokens),
        "status": np.where(columns["finish_ns"] < 0, REJECTED, FINISHED),
    }
    return SimpleNamespace(requests=columns, window=None)


def test_latencies_are_those_computed_by_hand_and_nan_where_there_are_none():
    there = result((1.0, 4.0, -1e-9))
    nan = math.nan
    for latency, expected in {
        "ttft": [1.0, 1.0, nan],
        "e2el": [1.0, 3.0, nan],
        "queue_time": [0.5, 0.0, nan],
        "tpot": [nan, 0.5, nan],
    }.items():
        assert latencies_s(there, latency) == pytest.approx(expected, nan_ok=True)


def test_unknown_latency_names_the_nearest():
    with pytest.raises(SpecError, match="did you mean ttft"):
        latencies_s(result((1.0, 4.0, 5.0)), "tttf")


def test_spread_is_the_coefficient_of_variation_of_each_request():
    runs = [result((1.0, 2.0, 4.0)), result((3.0, 2.0, -1e-9))]
    # 1 s and 3 s: mean 2, sample standard deviation sqrt 2; equal times do not spread.
    assert spread(runs) == pytest.approx([math.sqrt(2) / 2, 0.0, math.nan], nan_ok=True)


def test_spread_of_one_run_or_of_other_requests_is_an_error():
    one = result((1.0, 2.0, 4.0))
    with pytest.raises(SchedlabError, match="at least 2 replications"):
        spread([one])
    with pytest.raises(SchedlabError, match="output_tokens differ"):
        spread([one, result((1.0, 2.0, 4.0), output_tokens=(1, 5, 6))])


def test_replay_of_a_trace_with_new_arrivals_serves_the_same_requests(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"{i},{20 + 7 * i},{5 + 3 * i}" for i in range(12)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    spec = make_spec(
        {"workload": {"trace": str(path), "request_rate": 100}, "replications": 3,
         "engine": {"max_num_seqs": 2}}
    )  # fmt: skip
    values = spread([run(point.spec) for point in points(spec)])
    assert values.shape == (12,)
    assert (values > 0).all()


def test_alone_is_a_lower_bound_and_an_empty_server_slows_nobody_down():
    spec = make_spec({"workload": {"trace": "fixed", "num_requests": 10, "request_rate": 20}})
    alone = alone_s(spec)
    assert (slowdowns(run(spec), alone) >= 1 - 1e-9).all()
    idle = spec.model_copy(
        update={"workload": spec.workload.model_copy(update={"request_rate": 0.001})}
    )
    assert slowdowns(run(idle), alone) == pytest.approx(1.0)


def test_slowdowns_of_another_workload_are_an_error():
    with pytest.raises(ValueError, match="3 requests, alone_s 2"):
        slowdowns(result((1.0, 2.0, 4.0)), np.ones(2))
