"""What the shell offers after a Tab."""

from types import SimpleNamespace

import pytest

from schedlab.experiments.commands import completion


def offered(incomplete, *before):
    return completion.changes(SimpleNamespace(params={"overrides": before}), incomplete)


def test_experiments_are_those_that_come_along_and_files_in_yaml_beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quiet.yaml", "quite.yml", "quits.txt", "in/quick.yaml", "in/other.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "quiz.yaml").mkdir()
    assert completion.experiments("qui") == ["quickstart", "quiet.yaml", "quite.yml"]
    assert completion.experiments("in/q") == ["in/quick.yaml"]
    assert completion.experiments(f"{tmp_path}/in/o") == [f"{tmp_path}/in/other.yaml"]
    assert completion.experiments("nowhere/q") == []
    assert completion.shipped("qui") == ["quickstart"]


@pytest.mark.parametrize(
    ("names", "incomplete", "first"),
    [
        (completion.policies, "sar", "sarathi"),
        (completion.predictors, "ora", "oracle"),
        (completion.models, "llama-3-8", "llama-3-8b"),
        (completion.gpus, "a100-8", "a100-80gb"),
        (completion.metrics, "slo_att", "slo_attainment"),
        (completion.figures, "gan", "gantt"),
        (completion.presets, "azure-co", "azure-code"),
        (completion.cost_models, "roof", "roofline"),
    ],
)
def test_names_offered_are_those_that_begin_so(names, incomplete, first):
    found = names(incomplete)
    assert first in found
    assert all(name.startswith(incomplete) for name in found)
    assert set(found) < set(names(""))


@pytest.mark.slow
def test_keys_are_offered_until_one_is_left_and_then_its_values():
    assert offered("policy=sara") == ["policy=sarathi"]
    assert offered("policy.predictor=orac") == ["policy.predictor=oracle"]
    assert offered("hardware=h200") == ["hardware=h200"]
    assert offered("seed=1") == []
    assert {"engine.max_num_seqs", "engine.max_num_batched_tokens"} <= set(offered("engine.max_n"))
    assert offered("engine.max_num_s") == ["engine.max_num_seqs=", "engine.max_num_seqs=..."]
    assert offered("hardw") == [f"hardware={name}" for name in completion.gpus("")]


def test_bash_splits_a_change_at_its_sign_and_gets_values_alone():
    assert offered("", "policy") == completion.policies("")
    assert offered("sara", "policy", "=") == ["sarathi"]
    assert offered("orac", "seed=1", "policy.predictor", "=") == ["oracle"]
    assert offered("engine.max_num_s", "policy") == [
        "engine.max_num_seqs=",
        "engine.max_num_seqs=...",
    ]
    assert offered("hardware=h200", "seed", "=") == ["hardware=h200"]


def test_files_are_looked_for_in_the_folder_that_was_begun(monkeypatch):
    looked = []

    class Place:
        def __init__(self, text):
            looked.append(text)

        def iterdir(self):
            return [
                SimpleNamespace(
                    name=name, suffix=name[-5:], is_file=lambda name=name: name[0] != "d"
                )
                for name in ("b.yaml", "a.yaml", "d.yaml", "c.text")
            ]

    monkeypatch.setattr(completion, "Path", Place)
    monkeypatch.setattr(completion, "sorted", list, raising=False)
    for begun, folder in (("x", "."), ("in/x", "in/"), ("/x", "/"), ("/in/deep/", "/in/deep/")):
        start = "" if folder == "." else folder
        assert completion._files(begun) == [f"{start}b.yaml", f"{start}a.yaml"]
        assert looked.pop() == folder
