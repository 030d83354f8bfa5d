"""The bench beside a peer: both get the same requests, and ratios are taken inside a round."""

import json
from pathlib import Path

import pytest

from schedlab.experiments.bench import peers

CASE = peers.PeerCase(
    {
        "name": "bench",
        "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "workload": {"trace": "azure-conv", "num_requests": 20, "request_rate": 6.0},
    },
    few=100, many=1_100, our_many=10_100, peer_model="m", peer_hardware="h", longest_tokens=4096,
)  # fmt: skip


def test_peer_gets_the_same_requests_with_prefixes_of_their_own():
    rows = [json.loads(line) for line in peers.peer_trace(CASE.spec, 4096)]
    assert len(rows) == 20
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times)
    ids = [i for row in rows for i in row["hash_ids"]]
    assert ids == list(range(len(ids))), "nothing is shared"
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 512) for row in rows)


def test_peer_has_the_same_limits(tmp_path):
    engine = peers.peer_config(CASE, tmp_path)["engine"]["workers"]["aggregated"]
    assert engine["scheduler"] == {"max_sequences": 128, "max_batched_tokens": 2048}
    assert engine["kv_cache"] == {"block_size": 16, "prefix_caching": False}


def test_our_long_run_has_more_of_the_same_requests_than_the_peers(tmp_path):
    case = CASE._replace(few=5, many=10, our_many=20)
    lines = peers.commands(case, Path("peer"), tmp_path)
    ours = [
        json.loads((tmp_path / line[4]).read_text())["workload"]["num_requests"]
        for line in lines["schedlab"]
    ]
    configs = [json.loads((tmp_path / line[3]).read_text()) for line in lines["AISimulate"]]
    theirs = [Path(one["traffic"]["source"]["paths"][0]).read_text() for one in configs]
    assert ours == [5, 20]
    assert [text.count("\n") for text in theirs] == [5, 10]
    assert theirs[1].startswith(theirs[0])


def test_ratios_are_medians_of_those_inside_a_round():
    rows = [
        {"schedlab": [1.0, 11.0], "AISimulate": [2.0, 6.0]},  # 1,000 and 250 a second
        {"schedlab": [2.0, 22.0], "AISimulate": [2.0, 6.0]},  # on a machine half as fast for us
        {"schedlab": [1.0, 11.0], "AISimulate": [3.0, 8.0]},
    ]
    told = peers.ratios(CASE, rows)
    assert told["requests_per_cpu_s"] == {"schedlab": 1_000, "AISimulate": 250}
    assert told["slope_ratio"] == 4
    assert told["slope_ratio_range"] == (2, 5)
    assert told["whole_ratio"] == 2


@pytest.mark.parametrize(("report", "status", "finished"), [
    (None, 0, True),
    (None, 1, False),
    ({"completed_requests": 5, "num_requests": 5}, 1, True),
    ({"completed_requests": 4, "num_requests": 5}, 0, False),
])  # fmt: skip
def test_contestant_has_finished_if_its_report_has_all_requests(tmp_path, report, status, finished):
    if report is not None:
        (tmp_path / "prediction.json").write_text(json.dumps(report))
    assert peers._has_finished(tmp_path, status) is finished


def test_cases_draw_lengths_without_the_data_folder_and_resample_a_trace_that_is_there(tmp_path):
    drawn = peers.cases(tmp_path)
    assert list(drawn) == ["all at once", "6 req/s"]
    assert {case.spec["workload"]["trace"] for case in drawn.values()} == {"azure-conv"}
    assert not any("resample" in case.spec["workload"] for case in drawn.values())
    for name in (peers.TRACE, peers.MOONCAKE):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (first, second, mooncake) = (case.spec["workload"] for case in peers.cases(tmp_path).values())
    assert first["resample"]
    assert second["resample"]
    assert second["trace"] == str(tmp_path / peers.TRACE)
    assert "resample" not in mooncake
