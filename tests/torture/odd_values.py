"""What a hand, a broken script or an enemy may write where a value belongs."""

from collections.abc import Iterator

from pydantic import BaseModel

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.key_errors import model_in
from tests.torture.sandbox import Case

ODD_VALUES = (
    "",
    "null",
    "true",
    "0",
    "1",
    "-1",
    "1000000000",
    "9223372036854775807",
    "1000000000000000000000000000000",
    "1" * 5000,
    "1e-300",
    "1e300",
    ".inf",
    ".nan",
    '"x"',
    '"\\0"',
    "[]",
    "[1, 2]",
    "{}",
    "{a: 1}",
    "[[[[1]]]]",
    '"../.."',
    "/dev/zero",
    "x" * 6000,
    "2001-01-01",
    '"fcfs:Nope"',
    "nope:Nope",
    "0.1",
)

SMALL = """\
seed: 0
model: llama-3-8b
hardware: a100-80gb
cost_model: roofline
engine: {max_num_seqs: 8, max_model_len: 2048}
workload: {num_requests: 20, request_rate: 4, prompt_tokens: 64, output_tokens: 8}
policy: fcfs
"""


def keys() -> list[str]:
    """Return every dotted key of an experiment; names of classes and knobs are ``NAME``."""
    return list(_keys(ExperimentSpec, ""))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        inner = model_in(field.annotation)
        if inner:
            properties = model.model_json_schema()["properties"]
            named = "additionalProperties" in properties[name]
            yield from _keys(inner, f"{prefix}{name}.{'NAME.' if named else ''}")


def specification_cases() -> Iterator[tuple[str, Case]]:
    """Put every odd value at every key of a small experiment."""
    for key in keys():
        for value in ODD_VALUES:
            run = ["run", "s.yaml", f"{key}={value}", "-q", "-o", "out"]
            yield f"{key}={value[:30]}", Case(run, {"s.yaml": SMALL}, ["s.yaml", "override"])
