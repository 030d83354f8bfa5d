"""Every command that prints a table prints it whole at any width, into pipes and into logs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands import terminal
from schedlab.experiments.commands.app import app
from schedlab.experiments.comparing import comparison_files
from schedlab.experiments.results import text_table as tables
from schedlab.experiments.search.recommend_report import HEADER
from schedlab.experiments.training import evaluate
from schedlab.sim.cost.learning.errors import TableError
from tests.unit.test_load_tests import TEST

SPEC = """\
name: small
model: llama-3-8b
hardware: a100-80gb
workload: {trace: azure-conv, num_requests: 30, request_rate: 6}
slo: {ttft_ms: 1000, tpot_ms: 50}
replications: 2
sweep:
  policy: [static, {name: sjf, predictor: {name: noisy, kendall_tau: 0.6}}]
find: {maximize: workload.request_rate, between: [2, 9], at_most: {p99_ttft_ms: 900}, settle: false}
tune: {maximize: output_throughput, over: {engine.max_num_seqs: [4, 8]}, levels: 2, settle: false}
"""
CLAIM = """\
workload: {num_requests: 8, prompt_tokens: 64, output_tokens: 9}
replications: 2
sweep: {policy: [fcfs, static]}
claim:
  system: Continuous
  statement: It is faster.
  source: a paper
  scaled_down: nothing
  figures:
    - {name: throughput, metric: output_throughput, of: {policy: fcfs},
       against: {policy: static}, compare: ratio, paper: [2, 4], accept: [1.5, 5]}
"""
MEASURED = """\
name: measured
model: llama-3-8b
hardware: a100-80gb
engine: {profile: vllm-0.19}
workload: {trace: client.json}
validation: {measured: client.json}
"""
CLIENT = {
    "start_times": [0.0, 0.5, 1.0], "input_lens": [9, 1234, 20], "output_lens": [2, 3, 2],
    "ttfts": [0.2, 0.3, 0.2], "itls": [[0.01], [0.01, 0.02], [0.03]], "errors": [""] * 3,
}  # fmt: skip
MATRIX = """\
workloads: {chat: {workload: {trace: fixed, num_requests: 9, request_rate: 6}}}
seeds: [0]
registered: false
policies: {fcfs: fcfs, static: static}
metrics: {mean_ttft_ms: {relative: 0.01}}
"""
COMMANDS = [
    ["run", "s.yaml", "-o", "out", "-m", "largest(latency=itl)"],
    ["check", "s.yaml"],
    ["sweep", "s.yaml", "-o", "out", "-j", "1"],
    ["compare", "out", "--all"],
    ["by-class", "out"],
    ["find", "s.yaml", "-j", "1"],
    ["tune", "s.yaml", "sweep={}", "-j", "1"],
    ["regress", "check", "--baseline", "."],
    ["batch-means", "one", "--batches", "5"],
    ["claims", "claim.yaml", "-j", "1"],
    ["validate", "measured.yaml"],
    ["policy", "check", "fcfs", "--cases", "1", "--law", "never_idles"],
    ["validate", "measured.yaml", "--by-step"],
    ["validate", "runs.json", "hardware=h100", "cost_model=roofline"],
    ["predictor", "train", "one", "-o", "knn", "--kind", "knn"],
    ["predictor", "evaluate", "knn", "one"],
    ["predictor", "evaluate", "ranked", "one"],
    ["profile", "learn", "-o", "kernels.json"],
    ["policies"], ["metrics"], ["models"], ["gpus"], ["cost-models"],
    ["examples"], ["plot", "--list"], ["doctor"],
    ["trace", "describe", "t.csv"], ["trace", "formats"], ["trace", "presets"],
    ["trace", "fetch", "--list"],
]  # fmt: skip
EVALUATED = {
    "kind": "pointwise",
    "test": {
        "num_prompts": 123_456, "kendall_tau": 0.512, "interval": [0.498, 0.526],
        "pairs_right": 0.756, "pairs_right_interval": [0.749, 0.763],
        "mean_absolute_error_tokens": 12_345.6,
        "by_application": {
            "math_competition": {
                "num_prompts": 721, "kendall_tau": 0.412, "interval": [0.398, 0.426],
                "pairs_right": 0.706, "pairs_right_interval": [0.699, 0.713],
            },
        },
    },
    "learning_curve": [
        {"num_prompts": 1_000 * n, "generated_tokens": 12_345_678 * n, "kendall_tau": 0.4,
         "interval": [0.3, 0.5], "training_cpu_s": 1234.5}
        for n in (1, 2)
    ],
    "latency_s": {"median": 0.0012, "p99": 0.0123},
}  # fmt: skip
DIFFERENCES = [
    ("every step", "123,456", "12,345.67", "+1,234.56 ± 123.45"),
    ("steps with several prompts of chunks", "1,234.5", "", "-0.12 ± 0.01"),
]
_evaluate = evaluate.evaluate
LEARNING = "schedlab.sim.cost.learning"
MADE = {
    f"{LEARNING}.fit.learn": lambda tables: {},
    f"{LEARNING}.errors.table_errors": lambda *_: [
        TableError("rtx-pro-6000", "attention_of_decodes", "a table", 123_456, 0.1234, 1.2345)
    ],
    f"{LEARNING}.errors.layer_errors": lambda *_: {
        "a100-80gb": {"meta-llama/Llama-3.1-70B": {"learnt": 0.1234, "other_models": 0.2345}}
    },
    f"{LEARNING}.kernels_file.write_kernels": lambda *_: None,
    "schedlab.experiments.training.evaluate.evaluate": lambda model, data, **given: (
        EVALUATED if model.name == "ranked" else _evaluate(model, data, **given)
    ),
    "schedlab.experiments.comparing.forced_replay.forced_replay": lambda spec: SimpleNamespace(
        rows=lambda: DIFFERENCES, lines=list
    ),
}
"""What takes long to come to a table, or needs what a test has not, and what it might come to."""
WIDTHS = [80, 100, 120, 180]


@pytest.fixture(scope="module")
def printed(tmp_path_factory, blank_figures_of_module):
    """Run every command once, and keep what it gave to the table: command to arguments."""
    kept = {}
    real = tables.text_table
    with pytest.MonkeyPatch.context() as patch:
        for place, given in MADE.items():
            patch.setattr(place, given)
        patch.chdir(tmp_path_factory.mktemp("widths"))
        Path("s.yaml").write_text(SPEC)
        Path("t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,4\n1.5,1234,4\n")
        Path("matrix.yaml").write_text(MATRIX)
        Path("claim.yaml").write_text(CLAIM)
        Path("measured.yaml").write_text(MEASURED)
        Path("client.json").write_text(json.dumps(CLIENT))
        Path("runs.json").write_text(json.dumps([TEST]))
        CliRunner().invoke(
            app,
            [
                "run",
                "s.yaml",
                "sweep={}",
                "replications=1",
                "policy={name: static, predictor: oracle, max_batch_size: 4}",
                "-o",
                "one",
                "workload.num_requests=100",
                "-q",
            ],
        )
        CliRunner().invoke(app, ["regress", "update", "--baseline", ".", "-q"])
        baseline = Path("baseline.json")
        moved = re.sub(r"(mean_ttft_ms.: )\d", r"\g<1>3", baseline.read_text())
        baseline.write_text(moved)
        for words in COMMANDS:
            told = kept[" ".join(words)] = []
            keep = lambda *given, told=told: told.append(given) or real(*given)  # noqa: E731
            patch.setattr(tables, "text_table", keep)
            done = CliRunner().invoke(app, words)
            assert done.exit_code in (0, 1), (words, done.output)
    row = ("token budget", "4", "2", "1024", "16384", "shortest_prompt", "22.7 ±0.4", "settled")
    kept["recommend"] = [("", HEADER, [row[: len(HEADER)]], None, 6)]
    compared = (
        "p99_ttft_ms", "12345.6", "102.5%", "1234.5", "-48.4%", "-11.8", "-81.1% .. +13.0%", "off",
    )  # fmt: skip
    kept["measure"] = [("fcfs, request_rate=6", comparison_files.HEADER, [compared], None, 1)]
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("width", [*WIDTHS, None])
def test_table_of_every_command_shows_each_cell_whole(width, printed):
    assert all(printed.values()), [name for name, told in printed.items() if not told]
    for name, told in printed.items():
        for title, header, rows, _, num_keys in told:
            shown = tables.text_table(title, header, rows, width, num_keys)
            lines = shown.removeprefix(title).split("\n")
            assert width is None or max(map(len, lines)) <= width, (name, width, shown)
            squeezed = " ".join(shown.split())
            numbers = [cell for row in rows for cell in row if re.fullmatch(r"[\d,.% ±+-]+", cell)]
            assert all(number in squeezed for number in numbers), (name, width, shown)


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["policies", "models", "gpus"])
def test_what_a_terminal_is_told_is_no_wider_than_it(command, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    done = CliRunner().invoke(app, [command])
    assert max(map(len, done.stdout.splitlines())) <= width


def test_pipe_is_told_tables_in_one_piece():
    """What reads a pipe or a log has no width: a row stays a row."""
    done = CliRunner().invoke(app, ["gpus"])
    assert done.stdout.count("memory GiB") == 1


@pytest.mark.parametrize(("columns", "wraps"), [(12, True), (20, True), (21, False)])
def test_lines_on_a_terminal_are_wrapped_at_its_width_and_at_no_less_than_twenty(
    monkeypatch, capsys, columns, wraps
):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.print_lines(["a line of 21 letters."])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + wraps
    assert wraps or lines == ["a line of 21 letters."]


def test_lines_without_an_output_to_write_to_are_dropped(monkeypatch):
    monkeypatch.setattr(terminal.sys, "stdout", None)  # as Python has it where it is closed
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.print_lines(["nobody reads this"])


def test_each_line_of_a_text_is_wrapped_alone_and_goes_on_further_in(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    terminal.print_lines(["first\nthe second is a long one\n\nthe twenty of fourth", "next"])
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "first", "the second is a long", "  one", "", "the twenty of fourth", "next"
    ]  # fmt: skip


class Progress:
    """A bar of rich that notes what it is told."""

    told: ClassVar[list[object]] = []

    def __init__(self, *columns, console, transient):
        self.told.append((len(columns), console.stderr, transient))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.told.append("gone")

    def add_task(self, description, total):
        self.told.append(("task", description, total))
        return "the task"

    def update(self, task, description, completed):
        self.told.append((task, description, completed))


def test_progress_is_a_bar_on_a_terminal_and_nothing_where_it_is_not_wanted(monkeypatch):
    monkeypatch.setattr(Progress, "told", [])
    monkeypatch.setattr("rich.progress.Progress", Progress)
    monkeypatch.setattr(
        terminal, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True))
    )
    with terminal.steps_bar(False) as progress:
        progress(3, 4, "measuring [x]")
        progress(4, 4, "done")
    assert Progress.told == [
        (3, True, True), ("task", "", 1.0),
        ("the task", "\\[3/4] measuring \\[x]", 0.75), ("the task", "\\[4/4] done", 1.0), "gone",
    ]  # fmt: skip
    with terminal.bar(True) as draw, terminal.steps_bar(True) as progress:
        assert draw is progress is None


def test_progress_elsewhere_is_a_line_at_ten_seconds_and_ever_more_rarely(monkeypatch, capsys):
    at_s = [100.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: at_s[0]))
    monkeypatch.setattr(
        terminal, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: False))
    )
    with terminal.bar(False) as draw:
        for after_s in range(100):
            at_s[0] = 100.0 + after_s
            draw(f"part {after_s}", after_s / 100)
    out, told = capsys.readouterr()
    # Ten seconds after the last, or half as long again since the beginning.
    assert [line.split(":")[0] for line in told.splitlines()] == [
        f"{s} s, {s}%" for s in (10, 20, 30, 45, 68)
    ]
    assert told.splitlines()[0].endswith(": part 10")
    assert out == ""
