"""A sweep expands to plain experiments, in order, with common random numbers."""

import pytest

from experiments.loading import make_spec
from experiments.sweep import points
from sim.errors import SpecError

WORKLOAD = {"trace": "azure-conv", "num_requests": 10, "request_rate": 2.0}


def expand(sweep, **keys):
    return points(make_spec({"name": "x", "workload": WORKLOAD, "sweep": sweep, **keys}))


def test_points_without_sweep_is_the_experiment_itself():
    (point,) = expand({})
    assert (point.label, point.settings, point.replication) == ("x", {}, 0)
    assert point.spec == make_spec({"name": "x", "workload": WORKLOAD})


def test_points_vary_the_last_key_fastest():
    found = expand({"policy": ["fcfs", "static"], "workload.request_rate": [1, 2.5, "inf"]})
    assert [point.label for point in found] == [
        "fcfs, request_rate=1", "fcfs, request_rate=2.5", "fcfs, request_rate=inf",
        "static, request_rate=1", "static, request_rate=2.5", "static, request_rate=inf",
    ]  # fmt: skip
    assert [point.spec.workload.request_rate for point in found[:2]] == [1.0, 2.5]
    assert {point.spec.policy.name for point in found[3:]} == {"static"}
    assert all(not point.spec.sweep and point.spec.replications == 1 for point in found)


def test_replications_have_the_same_seeds_at_every_setting():
    found = expand({"policy": ["fcfs", "static"]}, seed=5, replications=3)
    assert [point.spec.seed for point in found] == [5, 6, 7, 5, 6, 7]
    assert [point.replication for point in found] == [0, 1, 2, 0, 1, 2]
    assert len({point.label for point in found}) == 2


def test_labels_tell_apart_values_of_the_same_name():
    noisy = {"name": "sjf", "predictor": {"name": "noisy", "sigma": 0.5}}
    found = expand({"policy": ["fcfs", {"name": "sjf", "predictor": "oracle"}, noisy]})
    assert [point.label for point in found] == [
        "fcfs", "sjf(predictor=oracle)", "sjf(predictor=noisy(sigma=0.5))"
    ]  # fmt: skip


def test_labels_keep_as_much_of_the_key_as_needed(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x")
    traces = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    found = expand({"workload.trace": traces, "policy.pad_prompts": [True]}, policy="static")
    assert found[0].label == "trace=a.csv, pad_prompts=true"


def test_folders_are_unique_sorted_and_plain_names():
    found = expand({"policy": ["fcfs", "static"], "seed": list(range(8))}, replications=2)
    folders = [point.folder for point in found]
    assert folders == sorted(folders)
    assert len(set(folders)) == 32
    assert all(set(folder) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-=.") for folder in folders)


def test_sweep_inside_a_swept_policy_applies_to_each_value():
    found = expand(
        {"policy": ["static", "dynamic"], "policy.max_batch_size": [4, 8]}, policy="fcfs"
    )
    assert [(p.spec.policy.name, p.spec.policy.knobs["max_batch_size"]) for p in found] == [
        ("static", 4), ("static", 8), ("dynamic", 4), ("dynamic", 8)
    ]  # fmt: skip


def test_points_combination_invalid_together_is_named():
    spec = make_spec(
        {
            "workload": WORKLOAD,
            "sweep": {"engine.max_num_seqs": [8, 512], "engine.max_num_batched_tokens": [512, 64]},
        }
    )
    with pytest.raises(SpecError, match=r"max_num_seqs=512, max_num_batched_tokens=64"):
        points(spec)
