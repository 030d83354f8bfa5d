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

import schedlab as sl
from schedlab.policies import ContinuousBatching

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
class ShortPromptsWithPatience(ContinuousBatching):
    """Serve short prompts first; patience turns waiting time into tokens."""

    def __init__(self, tokens_per_s: float = 500.0):
        self.tokens_per_s = tokens_per_s

    def key(self, state, now_ns):
        request = state.request
        return request.prompt_tokens + self.tokens_per_s * request.arrival_ns / 1e9


# %% [markdown]
# The class itself stands where a policy's name would, or an object with other knobs. In a file of
# its own it would be named `policy: my_file:ShortPromptsWithPatience`.

# %%
results = sl.run(
    {
        "name": "patience",
        "model": "llama-3-8b",
        "engine": {"max_num_seqs": 16},
        "workload": {"trace": "azure-conv", "num_requests": 12 if fast else 600, "request_rate": 5},
        "replications": 5,
        "sweep": {
            "policy": [
                "fcfs",
                "shortest_prompt",
                {"name": ShortPromptsWithPatience, "tokens_per_s": 50, "label": "50 tokens/s"},
                {"name": ShortPromptsWithPatience, "tokens_per_s": 500, "label": "500 tokens/s"},
            ],
        },
    }
)
metrics = ("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "p99_e2el_ms", "request_throughput")
results.plot.heat_map(metrics)

# %%
results.compare("mean_ttft_ms", "p99_ttft_ms")

# %% [markdown]
# Who pays for it?

# %%
results.plot.latency_cdf("queue_time")

# %%
results.plot.slowdown_against_length()

# %% [markdown]
# ## Is it honest?
#
# A policy may promise that its plan stays the same for a while, and the engine skips ahead. The
# flag `check_horizon` asks again at every skipped step and raises an error if a promise was
# wrong. The results must be the same to the last digit.

# %%
small = {
    "workload": {"trace": "azure-conv", "num_requests": 20 if fast else 60, "request_rate": 5},
    "policy": ShortPromptsWithPatience,
}
quick = sl.run(small).run
proven = sl.run(small, engine={"check_horizon": True}).run
slow = sl.run(small, engine={"fast_forward": False}).run
for other in (proven, slow):
    np.testing.assert_equal(other.metrics(), quick.metrics())
told = quick.provenance
print("the promises hold:", told["num_steps"], "steps, planned", told["num_plans"], "times")

# %% [markdown]
# What a server cannot know, a policy cannot see: the true length of an answer is not there.

# %%
from schedlab.sim.request import Request

print("a request says:", ", ".join(Request.__dataclass_fields__))
assert "output_tokens" not in Request.__dataclass_fields__
