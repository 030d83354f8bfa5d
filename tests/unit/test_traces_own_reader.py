"""A trace format from outside: a module of the user's with a Reader."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlab import traces
from schedlab.experiments.commands.app import app
from schedlab.experiments.running.point_hash import point_hash
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.own_modules import find_own_modules
from schedlab.sim.errors import SpecError, TraceError

PAGE = Path(__file__).resolve().parents[2] / "docs/traces.md"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write the reader that docs/traces.md shows, and a file for it."""
    source = re.search(r"```python\n(# our_log\.py.*?)```", PAGE.read_text(), re.DOTALL)[1]
    (tmp_path / "our_log.py").write_text(source)
    (tmp_path / "monday.log").write_text("0.5 10 20\n2 30 40\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "our_log", raising=False)
    return tmp_path / "our_log.py"


def spec():
    return make_spec({"workload": {"trace": "monday.log", "format": "our_log:READER"}})


@pytest.mark.usefixtures("module")
def test_read_takes_a_reader_of_a_module():
    trace = traces.read("monday.log", "our_log:READER")
    assert trace.arrival_ns.tolist() == [500_000_000, 2_000_000_000]
    assert trace.output_tokens.tolist() == [20, 40]


@pytest.mark.usefixtures("module")
def test_experiment_takes_a_reader_of_a_module():
    assert load_workload(spec(), max_model_len=100).prompt_tokens.tolist() == [10, 30]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise KeyError('key')", "KeyError: 'key'"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named"),
        ("def", "SyntaxError: "),
    ],
)
def test_module_of_a_reader_that_fails_as_it_is_imported_is_told_with_its_error(
    module, source, told
):
    module.write_text(source)
    with pytest.raises(TraceError) as caught:
        traces.read("monday.log", "our_log:READER")
    begun = "trace format 'our_log:READER': cannot import 'our_log': "
    assert str(caught.value).startswith(begun + told)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("raise ValueError('what')", "ValueError: what (our_log.py:13)"),
        ("yield {'prompt_tokens': [3]}", "yields a dict, not a Trace"),
        ("return 3", "TypeError: "),
    ],
)
def test_reader_of_a_module_that_fails_as_it_reads_is_named(module, does, told):
    head, _, tail = module.read_text().partition("    seconds, ")
    body = "    " + does + "\n\n\n" + tail[tail.index("READER = ") :]
    module.write_text(head + body)
    with pytest.raises(TraceError) as caught:
        traces.read("monday.log", "our_log:READER")
    assert str(caught.value).startswith("trace format our_log:READER: " + told)


@pytest.mark.usefixtures("module")
def test_format_of_no_such_name_names_the_nearest():
    said = (
        r"^unknown trace format 'azur'; did you mean azure\?.*\(or a reader like my_module:READER"
    )
    with pytest.raises(TraceError, match=said):
        traces.read("monday.log", "azur")


def test_reader_of_a_module_is_part_of_a_result(module):
    before = point_hash(spec())
    module.write_text(module.read_text() + "\n# changed\n")
    find_own_modules()
    assert point_hash(spec()) != before


@pytest.mark.usefixtures("module")
def test_describe_command_takes_a_reader_of_a_module():
    done = CliRunner().invoke(app, ["trace", "describe", "monday.log", "-f", "our_log:READER"])
    assert done.exit_code == 0, done.output
    assert "monday.log (our_log)" in done.output


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("our_lag:READER", "cannot import 'our_lag': ModuleNotFoundError"),
        ("our_log:Reader_", "our_log.py) has no 'Reader_' that is a schedlab.traces.Reader"),
    ],
)
def test_reader_that_is_not_there_is_told(named, message):
    with pytest.raises(TraceError, match=re.escape(message)):
        traces.read("monday.log", named)
    with pytest.raises(SpecError, match=r"workload\.format: .*" + re.escape(message)):
        make_spec({"workload": {"trace": "monday.log", "format": named}})
