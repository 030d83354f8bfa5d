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
# Two schedulers, three loads, one figure. Takes a few seconds (less with `FAST=1`). Open it with
# jupytext or as a plain script; everything it calls is a library function.

# %%
import os

from experiments.loading import make_spec
from experiments.plots import throughput_against_p99
from experiments.report import rows
from experiments.run import run
from experiments.sweep import points

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
        "sweep": {
            "policy": [{"name": "static", "max_batch_size": 32}, "fcfs"],
            "workload.request_rate": [1, 3, 6],
        },
    }
)

# %% [markdown]
# `points` writes the sweep out; `run` is a pure function of one point.

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
figure = throughput_against_p99(table, spec.name)

# %% [markdown]
# Every request and every step is there, in columns.

# %%
busiest = results[-1]
steps = busiest.log.steps()
print("steps:", steps.num_rows, " largest batch:", int(steps["num_decodes"].max()))
print("longest wait:", busiest.metrics()["p99_queue_time_ms"], "ms (P99)")
