"""What commands say: of finished results, of mistakes, and of work that stand-ins do for them.

Each runs in this process, in a folder of its own. Stand-ins note what they are given, every value
another, and answer with numbers that are easy to follow into what is printed.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from typer.testing import CliRunner

from schedlab.experiments.analysis.policy_comparison import METRICS
from schedlab.experiments.commands import doctor, experiment
from schedlab.experiments.commands.app import app
from tests.golden import drawn
from tests.golden.rounding import json_digest

_SWEEP = "SWEEP"
_RUN = "RUN"


@contextmanager
def _somewhere() -> Iterator[Path]:
    """Work in a folder of its own, and leave no trace of it in this process."""
    before, searched = Path.cwd(), list(sys.path)
    with TemporaryDirectory(prefix="golden-") as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            sys.path[:] = searched


def _said(line: str) -> list[Any]:
    """Run a command; what it prints, line by line, what it complains of, and how it ends."""
    results = drawn.results() if _SWEEP in line or _RUN in line else None
    words = [word.replace("~", " ") for word in line.split()]
    if results is not None:
        places = {_SWEEP: str(results.folder), _RUN: str(results.runs[-1].folder)}
        words = [places.get(word, word) for word in words]
    experiment._in_hand.clear()
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    text = done.output
    for place in (str(drawn._KEPT.name), str(Path.cwd()), str(Path.cwd().resolve())):
        text = text.replace(place, "FOLDER")
    text = re.sub(r"\d+\.\d{4,}", lambda n: f"{float(n[0]):.6g}", text)
    text = re.sub(r"-[0-9a-f]{16}\b", "-HASH", text)
    lines = [line for line in text.splitlines() if not re.match(r"\d+ s, \d+%: ", line)]
    return [done.exit_code, *lines]


# -- finished results -----------------------------------------------------------------------------

SHOWN = (
    "compare SWEEP", "compare SWEEP --all --against vtc", "compare SWEEP --metric mean_e2el_ms",
    "compare SWEEP --key workload.request_rate --metric p99_ttft_ms", "compare SWEEP --json",
    "compare SWEEP --against sjf", "compare SWEEP --metric mean_e2el", "compare nowhere",
    "batch-means SWEEP", "batch-means RUN --batches 2", "batch-means RUN --batches 1",
    "by-class SWEEP", "by-class RUN --column priority --metric longest_wait",
    "by-class RUN --column nothing", "by-class RUN --metric nothing",
    "plot --list", "plot", "plot SWEEP --format bmp", "plot SWEEP --size poster",
    "plot SWEEP --filter policy", "plot SWEEP --label =x", "plot SWEEP --figure histogram",
    "plot SWEEP --figure lines --metric p99_itl_ms --format svg -o one",
    "plot SWEEP --figure cdf --metric tpot -o two --format pdf",
    "plot SWEEP --figure gantt -o four", "plot SWEEP --size column -o five --format svg",
    "plot SWEEP --figure heat-map --size column -o six", "plot SWEEP -o file",
    "report SWEEP -o page.html", "report nowhere", "log SWEEP --to nobody",
)  # fmt: skip


def shown(_: str) -> dict[str, Any]:
    """Ask for tables and figures of a finished sweep."""
    from matplotlib.figure import Figure

    def savefig(self: Any, file: Any, **_: Any) -> None:
        Path(file).write_bytes(b"<svg/>")

    found: dict[str, Any] = {}
    with _somewhere() as folder, mock.patch.object(Figure, "savefig", savefig):
        (folder / "file").touch()
        with mock.patch("schedlab.experiments.report.page.write_page", lambda *given: given[1]):
            for line in SHOWN:
                said = _said(line)
                long = [*said[:5], len(said), json_digest(said)]
                found[line] = said if len(said) < 12 else long
        found["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))
    found["metrics"] = list(METRICS)
    return found


# -- experiments ----------------------------------------------------------------------------------

_TINY = """\
name: tiny
hardware: a100-80gb
engine: {num_gpu_blocks_override: 300}
workload: {trace: fixed, num_requests: 8, request_rate: 4}
slo: {ttft_ms: 1000}
"""
_MATRIX = """\
seeds: [0, 1]
experiment: {slo: {ttft_ms: 1000}, engine: {max_num_seqs: 4}}
workloads: {chat: {workload: {trace: azure-conv, num_requests: 9, request_rate: 8.0}}}
registered: false
policies: {fcfs: fcfs, static: static}
metrics:
  completed: {better: higher}
  mean_ttft_ms: {relative: 0.05, absolute: 1.0}
"""
CHECKED = (
    "check tiny.yaml", "check swept.yaml", "check swept.yaml engine.max_model_len=9000",
    "check short.yaml", "check tiny.yaml policy=fcsf", "check nowhere.yaml",
    "check tiny.yaml workload.trace=missing.csv",
    "run tiny.yaml --json --quiet x", "run tiny.yaml policy",
    "regress update --jobs 1 -q", "regress check --jobs 1", "regress update --jobs 1",
    "regress check --jobs 1 -q --markdown told.md --junit told.xml",
    "regress check --baseline nowhere", "regress update --baseline nowhere",
    "regress check --baseline moved --jobs 1", "regress check --baseline moved --jobs 1 -q",
    "validate tiny.yaml", "validate tiny.yaml --by-step", "validate tiny.yaml --run a",
    "validate tiny.yaml --spec-only a=1", "validate tiny.yaml --other-only a=1",
    "validate tiny.yaml --by-step --fitted-on tiny.yaml", "validate tiny.yaml --figure f",
    "validate tiny.yaml --measure-frontend f.json", "measure tiny.yaml --write-only",
    "calibrate -o p --engine none", "calibrate -o p --clock none",
    "predictor train d.jsonl -o m --kind knn --encoder minilm",
    "predictor train d.jsonl -o m --encoder hash", "claims --page claims tiny.yaml",
    "claims tiny.yaml", "compare-policies nowhere",
)  # fmt: skip


def checked(_: str) -> dict[str, Any]:
    """Check experiments and a small matrix of them; make mistakes."""
    found: dict[str, Any] = {}
    with _somewhere() as folder:
        tiny = yaml.safe_load(_TINY)
        (folder / "tiny.yaml").write_text(_TINY, encoding="utf-8")
        rates = {"workload.request_rate": [1, 2], "engine.num_gpu_blocks_override": [300, 700]}
        swept = {**tiny, "replications": 3, "sweep": rates}
        (folder / "swept.yaml").write_text(yaml.safe_dump(swept), encoding="utf-8")
        short = {**swept, "sweep": {"engine.max_model_len": [100, 4000, 4800, 5000]}}
        (folder / "short.yaml").write_text(yaml.safe_dump(short), encoding="utf-8")
        shipped = folder / "shipped"
        shipped.mkdir()
        (shipped / "matrix.yaml").write_text(_MATRIX, encoding="utf-8")
        place = mock.patch(
            "schedlab.experiments.specification.shipped.shipped_folder", return_value=shipped
        )
        with place, mock.patch.dict(os.environ, {"SOURCE_DATE_EPOCH": "0"}):
            for line in CHECKED:
                if line.endswith("moved --jobs 1"):
                    _move(folder / "regression", folder / "moved")
                found[line] = _said(line)[:9]
        found["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))
    return found


def _move(kept: Path, moved: Path) -> None:
    """Copy a baseline, with times that were ten times as short."""
    moved.mkdir()
    (moved / "matrix.yaml").write_text(_MATRIX, encoding="utf-8")
    text = (kept / "baseline.json").read_text(encoding="utf-8")
    changed = re.sub(r'("mean_ttft_ms": )([\d.]+)', lambda m: f"{m[1]}{float(m[2]) / 10!r}", text)
    (moved / "baseline.json").write_text(changed, encoding="utf-8")


# -- work that others do --------------------------------------------------------------------------

_IMPORTERS = "schedlab.sim.cost.importers"
_LEARNING = "schedlab.sim.cost.learning"
PASSED = (
    "profile import llmservingsim a/b -o p --tensor-parallel-size 2 --link-latency-us 7 "
    "--link-gb-per-s 9 --data-parallel-size 3 --expert-parallel --skew --all-reduce c.csv",
    "profile import llmservingsim a/b -o p --cluster c.json --no-skew",
    "profile import vidur m.csv -o p --hardware h100 --model m --tensor-parallel-size 4 "
    "--network n.csv",
    "profile import splitwise perf.csv -o p --model m --hardware h",
    "profile import aiconfigurator m -o p --hardware h --tensor-parallel-size 2 --backend b "
    "--backend-version 3 --expert-parallel",
    "profile learn -o kernels.json --aiconfigurator a --llmservingsim l --vidur v",
    "profile learn -o kernels.json",
    "predictor train d.jsonl -o m1 --kind buckets --encoder hf:e --num-buckets 7 --seed 5 "
    "--no-learning-curve --tokenizer t",
    "predictor train d.jsonl -o m2 -q", "predictor train d.jsonl -o m3 --json --kind knn --seed 2",
    "predictor evaluate m1 d.jsonl --tokenizer t", "predictor evaluate m1 d.jsonl --json",
    "predictor held-out m1 d.jsonl -o h.jsonl --tokenizer t",
    "measure tiny.yaml seed=4 --keep k --time-limit-s 60 --check -o c1", "measure tiny.yaml -q",
    "calibrate -o p --model m --device cuda:1 --engine vllm --clock reference --hardware h "
    "--max-num-seqs 3 --max-num-batched-tokens 5 --max-model-len 7 --block-size 9 --num-blocks 11 "
    "--rounds 13 --time-limit-s 15 --threads 17 --seed 19",
    "calibrate -o p", "calibrate -o p --device cuda --quiet",
    "validate tiny.yaml seed=3 --fitted-on tiny.yaml --spec-only seed=4 --other-only seed=5",
    "validate tiny.yaml --json --fitted-on tiny.yaml", "validate tiny.yaml",
    "validate tiny.yaml --by-step --json", "validate tiny.yaml --by-step --figure f",
    "claims tiny.yaml -j 1 -o out --page fleets", "claims -j 1 -q",
    "claims --page claims -j 1 -o out", "claims --page claims -j 1 -q",
)  # fmt: skip
_REPORT = {
    "kind": "listmle", "latency_s": {"median": 0.0123, "p99": 0.045}, "notes": ["a note"],
    "test": {
        "num_prompts": 1234, "kendall_tau": 0.51, "interval": [0.4, 0.6], "pairs_right": 0.75,
        "pairs_right_interval": None, "mean_absolute_error_tokens": 1234.56,
        "application_mean": {"kendall_tau": None, "interval": None, "pairs_right": 0.5,
                             "pairs_right_interval": [0.4, 0.55]},
        "gain": {"kendall_tau": 0.1, "interval": [0.05, 0.15], "pairs_right": 0.25,
                 "pairs_right_interval": [0.2, 0.3]},
        "by_application": {"": {"num_prompts": 9, "kendall_tau": 0.2, "interval": [0.1, 0.3],
                                "pairs_right": 0.6, "pairs_right_interval": [0.5, 0.7]}},
    },
    "learning_curve": [
        {"num_prompts": n, "generated_tokens": 100 * n, "kendall_tau": n / 9000,
         "interval": [0.0, 1.0], "training_cpu_s": n / 300} for n in (1000, 3000)
    ],
}  # fmt: skip
_NEIGHBOURS = {"kind": "knn", "test": {"mean_error_s": 1234.567, "num_seen": None, "a_b": 0.5},
               "latency_s": {"median": 0.5}}  # fmt: skip


def passed(_: str) -> dict[str, Any]:
    """Hand options on to stand-ins, and print what they answer."""
    given: list[str] = []
    found: dict[str, Any] = {}

    def told(answer: Any, name: str) -> Any:
        def stand_in(*args: Any, **named: Any) -> Any:
            words = [_brief(arg) for arg in args]
            words += [f"{key}={_brief(arg)}" for key, arg in sorted(named.items())]
            given.append(f"{name}({', '.join(words)})")
            return answer

        return stand_in

    imported = SimpleNamespace(save=told(None, "save"), assumptions=["one", "two"])
    error = [
        SimpleNamespace(gpu="g", kind="k", num_rows=7, error=0.123, without_gpu=without)
        for without in (None, 0.5)
    ]
    layers = {"gpu": {"m": {"learnt": 0.1, "other_models": 0.2}, "n": {"learnt": 0.3}}}
    checked = SimpleNamespace(
        to_data=lambda: {"x": 1.5}, rows=lambda: [("TTFT", "1", "2", "3 %")], lines=lambda: ["end"],
        header=lambda: ("a", "b", "c", "d"),
    )  # fmt: skip
    comparing, training = "schedlab.experiments.comparing", "schedlab.experiments.training"
    answers: dict[str, Any] = {
        f"{_IMPORTERS}.llmservingsim.import_bundle": imported,
        f"{_IMPORTERS}.llmservingsim.read_link": (0.25, 5e9),
        f"{_IMPORTERS}.vidur.import_vidur": imported,
        f"{_IMPORTERS}.splitwise.import_splitwise": imported,
        f"{_IMPORTERS}.aiconfigurator.import_aiconfigurator": imported,
        f"{_LEARNING}.tables.aiconfigurator_tables": ["a"],
        f"{_LEARNING}.tables.llmservingsim_tables": ["b", "c"],
        f"{_LEARNING}.tables.vidur_tables": ["d"],
        f"{_LEARNING}.fit.learn": "learnt",
        f"{_LEARNING}.errors.table_errors": error,
        f"{_LEARNING}.errors.layer_errors": layers,
        f"{_LEARNING}.kernels_file.write_kernels": None,
        f"{training}.dataset.read_dataset": "data set",
        f"{training}.train.train": _REPORT,
        f"{training}.train.train_estimator": _NEIGHBOURS,
        f"{training}.evaluate.evaluate": {**_REPORT, "learning_curve": []},
        f"{training}.evaluate.write_held_out": 12_345,
        f"{comparing}.compare.compare": [],
        f"{comparing}.comparison_files.write": None,
        f"{comparing}.comparison_files.agreement_lines": ["yes", "no"],
        f"{comparing}.comparison_files.runs_told": "two runs",
        f"{comparing}.calibrate.calibrate": SimpleNamespace(verdict="good"),
        f"{comparing}.calibrate.calibration_config": "config",
        f"{comparing}.machine.detected_hardware": "found",
        f"{comparing}.validate.validate": checked,
        f"{comparing}.host_terms.validate_elsewhere": ("terms", checked),
        f"{comparing}.forced_replay.forced_replay": checked,
        f"{comparing}.by_step_figures.step_time_figure": "figure",
        "schedlab.experiments.figures.style.save": None,
        "schedlab.experiments.claims.claims.load_claims": [("p", SimpleNamespace(backend="sim"))],
        "schedlab.experiments.claims.claims.shipped": ["shipped"],
        "schedlab.experiments.claims.claims.examine": "finding",
        "schedlab.experiments.claims.report.row_texts": [("s", "f", "p", "a", "m", "v")],
        "schedlab.experiments.claims.report.write": ["report.md"],
        "schedlab.experiments.claims.page.run_page": ("quoted", "findings"),
        "schedlab.experiments.claims.page.claim_rows": [("x", "q", "v")],
        "schedlab.experiments.claims.page.write": ["claims.md"],
    }
    with _somewhere() as folder, ExitStack() as stack:
        (folder / "tiny.yaml").write_text(_TINY, encoding="utf-8")
        for path, answer in answers.items():
            name = path.rpartition(".")[2]
            stack.enter_context(mock.patch(path, told(answer, name)))
        for line in PASSED:
            given.clear()
            said = _said(line)
            found[line] = [*said, *given]
    return found


def _brief(value: Any) -> str:
    """Return an argument in words: experiments by their seed, others by their type."""
    if hasattr(value, "workload"):
        return f"experiment with seed {value.seed}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"[{', '.join(map(_brief, value))}]"
    simple = isinstance(value, str | int | float | Path | None | dict)
    if simple or hasattr(value, "__dataclass_fields__") or hasattr(value, "_fields"):
        return re.sub(r"\.[\w.-]+\.new-\d+", "NEW", str(value).replace(str(Path.cwd()), "FOLDER"))
    return type(value).__name__


# -- this machine ---------------------------------------------------------------------------------


def machine(_: str) -> dict[str, Any]:
    """Look at a machine of which all is known."""
    from importlib import metadata

    there = {"numpy": "2.0", "scipy": "1.9", "torch": "2.5", "schedlab": "0.9"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    found: dict[str, Any] = {}
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 3 << 20}
    with (
        _somewhere(),
        mock.patch.object(metadata, "version", version),
        mock.patch.object(os, "sched_getaffinity", return_value={1, 5, 6}, create=True),
        mock.patch.object(os, "sysconf", pages.__getitem__),
        mock.patch("platform.system", return_value="System"),
        mock.patch("platform.machine", return_value="m64"),
        mock.patch.object(doctor, "_cuda", return_value=doctor.ReportLine("CUDA", "ok", "none")),
        mock.patch.object(doctor, "_core", return_value=doctor.ReportLine("core", "ok", "c")),
        mock.patch.dict(os.environ, {"SCHEDLAB_DATA": "nowhere"}),
    ):
        found["doctor"] = [line for line in _said("doctor") if not str(line).startswith("python")]
        found["version"] = [_said("version"), _said("--version")]
        with mock.patch.object(doctor, "_REQUIRED", ("numpy",)):
            found["well"] = _said("doctor")[0]
        for name, value in (("data", "."), ("no data", "")):
            with mock.patch.dict(os.environ, {"SCHEDLAB_DATA": value}):
                found[name] = list(vars(doctor._data_folder()).values())
    python = doctor._python()
    found["python"] = [python.subject, python.state, python.detail.rpartition(";")[2]]
    return found


CASES = {
    "commands on results": (shown, ""),
    "commands on experiments": (checked, ""),
    "commands that pass on": (passed, ""),
    "commands on a machine": (machine, ""),
}
