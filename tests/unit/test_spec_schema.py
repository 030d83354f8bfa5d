"""The JSON Schema and the documentation describe what the loader accepts."""

from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, Field

from schedlab.experiments.specification import schema
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.experiments.specification.schema import json_schema, key_table
from schedlab.sim.errors import SpecError

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_schema_accepts_every_shipped_experiment(validator, path):
    validator.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_shipped_experiment_loads_or_says_how_to_get_what_is_missing(path):
    try:
        load_spec(path)
    except SpecError as error:
        told = str(error)  # either outcome is right
        assert any(
            how in told
            for how in ("schedlab trace fetch", "schedlab calibrate", "SCHEDLAB_DATA is not set")
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"enigne": {}},
        {"engine": {"max_num_seqs": 0}},
        {"engine": {"dtype": "bf17"}},
        {"seed": -1},
        {"slo": {"ttft_ms": 0}},
        {"workload": {"trace": "azure-conv", "request_rate": 0}},
        {"sweep": {"seed": []}},
        {"policy": []},
    ],
    ids=str,
)
def test_schema_and_loader_both_refuse(validator, change):
    data = {"workload": {"trace": "azure-conv", "num_requests": 3}, **change}
    assert not validator.is_valid(data)
    with pytest.raises(SpecError):
        make_spec(data)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "fcfs"},
        {"policy": {"name": "static", "max_batch_size": 4}},
        {"cost_model": {"name": "roofline", "memory_efficiency": 0.5}},
        {"workload": {"num_requests": 5, "prompt_tokens": 100, "output_tokens": 10}},
        {"workload": {"trace": "fixed", "num_requests": 5, "request_rate": "inf"}},
        {"workload": {"trace": "fixed", "num_requests": 1e1, "arrivals": "all_at_once"}},
    ],
    ids=str,
)
def test_schema_and_loader_both_accept(validator, change):
    data = {"workload": {"trace": "azure-conv", "num_requests": 3}, **change}
    validator.validate(data)
    make_spec(data)


def test_schema_asks_for_a_workload_unless_a_parent_or_a_sweep_may_bring_it(validator):
    swept = {"sweep": {"workload.trace": ["azure-conv"], "workload.num_requests": [3, 5]}}
    validator.validate(swept)
    validator.validate({"extends": "other.yaml"})
    validator.validate({"extends": "other.yaml", **swept})
    for lacking in ({}, {"policy": "fcfs"}, {"seed": 3, "name": "x"}):
        assert not validator.is_valid(lacking)


def test_schema_accepts_a_fully_written_out_spec(validator):
    spec = make_spec({"workload": {"trace": "azure-conv", "num_requests": 3}})
    validator.validate(spec.to_data())


@pytest.mark.slow
def test_documented_keys_are_those_of_the_schema():
    page = (ROOT / "docs" / "experiments.md").read_text()
    # Regenerate with: schedlab schema --markdown
    assert key_table() in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "FCFS"}, "fcfs"),
        ({"policy": {"name": "sjff"}}, "sjf"),
        ({"policy": {"name": "sjf", "predictor": "oracel"}}, "oracle"),
        ({"sweep": {"policy": ["fcfs", "sfj"]}}, "sjf"),
        ({"sweep": {"polcy": ["fcfs"]}}, "policy"),
    ],
    ids=str,
)
def test_schema_knows_the_names_that_the_loader_knows(validator, change, message):
    data = {"workload": {"trace": "azure-conv", "num_requests": 3, "request_rate": 1}, **change}
    assert not validator.is_valid(data)
    with pytest.raises(SpecError, match=message):
        make_spec(data)


@pytest.mark.slow
def test_schema_offers_names_and_knobs_to_an_editor():
    schema = json_schema()
    assert schema["$id"] == "urn:schedlab:experiment"
    assert "h100-80gb" in schema["properties"]["hardware"]["anyOf"][0]["enum"]
    assert "azure-conv" in str(schema["$defs"]["Workload"]["properties"]["trace"])
    assert "static" in schema["$defs"]["PolicySpec"]["properties"]["max_batch_size"]["description"]
    assert "engine.max_num_seqs" in schema["properties"]["sweep"]["properties"]
    assert "p99_ttft_ms" in schema["$defs"]["Find"]["properties"]["at_most"]["properties"]


class Part(BaseModel):
    """A section with or without a name."""

    number: int = 3


class Named(Part):
    """A section that has one."""

    name: str = "roofline"


@pytest.mark.parametrize(
    ("field", "told"),
    [
        (Field(), "required"), (ExperimentSpec.model_fields["name"], "the file's name"),
        (Field(default=None), "absent"), (Field(default_factory=dict), "none"),
        (Field(default=False), "`false`"), (Field(default=True), "`true`"),
        (Field(default=0), "`0`"), (Field(default=0.5), "`0.5`"), (Field(default="vllm"), "`vllm`"),
        (Field(default_factory=Part), "its keys' defaults"), (Field(default=Named()), "`roofline`"),
    ],
)  # fmt: skip
def test_default_of_a_key_is_told_as_it_would_be_written(field, told):
    assert schema._default(field) == told


def test_schema_offers_a_shorthand_first_among_the_choices_of_its_key_and_keeps_its_notes(
    monkeypatch,
):
    monkeypatch.setattr(schema, "_offer_names", lambda whole: None)
    whole, plain = json_schema(), ExperimentSpec.model_json_schema()
    counts = []
    for model in schema._models(ExperimentSpec):
        is_top = model is ExperimentSpec
        made, raw = (
            (one if is_top else one["$defs"][model.__name__])["properties"]
            for one in (whole, plain)
        )
        for key, field in model.model_fields.items():
            short = schema.shorthand_of(field)
            if short is None:
                continue
            choices = raw[key].get("anyOf", [raw[key]])
            first, *rest = made[key]["anyOf"]
            assert first == short.schema
            assert len(rest) == len(choices)
            for one, choice in zip(rest, choices, strict=True):
                assert one.get("$ref") == choice.get("$ref")
                assert one.get("type") == choice.get("type")
            for note in ("description", "default", "title"):
                assert made[key].get(note, "none") == raw[key].get(note, "none")
                assert not any(note in one for one in rest)
            counts.append(len(rest))
    assert {1, 2} <= set(counts)
