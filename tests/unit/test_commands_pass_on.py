"""What commands hand to those who do the work, and what they make of the answer.

The work itself is replaced by something that notes every argument, all of them distinct: commands
are otherwise asked through dear runs, in which most options are left alone.
"""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from schedlab import testing
from schedlab.experiments.analysis import policy_comparison
from schedlab.experiments.analysis.policy_comparison import PolicyChange
from schedlab.experiments.commands.app import app
from schedlab.experiments.regression.check import Move
from schedlab.experiments.regression.report import _sentence
from schedlab.experiments.results import saved_results
from schedlab.experiments.statistics import LEAST_SEEDS, Change
from schedlab.sim.config import EngineConfig
from schedlab.testing import Case, LawBroken


def schedlab(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


# -- lists -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["policies", "metrics", "models", "gpus", "cost-models"])
def test_list_shows_whose_name_has_the_part_whatever_its_case(command):
    def names(*more):
        found = json.loads(schedlab(command, "--json", "--", *more).stdout)
        return [next(iter(row.values())) for rows in found.values() for row in rows]

    everything = names()
    part = everything[-1][1:4]
    assert names(part.upper()) == [name for name in everything if part.lower() in name.lower()]
    assert names(everything[0][-3:].title())[0]
    wrong = schedlab(command, "qqq")
    assert wrong.exit_code == 2
    assert "is called 'qqq'" in wrong.output


# -- policy check ------------------------------------------------------------------------------


def test_check_of_a_policy_hands_on_every_option_and_ends_by_what_was_found(monkeypatch):
    asked, broken = [], []

    def verdicts(make, **options):
        asked.append((make().chunk_size, options))
        laws = [SimpleNamespace(law="a", meaning="one", broken=None)]
        return laws + [SimpleNamespace(law=b.law, meaning="other", broken=b) for b in broken]

    monkeypatch.setattr(testing, "policy_verdicts", verdicts)
    words = ["policy", "check", "sarathi", "chunk_size=77", "--seed", 7, "--cases", 3]
    assert schedlab(*words, "--law", "a", "--law", "b", "--may-wait").exit_code == 0
    assert schedlab(*words).exit_code == 0
    assert asked == [
        (77, {"may_wait": True, "only": ["a", "b"], "seed": 7, "num_cases": 3}),
        (77, {"may_wait": False, "only": None, "seed": 7, "num_cases": 3}),
    ]
    case = Case((), EngineConfig(num_blocks=9, max_model_len=9))
    broken += [
        LawBroken("P", name, "m", why, case) for name, why in (("b", "x"), ("c", "x"), ("d", "y"))
    ]
    done = schedlab(*words)
    assert done.exit_code == 1
    assert done.output.count("BROKEN") == 3
    assert done.output.count("the same breaks c") == 1


# -- compare -----------------------------------------------------------------------------------


def change(of, low, high, num_pairs=LEAST_SEEDS, p_value=0.001):
    found = Change((low + high) / 2, low, high, 1.5, num_pairs, p_value)
    return PolicyChange("rate=3", "mean_ttft_ms", of, "fcfs", (2.0, 1.0), found, f"says {of}")


def test_comparisons_that_decide_nothing_are_counted_and_shown_when_asked_for(monkeypatch):
    found = [
        change("clear", 0.2, 0.4), change("worse", -0.4, -0.2), change("around", -0.1, 0.3),
        change("few", 0.2, 0.4, num_pairs=LEAST_SEEDS - 1), change("chance", 0.2, 0.4, p_value=0.2),
    ]  # fmt: skip
    asked = []
    monkeypatch.setattr(saved_results, "read_points", lambda folder: [folder.name])
    monkeypatch.setattr(
        policy_comparison, "compare_policies", lambda *given: asked.append(given) or found
    )

    def shown(*more):
        text = schedlab("compare", "out", "--against", "x", "--key", "k", *more).output
        return [
            one.of for one in found if f"says {one.of}" in text
        ], "decide nothing (--all)" in text

    assert shown() == (["clear", "worse"], True)
    assert "3 of 5 comparisons decide nothing (--all)" in schedlab("compare", "out").output
    every = [one.of for one in found]
    assert shown("--all") == (every, False)
    assert shown("-m", "mean_ttft_ms") == (every, False)
    assert [(given[0], list(given[1])[:1], *given[2:]) for given in asked] == [
        (["out"], ["request_throughput"], "x", "k"),
        (["out"], ["request_throughput"], None, "policy"),
        (["out"], ["request_throughput"], "x", "k"),
        (["out"], ["mean_ttft_ms"], "x", "k"),
    ]
    data = json.loads(schedlab("compare", "out", "--json").stdout)
    assert [row["of"] for row in data] == every


# -- regress -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "which"), [(None, "ttft:"), (0, "(seed 0):"), (3, "(seed 3):")])
def test_move_of_a_metric_names_its_seed_if_it_is_of_one(seed, which):
    assert which in _sentence(Move("ttft", 2.0, 3.0, 0.1, False, seed))
