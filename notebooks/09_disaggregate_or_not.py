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
# # Disaggregate or not
#
# Prompts and answers on engines of their own, or both on each? Apart, no prompt delays a token; but
# an engine for prompts cannot help with answers, and KV has to travel. Takes two minutes (a few
# seconds with `FAST=1`).

# %%
import os

import schedlab as sl

fast = bool(os.environ.get("FAST"))
num_requests = 30 if fast else 500
rates = [20, 60] if fast else [10, 20, 40, 60, 80]

mixed = {"count": 4}
apart = {"pools": {"prompts": {"role": "prefill", "count": 2}, "answers": {"role": "decode", "count": 2}}}


def fleet(cluster, **keys):
    """Return an experiment on four H100."""
    return {
        "name": "disaggregation",
        "model": "llama-3-8b",
        "hardware": "h100-80gb",
        "slo": {"ttft_ms": 400, "tpot_ms": 15},
        "workload": {"trace": "azure-conv", "num_requests": num_requests, "request_rate": 40},
        "cluster": cluster,
        **keys,
    }


# %% [markdown]
# ## Both latencies, over the load

# %%
kinds = {
    "together": sl.run(fleet(mixed, sweep={"workload.request_rate": rates})),
    "apart": sl.run(fleet(apart, sweep={"workload.request_rate": rates})),
}
for name, found in kinds.items():
    print(name)
    for row in found.rows:
        print(
            f"  {row.settings['workload.request_rate']:>4} requests/s: P99 gap "
            f"{row.mean('p99_itl_ms'):6.1f} ms, P99 first token {row.mean('p99_ttft_ms'):7.1f} ms, "
            f"within targets {row.mean('slo_attainment'):.0%}"
        )

# %% [markdown]
# Apart, the gap between tokens stays near that of an answer alone, while first tokens queue at half
# of the engines: the two latencies are separated. Which is better depends on which target binds.

# %%
kinds["together"].plot.latency_against_rate(("ttft", "itl"))

# %%
kinds["apart"].plot.latency_against_rate(("ttft", "itl"))

# %% [markdown]
# ## What travels
#
# The KV of a thousand tokens of this model is 131 MB. Over 100 GbE that is some 10 ms a prompt;
# over a slow link requests wait for it.

# %%
slow = sl.run(fleet({**apart, "link": "ethernet-100g"}))
slow.plot.transfers()

# %%
slow.plot.engine_shares()

# %% [markdown]
# ## The cheapest split
#
# `find` with `minimize` looks for the fewest engines that hold the targets, here of those for
# answers, for every number of those for prompts, and of engines that do both.

# %%
seeds = 2 if fast else 5
held = "subject to slo_attainment >= 0.9"
split = sl.find(
    fleet(
        apart,
        replications=seeds,
        find=f"min cluster.pools.answers.count between 1 and 8 {held}",
        sweep={"cluster.pools.prompts.count": [1, 2, 3]},
    ),
    **{"find.settle": False},
)
split

# %%
together = sl.find(
    fleet(mixed, replications=seeds, find=f"min cluster.count between 1 and 8 {held}"),
    **{"find.settle": False},
)
together
