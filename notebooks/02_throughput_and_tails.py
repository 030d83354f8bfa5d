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
# # Throughput against tail latency, for every policy
#
# Which schedulers carry more load before the tail grows, and what do they give up for it? Takes
# two minutes (half a minute with `FAST=1`).

# %%
import os
import tempfile
from pathlib import Path

import schedlab as sl

fast = bool(os.environ.get("FAST"))
rates = [2, 10] if fast else [2, 4, 6, 8, 10, 12]
num_requests = 8 if fast else 300

# %% [markdown]
# All registered policies (ten with `FAST=1`) with their default knobs; those that order by output length get a
# predictor that is right about the order of three pairs in four (Kendall's tau 0.5).

# %%
known = sl.known_policies()
predictor = {"name": "noisy", "kendall_tau": 0.5}


def with_predictor(name):
    needs = known[name].needs_prediction
    return {"name": name, "predictor": predictor} if needs else name


wrappers = {"aged", "boosted"}  # these decorate another policy
few = ("static", "fcfs", "sjf", "srtf", "prefill_first", "sarathi", "hrrn", "edf", "vtc", "tgi3")
names = few if fast else [name for name in known if name not in wrappers]
results = sl.run(
    {
        "name": "every policy",
        "model": "llama-3-8b",
        "hardware": "a100-80gb",
        "slo": {"ttft_ms": 1000, "tpot_ms": 60},
        "workload": {"trace": "azure-conv", "num_requests": num_requests},
        "replications": 5,
        "sweep": {
            "policy": [with_predictor(name) for name in names],
            "workload.request_rate": rates,
        },
    }
)
print(len(results.saved.runs), "runs of", len({row.policy for row in results.rows}), "policies")

# %% [markdown]
# More than thirty curves are too many to tell apart: those that reach the frontier somewhere are in
# colour, the others grey.

# %%
best = results.frontier("request_throughput", "p99_ttft_ms")
front = list(dict.fromkeys(row.policy for row in best))[:6]
highlight = list(dict.fromkeys([*front, "static", "fcfs"]))
results.plot.throughput_against_p99(highlight=highlight)

# %%
results.plot.attainment_against_rate(highlight=highlight)

# %% [markdown]
# All of them, with numbers, at one load. Bold is the best, and what its interval does not tell
# from it.

# %%
load = rates[-2]
results.plot.heat_map(rate=load)

# %%
results.plot.pareto(x="output_throughput", y="p99_ttft_ms")

# %% [markdown]
# What a GPU makes against what a user sees: the figure that deployments are chosen by.

# %%
results.plot.gpu_frontier()

# %% [markdown]
# ## A verdict needs replications
#
# Both sides of a comparison met the same random numbers, so their differences are paired. Fewer than
# five seeds get no verdict, and the more is compared, the surer each must be.

# %%
for change in results.compare("mean_e2el_ms", "p99_ttft_ms", "request_throughput", against="fcfs"):
    if change.of in ("sjf", "static", "prefill_first") and str(load) in change.setting:
        print(change.verdict)

# %% [markdown]
# ## Who pays: slowdown against length
#
# The slowdown of a request is its latency over what it would be on a server of its own.

# %%
chosen = ["static", "fcfs", with_predictor("sjf"), with_predictor("srtf"), "prefill_first"]
some = sl.run(
    sl.spec(
        {"model": "llama-3-8b", "name": f"{load} requests/s",
         "workload": {"trace": "azure-conv", "num_requests": num_requests, "request_rate": load},
         "sweep": {"policy": chosen}}
    )
)  # fmt: skip
some.plot.slowdown_against_length()

# %% [markdown]
# ## Predictability
#
# How much does the latency of *one and the same* request vary from run to run? The requests must
# be the same, so they are written to a file once, and only the arrivals are drawn anew.

# %%
folder = Path(tempfile.mkdtemp())
same = sl.synthesize(folder / "same.csv", num_requests, preset="azure-conv")
again = sl.run(
    {
        "name": "the same requests in other traffic",
        "workload": {"trace": str(same), "request_rate": load},
        "replications": 4 if fast else 10,
        "sweep": {"policy": [with_predictor(name) for name in ("fcfs", "sjf", "prefill_first")]},
    }
)
again.plot.predictability()
