"""Recordings of load generators, as workloads and as what a prediction is held against."""

import json

import numpy as np
import pytest

from schedlab.experiments.comparing.validate import validate
from schedlab.experiments.comparing.vllm_recording import read_recording
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.errors import SpecError, TraceError
from schedlab.traces import detect_format, read
from schedlab.traces.readers.client_results import read_client_results

VLLM = {
    "date": "20261122-101500", "num_prompts": 3, "completed": 2, "failed": 1,
    "input_lens": [20, 30, 40], "output_lens": [3, 2, 0], "start_times": [107.5, 105.0, 106.0],
    "ttfts": [0.5, 0.25, 0.0], "itls": [[0.5, 1.0], [0.125], []],
    "latencies": [2.0, 0.375, 0.0], "errors": ["", "", "refused"],
}  # fmt: skip


def guidellm_request(start_s, prompt, output, first_s, last_s):
    timings = {
        "request_start": start_s, "first_token_iteration": first_s, "last_token_iteration": last_s,
        "resolve_start": start_s - 0.01, "token_iterations": output,
    }  # fmt: skip
    return {
        "type_": "generative_request_stats", "info": {"status": "completed", "timings": timings},
        "prompt_tokens": prompt, "output_tokens": output,
    }  # fmt: skip


GUIDELLM = {
    "metadata": {"version": 1},
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    guidellm_request(107.5, 20, 3, 108.0, 109.5),
                    guidellm_request(105.0, 30, 2, 105.25, 105.375),
                ],
                "errored": [],
                "incomplete": [{"info": {"status": "cancelled"}}],
            }
        }
    ],
}


def inference_perf_request(start_s, prompt, output, times, nested):
    told = {"output_tokens": output, "output_token_times": times}
    info = {"input_tokens": prompt, **({"response_metrics": told} if nested else told)}
    return {
        "start_time": start_s, "end_time": times[-1], "request": "{}", "info": info, "error": None
    }  # fmt: skip


INFERENCE_PERF = [
    inference_perf_request(107.5, 20, 3, [108.0, 108.5, 109.5], nested=True),
    inference_perf_request(105.0, 30, 2, [105.25, 105.375], nested=False),
    {"start_time": 106.0, "end_time": 106.0, "info": None, "error": {"error_type": "Timeout"}},
]
ALL = {"vllm": VLLM, "guidellm": GUIDELLM, "inference-perf": INFERENCE_PERF}


def aiperf_request(start_s, prompt, output, ttft_ms, latency_ms):
    metrics = {
        "input_sequence_length": {"value": prompt, "unit": "tokens"},
        "output_sequence_length": {"value": output, "unit": "tokens"},
        "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
        "request_latency": {"value": latency_ms, "unit": "ms"},
    }
    metadata = {
        "session_num": 0, "request_start_ns": round(start_s * 1e9), "benchmark_phase": "profiling",
        "request_end_ns": round(start_s * 1e9 + latency_ms * 1e6), "was_cancelled": False,
    }  # fmt: skip
    return {"metadata": metadata, "metrics": metrics, "error": None}


AIPERF = [
    aiperf_request(107.5, 20, 3, 500.0, 2000.0),
    aiperf_request(105.0, 30, 2, 250.0, 375.0),
    {
        "metadata": {"request_start_ns": 106 * 10**9, "was_cancelled": True},
        "metrics": {"error_isl": {"value": 40, "unit": "tokens"}},
        "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"},
    },
]


@pytest.fixture
def saved_lines(tmp_path):
    def save(requests, name="profile_export.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(request) + "\n" for request in requests))
        return path

    return save


@pytest.fixture
def saved(tmp_path):
    def save(data, name="result.json"):
        path = tmp_path / name
        path.write_text(json.dumps(data, indent=1 if name == "pretty.json" else None))
        return path

    return save


@pytest.mark.parametrize("client", ALL)
def test_recording_of_a_client_has_its_requests_as_they_were_sent(client, saved):
    found = read_recording(saved(ALL[client]))
    assert found.prompt_tokens.tolist() == [30, 20]
    assert found.output_tokens.tolist() == [2, 3]
    assert found.queued_s.tolist() == [105.0, 107.5]
    assert found.first_token_s.tolist() == [105.25, 108.0]
    assert found.last_token_s.tolist() == [105.375, 109.5]


@pytest.mark.parametrize("name", ["result.json", "pretty.json"])
@pytest.mark.parametrize("client", ALL)
def test_results_of_a_client_are_known_by_what_is_in_them(client, name, saved):
    assert detect_format(saved(ALL[client], name)) == "client_results"


@pytest.mark.parametrize("name", ["result.json", "pretty.json"])
def test_results_without_single_requests_say_which_option_saves_them(name, saved):
    path = saved({"completed": 3, "request_throughput": 1.5, "total_input_tokens": 9}, name)
    with pytest.raises(TraceError, match="run it again with --save-result --save-detailed"):
        read(path)


def test_counts_of_inference_perf_are_read_where_they_were_and_where_they_will_be(saved):
    told = json.loads(json.dumps(INFERENCE_PERF))
    for count, request in zip((20, 30), told, strict=False):
        request["info"]["request_metrics"] = {"text": {"input_tokens": count}}
        request["info"]["input_tokens"] = 7
    assert read_recording(saved(told)).prompt_tokens.tolist() == [30, 20]
    for request in told[:2]:
        del request["info"]["input_tokens"]
    assert read_recording(saved(told)).prompt_tokens.tolist() == [30, 20]
    del told[0]["info"]["request_metrics"]["text"]["input_tokens"]
    with pytest.raises(TraceError, match="request 0: no input_tokens"):
        read_recording(saved(told))


def test_several_results_in_one_file_are_told_from_what_is_no_json(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(f"{json.dumps(VLLM)}\n{json.dumps(VLLM)}")
    with pytest.raises(TraceError, match=r"several results in one file, as .* --append-result"):
        read(path)
    path.write_text(json.dumps(VLLM)[:-1])
    with pytest.raises(TraceError, match=r"result\.json: not JSON \(Expecting [^)]*\)+$"):
        read(path, "client_results")


@pytest.mark.parametrize("client", ALL)
def test_results_of_a_client_are_a_workload_without_what_failed(client, saved):
    trace = read(saved(ALL[client], "pretty.json"), "client_results")
    assert trace.arrival_ns.tolist() == [0, 2_500_000_000]
    assert trace.prompt_tokens.tolist() == [30, 20]
    assert sum(trace.report.rows_dropped.values()) == 1


def test_prediction_is_held_against_what_a_client_saved(saved):
    path = str(saved(VLLM))
    spec = make_spec(
        {
            "name": "served",
            "workload": {"trace": path, "format": "client_results"},
            "validation": {"measured": path},
        }
    )
    found = validate(spec)
    assert found.measured_ms["TTFT Mean"] == pytest.approx(375)
    assert found.measured_ms["TPOT Mean"] == pytest.approx((750 + 125) / 2)
    assert all(np.isfinite(list(found.predicted_ms.values())))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"completed": 2}, "not the per-request results of a load generator"),
        (VLLM | {"ttfts": [0.5]}, "3 start_times, but 1 ttfts"),
        (VLLM | {"itls": None}, "itls must be a list, one entry a request"),
        (VLLM | {"ttfts": [0.5, "x", 0]}, "request 1: ttfts must be a time in seconds, got 'x'"),
        (VLLM | {"ttfts": [0.5, -1.0, 0]}, "request 1: sent, first token and last token must not"),
        (VLLM | {"output_lens": [3, -1, 0]}, "request 1: output tokens must be a whole number ab"),
        (VLLM | {"errors": ["no"] * 3}, "no request was answered"),
        ({"benchmarks": GUIDELLM["benchmarks"] * 2}, "2 benchmarks; a recording is of one"),
        ({"benchmarks": [{}]}, r"benchmarks\[0\]: no requests"),
        (
            {
                "benchmarks": [
                    {
                        "requests": {
                            "successful": [{"prompt_tokens": 5, "first_token_time": 1.0}],
                            "errored": [],
                            "incomplete": [],
                        }
                    }
                ]
            },
            "successful request 0: no info: GuideLLM before 0.4 wrote this, which is not read",
        ),
        ([{"start_time": 1.0, "error": None}], "request 0: no info"),
        (
            [inference_perf_request(1.0, 5, 5, [2.0], False) | {"info": {"input_tokens": 5}}],
            "request 0: no output_token_times: only streamed answers have them",
        ),
        (
            [
                inference_perf_request(1.0, 5, 5, [2.0], False)
                | {"info": {"input_tokens": 5, "output_tokens": 5, "output_token_times": []}}
            ],
            "request 0: no times of its tokens: only streamed answers have them",
        ),
        ([INFERENCE_PERF[0] | {"info": 3}], "request 0: no output_token_times"),
    ],
)
def test_file_that_is_no_recording_is_refused_with_request_and_key(data, said, saved):
    with pytest.raises(TraceError, match=said):
        read_recording(saved(data))


@pytest.mark.parametrize("count", [0, None])
@pytest.mark.parametrize("key", ["prompt", "output"])
@pytest.mark.parametrize("client", ALL)
def test_requests_without_tokens_are_left_out_and_counted_if_asked(client, key, count, saved):
    data = json.loads(json.dumps(ALL[client]))
    if client == "vllm":
        data[f"{dict(prompt='in', output='out')[key]}put_lens"][1] = count
    elif client == "guidellm":
        request = data["benchmarks"][0]["requests"]["successful"][1]
        request[f"{key}_tokens"] = count
        request["info"]["timings"] |= dict.fromkeys(
            ("first_token_iteration", "last_token_iteration")
        )
    else:
        info = data[1]["info"]
        info[f"{dict(prompt='in', output='out')[key]}put_tokens"] = count
        info["output_token_times"] = []
    path = saved(data)
    trace = read(path, drop_empty=True)
    assert trace.prompt_tokens.tolist() == [20]
    assert trace.arrival_ns.tolist() == [0]
    assert trace.report.rows_dropped["no prompt or no output tokens"] == 1
    assert read_recording(path).prompt_tokens.tolist() == [20]
    with pytest.raises(TraceError, match=f"request 1: {key} tokens .*trace convert --drop-empty"):
        read(path)


@pytest.mark.parametrize("section", ["metrics", "scheduler_metrics"])
def test_report_that_lists_a_sample_of_its_requests_is_refused_with_the_way_out(section, saved):
    totals = "request_totals" if section == "metrics" else "requests_made"
    for status, listed in (("successful", 2), ("errored", 0), ("incomplete", 1)):
        counted = {"successful": 2, "errored": 0, "incomplete": 1, "total": 3}
        benchmark = GUIDELLM["benchmarks"][0] | {section: {totals: counted}}
        path = saved({"benchmarks": [benchmark]})
        assert len(read(path)) == 2
        counted[status] += 298
        path = saved({"benchmarks": [benchmark]})
        if (section, status) == ("scheduler_metrics", "incomplete"):  # they may not have begun
            assert len(read(path)) == 2
            continue
        said = f"lists {listed} of {listed + 298} {status} requests: .* without --sample-requests"
        with pytest.raises(TraceError, match=said):
            read_recording(path)


def test_recording_whose_requests_have_no_tokens_is_refused(saved):
    with pytest.raises(SpecError, match=r"result\.json: no request has tokens"):
        read_recording(saved(VLLM | {"output_lens": [0, 0, 0]}))


def test_results_of_vllm_without_requests_are_told_from_what_is_none_of_them(tmp_path):
    path = tmp_path / "results.json"
    totals = {"request_throughput": 1.0, "total_input_tokens": 9}
    for data, said in (
        (totals, "saved no single requests"), ({**totals, "more": 1}, "saved no single requests"),
        ({"request_throughput": 1.0}, "not the per-request results of a load generator"),
        ({}, "not the per-request results"), ("text", "not the per-request results"),
        ([], "no request was answered"),
    ):  # fmt: skip
        path.write_text(json.dumps(data))
        with pytest.raises(TraceError, match=said):
            read_client_results(path)


@pytest.mark.parametrize("name", ["profile_export.jsonl", "lines.json"])
def test_lines_of_aiperf_are_a_recording_and_a_workload(name, saved_lines):
    path = saved_lines(AIPERF, name)
    assert detect_format(path) == "client_results"
    found = read_recording(path)
    assert found.prompt_tokens.tolist() == [30, 20]
    assert found.output_tokens.tolist() == [2, 3]
    assert found.queued_s.tolist() == [105.0, 107.5]
    assert found.first_token_s.tolist() == [105.25, 108.0]
    assert found.last_token_s.tolist() == [105.375, 109.5]
    trace = read(path)
    assert trace.arrival_ns.tolist() == [0, 2_500_000_000]
    assert sum(trace.report.rows_dropped.values()) == 1
    assert len(read(saved_lines(AIPERF[:1]))) == 1  # one line is one JSON value, too


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("metrics", "time_to_first_token", {"value": 0.5, "unit": "sec"}, "must be in ms, got 'se"),
        ("metrics", "request_latency", {"value": "x", "unit": "ms"}, "a time in milliseconds, got"),
        ("metrics", "request_latency", {"value": 100.0, "unit": "ms"}, "must not run backwards"),
        ("metrics", "request_latency", {"unit": "ms"}, "request_latency: no value"),
        ("metrics", "output_sequence_length", {"value": 2.5, "unit": "tokens"}, "whole number"),
        ("metadata", "request_start_ns", 1e30, "request_start_ns must be a time in nanoseconds"),
    ],
)
def test_line_of_aiperf_that_cannot_be_is_refused_with_its_number(
    where, name, value, said, saved_lines
):
    requests = json.loads(json.dumps(AIPERF))
    requests[1][where][name] = value
    with pytest.raises(TraceError, match=rf"profile_export\.jsonl:2: .*{said}"):
        read(saved_lines(requests))


def test_lines_of_aiperf_without_streaming_or_whole_json_are_refused(saved_lines):
    requests = json.loads(json.dumps(AIPERF))
    del requests[0]["metrics"]["time_to_first_token"]
    with pytest.raises(TraceError, match=r"jsonl:1: no times of its tokens: only streamed"):
        read(saved_lines(requests))
    path = saved_lines(AIPERF)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(TraceError, match=r"jsonl:3: not JSON"):
        read(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"experiments": [], "service_kind": "openai"}, "GenAI-Perf saves no token counts of sing"),
        (
            {"request_throughput": {}, "request_latency": {}, "input_config": {}},
            "totals of a run of AIPerf or GenAI-Perf; .* in profile_export.jsonl",
        ),
    ],
)
def test_files_of_genai_perf_name_the_one_that_is_read(data, said, saved):
    with pytest.raises(TraceError, match=said):
        read(saved(data), "client_results")
    with pytest.raises(TraceError, match=said):
        read_recording(saved(data))
