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
# # Quick start
#
# Two schedulers, three loads, one figure. Takes ten seconds (two with `FAST=1`). Open it with
# Jupyter or run it as a plain script; everything it calls is a library function.

# %%
import os

from schedlab.experiments.figures import plots
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.figures.style import show_in_notebooks
from schedlab.experiments.results.tables import rows
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.sweep import points

show_in_notebooks()
num_requests = 60 if os.environ.get("FAST") else 600

# %% [markdown]
# An experiment is what a YAML file would say, as a mapping.

# %%
spec = make_spec(
    {
        "name": "static against continuous batching",
        "model": "llama-3-8b",
        "hardware": "a100-80gb",
        "workload": {"trace": "azure-conv", "num_requests": num_requests},
        "replications": 3,
        "sweep": {
            "policy": [{"name": "static", "max_batch_size": 32}, "fcfs"],
            "workload.request_rate": [1, 3, 6],
        },
    }
)

# %% [markdown]
# `points` writes the sweep out; `run` is a pure function of one point. Replication *r* has the
# same seed at every point, so both schedulers meet the same requests.

# %%
todo = points(spec)
results = [run(point.spec) for point in todo]
table = rows(todo, [result.metrics() for result in results])
for row in table:
    print(
        f"{row.label:24} {row.mean('request_throughput'):6.2f} req/s"
        f"   P99 TTFT {row.mean('p99_ttft_ms'):10.0f} ms"
    )

# %%
plots.throughput_against_p99(table, spec.name)

# %% [markdown]
# Every request and every step is there, in columns.

# %%
busiest = results[-1]
steps = busiest.log.steps()
print("steps:", steps.num_rows, " largest batch:", int(steps["num_decodes"].max()))
print("longest wait:", busiest.metrics()["p99_queue_time_ms"], "ms (P99)")

# %%
plots.time_series(busiest, "continuous batching at 6 requests/s")

# %% [markdown]
# Why continuous batching wins, at a glance: 24 requests at once, eight seats. A static batch
# keeps its seats until its longest answer is done.

# %%
small = {
    "model": "llama-3-8b",
    "engine": {"max_num_seqs": 8},
    "workload": {
        "num_requests": 24,
        "arrivals": "all_at_once",
        "prompt_tokens": {"distribution": "uniform", "low": 50, "high": 400},
        "output_tokens": {"distribution": "lognormal", "mu": 4.5, "sigma": 0.9, "cap": 600},
    },
}
both = {
    "static batching": run(make_spec(small | {"policy": {"name": "static", "max_batch_size": 8}})),
    "continuous batching": run(make_spec(small | {"policy": "fcfs"})),
}
plots.batching(both, "24 requests, 8 seats")
