"""Which value of a sweep a claim means, and how often a run tells how far it is."""

import pytest

from schedlab.experiments.claims.report import _changed
from schedlab.experiments.running.run import _reporter
from schedlab.experiments.specification.claim_settings import _fits
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sweep import shown
from schedlab.sim.errors import SpecError

STATIC = {"name": "static", "max_batch_size": 4, "router": {"name": "random", "seed": 1}}


@pytest.mark.parametrize(
    ("given", "value", "fits"),
    [
        ("static", STATIC, True),
        ("fcfs", STATIC, False),
        ({}, STATIC, True),
        ({"max_batch_size": 4}, STATIC, True),
        ({"max_batch_size": 8}, STATIC, False),
        ({"name": "static", "max_batch_size": 8}, STATIC, False),
        ({"name": "fcfs", "max_batch_size": 4}, STATIC, False),
        ({"max_batch_size": 4, "unknown": 1}, STATIC, False),
        ({"router": "random"}, STATIC, True),
        ({"router": {"seed": 1}}, STATIC, True),
        ({"router": {"name": "random", "seed": 2}}, STATIC, False),
        ({"router": {"seed": 1}, "name": "fcfs"}, STATIC, False),
        (4, STATIC, False),
        (20, 20, True),
        (20, 21, False),
        ("fcfs", "fcfs", True),
        ("fcfs", "static", False),
        ({"name": "fcfs"}, "fcfs", True),
        ({"name": "fcfs", "x": 1}, "fcfs", False),
        ("trace.csv", "/some/folder/trace.csv", True),
        ("folder/trace.csv", "/some/folder/trace.csv", False),
        ("trace.csv", "folder/trace.csv", False),
        (3, "/3", False),
        (None, None, True),
    ],
)
def test_setting_of_a_claim_fits_a_value_that_has_all_parts_of_it(given, value, fits):
    assert _fits(given, value) is fits


@pytest.mark.parametrize(
    ("total", "done", "told"),
    [
        (1000, [1, 199, 200, 201, 399, 400, 401], [200, 400]),
        (1000, [150, 250, 449, 450, 1000], [250, 450, 1000]),
        (3, [1, 2, 3], [3]),
        (200, [200], [200]),
    ],
)
def test_progress_of_a_run_is_told_every_two_hundred_requests_and_at_the_end(total, done, told):
    found = []
    report = _reporter(lambda *given: found.append(given), total)
    for count in done:
        report(count)
    assert found == [(count, total) for count in told]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("/some/folder/trace.csv", "trace.csv"),
        ("folder/trace.csv", "folder/trace.csv"),
        ("fcfs", "fcfs"),
        (4, "4"),
        (0.5, "0.5"),
        (None, shown(None)),
        (True, shown(True)),
        (["/a/b"], shown(["/a/b"])),
        ({"name": "static", "max_batch_size": 4}, shown({"name": "static", "max_batch_size": 4})),
    ],
)
def test_change_in_a_report_of_claims_names_a_file_without_its_folder(value, text):
    assert _changed(value) == text


def drawn(**changes):
    """Return a workload of drawn sessions with tools and sub-agents, one part of it changed."""
    sessions = {
        "count": 2, "turns": 2, "new_tokens": 8, "first_tokens": 9, "output_tokens": 4,
        "think_s": 1.0, "tools": {"search": {"share": 0.5, "seconds": 2.0, "tokens": 3}},
        "fan_out": {"share": 0.5, "width": 2, "tokens": 5},
    }  # fmt: skip
    for path, value in changes.items():
        *outer, key = path.split("__")
        part = sessions
        for name in outer:
            part = part[name]
        part[key] = value
    return {"workload": {"sessions": sessions, "session_rate": 1.0}}


@pytest.mark.parametrize(
    "path",
    [
        "turns", "new_tokens", "first_tokens", "output_tokens", "think_s",
        "tools__search__seconds", "tools__search__tokens", "fan_out__width", "fan_out__tokens",
    ],
)  # fmt: skip
def test_distribution_of_sessions_that_is_unknown_or_has_no_such_knob_is_refused_by_its_key(path):
    key = "workload.sessions." + path.replace("__", r"\.")
    make_spec(drawn())
    for given in ({"distribution": "unifrom"}, {"distribution": "uniform", "lo": 1, "high": 2}):
        with pytest.raises(SpecError, match=rf"{key}"):
            make_spec(drawn(**{path: given}))


def test_think_times_of_a_trace_that_are_of_no_known_distribution_are_refused():
    load = {"trace": "sessions.jsonl", "follow_sessions": True, "num_requests": 3}
    for given in ({"distribution": "unifrom"}, {"distribution": "uniform", "lo": 1, "high": 2}):
        with pytest.raises(SpecError, match=r"workload\.think_s"):
            make_spec({"workload": {**load, "think_s": given}})
