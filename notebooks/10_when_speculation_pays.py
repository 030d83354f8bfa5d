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
# # When speculation pays
#
# Drafting k tokens and verifying them in one step trades computation, of which an idle GPU has
# plenty, for passes over the weights, which it waits for. So it depends on three things: how often
# a draft is right, what drafting costs, and how busy the GPU is. Takes two minutes (a few seconds
# with `FAST=1`).

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

import schedlab as sl

fast = bool(os.environ.get("FAST"))

# %% [markdown]
# ## Tokens a step
#
# If each drafted token is right with probability a, and counts only if all before it are, k of them
# and the one that the verification adds make
# 1 + a + a² + ... + aᵏ = (1 - aᵏ⁺¹) / (1 - a) tokens a step
# (Leviathan et al., ICML 2023). One request at a time, so nothing else plays a part:

# %%
alone = {"workload.num_requests": 4 if fast else 60, "workload.request_rate": 0.1}
acceptances = [0.5, 0.7, 0.9]
lengths = [1, 2, 4] if fast else [1, 2, 3, 4, 6, 8]


def draft(k, acceptance, method="eagle", **more):
    return {
        "method": method,
        "num_speculative_tokens": k,
        "acceptance": acceptance,
        **more,
    }


def values(metric, drafts, **changes):
    """Run the shipped experiment with each of these drafts, and return a metric of each run."""
    results = sl.run("speculation", sweep={"engine.speculation": drafts}, **changes)
    return np.array([run.metric(metric) for run in results.runs])


figure, axes = plt.subplots(figsize=(6.4, 3.4))
for acceptance in acceptances:
    drafts = [draft(k, acceptance) for k in lengths]
    found = values("mean_tokens_per_step", drafts, **alone)
    expected = (1 - acceptance ** (np.array(lengths) + 1)) / (1 - acceptance)
    (line,) = axes.plot(lengths, expected, label=f"a = {acceptance}")
    axes.plot(lengths, found, "o", color=line.get_color())
    worst = abs(found / expected - 1).max()
    print(f"a = {acceptance}: simulated within {worst:.1%} of the formula")
axes.set_xlabel("drafted tokens k")
axes.set_ylabel("tokens a step")
axes.legend(frameon=False, title="lines: formula; points: simulated")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What it gains a request that is alone
#
# More drafts always make more tokens a step, but each costs a pass of the drafter: a head of one
# layer (`eagle`) next to nothing, a model of a billion parameters an eighth of the model's own
# pass. So the dear drafter is best with few drafts, and worse than none where it is rarely right.

# %%
drafters = {
    "eagle": {"method": "eagle"},
    "llama-3.2-1b": {"method": "draft_model", "model": "llama-3.2-1b"},
}
(none_ms,) = values("mean_tpot_ms", [None], **alone)
figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.2), sharey=True)
for axes, (name, drafter) in zip(panels, drafters.items(), strict=True):
    for acceptance in acceptances:
        drafts = [draft(k, acceptance, **drafter) for k in lengths]
        gain = none_ms / values("mean_tpot_ms", drafts, **alone)
        axes.plot(lengths, gain, "o-", label=f"a = {acceptance}")
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set_title(name)
    axes.set_xlabel("drafted tokens k")
panels[0].set_ylabel("times as fast, per token")
panels[1].legend(frameon=False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Under load
#
# With many requests in a step the GPU computes all the time, and what is spent on rejected tokens
# others wait for. Fixed drafts stop paying; `goodput` (SmartSpec) drafts what yields most tokens a
# second by the cost model and what was accepted so far, down to nothing. End-to-end latency, as a
# multiple of that without speculation at the same load:

# %%
rates = [1, 48] if fast else [1, 8, 16, 32, 48, 64]
strategies = {
    "none": None,
    "4, fixed": draft(4, 0.7),
    "4 at most, by goodput": draft(4, 0.7, draft_length="goodput"),
    "4 at most, by goodput, rarely right": draft(4, 0.4, draft_length="goodput"),
    "4, fixed, rarely right": draft(4, 0.4),
}
latency_ms = {}
for rate in rates:
    busy = {"workload.num_requests": 20 if fast else 400, "workload.request_rate": rate}
    latency_ms[rate] = values("mean_e2el_ms", list(strategies.values()), **busy)

# %%
figure, axes = plt.subplots(figsize=(6.4, 3.6))
for i, name in enumerate(strategies):
    if name != "none":
        axes.plot(rates, [latency_ms[r][i] / latency_ms[r][0] for r in rates], "o-", label=name)
axes.axhline(1, color="#444444", linewidth=0.8)
axes.set_xlabel("requests/s")
axes.set_ylabel("mean latency, times that of none")
axes.legend(frameon=False, ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
figure.tight_layout()
plt.show()

# %% [markdown]
# The formula has no GPU in it: what a token costs at a given load comes from the cost model, here the
# roofline, which no measurement of speculation was held against. Where lines cross is what to try
# on the machine, not what to believe. What the papers found, and whether it holds here:
# docs/results/speculation.
