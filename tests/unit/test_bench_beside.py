"""The table beside another simulator, by a clock of paper."""

import pytest

from schedlab.experiments.bench import beside


def test_table_beside_a_peer_has_percentiles_ratios_and_seconds_of_each(monkeypatch, capsys):
    asked = []
    clock = iter([100.0, 101.5, 105.5, 200.0, 200.25, 207.25])
    monkeypatch.setattr(beside.time, "perf_counter", lambda: next(clock))

    def specification(folder, rate, num_requests):
        asked.append((str(folder), rate, num_requests))
        return {"rate": rate}

    def ours(spec):
        asked.append(spec)
        return {"ttft": [spec["rate"], 3.0 * spec["rate"]], "e2el": [8.0]}

    def theirs(spec, folder, python):
        asked.append((spec, str(folder), str(python)))
        return {"ttft": [spec["rate"]], "e2el": [16.0]}

    peer = beside.Peer("other", "with numpy", specification, ours, theirs)
    words = ["--peer", "a/checkout", "--python", "a/python", "--num-requests", "9"]
    beside.beside_peer(peer, (2.0, 4.0), 100, words)
    assert asked == [
        ("a/checkout", 2.0, 9), {"rate": 2.0}, ({"rate": 2.0}, "a/checkout", "a/python"),
        ("a/checkout", 4.0, 9), {"rate": 4.0}, ({"rate": 4.0}, "a/checkout", "a/python"),
    ]  # fmt: skip
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["req/s", "metric", "here,", "s", "other,", "s", "x"]
    assert lines == [
        ["2", "ttft", "p50", "4.0000", "2.0000", "2.000"],
        ["2", "ttft", "p99", "5.9600", "2.0000", "2.980"],
        ["2", "e2el", "p50", "8.0000", "16.0000", "0.500"],
        ["2", "e2el", "p99", "8.0000", "16.0000", "0.500"],
        ["2", "seconds", "to", "run", "1.5", "4.0"],
        ["4", "ttft", "p50", "8.0000", "4.0000", "2.000"],
        ["4", "ttft", "p99", "11.9200", "4.0000", "2.980"],
        ["4", "e2el", "p50", "8.0000", "16.0000", "0.500"],
        ["4", "e2el", "p99", "8.0000", "16.0000", "0.500"],
        ["4", "seconds", "to", "run", "0.2", "7.0"],
    ]


@pytest.mark.parametrize(
    ("words", "rates", "count"),
    [([], [1.0, 2.5], 7), (["--rates", "3"], [3.0], 7), (["--num-requests", "8"], [1.0, 2.5], 8)],
)
def test_bench_beside_a_peer_takes_rates_and_requests_of_its_own_unless_told(words, rates, count):
    asked = []

    def specification(folder, rate, num_requests):
        asked.append((rate, num_requests))
        return {}

    peer = beside.Peer("other", "", specification, lambda _: {}, lambda *_: {})
    beside.beside_peer(peer, (1.0, 2.5), 7, ["--peer", "p", "--python", "q", *words])
    assert asked == [(rate, count) for rate in rates]
