"""The specification as JSON Schema for editors, and as a table of keys for the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.fields import shorthand_of
from schedlab.experiments.specification.key_errors import model_in

Schema = dict[str, Any]


def json_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of an experiment file.

    Returns
    -------
    dict
        A schema that every file `load_spec` accepts satisfies. It offers every known name
        (policies and their knobs, predictors, models, GPUs, cost models, presets, metrics, keys
        that can be swept), for an editor to complete. What the values of knobs may be is left to
        `load_spec`.
    """
    schema = ExperimentSpec.model_json_schema()
    for model in _models(ExperimentSpec):
        properties = (schema if model is ExperimentSpec else schema["$defs"][model.__name__])[
            "properties"
        ]
        for key, field in model.model_fields.items():
            short = shorthand_of(field)
            if short is not None:
                full = properties[key]
                notes = {k: full.pop(k) for k in ("description", "default", "title") if k in full}
                properties[key] = {"anyOf": [short.schema, *full.get("anyOf", [full])], **notes}
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Another experiment file this one changes (one level).",
    }
    schema["properties"]["files"] = {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Of a result: files that are named above, and the SHA-256 of each.",
    }
    schema["properties"]["sweep"]["additionalProperties"] = {"type": "array", "minItems": 1}
    schema["required"].remove("name")
    # With a parent, or swept, even a required section may be absent from the file itself.
    schema["anyOf"] = [
        {"required": schema.pop("required")},
        {"required": ["extends"]},
        {"required": ["sweep"]},
    ]
    _offer_names(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:schedlab:experiment",
        **schema,
    }


def _offer_names(schema: Schema) -> None:
    """Put the names that are known where a name is asked for, and knobs beside them."""
    from schedlab.policies import registry as policies
    from schedlab.policies.predictors import registry as predictors
    from schedlab.sim.cost import registry as cost_models
    from schedlab.sim.hardware.gpus import gpu_names
    from schedlab.sim.hardware.models import model_names
    from schedlab.sim.metrics.registry import names as metric_names
    from schedlab.traces import PRESETS

    defs, properties = schema["$defs"], schema["properties"]
    # One's own is module:Class; nothing else that is no known name is accepted.
    policy = {"anyOf": [{"enum": list(policies.names())}, {"type": "string", "pattern": ":"}]}
    predictor = {"anyOf": [{"enum": list(predictors.names())}, {"type": "string", "pattern": ":"}]}
    _name(properties["policy"], defs["PolicySpec"], policy)
    _name(defs["PolicySpec"]["properties"]["predictor"], defs["PredictorSpec"], predictor)
    for section, registry, each in (
        ("PolicySpec", policies.names(), lambda name: policies.policy_class(name).knobs()),
        (
            "PredictorSpec",
            predictors.names(),
            lambda name: predictors.predictor_class(name).knobs(),
        ),
        ("CostModelSpec", cost_models.names(), cost_models.knobs),
    ):
        takers: dict[str, list[str]] = {}
        for name in registry:
            for knob in each(name):
                takers.setdefault(knob, []).append(name)
        for knob, names in takers.items():
            of = {"description": f"A knob of {', '.join(names)}."}
            defs[section]["properties"].setdefault(knob, of)
    # Where a path may stand as well, names are offered and any text is accepted.
    for holder, key, choices in (
        (schema, "model", model_names()),
        (schema, "hardware", gpu_names()),
        (defs["CostModelSpec"], "name", cost_models.names()),
        (defs["Workload"], "trace", PRESETS),
    ):
        _offer(holder["properties"][key], list(choices))
    metrics = {name: {"type": "number"} for name in metric_names()}
    for section in ("Find", "Tune"):
        for bound in ("at_most", "at_least"):
            defs[section]["properties"][bound]["properties"] = metrics
    properties["sweep"]["properties"] = {key: {"type": "array", "minItems": 1} for key in keys()}
    properties["sweep"]["properties"]["policy"]["items"] = properties["policy"]
    # A key inside a section may be a knob, which only its owner knows; one at the top is known.
    top = [key for key in keys() if "." not in key]
    properties["sweep"]["propertyNames"] = {"anyOf": [{"enum": top}, {"pattern": "\\."}]}


def _name(short_or_full: Schema, full: Schema, name: Schema) -> None:
    """Let a name stand alone or under `name` in a mapping."""
    short_or_full["anyOf"][0] = name
    full["properties"]["name"] = {**name, "description": full["properties"]["name"]["description"]}


def _offer(place: Schema, names: list[str]) -> None:
    """Offer names where any text is accepted."""
    for form in place.get("anyOf", [place]):
        if form.get("type") == "string":
            kept = {key: form.pop(key) for key in ("type", "minLength") if key in form}
            form["anyOf"] = [{"enum": names}, kept]


def keys() -> list[str]:
    """Return every key of the specification, dotted; NAME stands for one that is free."""
    return [row.split("`")[1] for row in _rows(ExperimentSpec, "")]


def key_table() -> str:
    """Return every key of the specification as a Markdown table.

    Returns
    -------
    str
        Columns key, values, default and meaning, in the order of the schema; `docs/experiments.md`
        holds it and a test compares the two.
    """
    head = "| key | values | default | meaning |\n|---|---|---|---|"
    return "\n".join([head, *_rows(ExperimentSpec, "")]) + "\n"


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a model and all that its fields hold."""
    inner = (model_in(field.annotation) for field in model.model_fields.values())
    return {model}.union(*(_models(found) for found in inner if found))


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        values = _values(properties[name]) if not inner else "mapping"
        if inner and properties[name].get("type") == "array":
            values = "list of mappings"
        named = inner is not None and "additionalProperties" in properties[name]
        if named:
            values = "mappings by name"
        short = shorthand_of(field)
        if short is not None:
            values = f"{_values(short.schema)} or {values}"
        yield f"| `{prefix}{name}` | {values} | {_default(field)} | {field.description} |"
        if inner:
            yield from _rows(inner, f"{prefix}{name}.{'NAME.' if named else ''}")


def _values(schema: Schema) -> str:
    """Return what a key takes, in words: its choices, or its type and bounds."""
    forms = [form for form in schema.get("anyOf", [schema]) if form.get("type") != "null"]
    (form,) = forms
    if "enum" in form:
        return " \\| ".join(f"`{choice}`" for choice in form["enum"])
    if "const" in form:
        return f"`{form['const']}`"
    mapped = form.get("additionalProperties")
    kind = {
        "integer": "integer",
        "number": "number",
        "boolean": "`true` \\| `false`",
        "string": "text",
        "array": "[number, number]" if "maxItems" in form else "list of numbers",
        "object": {"array": "mapping of lists", "number": "mapping of numbers"}.get(
            str(mapped.get("type")) if isinstance(mapped, dict) else "", "mapping"
        ),
    }[form["type"]]
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {form[key]:g}" for key, sign in signs.items() if key in form]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "the file's name" if field is ExperimentSpec.model_fields["name"] else "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "absent"
    if isinstance(value, BaseModel):
        name = getattr(value, "name", None)
        return f"`{name}`" if name else "its keys' defaults"
    if value == {}:
        return "none"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"
