import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.trace import app
from schedlab.sim.errors import SpecError, TraceError
from schedlab.traces import PRESETS, READERS, read

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
