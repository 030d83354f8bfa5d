"""The commands that list what there is, by the names that an experiment gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer

from schedlab.experiments.commands.experiment import AsJson
from schedlab.experiments.commands.terminal import print_table
from schedlab.sim.text import json_text

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Part = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Show those whose name has this in it.")
]


class _Listed(NamedTuple):
    """A list of things that go by names, which stand in the first column."""

    kind: str
    title: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]


@app.command("metrics")
def list_metrics(
    part: Part = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/metrics.md.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what can be measured of a run: unit, better, parameters, definition."""
    from schedlab.experiments.results.metric_table import metric_rows, metric_tables

    if markdown:
        typer.echo(metric_tables(), nl=False)
        return
    listed = _Listed(
        "metrics",
        "metrics (NAME, NAME(parameter=value), or module:function)",
        ("name", "unit", "better", "definition"),
        [row for rows in metric_rows(every=part is not None).values() for row in rows],
    )
    _show([listed], part, as_json)


@app.command()
def policies(part: Part = None, as_json: AsJson = False) -> None:
    """List policies and predictors: purpose, source, knobs."""
    from schedlab.policies import registry
    from schedlab.policies.predictors import registry as predictors

    classes = {name: registry.policy_class(name) for name in registry.names()}
    known = _Listed(
        "policies",
        "policies (policy: NAME, or policy: {name: NAME, knob: value})",
        ("name", "purpose", "source", "in vLLM", "knobs"),
        [
            (
                name,
                _purpose(cls) + _needs(cls.needs_prediction),
                cls.source,
                _in_vllm(name),
                _knobs(cls.knobs()),
            )
            for name, cls in classes.items()
        ],
    )
    predicting = _Listed(
        "predictors",
        "predictors (policy: {name: NAME, predictor: NAME})",
        ("name", "purpose", "source", "knobs"),
        [
            (name, _purpose(cls), cls.source, _knobs(cls.knobs()))
            for name, cls in ((n, predictors.predictor_class(n)) for n in predictors.names())
        ],
    )
    _show([known, predicting], part, as_json)


@app.command("cost-models")
def cost_models(part: Part = None, as_json: AsJson = False) -> None:
    """List cost models: what they go by, and their knobs."""
    from schedlab.sim.cost import registry

    listed = _Listed(
        "cost models",
        "cost models (cost_model: NAME, or {name: NAME, knob: value}; those read from a profile: "
        "cost_model: FOLDER, or {profile: FOLDER, knob: value})",
        ("name", "purpose", "profile", "knobs"),
        [
            (
                name,
                _purpose(registry.maker(name)),
                registry.profile_files().get(name, "-"),
                _knobs(registry.knobs(name)),
            )
            for name in registry.names()
        ],
    )
    _show([listed], part, as_json)


@app.command()
def models(part: Part = None, as_json: AsJson = False) -> None:
    """List known models (a config.json works, too).

    The names of their repositories on huggingface.co are understood, and later releases of the
    same shape: llama-3.3-70b is found as llama-3.1-70b.
    """
    from schedlab.sim.hardware.models import canonical_model, model, model_names

    if part is not None and canonical_model(part) in model_names():
        part = canonical_model(part)

    listed = _Listed(
        "models",
        "models (model: NAME)",
        ("name", "parameters", "layers", "KV B/token (bf16)", "max_model_len", "source"),
        [
            (
                name,
                f"{shape.num_parameters / 1e9:.2f} B",
                str(shape.num_layers),
                f"{shape.kv_bytes_per_token('bf16'):,}",
                f"{shape.max_model_len:,}",
                shape.source,
            )
            for name, shape in ((name, model(name)) for name in model_names())
        ],
    )
    _show([listed], part, as_json)


@app.command()
def gpus(part: Part = None, as_json: AsJson = False) -> None:
    """List known GPUs (a YAML of datasheet numbers works, too)."""
    from schedlab.sim.hardware.gpus import canonical_gpu, gpu, gpu_names

    if part is not None and canonical_gpu(part) in gpu_names():
        part = canonical_gpu(part)

    listed = _Listed(
        "GPUs",
        "GPUs (hardware: NAME)",
        ("name", "memory GiB", "bandwidth TB/s", "dense bf16 TFLOP/s", "USD/hour", "source"),
        [
            (
                name,
                f"{device.memory_bytes / 2**30:.1f}",
                f"{device.memory_bytes_per_s / 1e12:.2f}",
                f"{device.flops_per_s['bf16'] / 1e12:.0f}" if "bf16" in device.flops_per_s else "-",
                "-" if device.usd_per_hour is None else f"{device.usd_per_hour:.2f}",
                device.source,
            )
            for name, device in ((name, gpu(name)) for name in gpu_names())
        ],
    )
    _show([listed], part, as_json)


def _show(lists: Sequence[_Listed], part: str | None, as_json: bool) -> None:
    """Print lists, or what of them has a part of a name in its name."""
    from schedlab.sim.errors import SpecError, nearest

    wanted = (part or "").lower()
    found = [one._replace(rows=[r for r in one.rows if wanted in r[0].lower()]) for one in lists]
    found = [one for one in found if one.rows]
    if not found:
        names = [row[0] for one in lists for row in one.rows]
        raise SpecError(f"none of the {lists[0].kind} is called {part!r}; {nearest(part, names)}")
    if as_json:
        data = {one.kind: [dict(zip(one.header, row, strict=True)) for row in one.rows]
                for one in found}  # fmt: skip
        typer.echo(json_text(data, indent=2))
        return
    for one in found:
        print_table(one.title, one.header, one.rows)


def _in_vllm(policy: str) -> str:
    from schedlab.experiments.search.recommend import ASK_A_COST_MODEL, NOT_IN_VLLM

    if policy in NOT_IN_VLLM:
        return "no"
    return "with a cost model" if policy in ASK_A_COST_MODEL else "yes"


def _purpose(maker: object) -> str:
    return (maker.__doc__ or "").strip().partition("\n")[0]


def _needs(prediction: bool) -> str:
    return " Needs a predictor." if prediction else ""


def _knobs(parameters: dict[str, Any]) -> str:
    shown = []
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty
        shown.append(name if required else f"{name}={parameter.default}")
    return ", ".join(shown) or "-"
