# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The claims of the literature, one figure each
#
# What papers say of their schedulers, and what this laboratory gives. The numbers are those that
# `schedlab claims` wrote; this notebook draws them, and measures one claim again. Takes ten
# seconds.
#
# The step times come from an uncalibrated roofline, and all setups are smaller than the papers':
# ratios between policies are meant to carry over, milliseconds are not. What differs stands in
# the reports beside the JSON.

# %%
import json
import os
from collections import Counter
from pathlib import Path

from schedlab import experiments
from schedlab.experiments.figures import plots
from schedlab.experiments.claims.claims import examine, load_claims
from schedlab.experiments.figures.style import show_in_notebooks

try:
    from IPython.display import display
except ImportError:  # run as a plain script
    display = print

show_in_notebooks()
fast = bool(os.environ.get("FAST"))
root = Path(experiments.__file__).resolve().parent.parent

# %%
told = {}
for name in ("claims", "policies"):
    path = root / "docs" / "results" / f"{name}.json"
    if path.exists():
        told[name] = json.loads(path.read_text())["experiments"]
for name, found in told.items():
    verdicts = Counter(figure["verdict"] for one in found for figure in one["figures"])
    print(f"{name}.json: {len(found)} claims,", ", ".join(f"{n} {v}" for v, n in verdicts.most_common()))
if not told:
    print("no recorded claims here: schedlab claims -o docs/results makes them")

# %% [markdown]
# Each strip is one figure of a claim, on a scale of its own. The band was fixed before the run.


# %%
def draw_all(name):
    for one in told.get(name, []):
        display(plots.claim(one))


# %% [markdown]
# ## What is said of serving in general

# %%
draw_all("claims")

# %% [markdown]
# ## What papers say of their systems

# %%
draw_all("policies")

# %% [markdown]
# ## One of them, measured again
#
# Every claim is an experiment like any other: the YAML says what is compared, and which band
# counts as reproduced.

# %%
(path, spec), = load_claims([Path(experiments.__file__).parent / "papers" / "policies" / "aged.yaml"])
if fast:
    spec = spec.model_copy(update={"replications": 2})
finding = examine(path, spec)
print(spec.claim.statement)
for one in finding.measured:
    print(f"  {one.figure.name}: {one.estimate:.3f} [{one.low:.3f}, {one.high:.3f}], {one.verdict}")
