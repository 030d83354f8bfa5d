"""A sweep expands to plain experiments, in order, with common random numbers."""

import pytest

from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.experiments.specification.sweep import points
from schedlab.experiments.sweeps.store import Store
from schedlab.sim.errors import SpecError

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
        (tmp_path / name).write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    traces = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    found = expand({"workload.trace": traces, "policy.pad_prompts": [True]}, policy="static")
    assert found[0].label == "trace=a.csv, pad_prompts=true"


def test_folders_of_points_are_unique_and_plain_names(tmp_path):
    found = expand({"policy": ["fcfs", "static"], "seed": list(range(8))}, replications=2)
    store = Store(tmp_path)
    folders = [store.job(point.spec, point.label).folder.name for point in found]
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


LINKED = "engine.max_num_seqs, engine.max_num_batched_tokens"


def test_linked_keys_move_together_and_count_as_one():
    found = expand({LINKED: [[64, 1024], [128, 1024], [128, 2048]], "policy": ["fcfs", "static"]})
    assert [point.label for point in found[::2]] == [
        "max_num_seqs=64, max_num_batched_tokens=1024, fcfs",
        "max_num_seqs=128, max_num_batched_tokens=1024, fcfs",
        "max_num_seqs=128, max_num_batched_tokens=2048, fcfs",
    ]
    engines = [(p.spec.engine.max_num_seqs, p.spec.engine.max_num_batched_tokens) for p in found]
    assert engines == [(64, 1024)] * 2 + [(128, 1024)] * 2 + [(128, 2048)] * 2
    assert found[0].settings["engine.max_num_batched_tokens"] == "1024"


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            {LINKED: [64, 128]},
            r"\[0\]: must be a list with a value for each of engine.max_num_seqs",
        ),
        ({LINKED: [[64, 1024], [128]]}, r"\[1\]: must be a list with a value for each"),
        ({LINKED: [[64, 1024]], "engine.max_num_seqs": [8]}, "engine.max_num_seqs is swept twice"),
        ({LINKED: [[64, 0]]}, r"engine.max_num_batched_tokens: must be >= 1"),
        ({"seed, name": [[1, 2]]}, "'name' cannot be swept"),
    ],
)
def test_linked_keys_wrongly_given_are_named(sweep, message):
    with pytest.raises(SpecError, match=message):
        expand(sweep)


def test_linked_keys_are_read_from_yaml_with_lines_and_paths(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    path = tmp_path / "e.yaml"
    text = (
        "workload: {trace: fixed, num_requests: 1}\nsweep:\n"
        "  workload.trace, seed:\n    - [t.csv, 1]\n    - [fixed, 2]\n"
    )
    path.write_text(text)
    spec = load_spec(path)
    assert [p.spec.workload.trace for p in points(spec)] == [str(tmp_path / "t.csv"), "fixed"]
    assert load_spec(path, ["sweep.workload.trace, seed=[[fixed, 7]]"]).seed == 7
    with pytest.raises(SpecError, match="seed is swept together with others"):
        load_spec(path, ["seed=3"])
    path.write_text(text.replace("[fixed, 2]", "[fixed, -2]"))
    with pytest.raises(SpecError, match=r"e.yaml:5: seed: must be >= 0"):
        load_spec(path)


@pytest.mark.parametrize(
    ("entry", "items", "line", "key"),
    [
        ("seed", ["4", "-1"], 5, "seed"),
        ("engine.max_num_seqs, seed", ["[4,\n    1]", "[8,\n    -1]"], 7, "seed"),
        ("engine.max_num_seqs, seed", ["[4,\n    1]", "[0,\n    3]"], 6, "engine.max_num_seqs"),
    ],
)
def test_wrong_swept_value_is_told_with_the_line_of_itself_and_not_of_its_list(
    tmp_path, entry, items, line, key
):
    path = tmp_path / "s.yaml"
    lines = ["workload: {trace: fixed, num_requests: 3}", "sweep:", f"  {entry}:"]
    path.write_text("\n".join([*lines, *(f"  - {item}" for item in items)]) + "\n")
    with pytest.raises(SpecError, match=rf"s\.yaml:{line}: {key}: "):
        load_spec(path)
