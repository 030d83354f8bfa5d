"""What benches print of figures that are known: every column by its own number."""

import json
from types import SimpleNamespace

from schedlab.experiments.bench import fleet_bench, peers, policy_shares


def cells(printed):
    return [line.split() for line in printed.splitlines()]


def test_table_of_fleets_has_a_line_a_router_and_fleet_in_their_order(monkeypatch, capsys):
    asked = []

    def measure(name, num_engines, rounds):
        asked.append((name, num_engines, rounds))
        n = len(asked)
        return fleet_bench.Overhead(
            name, num_engines, 1000.0 * n, 1.1 * n, 2.2 * n, 3.3 * n, 4.4 * n
        )

    monkeypatch.setattr(fleet_bench, "measure", measure)
    rows = fleet_bench.report(["vllm", "llm_d"], [2, 3], 7)
    assert asked == [("vllm", 2, 7), ("llm_d", 2, 7), ("vllm", 3, 7), ("llm_d", 3, 7)]
    assert [row[:3] for row in rows] == [
        ("vllm", 2, 1000.0), ("llm_d", 2, 2000.0), ("vllm", 3, 3000.0), ("llm_d", 3, 4000.0)
    ]  # fmt: skip
    _, header, *lines = cells(capsys.readouterr().out)
    assert header[-4:] == ["separate", "alone", "given", "decision"]
    assert lines == [
        ["vllm", "2", "1,000", "1.10", "2.20", "3.30", "4.4", "us"],
        ["llm_d", "2", "2,000", "2.20", "4.40", "6.60", "8.8", "us"],
        ["vllm", "3", "3,000", "3.30", "6.60", "9.90", "13.2", "us"],
        ["llm_d", "3", "4,000", "4.40", "8.80", "13.20", "17.6", "us"],
    ]


def test_table_of_policies_has_shares_plans_and_seconds(monkeypatch, capsys):
    row = policy_shares.Share("edf", 0.25, 0.5, 1234, 6.75)
    monkeypatch.setattr(policy_shares, "measure", lambda *given: [row._replace(policy=str(given))])
    policy_shares.main(["edf", "--requests", "11", "--rounds", "2"])
    first, header, line = capsys.readouterr().out.splitlines()
    assert first.endswith("; 11 requests, 2 rounds in turn")
    assert header.split() == ["policy", "share", "of", "fcfs", "by", "plans", "plans", "CPU", "s"]
    assert line.removeprefix("(['edf'], 11, 2)").split() == ["0.25", "0.50", "1,234", "6.75"]


def test_policy_is_run_on_as_many_requests_with_what_it_needs(monkeypatch):
    seen = []

    def run(spec):
        seen.append(spec)
        return SimpleNamespace(provenance={"num_plans": 9}, metrics=lambda: None)

    monkeypatch.setattr(policy_shares, "run", run)
    for name, predictor in (("fcfs", None), ("sjf", "oracle")):
        _, num_plans = policy_shares._run(name, 77)
        spec = seen.pop()
        assert (spec.policy.name, spec.workload.num_requests, num_plans) == (name, 77, 9)
        assert (spec.policy.predictor and spec.policy.predictor.name) == predictor


def test_cases_beside_a_peer_replay_what_the_data_folder_has(tmp_path):
    without = peers.cases(tmp_path)
    assert set(without) == {"all at once", "6 req/s"}
    assert all("resample" not in case.spec["workload"] for case in without.values())
    for name in (peers.TRACE, peers.MOONCAKE):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = peers.cases(tmp_path)
    *drawn, mooncake = found.values()
    assert all(case.spec["workload"]["resample"] is True for case in drawn)
    assert mooncake.spec["workload"] == {
        "trace": str(tmp_path / peers.MOONCAKE), "max_total_tokens": 131_072,
    }  # fmt: skip
    engine = {name: mooncake.spec["engine"][name] for name in (
        "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"
    )}  # fmt: skip
    assert engine == {
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "enable_prefix_caching": True,
    }  # fmt: skip
    assert (mooncake.few, mooncake.many, mooncake.our_many) == (500, 6_000, 6_000)


def test_table_beside_a_peer_has_speeds_ratios_and_lengths_of_runs(monkeypatch, capsys, tmp_path):
    case = SimpleNamespace(few=1_000, many=9_000, our_many=5_000)
    told = {
        "requests_per_cpu_s": {"schedlab": 1111.0, "AISimulate": 222.0},
        "slope_ratio": 5.0, "slope_ratio_range": (4.5, 5.5),
        "whole_ratio": 7.0, "whole_ratio_range": (6.25, 7.75),
    }  # fmt: skip
    asked = []
    monkeypatch.setattr(peers, "cases", lambda data: {"one": case})
    monkeypatch.setattr(peers, "measure", lambda *given: asked.append(given) or ["rows"])
    monkeypatch.setattr(peers, "ratios", lambda *given: asked.append(given) or told)
    file = tmp_path / "found.json"
    peers.main(["--peer", str(tmp_path / "x"), "--rounds", "4", "--json", str(file)])
    assert asked == [(case, tmp_path / "x", 4), (case, ["rows"])]
    first, header, line = capsys.readouterr().out.splitlines()
    assert first.endswith("; 4 rounds in turn; CPU seconds of processes")
    assert first.startswith(f"core: {peers.core.running()};")
    assert header.split() == ["case", "ours/CPU-s", "peer/CPU-s", "slope", "ratio", "short", "run"]
    assert line.split() == [
        "one", "1,111", "222", "5.00", "(4.50-5.50)", "7.00", "(6.25-7.75)", "1,000", "to",
        "5,000", "and", "9,000", "requests",
    ]  # fmt: skip
    kept = json.loads(file.read_text())
    assert kept.pop("core") == peers.core.running()
    assert kept == {
        "one": json.loads(json.dumps(
            {"few": 1_000, "many": 9_000, "our_many": 5_000, **told, "cpu_s": ["rows"]}
        ))
    }  # fmt: skip


def test_share_of_a_policy_is_between_two_runs_of_the_base_after_short_ones_that_import(
    monkeypatch,
):
    """Seconds of base and policy in turn; the median of three rounds is told, and the least."""
    ran = []
    seconds = {
        "fcfs": iter([9.0, 2.0, 4.0, 2.0, 6.0, 1.0, 1.0, 1.0, 1.0]),
        "sjf": iter([9.0, 6.0, 2.0, 4.0]),
        "edf": iter([9.0, 2.0, 4.0, 8.0]),
    }

    def run(name, num_requests):
        ran.append((name, num_requests))
        return next(seconds[name]), {"fcfs": 60, "sjf": 40, "edf": 30}[name]

    monkeypatch.setattr(policy_shares, "_run", run)
    found = list(policy_shares.measure(["sjf", "edf"], 700, 3))
    assert ran[:3] == [("fcfs", 50), ("sjf", 50), ("edf", 50)]
    one = [("fcfs", 700), *[("sjf", 700), ("fcfs", 700)] * 3]
    assert ran[3:10] == one
    assert [tuple(share) for share in found] == [
        ("sjf", 1.0, 1.5, 40, 2.0),  # of 3 / 6, 3 / 2 and 4 / 4
        ("edf", 0.25, 2.0, 30, 2.0),  # of 1 / 2, 1 / 4 and 1 / 8
    ]
