"""Which requests an experiment asks for: rows of a file, drawn or cut, with its own arrivals."""

import numpy as np
import pytest

from schedlab.experiments.running.workload import is_too_short, load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.errors import SpecError

ROWS = ((0, 10, 1), (1, 20, 2), (3, 30, 3), (6, 40, 4))


@pytest.fixture
def loaded(tmp_path):
    """Load requests of 10, 20, 30 and 40 tokens that come at 0, 1, 3 and 6 s."""
    path = tmp_path / "four.csv"
    lines = [f"2023-11-16 18:00:{s:02}.0000000,{prompt},{output}" for s, prompt, output in ROWS]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))

    def load(max_model_len=100, seed=0, **workload):
        spec = make_spec({"seed": seed, "workload": {"trace": str(path), **workload}})
        return load_workload(spec, max_model_len)

    return load


def rows(trace):
    columns = trace.arrival_ns / 1e9, trace.prompt_tokens, trace.output_tokens
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_rows_of_a_file_come_at_their_times_or_a_scale_of_them(loaded):
    assert rows(loaded()) == list(ROWS)
    assert rows(loaded(num_requests=2)) == list(ROWS[:2])
    assert rows(loaded(slice=[1, 4])) == [(0, 20, 2), (2, 30, 3)]
    assert [at for at, *_ in rows(loaded(rate_scale=2))] == [0, 0.5, 1.5, 3]
    assert [at for at, *_ in rows(loaded(request_rate="inf"))] == [0, 0, 0, 0]
    with pytest.raises(
        SpecError, match=r"num_requests: 5 asked for, but .*four.csv has 4 "
    ) as told:
        loaded(num_requests=5)
    assert is_too_short(str(told.value))
    assert not is_too_short("no request arrives in 9..10 s")


def test_rows_drawn_at_random_are_whole_and_come_when_the_rate_says(loaded):
    drawn, other = (loaded(resample=True, num_requests=400, request_rate=2, seed=s) for s in (0, 1))
    found = {(prompt, output) for _, prompt, output in rows(drawn)}
    assert found == {row[1:] for row in ROWS}
    assert drawn.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert (np.diff(drawn.arrival_ns) > 0).all()
    assert drawn.arrival_ns[-1] / 1e9 == pytest.approx(200, rel=0.2)
    assert any("400 rows drawn at random" in note for note in drawn.report.notes)
    assert any("Poisson, 2 req/s" in note for note in drawn.report.notes)
    # It goes on where it was: more rows begin with the same ones.
    few = loaded(resample=True, num_requests=7, request_rate=2)
    assert rows(few) == rows(drawn)[:7]


def test_rows_drawn_at_random_have_no_times_of_their_own(loaded):
    said = "workload.resample: rows are drawn without the times .*; give workload.request_rate"
    with pytest.raises(SpecError, match=said):
        loaded(resample=True, num_requests=9)


def test_lengths_of_an_experiment_replace_those_of_the_file_one_by_one(loaded):
    prompts = loaded(prompt_tokens={"distribution": "fixed", "tokens": 7})
    assert rows(prompts) == [(at, 7, output) for at, _, output in ROWS]
    assert "prompt_tokens drawn anew" in prompts.report.notes
    outputs = loaded(output_tokens={"distribution": "fixed", "tokens": 7})
    assert rows(outputs) == [(at, prompt, 7) for at, prompt, _ in ROWS]
    assert "output_tokens drawn anew" in outputs.report.notes


def test_requests_that_are_too_long_are_clipped_or_dropped_by_the_shorter_limit(loaded):
    # 44 tokens are too many for 40, and 33 for 30.
    assert rows(loaded(40, too_long="clip_prompt"))[2:] == [(3, 30, 3), (6, 36, 4)]
    assert rows(loaded(30, too_long="drop")) == list(ROWS[:2])
    limited = {"too_long": "clip_prompt", "max_total_tokens": 30}
    assert rows(loaded(40, **limited))[2:] == rows(loaded(30, too_long="clip_prompt"))[2:]
    assert rows(loaded(20, **limited)) == rows(loaded(20, too_long="clip_prompt"))
    assert rows(loaded(too_long="reject", max_total_tokens=100)) == list(ROWS)
    with pytest.raises(SpecError, match="too_long must be drop or clip_prompt"):
        loaded(too_long="reject", max_total_tokens=99)


def test_classes_with_arrivals_of_their_own_share_the_requests_by_who_comes_first(loaded):
    steady = {"process": "constant"}
    classes = {
        "slow": {"arrivals": {**steady, "rate": 1}, "priority": 1},
        "fast": {"arrivals": {**steady, "rate": 3}, "priority": 0},
    }
    trace = loaded(resample=True, num_requests=8, classes=classes)
    assert sorted(trace.tenant.tolist()) == ["fast"] * 6 + ["slow"] * 2
    assert (np.diff(trace.arrival_ns) >= 0).all()
    assert trace.priority.tolist() == [int(name == "slow") for name in trace.tenant]
