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

from schedlab.experiments.figures import plots
from schedlab.experiments.figures.style import show_in_notebooks
from schedlab.experiments.statistics import estimate
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.request import Arrival, Request
from schedlab.sim.rng import stream
from schedlab.sim.drive.simulation import simulate

show_in_notebooks()
fast = bool(os.environ.get("FAST"))
replications = 4 if fast else 10
num_requests = 120 if fast else 4_000
warm_up = num_requests // 10
MEAN_TOKENS, TOKEN_NS = 100, 1_000

# %% [markdown]
# A cost model is an object that prices a batch. This one takes one unit of time for each step,
# or for each token of it: then the more requests run, the slower each one is, which is processor
# sharing.


# %%
class Unit(CostModel):
    name = "unit"

    def __init__(self, per_step_ns, per_token_ns):
        self.per_step_ns, self.per_token_ns = per_step_ns, per_token_ns

    def step_ns(self, shape, k=1):
        tokens = shape.num_decodes + sum(n for n, _ in shape.chunks)
        return [self.per_step_ns + self.per_token_ns * tokens] * k

    def describe(self):
        return {"name": self.name}


def served(draw, load, seed, seats=1, cost=None):
    """Simulate Poisson arrivals; return the requests after the warm-up, times in tokens."""
    tokens = np.maximum(1, np.rint(draw(stream(seed, "lengths"), num_requests))).astype(int)
    gaps = stream(seed, "arrivals").exponential(MEAN_TOKENS * TOKEN_NS / load, num_requests)
    at_ns = np.cumsum(gaps).astype(int).tolist()
    work = [
        Arrival(Request(i, at_ns[i], 1, max_tokens=1 << 20), int(tokens[i]), at_ns[i])
        for i in range(num_requests)
    ]
    config = EngineConfig(
        num_blocks=10_000_000, max_model_len=1_000_000, max_num_seqs=seats,
        max_num_batched_tokens=2 * seats,
    )  # fmt: skip
    executor = SimExecutor(Pricing(cost or Unit(TOKEN_NS, 0)))
    log = simulate(Engine(config, registry.make("fcfs"), executor), work, None)
    columns = log.requests()
    return {name: columns[name][warm_up:] / TOKEN_NS for name in columns if name.endswith("_ns")}


def wait(requests):
    return float(np.mean(requests["first_scheduled_ns"] - requests["arrival_ns"]))


def sojourn(requests):
    return float(np.mean(requests["finish_ns"] - requests["arrival_ns"]))


# %% [markdown]
# ## One server: Pollaczek and Khinchine
#
# $W = \frac{\rho}{1-\rho} \cdot \frac{E[S^2]}{2 E[S]}$: exponential service waits twice as long as
# constant service, and heavy tails wait longer still.

# %%
services = {
    "M/D/1": (lambda rng, n: np.full(n, MEAN_TOKENS), 0.5),
    "M/M/1": (lambda rng, n: rng.exponential(MEAN_TOKENS, n), 1.0),
    "M/G/1, lognormal": (
        lambda rng, n: rng.lognormal(math.log(MEAN_TOKENS) - 0.5, 1.0, n),
        math.e / 2,
    ),
}
loads = [0.3, 0.5, 0.7]
curve = np.linspace(0.02, 0.75, 60)
checks = {}
for name, (draw, factor) in services.items():
    simulated = [
        estimate([wait(served(draw, load, r)) / MEAN_TOKENS for r in range(replications)])
        for load in loads
    ]
    checks[name] = plots.TheoryCheck(curve, factor * curve / (1 - curve), loads, simulated)
    for load, found in zip(loads, simulated):
        theory = factor * load / (1 - load)
        print(f"{name:18} load {load}: theory {theory:.3f}, simulated {found.mean:.3f} ± {found.half_width:.3f}")
plots.theory_against_simulation(
    checks, "time in the queue of one server", "load", "mean wait / mean service"
)

# %% [markdown]
# ## Shared server: the distribution does not matter
#
# M/G/1 with processor sharing: $T = E[S] / (1-\rho)$, whatever the distribution. A step of B
# tokens takes B units, so a lone arrival still has to wait for the step under way: a few units.

# %%
checks = {}
for name in ("M/M/1", "M/G/1, lognormal"):
    draw, _ = services[name]
    simulated = [
        estimate(
            [
                sojourn(served(draw, load, r, seats=2_000, cost=Unit(0, TOKEN_NS))) / MEAN_TOKENS
                for r in range(replications)
            ]
        )
        for load in loads
    ]
    checks[f"{name} - PS"] = plots.TheoryCheck(curve, 1 / (1 - curve), loads, simulated)
plots.theory_against_simulation(
    checks, "processor sharing", "load", "mean time in system / mean service"
)

# %% [markdown]
# ## Little's law, exactly
#
# Over a run that starts and ends empty, the area under the number in the system is the sum of
# the times in the system. No statistics, no tolerance.

# %%
requests = served(services["M/M/1"][0], 0.7, seed=0)
arrivals, finishes = requests["arrival_ns"], requests["finish_ns"]
events = np.concatenate([arrivals, finishes])
change = np.repeat([1, -1], len(arrivals))
order = np.argsort(events, kind="stable")
area = np.dot(np.cumsum(change[order])[:-1], np.diff(events[order]))
print("area under the number in system:", round(float(area), 3))
print("sum of times in system:         ", round(float((finishes - arrivals).sum()), 3))
assert math.isclose(area, (finishes - arrivals).sum(), rel_tol=1e-9)
