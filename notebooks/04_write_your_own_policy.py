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
# # Write your own policy
#
# One class, usually one method; the same object then runs on the simulator and on the real
# backend. Takes a few seconds.

# %%
import os

import numpy as np

from schedlab.experiments.figures import plots
from schedlab.experiments.analysis.latencies import alone_s
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.metrics.registry import metric_named
from schedlab.experiments.figures.style import show_in_notebooks
from schedlab.experiments.results.tables import rows
from schedlab.experiments.running.run import run
from schedlab.experiments.statistics import paired_change, verdict
from schedlab.experiments.specification.sweep import points
from schedlab.policies import ContinuousBatching
from schedlab.policies.registry import register

show_in_notebooks()
fast = bool(os.environ.get("FAST"))

# %% [markdown]
# `ContinuousBatching` is vLLM V1's loop: running requests first, then the waiting ones in the
# order of `key` (smaller is sooner, ties go to the earlier arrival). Here: short prompts first,
# but two seconds of waiting count as much as 1,000 tokens.
#
# Keys whose order can change while requests wait need `static_keys = False`. This one needs none:
# the prompt minus 500 tokens a second of waiting sorts as the prompt plus 500 tokens a second of
# arrival time, whatever the time is now.


# %%
@register("short_prompts_with_patience")
class ShortPromptsWithPatience(ContinuousBatching):
    """Serve short prompts first; patience turns waiting time into tokens."""

    def __init__(self, tokens_per_s: float = 500.0):
        self.tokens_per_s = tokens_per_s

    def key(self, state, now_ns):
        request = state.request
        return request.prompt_tokens + self.tokens_per_s * request.arrival_ns / 1e9


# %% [markdown]
# In a file of its own it would be named `policy: my_file:ShortPromptsWithPatience`. Its knob can
# be swept like every other key.

# %%
spec = make_spec(
    {
        "name": "patience",
        "model": "llama-3-8b",
        "engine": {"max_num_seqs": 16},
        "workload": {"trace": "azure-conv", "num_requests": 120 if fast else 600, "request_rate": 5},
        "replications": 3 if fast else 5,
        "sweep": {
            "policy": [
                "fcfs",
                "shortest_prompt",
                {"name": "short_prompts_with_patience", "tokens_per_s": 50},
                {"name": "short_prompts_with_patience", "tokens_per_s": 500},
            ],
        },
    }
)
todo = points(spec)
results = [run(point.spec) for point in todo]
table = rows(todo, [result.metrics() for result in results])
metrics = ("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "p99_e2el_ms", "request_throughput")
plots.heat_map(table, spec.name, metrics)

# %%
names = list(dict.fromkeys(point.label for point in todo))


def samples(label, metric):
    return [r.metrics()[metric] for point, r in zip(todo, results) if point.label == label]


for name in names[1:]:
    for metric in ("mean_ttft_ms", "p99_ttft_ms"):
        change = paired_change(samples(name, metric), samples("fcfs", metric))
        print(verdict(name, "fcfs", metric, change, metric_named(metric).larger_is_better))

# %% [markdown]
# Who pays for it?

# %%
first = {point.label: result for point, result in zip(todo, results) if point.replication == 0}
plots.latency_cdf(first, "time in the queue", "queue_time")

# %%
plots.slowdown_against_length(first, alone_s(todo[0].spec), "slowdown")

# %% [markdown]
# ## Is it honest?
#
# A policy may promise that its plan stays the same for a while, and the engine skips ahead. The
# flag `check_horizon` asks again at every skipped step and raises an error if a promise was
# wrong. The results must be the same to the last digit.

# %%
small = {
    "workload": {"trace": "azure-conv", "num_requests": 60, "request_rate": 5},
    "policy": "short_prompts_with_patience",
}
quick = run(make_spec(small))
proven = run(make_spec(small | {"engine": {"check_horizon": True}}))
slow = run(make_spec(small | {"engine": {"fast_forward": False}}))
for other in (proven, slow):
    np.testing.assert_equal(other.metrics(), quick.metrics())
print("the promises hold:", quick.log.num_steps, "steps, planned", quick.provenance["num_plans"], "times")

# %% [markdown]
# What a server cannot know, a policy cannot see: the true length of an answer is not there.

# %%
from schedlab.sim.request import Request

print("a request says:", ", ".join(Request.__dataclass_fields__))
assert "output_tokens" not in Request.__dataclass_fields__
