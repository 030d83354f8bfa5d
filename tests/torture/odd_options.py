"""Every option of every command that ends soon, with values that mean nothing."""

import json
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from tests.torture.feature_experiments import experiment
from tests.torture.odd_values import SMALL
from tests.torture.sandbox import Case
from tests.torture.sound_files import finished
from tests.trace_samples import SAMPLES

_VALUES = (
    "", "x", "-1", "0", "1", "1.5", "1e308", "nan", "inf", "9" * 30, "9" * 5000, "s.yaml", "out",
    "nope/nope", "a=b", "=", "[", "{}", "é", "%s", "../out", "x" * 300, "t.csv", "os:path", "1/2",
)  # fmt: skip
_LEFT_OUT = {
    "--jobs",  # starts as many processes
    "--ray",  # asks a network
    "--show-completion",
    "--install-completion",  # writes into the home folder
    "--help",
}

_LINES: tuple[tuple[str, ...], ...] = (
    ("run", "s.yaml", "-q", "-o", "out2"),
    ("check", "s.yaml"),
    ("sweep", "s.yaml", "-q", "-o", "out2"),
    ("find", "find.yaml", "-q", "-o", "out2", "-j", "1"),
    ("tune", "tune.yaml", "-q", "-o", "out2", "-j", "1"),
    # An impossible number of GPUs at the end: options are read, and no search begins.
    ("recommend", "--model", "llama-3-8b", "--gpu", "a100-80gb", "-q", "-o", "out2", "--gpus", "0"),
    ("plot", "out"),
    ("report", "out"),
    ("compare", "out"),
    ("by-class", "out"),
    ("batch-means", "out"),
    ("log", "out", "--to", "nobody"),
    ("validate", "s.yaml"),
    ("metrics",),
    ("policies",),
    ("cost-models",),
    ("models",),
    ("gpus",),
    ("examples",),
    ("schema",),
    ("init", "begun"),
    ("trace", "describe", "t.csv"),
    ("trace", "convert", "t.csv", "u.csv"),
    ("trace", "synth", "u.csv", "-n", "10"),
    ("profile", "import", "llmservingsim", "out", "-o", "p"),
    ("profile", "import", "vidur", "t.csv", "-o", "p", "--hardware", "a100-80gb"),
    ("profile", "import", "splitwise", "t.csv", "-o", "p"),
    ("profile", "learn", "-o", "k.json", "--vidur", "out"),
    ("policy", "check", "fcfs", "--cases", "1"),
    ("predictor", "train", "text.jsonl", "-o", "m", "-q"),
    ("predictor", "evaluate", "m", "text.jsonl"),
    ("claims", "s.yaml", "-q"),
    ("measure", "s.yaml", "-q", "-o", "out2", "--write-only", "--keep", "kept"),
    ("regress", "check", "--baseline", "nope", "-q"),
)


def option_cases() -> Iterator[tuple[str, Case]]:
    """Yield each command line with each option at each value."""
    files: dict[str, bytes | str] = {
        "s.yaml": SMALL,
        "find.yaml": json.dumps(experiment("find")),
        "tune.yaml": json.dumps(experiment("tune")),
        "t.csv": SAMPLES["schedlab"],
        "text.jsonl": SAMPLES["vllm_custom"],
        **{f"out/{name}": part for name, part in finished().items()},
    }
    for line in _LINES:
        for option in _command(line).params:
            if option.param_type_name != "option":
                continue
            name = max(option.opts, key=len)
            if name in _LEFT_OUT:
                continue
            words = [name] if option.is_flag else [f"{name}={value}" for value in _VALUES]
            for word in words:  # at the end, where it counts though the line has it already
                yield f"{' '.join(line)} {word[:40]}", Case((*line, word), files)


def _command(line: tuple[str, ...]) -> Any:
    """Return the command that a line calls."""
    from schedlab.experiments.commands.app import app

    command: Any = get_command(app)
    for word in line:
        if hasattr(command, "commands"):
            command = command.commands[word]
    return command
