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

from schedlab.experiments.figures import plots
from schedlab.experiments.analysis.frontier import on_frontier
from schedlab.experiments.analysis.latencies import alone_s
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.metrics.registry import metric_named
from schedlab.experiments.figures.style import show_in_notebooks
from schedlab.experiments.results.tables import rows
from schedlab.experiments.running.run import run
from schedlab.experiments.statistics import paired_change, verdict
from schedlab.experiments.specification.sweep import points
from schedlab.policies import registry

show_in_notebooks()
fast = bool(os.environ.get("FAST"))
rates = [2, 10] if fast else [2, 4, 6, 8, 10, 12]
replications = 2 if fast else 5
num_requests = 25 if fast else 300

# %% [markdown]
# All registered policies with their default knobs; those that order by output length get a
# predictor that is right about the order of three pairs in four (Kendall's tau 0.5).

# %%
predictor = {"name": "noisy", "kendall_tau": 0.5}


def with_predictor(name):
    needs = registry.policy_class(name).needs_prediction
    return {"name": name, "predictor": predictor} if needs else name


wrappers = {"aged", "boosted"}  # these decorate another policy
spec = make_spec(
    {
        "name": "every policy",
        "model": "llama-3-8b",
        "hardware": "a100-80gb",
        "slo": {"ttft_ms": 1000, "tpot_ms": 60},
        "workload": {"trace": "azure-conv", "num_requests": num_requests},
        "replications": replications,
        "sweep": {
            "policy": [with_predictor(name) for name in registry.names() if name not in wrappers],
            "workload.request_rate": rates,
        },
    }
)
todo = points(spec)
results = [run(point.spec) for point in todo]
table = rows(todo, [result.metrics() for result in results])
print(len(todo), "runs of", len({row.policy for row in table}), "policies")

# %% [markdown]
# Nearly thirty curves are too many to tell apart: those that reach the frontier somewhere are in
# colour, the others grey.

# %%
values = [[row.mean("request_throughput"), row.mean("p99_ttft_ms")] for row in table]
best = on_frontier(values, [True, False])
front = list(dict.fromkeys(row.policy for row, is_best in zip(table, best) if is_best))[:6]
highlight = list(dict.fromkeys([*front, "static", "fcfs"]))
plots.throughput_against_p99(table, spec.name, highlight=highlight)

# %%
plots.attainment_against_rate(table, "both targets: TTFT 1 s, TPOT 60 ms", highlight=highlight)

# %% [markdown]
# All of them, with numbers, at one load. Bold is the best, and what its interval does not tell
# from it.

# %%
load = rates[-2]
there = [row for row in table if row.settings["workload.request_rate"] == str(load)]
plots.heat_map(there, f"every policy at {load} requests/s")

# %%
plots.pareto(table, spec.name, x="output_throughput", y="p99_ttft_ms")

# %% [markdown]
# ## A verdict needs replications
#
# Both sides of a comparison met the same random numbers, so their differences are paired. One
# run alone gets no verdict.


# %%
def samples(policy, metric):
    return [
        result.metrics()[metric]
        for point, result in zip(todo, results)
        if point.settings == {"policy": policy, "workload.request_rate": str(load)}
    ]


for policy in ("sjf", "static", "prefill_first"):
    for metric in ("mean_e2el_ms", "p99_ttft_ms", "request_throughput"):
        change = paired_change(samples(policy, metric), samples("fcfs", metric))
        print(verdict(policy, "fcfs", metric, change, metric_named(metric).larger_is_better))

# %% [markdown]
# ## Who pays: slowdown against length
#
# The slowdown of a request is its latency over what it would be on a server of its own.

# %%
chosen = ("static", "fcfs", "sjf", "srtf", "prefill_first")
runs = {
    point.settings["policy"]: (point.spec, result)
    for point, result in zip(todo, results)
    if point.settings["workload.request_rate"] == str(load)
    and point.replication == 0
    and point.settings["policy"] in chosen
}
alone = alone_s(runs["fcfs"][0])
plots.slowdown_against_length(
    {name: result for name, (_, result) in runs.items()}, alone, f"{load} requests/s"
)

# %% [markdown]
# ## Predictability
#
# How much does the latency of *one and the same* request vary from run to run? The requests must
# be the same, so they are written to a file once, and only the arrivals are drawn anew.

# %%
from schedlab.traces.synthetic import synthesize
from schedlab.traces.writer import write

folder = Path(tempfile.mkdtemp())
write(synthesize(num_requests, preset="azure-conv", seed=0), folder / "same.csv")
fixed = make_spec(
    {
        "name": "the same requests in other traffic",
        "workload": {"trace": str(folder / "same.csv"), "request_rate": load},
        "replications": 4 if fast else 10,
        "sweep": {"policy": [with_predictor(name) for name in ("fcfs", "sjf", "prefill_first")]},
    }
)
again = {}
for point in points(fixed):
    again.setdefault(point.settings["policy"], []).append(run(point.spec))
plots.predictability(again, fixed.name)
