"""Cost models by name, by profile folder and from outside: one file is all it takes to add one."""

import shutil
import sys
from pathlib import Path

import pytest

from schedlab.experiments.running.point_hash import point_hash
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.experiments.specification.own_modules import find_own_modules
from schedlab.sim import cost
from schedlab.sim.cost import registry
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.profile import read_fit, read_meta, write_fit
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table_profile import Curve, TableProfile, write_table
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from schedlab.testing import LinearCost
from tests.unit.test_cli import schedlab

DOCS = Path(__file__).resolve().parents[2] / "docs"
PROFILE = next((Path(__file__).parents[2] / "profiles" / "cpu").rglob("fit.json")).parent
WHERE = Deployment(model("llama-3-8b"), gpu("a100-80gb"))
SPEC = {"workload": {"trace": "azure-conv", "num_requests": 5, "request_rate": 2.0}}
SOURCE = '''
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.registry import register
from schedlab.sim.hardware.deployment import Deployment


{decorator}
class Constant(CostModel):
    """Every step takes the same time."""

    name = "constant"

    def __init__(self, deployment: Deployment, step_s: float = 0.01) -> None:
        if step_s <= 0:
            raise ValueError(f"step_s must be positive, got {{step_s}}")
        self.gpu = deployment.gpu.name
        self.step_s = step_s

    def step_ns(self, shape, k=1):
        return [int(self.step_s * 1e9)] * k

    def describe(self):
        return {{"name": self.name, "hardware": self.gpu, "step_s": self.step_s}}
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Write a cost model into a module of somebody's own; return its ``module:Class``."""
    (tmp_path / "my_cost.py").write_text(SOURCE.format(decorator=""))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_cost:Constant"
    sys.modules.pop("my_cost", None)


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """Put one file among the cost models of the simulator, and nothing else."""
    (tmp_path / "constant.py").write_text(SOURCE.format(decorator='@register("constant")'))
    monkeypatch.setattr(cost, "__path__", [*cost.__path__, str(tmp_path)])
    monkeypatch.setattr(registry._MAKERS, "found", dict(registry._MAKERS.found))
    yield "constant"
    sys.modules.pop("schedlab.sim.cost.constant", None)


def durations_ns(chosen):
    steps = run(make_spec({**SPEC, "cost_model": chosen})).log.steps()
    return set((steps["end_ns"] - steps["start_ns"]).tolist())


def test_shipped_cost_models_are_registered():
    assert registry.names() == ["fitted", "roofline", "table"]
    assert registry.profile_files() == {"fitted": "fit.json", "table": "table.json"}


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        ("[-5] * k", "step_ns(shape, 1) gives [-5], expected a list of 1 whole number of nanosec"),
        ("[0] * k", "step_ns(shape, 1) gives [0], expected"),
        ("[0.5] * k", "step_ns(shape, 1) gives [0.5], expected"),
        ("[float('nan')] * k", "step_ns(shape, 1) gives [nan], expected"),
        ("[True] * k", "step_ns(shape, 1) gives [True], expected"),
        ("9", "step_ns(shape, 1) gives 9, expected"),
        ("None", "step_ns(shape, 1) gives None, expected"),
        ("(9,) * k", "step_ns(shape, 1) gives (9,), expected"),
        ("[9]", " gives [9], expected a list of "),
        ("[9] * 500", f"step_ns(shape, 1) gives [{'9, ' * 19}9,... (500 of them), expected"),
        ("__import__('numpy').full(k, 9)", "step_ns(shape, 1) gives array([9]), expected"),
        ("[1 // 0]", "step_ns(shape, 1) raised ZeroDivisionError: "),
    ],
)  # fmt: skip
def test_cost_model_from_outside_that_gives_no_prices_is_named(outside, tmp_path, gives, told):
    source = (tmp_path / "my_cost.py").read_text()
    wrong = source.replace("[int(self.step_s * 1e9)] * k", gives)
    assert wrong != source
    (tmp_path / "my_cost.py").write_text(wrong)
    with pytest.raises(SpecError) as caught:
        durations_ns(outside)
    assert "cost model my_cost:Constant: " in str(caught.value)
    assert told in str(caught.value)


def test_cost_model_from_outside_that_raises_is_told_with_its_line(outside, tmp_path):
    source = (tmp_path / "my_cost.py").read_text().replace("[int(self", "[1 // 0, int(self")
    (tmp_path / "my_cost.py").write_text(source)
    with pytest.raises(SpecError, match=r"ZeroDivisionError: .* \(my_cost\.py:\d+\)$"):
        durations_ns(outside)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "    scheduling_overhead = 5",
            "scheduling_overhead is 5, expected a SchedulingOverhead or",
        ),
        ("    step_spread = 5", "step_spread is 5, expected a StepSpread or None"),
        ("    num_stages = None", "num_stages is None, expected a whole number"),
        ("    draw = 'x'", "draw is 'x', expected a whole number"),
        ("    describe = lambda self: 1 // 0", "describe() raised ZeroDivisionError: "),
        ("    describe = lambda self: exit(3)", "describe() raised SystemExit: 3 (my_cost.py:"),
        ("    describe = lambda self: [self]", "describe() gives [<my_cost.Constant object at "),
        ("    describe = lambda self: None", "describe() gives None, expected a dict"),
    ],
)
def test_cost_model_from_outside_that_says_nonsense_of_itself_is_told_before_anything_runs(
    outside, tmp_path, monkeypatch, line, told
):
    source = (tmp_path / "my_cost.py").read_text()
    (tmp_path / "my_cost.py").write_text(f"{source}\n{line}\n")
    (tmp_path / "spec.yaml").write_text(
        f"cost_model: {outside}\nworkload: {{trace: azure-conv, num_requests: 5}}\n"
    )
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "spec.yaml")
    assert "spec.yaml:1: cost_model: cost model my_cost:Constant: " in str(caught.value)
    assert told in str(caught.value)


def test_cost_model_from_outside_describes_itself_by_its_path_and_knobs(outside, tmp_path):
    source = (tmp_path / "my_cost.py").read_text()
    (tmp_path / "my_cost.py").write_text(source[: source.index("    def describe")])
    result = run(make_spec({**SPEC, "cost_model": {"name": outside, "step_s": 0.02}}))
    assert result.provenance["cost_model"] == {"name": outside, "step_s": 0.02}


@pytest.mark.parametrize("knob", ["ms=5", "ms: Unknown = 5", "ms: 'Unknown' = 5", "ms: Thing = 5"])
def test_knob_of_a_cost_model_that_nothing_is_said_of_may_be_anything(outside, tmp_path, knob):
    source = (tmp_path / "my_cost.py").read_text()
    source = source.replace("step_s: float = 0.01", f"step_s: float = 0.01, {knob}")
    source = source.replace("class Constant", "class Thing:\n    pass\n\n\nclass Constant")
    (tmp_path / "my_cost.py").write_text("from __future__ import annotations\n" + source)
    (tmp_path / "spec.yaml").write_text(
        f"cost_model: {{name: '{outside}', ms: 7}}\n"
        "workload: {trace: azure-conv, num_requests: 5}\n"
    )
    assert load_spec(tmp_path / "spec.yaml").cost_model.knobs == {"ms": 7}


def test_policy_that_asks_a_cost_model_from_outside_is_not_blamed_for_it():
    class Single(LinearCost):
        def step_ns(self, shape, k=1):
            return 9

        def uneven_ns(self, steps):
            return [9.0] * len(steps)

    pricing = Pricing(Single())
    shape = BatchShape(1, 9, 9, rows_sampled=1)
    with pytest.raises(SpecError, match=r"Single: step_ns\(shape, 1\) gives 9, expected"):
        pricing.chunk_pricer(shape, 0)(4)
    with pytest.raises(SpecError, match=r"Single: uneven_ns\(steps\) gives \[9.0\], expected"):
        pricing.uneven_ns([shape])
    assert Pricing(LinearCost()).chunk_pricer(shape, 0)(4) == LinearCost().chunk_pricer(shape, 0)(4)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_new_cost_model_takes_one_file(where, request):
    name = request.getfixturevalue(where)
    assert durations_ns(name) == {10_000_000}
    assert durations_ns({"name": name, "step_s": 0.002}) == {2_000_000}
    result = run(make_spec({**SPEC, "cost_model": name}))
    assert result.provenance["cost_model"] == {
        "name": "constant", "hardware": "a100-80gb", "step_s": 0.01,
    }  # fmt: skip


def test_registered_cost_model_is_listed_with_its_purpose_and_knobs(inside, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = schedlab("cost-models").stdout
    assert "Every step takes the same time." in shown
    assert "step_s=0.01" in shown
    assert "memory_efficiency=None" in shown


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"step_ms": 1.0}, r"cost_model\.step_ms: .* has no such knob; did you mean step_s\?"),
        ({"step_s": "long"}, r"cost_model\.step_s: must be a number, got 'long'"),
        ({"step_s": -1.0}, "cost_model: .*step_s must be positive, got -1.0"),
    ],
)
def test_wrong_knob_is_refused_with_file_and_key(outside, tmp_path, knobs, message):
    path = tmp_path / "spec.yaml"
    chosen = ", ".join(f"{key}: {value}" for key, value in {"name": outside, **knobs}.items())
    path.write_text(f"cost_model: {{{chosen}}}\nworkload: {{trace: azure-conv, num_requests: 5}}\n")
    with pytest.raises(SpecError, match=r"spec\.yaml:1: " + message):
        load_spec(path)


def test_sweep_over_cost_models_mixes_names_profiles_and_own_ones(outside):
    spec = make_spec(
        {
            **SPEC, "model": "schedlab-small", "hardware": "cpu", "engine": {"dtype": "fp32"},
            "sweep": {"cost_model": ["roofline", outside, str(PROFILE)]},
        },
        ["sweep.seed=[0, 1]"],
    )  # fmt: skip
    assert spec.cost_model.name == "roofline"
    changed = make_spec({**SPEC, "cost_model": "roofline"}, ["cost_model.memory_efficiency=0.5"])
    assert changed.cost_model.knobs == {"memory_efficiency": 0.5}
    knobs = make_spec({**SPEC, "cost_model": outside}, ["cost_model.step_s=0.5"]).cost_model.knobs
    assert knobs == {"step_s": 0.5}


def test_changed_source_of_an_own_cost_model_is_another_point(outside, tmp_path):
    spec = make_spec({**SPEC, "cost_model": outside})
    before = point_hash(spec)
    assert point_hash(spec) == before
    path = tmp_path / "my_cost.py"
    path.write_text(path.read_text() + "# changed\n")
    assert point_hash(spec) == before, "what was loaded"
    find_own_modules()
    assert point_hash(spec) != before


def test_unknown_cost_model_names_the_nearest():
    with pytest.raises(SpecError, match=r"unknown cost model 'rooflin'; did you mean roofline\?"):
        registry.make("rooflin", WHERE)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Model", "cannot import 'no_such_module'"),
        ("schedlab.sim.errors:SpecError", "has no CostModel class 'SpecError'"),
    ],
)
def test_path_that_leads_to_no_cost_model_is_refused(path, message):
    with pytest.raises(SpecError, match=message):
        registry.make(path, WHERE)


def test_second_cost_model_of_one_name_is_refused():
    with pytest.raises(ValueError, match="'roofline' is taken by RooflineCostModel"):

        @registry.register("roofline")
        class Other(RooflineCostModel):
            """Another."""


def test_profile_folder_is_read_by_the_kind_of_its_file():
    found = registry.load_profile(PROFILE)
    assert isinstance(found, FittedCostModel)
    assert found.is_measured
    assert not registry.make("roofline", WHERE).is_measured


def write_small_table(folder):
    curve = Curve("all", 1, (1, 2), (5.0, 6.0))
    rates = {"us_per_pair": 1e-3, "us_per_kv_token": 1e-3, "us_per_call": 1.0}
    write_table(folder, read_meta(PROFILE), TableProfile((curve,), (), rates, 1))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_profile_written_over_one_of_another_kind_is_refused_and_harms_nothing(tmp_path):
    calibrated, imported = tmp_path / "calibrated", tmp_path / "imported"
    shutil.copytree(PROFILE, calibrated)
    write_small_table(imported)
    before = contents(calibrated), contents(imported)
    with pytest.raises(SpecError, match=r"calibrated: holds a profile of another kind \(fit\.json"):
        write_small_table(calibrated)
    with pytest.raises(SpecError, match=r"another kind \(table\.json, which cost model 'table'"):
        write_fit(imported, read_meta(PROFILE), read_fit(PROFILE))
    assert (contents(calibrated), contents(imported)) == before
    write_small_table(imported)
    write_fit(calibrated, read_meta(PROFILE), read_fit(PROFILE))


@pytest.mark.parametrize("name", ["fitted", "table"])
def test_folder_with_two_profiles_is_refused_whichever_is_asked_for(tmp_path, name):
    write_small_table(tmp_path)
    (tmp_path / "fit.json").write_text((PROFILE / "fit.json").read_text())
    for asked in (
        lambda: registry.load_profile(tmp_path),
        lambda: registry.make(name, None, profile=str(tmp_path)),
        lambda: make_spec({**SPEC, "cost_model": str(tmp_path)}),
    ):
        with pytest.raises(SpecError, match=r"several profiles, fit\.json and table\.json"):
            asked()


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("roofline", True),
        ("my_module:MyModel", True),
        ("a.b:C", True),
        ("./roofline", False),
        ("profiles/h200", False),
        ("roofine", False),
        ("C:\\profiles", False),
        ("1a:B", False),
    ],
)
def test_text_is_a_name_or_a_folder(text, is_name):
    assert registry.is_name(text) is is_name


def test_cost_models_document_lists_every_cost_model_and_knob():
    rows = {}
    for line in (DOCS / "cost-models.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            rows.setdefault(line.split("`")[1], line)
    for name in registry.names():
        for knob in registry.knobs(name):
            if knob != "profile":
                assert f"`{knob}`" in rows[name], f"docs/cost-models.md does not name {knob}"


def test_cost_model_that_forgets_the_deployment_is_told_where_it_goes(tmp_path, monkeypatch):
    forgetful = SOURCE.format(decorator="").replace("deployment: Deployment, ", "")
    (tmp_path / "forgetful_cost.py").write_text(forgetful)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpecError, match=r"its first parameter, step_s, is given the Deployment"):
        make_spec({**SPEC, "cost_model": {"name": "forgetful_cost:Constant", "step_s": 0.1}})
