"""Two checkouts are measured in turn, and judged by ratios inside a round."""

from pathlib import Path

import pytest
import yaml

from schedlab.experiments.bench import against
from schedlab.experiments.specification.loading import make_spec

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = {
    "same": [{"base": 1.0, "this": 1.0}, {"base": 3.0, "this": 3.0}, {"base": 2.0, "this": 2.1}],
    "slow": [{"base": 1.0, "this": 1.4}, {"base": 3.0, "this": 3.6}, {"base": 2.0, "this": 1.9}],
}


def test_cases_that_are_measured_are_valid_experiments():
    for spec in against.cases().values():
        make_spec(spec)


def test_engine_that_preempts_is_the_common_one_with_fewer_blocks():
    cases = against.cases()
    common, preempting = (cases[name]["engine"] for name in ("6 req/s", "preempting"))
    assert {"max_num_seqs", "max_num_batched_tokens"} <= common.keys()
    assert preempting == {**common, "num_gpu_blocks_override": 1_500}


def test_ratio_is_taken_inside_a_round_and_judged_by_its_median():
    assert against.slower(ROUNDS, 1.15) == ["slow"]
    assert against.slower(ROUNDS, 1.3) == []
    assert against.table(ROUNDS)[-1] == "| slow | 2.00 | 1.90 | 1.20 (0.95-1.40) |"


def test_contestants_take_turns_with_schedlab_of_their_own(monkeypatch):
    asked = []

    def fake(root, arguments, _):
        asked.append((root.name, arguments[0]))
        return 1.0

    monkeypatch.setattr(against, "cpu_s", fake)
    roots = {"base": Path("/there"), "this": Path("/here")}
    found = against.measure(roots, {"one": {}}, rounds=2)
    assert [list(row) for row in found["one"]] == [["this", "base"], ["base", "this"]]
    assert asked[:2] == [("there", "-c"), ("there", "-m")]


def test_checkout_that_is_none_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        against.main([str(tmp_path)])
    assert "no checkout of schedlab" in capsys.readouterr().err


def test_checkout_is_measured_in_five_rounds_unless_others_are_asked_for(monkeypatch, tmp_path):
    (tmp_path / "schedlab").mkdir()
    (tmp_path / "schedlab" / "__init__.py").touch()
    asked = []
    monkeypatch.setattr(
        against, "measure", lambda roots, cases, rounds: asked.append((roots, rounds)) or ROUNDS
    )
    with pytest.raises(SystemExit):
        against.main([str(tmp_path)])
    against.main([str(tmp_path), "--rounds", "2", "--limit", "1.3"])
    assert [rounds for _, rounds in asked] == [5, 2]
    assert asked[0][0] == {"base": tmp_path.resolve(), "this": against.ROOT}


def test_workflow_runs_the_comparison_with_options_it_has():
    workflow = yaml.safe_load((ROOT / ".github/workflows/speed.yml").read_text())
    steps = workflow["jobs"]["against-base"]["steps"]
    (line,) = [s["run"] for s in steps if "bench.against" in s.get("run", "")]
    assert line == "python -m schedlab.experiments.bench.against ../base --markdown speed.md"
