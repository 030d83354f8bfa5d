"""Notebooks run from top to bottom, and are the same as script and as notebook."""

import json
import os
import re
import runpy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
LONGEST_S = 180
SHOWN = {
    "workload": {"trace": "fixed", "num_requests": 3},
    "sweep": {"policy": ["fcfs", "static"], "workload.request_rate": [1, 4]},
}
THEORY = ROOT / "notebooks" / "05_queueing_theory.py"


# What is computed in the other one is looked at, below.
@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in SCRIPTS if p != THEORY], ids=lambda p: p.name)
def test_notebook_runs_to_its_end(path, monkeypatch):
    # In this process: starting one takes longer than most of them.
    monkeypatch.setenv("FAST", "1")
    monkeypatch.setattr(sys, "argv", [str(path)])
    # With Plotly installed their figures are Plotly's, as in a notebook.
    monkeypatch.setattr("schedlab.experiments.figures.interactive.is_notebook", lambda: True)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        plt.close("all")


@pytest.mark.slow
def test_simulated_points_lie_where_the_theory_beside_them_is_drawn(monkeypatch):
    monkeypatch.setenv("FAST", "1")
    told = runpy.run_path(str(THEORY), run_name="__main__")
    for figure in told["figures"]:
        axes = figure.axes[0]
        simulated = axes.lines[0].get_ydata()
        assert len(simulated) == 3
        assert all(low <= ms <= high for ms in simulated for low, high in [axes.get_ylim()])
    plt.close("all")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_notebook_has_no_formulas_that_only_some_pages_typeset(path):
    assert "$" not in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_figures_and_results_are_shown_in_jupyter(monkeypatch):
    reason = "pip install 'schedlab[notebooks]'"
    nbformat = pytest.importorskip("nbformat", reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    new = nbformat.v4
    cells = [
        "import schedlab as sl\nresults = sl.run({SPEC})".replace("{SPEC}", repr(SHOWN)),
        "results",
        "results.plot.throughput_against_p99()",
    ]
    notebook = new.new_notebook(cells=[new.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=LONGEST_S, kernel_name="python3").execute()
    nothing, table, figure = (cell["outputs"] for cell in notebook["cells"])
    assert nothing == []
    assert ["text/html" in output["data"] for output in table] == [True]
    assert ["image/png" in output["data"] for output in figure] == [True]


def cells_of_script(text):
    """Return (kind, source) of each cell of a script in jupytext's percent format."""
    _, _, body = text.partition("# ---\n\n")
    found = []
    for part in re.split(r"^# %%", body, flags=re.MULTILINE)[1:]:
        kind, _, source = part.partition("\n")
        if kind.strip() == "[markdown]":
            lines = [
                line.removeprefix("#").removeprefix(" ") for line in source.strip().split("\n")
            ]
            found.append(("markdown", "\n".join(lines)))
        else:
            found.append(("code", source.strip()))
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_notebook_and_script_have_the_same_cells(path):
    notebook = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == cells_of_script(path.read_text(encoding="utf-8")), "run: make notebooks"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_notebook_has_no_outputs(path):
    notebook = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_notebook_begins_by_saying_how_long_it_takes(path):
    kind, source = cells_of_script(path.read_text(encoding="utf-8"))[0]
    assert kind == "markdown"
    assert re.search(r"(second|minute)s?", source)


def test_there_is_no_notebook_without_a_script():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {p.stem for p in SCRIPTS}
