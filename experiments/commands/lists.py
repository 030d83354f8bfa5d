"""The commands that list what there is, by the names that an experiment gives it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from schedlab.experiments.commands.terminal import print_table

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("metrics")
def list_metrics(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/metrics.md.")
    ] = False,
) -> None:
    """List what can be measured of a run: unit, better, parameters, definition."""
    from schedlab.experiments.results.metric_table import metric_rows, metric_tables

    if markdown:
        typer.echo(metric_tables(), nl=False)
        return
    print_table(
        "metrics (NAME, NAME(parameter=value), or module:function)",
        ("name", "unit", "better", "definition"),
        [row for rows in metric_rows().values() for row in rows],
    )


@app.command()
def policies() -> None:
    """List policies and predictors: purpose, source, knobs."""
    from schedlab.policies import registry
    from schedlab.policies.predictors import registry as predictors

    print_table(
        "policies (policy: NAME, or policy: {name: NAME, knob: value})",
        ("name", "purpose", "source", "knobs"),
        [
            (name, _purpose(cls) + _needs(cls.needs_prediction), cls.source, _knobs(cls.knobs()))
            for name, cls in ((name, registry.policy_class(name)) for name in registry.names())
        ],
    )
    print_table(
        "predictors (policy: {name: NAME, predictor: NAME})",
        ("name", "purpose", "source", "knobs"),
        [
            (name, _purpose(cls), cls.source, _knobs(cls.knobs()))
            for name, cls in ((n, predictors.predictor_class(n)) for n in predictors.names())
        ],
    )


@app.command("cost-models")
def cost_models() -> None:
    """List cost models: what they go by, and their knobs."""
    from schedlab.sim.cost import registry

    print_table(
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


@app.command()
def models() -> None:
    """List known models (a config.json works, too)."""
    from schedlab.sim.hardware.models import model, model_names

    print_table(
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


@app.command()
def gpus() -> None:
    """List known GPUs (a YAML of datasheet numbers works, too)."""
    from schedlab.sim.hardware.gpus import gpu, gpu_names

    print_table(
        "GPUs (hardware: NAME)",
        ("name", "memory GiB", "bandwidth TB/s", "dense bf16 TFLOP/s", "source"),
        [
            (
                name,
                f"{device.memory_bytes / 2**30:.1f}",
                f"{device.memory_bytes_per_s / 1e12:.2f}",
                f"{device.flops_per_s['bf16'] / 1e12:.0f}" if "bf16" in device.flops_per_s else "-",
                device.source,
            )
            for name, device in ((name, gpu(name)) for name in gpu_names())
        ],
    )


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
