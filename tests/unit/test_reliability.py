"""Every promise of docs/reliability.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def functions_of(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    promises, campaign, _ = text.partition("\n## The campaign\n")  # whose table promises nothing
    assert campaign
    rows = [
        line
        for line in promises.splitlines()
        if line.startswith("| ") and not line.startswith(("| Promise", "| ---"))
    ]
    assert len(rows) > 20
    for row in rows:
        named = _TEST.findall(row)
        assert named, f"no test proves: {row}"
        for path, name in named:
            assert name in functions_of(path), f"{path} has no {name}"
