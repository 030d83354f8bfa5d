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
# # Routers and tails
#
# Eight engines share a load. Who sends a request where decides little of the mean and much of the
# tail; and where prompts begin alike, it decides how much has to be computed at all.
# Takes two minutes (a few seconds with `FAST=1`).

# %%
import os

import schedlab as sl

fast = bool(os.environ.get("FAST"))
num_requests = 40 if fast else 600
seeds = 2 if fast else 5

# %% [markdown]
# ## The tail of the first token
#
# Chats of Azure's trace on eight A100 with 24 seats each. `jsq` looks at every queue, `power_of_d`
# at two drawn at random, `round_robin` and `random` at none.

# %%
loads = sl.run(
    {
        "name": "routers",
        "model": "llama-3-8b",
        "hardware": "a100-80gb",
        "replications": seeds,
        "engine": {"max_num_seqs": 24},
        "workload": {"trace": "azure-conv", "num_requests": num_requests, "request_rate": 40},
        "slo": {"ttft_ms": 500, "tpot_ms": 40},
        "cluster": {"count": 8},
        "sweep": {"cluster.router": ["random", "round_robin", "power_of_d", "jsq"]},
    }
)
loads.plot.latency_cdf("ttft")

# %% [markdown]
# The medians lie close together; the slowest hundredth waits several times as long behind a router
# that does not look. Two looks give most of what all of them do. For a dollar:

# %%
loads.plot.goodput_per_dollar()

# %% [markdown]
# One engine at a time: behind a blind router some fill up while others have seats.

# %%
loads.plot.engines_over_time("router=random")

# %%
loads.plot.engines_over_time("router=jsq")

# %% [markdown]
# ## Where prompts begin alike
#
# Half of the requests carry one of 64 beginnings of 2,048 tokens. A router that sends them where
# that beginning is saves its computation; one that only counts requests spreads it over all caches.

# %%
prefixes = sl.run(
    "cluster-prefixes",
    replications=seeds,
    slo={"ttft_ms": 500, "tpot_ms": 40},
    **{"workload.num_requests": num_requests},
)
for row in prefixes.rows:
    print(f"{row.label:40} finds {row.mean('prefix_hit_share'):.0%} of the prompt tokens")
prefixes.plot.heat_map(["p99_ttft_ms", "p99_e2el_ms", "output_throughput"])

# %%
prefixes.plot.latency_cdf("ttft")

# %% [markdown]
# What caches that forget nothing could find at most, and at least, can be counted without a
# simulation: see `docs/fleets.md`, which has the table of a real trace.
