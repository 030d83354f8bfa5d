"""The documents about policies say what is there, and their code runs."""

import re
import sys
import types
from dataclasses import replace
from pathlib import Path

from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.testing import POLICY_LAWS, check_cost_model
from tests import laws
from tests.laws import arrival
from tests.traced import batches, limits

DOCS = Path(__file__).resolve().parents[2] / "docs"


def documented_policy(monkeypatch):
    """Execute the code block of add-a-policy.md as the module `fair`."""
    text = (DOCS / "add-a-policy.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code) == 1
    module = types.ModuleType("fair")
    exec(compile(code[0], "add-a-policy.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "fair", module)
    return re.search(r"^policy: (\S+)$", text, re.M).group(1)


def test_add_a_policy_code_runs_by_its_path_and_orders_as_it_says(monkeypatch):
    name = documented_policy(monkeypatch)
    work = [arrival(i, prompt=2, application="a" if i < 3 else "b") for i in range(5)]
    got, _ = batches(name, work, limits(seats=1))
    assert [list(b) for b in got] == [[0], [3], [1], [4], [2]]


def test_add_a_policy_code_keeps_its_promise(monkeypatch):
    name = documented_policy(monkeypatch)
    work = [arrival(i, 700 * i, 1 + i % 7, 2 + i % 5, application="ab"[i % 2]) for i in range(40)]
    config = limits(seats=3)
    fast = laws.signature(laws.run(registry.make(name), work, config))
    assert fast == laws.signature(laws.run(registry.make(name), work, laws.slow(config)))
    laws.run(registry.make(name), work, replace(config, check_horizon=True))


def test_policies_document_lists_every_policy_and_knob():
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", text, re.M))
    assert sorted(rows) == registry.names()
    shared = set(registry.policy_class("static").knobs())
    for name in registry.names():
        for knob in registry.policy_class(name).knobs():
            known = f"`{knob}`" in rows[name]
            known |= knob in shared and "those of `static`" in rows[name]
            known |= "those of `wait`" in rows[name]
            assert known, f"docs/policies.md does not name {knob} of {name}"


def test_readme_counts_policies_and_routers_as_there_are():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"lists the {len(registry.names())} that are there" in text
    assert len(routers.names()) == 20
    assert "behind one of twenty routers" in text


def test_documented_cost_model_keeps_the_laws():
    text = (DOCS / "cost-models.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_costs.py.*?)```", text, re.S)
    module = types.ModuleType("my_costs")
    exec(compile(code, "cost-models.md", "exec"), module.__dict__)
    (name,) = re.findall(r"name: my_costs:(\w+)", code)
    check_cost_model(getattr(module, name))


def test_policies_document_tells_who_needs_a_prediction():
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", text, re.M))
    for name in registry.names():
        needed = rows[name].split("|")[2]
        cls = registry.policy_class(name)
        if cls.needs_prediction:
            assert re.search("length|rank", needed), name


def test_add_a_policy_lists_every_law():
    text = (DOCS / "add-a-policy.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| [a-zE]", text[text.index("## Prove it") :], re.M)
    assert listed == list(POLICY_LAWS)
