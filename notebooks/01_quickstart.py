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
# Two schedulers, three loads, one figure. Takes twenty seconds (a few with `FAST=1`). Open it with
# Jupyter or run it as a plain script; everything it calls is `import schedlab as sl`.

# %%
import os

import schedlab as sl

num_requests = 20 if os.environ.get("FAST") else 600

# %% [markdown]
# An experiment is what a YAML file would say, as a mapping; a file's name does as well.
# Replication *r* has the same seed at every point, so both schedulers meet the same requests.

# %%
results = sl.run(
    {
        "name": "static against continuous batching",
        "model": "llama-3-8b",
        "hardware": "a100-80gb",
        "workload": {"trace": "azure-conv", "num_requests": num_requests},
        "replications": 5,
        "sweep": {
            "policy": [{"name": "static", "max_batch_size": 32}, "fcfs"],
            "workload.request_rate": [1, 3, 6],
        },
    }
)
results

# %%
results.plot.throughput_against_p99()

# %% [markdown]
# Every request and every step is there, in columns (`results.to_frame("requests")` where pandas is
# installed).

# %%
busiest = results.runs[-1]
steps = busiest.log.steps()
print("steps:", len(steps["num_decodes"]), " largest batch:", int(steps["num_decodes"].max()))
print("longest wait:", busiest.metrics()["p99_queue_time_ms"], "ms (P99)")

# %%
results.plot.time_series("fcfs, request_rate=6")

# %% [markdown]
# Why continuous batching wins, at a glance: 24 requests at once, eight seats. A static batch
# keeps its seats until its longest answer is done.

# %%
small = {
    "name": "24 requests, 8 seats",
    "model": "llama-3-8b",
    "engine": {"max_num_seqs": 8},
    "workload": {
        "num_requests": 24,
        "arrivals": "all_at_once",
        "prompt_tokens": {"distribution": "uniform", "low": 50, "high": 400},
        "output_tokens": {"distribution": "lognormal", "mu": 4.5, "sigma": 0.9, "cap": 600},
    },
    "sweep": {
        "policy": [
            {"name": "static", "max_batch_size": 8, "label": "static batching"},
            {"name": "fcfs", "label": "continuous batching"},
        ]
    },
}
sl.run(small).plot.batching()
