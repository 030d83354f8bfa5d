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
import os
from itertools import islice
from pathlib import Path

import schedlab as sl

try:
    from IPython.display import display
except ImportError:  # run as a plain script
    display = print

fast = bool(os.environ.get("FAST"))
shown = 3 if fast else None
results = Path(sl.__file__).resolve().parents[1] / "docs" / "results"

# %%
told = {}
for name in ("claims", "policies"):
    if (results / f"{name}.json").exists():
        told[name] = sl.load_claims(results / f"{name}.json")
for name, claims in told.items():
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in claims.verdicts.most_common())
    print(f"{name}: {len(claims.experiments)} claims, {verdicts}")
if not told:
    print("no recorded claims here: schedlab claims -o docs/results makes them")

# %% [markdown]
# Each strip is one figure of a claim, on a scale of its own. The band was fixed before the run.
#
# ## What is said of serving in general

# %%
for figure in islice(told["claims"].plot(), shown) if "claims" in told else ():
    display(figure)

# %% [markdown]
# ## What papers say of their systems

# %%
for figure in islice(told["policies"].plot(), shown) if "policies" in told else ():
    display(figure)

# %% [markdown]
# ## One of them, measured again
#
# Every claim is an experiment like any other: the YAML says what is compared, and which band
# counts as reproduced.

# %%
again = sl.claims("aged", **({"replications": 2} if fast else {}))
print(again.experiments[0]["claim"]["statement"])
again
