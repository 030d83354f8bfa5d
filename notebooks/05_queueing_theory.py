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
# # Queueing theory as a test
#
# With one seat and a constant time per token the engine is a single server, and textbooks say
# how long requests wait. If the simulator disagrees, the simulator is wrong. Takes half a minute
# (a few seconds with `FAST=1`).

# %%
import math
import os

import numpy as np

import schedlab as sl
from schedlab.sim.cost.cost_model import CostModel

fast = bool(os.environ.get("FAST"))
MEAN_TOKENS = 100

# %% [markdown]
# A cost model is a class that prices a batch. This one takes a millisecond for each step, or for
# each token of it: then the more requests run, the slower each one is, which is processor
# sharing.


# %%
class Unit(CostModel):
    name = "unit"

    def __init__(self, deployment, step_ms: int = 0, token_ms: int = 0):
        self.step_ms, self.token_ms = step_ms, token_ms

    def step_ns(self, shape, k=1):
        tokens = shape.num_decodes + sum(n for n, _ in shape.chunks)
        return [1_000_000 * (self.step_ms + self.token_ms * tokens)] * k

    def describe(self):
        return {"name": self.name}


# %% [markdown]
# Three distributions of the length of answers with the same mean of 100 tokens, so of the time in
# service, 0.1 s (the prompt, one token long, is read in the step that gives the first token), at
# 30, 50 and 70 % of what the server can do: 10 requests a second.

# %%
lengths = {
    "M/D/1": MEAN_TOKENS,
    "M/M/1": {"distribution": "exponential", "mean": MEAN_TOKENS},
    "M/G/1": {"distribution": "lognormal", "mu": math.log(MEAN_TOKENS) - 0.5, "sigma": 1.0},
}
one_server = {
    "name": "one server",
    "cost_model": {"name": Unit, "step_ms": 1},
    "engine": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 2,
        "max_model_len": 8192,
        "num_gpu_blocks_override": 10_000,
    },
    "workload": {"prompt_tokens": 1, "num_requests": 60 if fast else 4_000},
    "measure": {"warm_up_requests": 12 if fast else 400},
    "replications": 5 if fast else 10,
    "sweep": {"workload.request_rate": [3, 5, 7]},
}
served = {
    name: sl.run(one_server, **{"workload.output_tokens": distribution})
    for name, distribution in lengths.items()
}

# %% [markdown]
# ## One server: Pollaczek and Khinchine
#
# W = ρ / (1 - ρ) · E[S²] / (2 E[S]): exponential service waits twice as long as
# constant service, and heavy tails wait longer still.

# %%
factors = {"M/D/1": 0.5, "M/M/1": 1.0, "M/G/1": math.e / 2}


def against_theory(results, metric, theory_s, title):
    """Draw a metric over the rate, and what theory says of it."""
    figure = results.plot.matplotlib.lines(metric)  # whose axes can be drawn on
    rates = np.linspace(0.2, 7.5, 60)
    axes = figure.axes[0]
    (theory,) = axes.plot(rates, 1000 * theory_s(rates / 10), color="black", linewidth=0.8)
    axes.set_ylim(0, 1500 * theory_s(0.7))
    axes.set_title(title)
    axes.legend([axes.lines[0], theory], ["simulated", "theory"])
    for row in results.rows:
        rate = float(row.settings["workload.request_rate"])
        mean_ms, half_width_ms = row.metrics[metric]
        print(
            f"{title}, {rate:g}/s: theory {1000 * theory_s(rate / 10):.1f} ms,"
            f" simulated {mean_ms:.1f} ± {half_width_ms:.1f} ms"
        )
    return figure


figures = [
    against_theory(
        served[name], "mean_queue_time_ms", lambda load: factor * load / (1 - load) / 10, name
    )
    for name, factor in factors.items()
]
figures[0]

# %%
figures[1]

# %%
figures[2]

# %% [markdown]
# ## Shared server: the distribution does not matter
#
# M/G/1 with processor sharing: T = E[S] / (1 - ρ), whatever the distribution. A step of B
# tokens takes B units, so a lone arrival still has to wait for the step under way: a few units.

# %%
shared = {
    "cost_model": {"name": Unit, "token_ms": 1},
    "engine": {"max_num_seqs": 2_000, "max_num_batched_tokens": 4_000},
}
figures = [
    against_theory(
        sl.run(one_server, **shared, **{"workload.output_tokens": lengths[name]}),
        "mean_e2el_ms", lambda load: 0.1 / (1 - load), f"{name}, processor sharing",
    )
    for name in ("M/M/1", "M/G/1")
]  # fmt: skip
figures[0]

# %%
figures[1]

# %% [markdown]
# ## Little's law, exactly
#
# Over a run that starts and ends empty, the area under the number in the system is the sum of
# the times in the system. No statistics, no tolerance.

# %%
requests = served["M/M/1"].run.requests
arrivals, finishes = requests["arrival_ns"], requests["finish_ns"]
events = np.concatenate([arrivals, finishes])
change = np.repeat([1, -1], len(arrivals))
order = np.argsort(events, kind="stable")
area_ns = np.dot(np.cumsum(change[order])[:-1], np.diff(events[order]))
print("area under the number in system:", area_ns, "ns")
print("sum of times in system:         ", (finishes - arrivals).sum(), "ns")
assert area_ns == (finishes - arrivals).sum()
