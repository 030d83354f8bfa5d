import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands import trace as trace_commands
from schedlab.experiments.commands.trace import app
from schedlab.sim.errors import SpecError, TraceError
from schedlab.traces import PRESETS, READERS, read, statistics

OWN = "arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,20,6\n3,30,7\n"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text(OWN)
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_describe_prints_report_and_tables(source):
    out = run("describe", source).output
    assert f"source: {source} (schedlab)" in out
    assert "3 requests" in out
    assert "as bursty as gamma of shape" in out
    assert "mean rate, requests/s" in out


def test_describe_as_json_is_only_json(source):
    stats = json.loads(run("describe", source, "--json").output)
    assert stats["num_requests"] == 3
    assert stats["prompt_tokens"]["mean"] == 20.0


def test_convert_writes_the_same_trace(source, tmp_path):
    out = tmp_path / "out.parquet"
    assert "wrote 3 requests" in run("convert", source, out).output
    assert read(out).arrival_ns.tolist() == read(source).arrival_ns.tolist()


def test_synth_writes_the_preset_and_repeats(tmp_path):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    options = ("--preset", "fixed", "--num-requests", 20, "--rate", 3, "--seed", 5)
    assert "drawn with seed 5" in run("synth", one, *options).output
    run("synth", two, *options)
    assert one.read_bytes() == two.read_bytes()
    assert read(one).prompt_tokens.tolist() == [512] * 20


def test_presets_and_formats_list_everything():
    presets, formats = run("presets").output, run("formats").output
    assert all(name in presets for name in PRESETS)
    assert all(name in formats for name in READERS)


def test_errors_are_raised_for_the_main_command_to_print(tmp_path, source):
    with pytest.raises(TraceError, match="no such trace file"):
        run("describe", tmp_path / "none.csv")
    with pytest.raises(TraceError, match="use one of"):
        run("convert", source, tmp_path / "out.xlsx")
    with pytest.raises(SpecError, match="unknown preset"):
        run("synth", tmp_path / "out.csv", "--preset", "nope")
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.slow
def test_importing_traces_loads_no_heavy_library():
    program = (
        "import sys, traces, schedlab.experiments.commands.trace;"
        "print([m for m in ('pandas', 'scipy', 'pyarrow', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_description_of_a_trace_is_shown_with_prompts_beside_answers(capsys, monkeypatch):
    def lengths(factor):
        return {
            "mean": 1000.25 * factor, "std": 2.0 * factor, "p50": 3.0 * factor, "p90": 4.0 * factor,
            "p99": 5.0 * factor, "max": 6 * factor,
            "lognormal": {"mu": 1.5 * factor, "ks": None if factor == 7 else 0.25},
            "gamma": {"shape": 0.125 * factor},
        }  # fmt: skip

    stats = {
        "num_requests": 12345, "prompt_tokens": lengths(1), "output_tokens": lengths(7),
        "arrivals": {"rate": 2.34567, "cv": None, "fano_10s": 0.5}, "prefix": None,
        "sessions": {"num_sessions": 4321, "lru": {1000: 0.5, 20000: 0.75}},
    }  # fmt: skip
    header, rows = trace_commands._lengths_table(stats)
    assert header == ("tokens", "prompt", "output")
    assert rows == [
        ("mean", "1,000.2", "7,001.8"), ("std", "2.0", "14.0"), ("p50", "3.0", "21.0"),
        ("p90", "4.0", "28.0"), ("p99", "5.0", "35.0"), ("max", "6.0", "42.0"),
        ("lognormal mu", "1.500", "10.500"), ("lognormal ks", "0.250", "-"),
        ("gamma shape", "0.125", "0.875"),
    ]  # fmt: skip
    assert trace_commands._number_rows(stats["arrivals"]) == [
        ("mean rate, requests/s", "2.346"), ("coefficient of variation of gaps", "-"),
        ("variance / mean of counts in 10 s", "0.5"),
    ]  # fmt: skip
    assert trace_commands._number_rows(stats["sessions"]) == [
        ("num_sessions", "4,321"), ("lru 1,000", "0.5"), ("lru 20,000", "0.75")
    ]  # fmt: skip
    report = SimpleNamespace(lines=lambda: ["read 7 rows"])
    trace = SimpleNamespace(report=report)
    monkeypatch.setattr(statistics, "describe", lambda one: stats if one is trace else None)
    trace_commands._print_description(trace, False)
    shown = capsys.readouterr().out
    assert shown.startswith("read 7 rows\n")
    titles = ("12,345 requests", "arrivals", "prefix", "sessions")
    assert [shown.count(title) for title in titles] == [1, 1, 0, 2]
    trace_commands._print_description(trace, True)
    assert json.loads(capsys.readouterr().out) == {"report": ["read 7 rows"], **json.loads(
        json.dumps(stats))}  # fmt: skip
