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
        A schema that every file `load_spec` accepts satisfies. The knobs of policies,
        predictors and distributions are open in it; `load_spec` checks them.
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
    schema["properties"]["sweep"]["additionalProperties"] = {"type": "array", "minItems": 1}
    schema["required"].remove("name")
    # With a parent, or swept, even a required section may be absent from the file itself.
    schema["anyOf"] = [
        {"required": schema.pop("required")},
        {"required": ["extends"]},
        {"required": ["sweep"]},
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


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
        yield f"| `{prefix}{name}` | {values} | {_default(field, inner)} | {field.description} |"
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
        "array": "[number, number]",
        "object": {"array": "mapping of lists", "number": "mapping of numbers"}.get(
            str(mapped.get("type")) if isinstance(mapped, dict) else "", "mapping"
        ),
    }[form["type"]]
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {form[key]:g}" for key, sign in signs.items() if key in form]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _default(field: FieldInfo, inner: type[BaseModel] | None) -> str:
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
