"""Data is never code: what reads it cannot run any of it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sim", "policies", "traces", "gpu_backend", "experiments", "schedlab")
UNPICKLERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "imp"}
RUNNERS = {
    "eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "torch.load", "pd.read_pickle", "pandas.read_pickle", "tempfile.mktemp",
    "code.interact",
}  # fmt: skip


def sources():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def dangers(source):
    """Yield (line, what) for each way of turning data into code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if not modules else []
            for module in modules:
                if (module or "").partition(".")[0] in UNPICKLERS:
                    yield node.lineno, module
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in RUNNERS:
                yield node.lineno, called
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and on:
                    yield node.lineno, f"{keyword.arg}=True"
            if called.endswith(("np.load", "numpy.load")) and "allow_pickle" not in {
                keyword.arg for keyword in node.keywords
            }:
                yield node.lineno, f"{called} without allow_pickle=False"


@pytest.mark.slow
def test_source_has_no_way_to_run_data():
    found = [f"{path}:{line}: {what}" for path, text in sources() for line, what in dangers(text)]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os\nos.system('x')",
        "eval('1')",
        "yaml.load(text)",
        "torch.load(path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run('x', shell=True)",
    ],
)
def test_search_finds_what_runs_data(source):
    assert len(list(dangers(source))) == 1
