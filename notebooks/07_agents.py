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
# # Agents
#
# An agent's next call comes when its tool is done, a user's next question after some thought: how
# fast the server is decides when requests come. What counts is how long the whole session takes.
# Takes two minutes (a few seconds with `FAST=1`).

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

import schedlab as sl

fast = bool(os.environ.get("FAST"))
# Few sessions, but as many at a time: else nobody waits.
sessions = {"workload.sessions.count": 60 if fast else 200, "workload.session_rate": 8 if fast else 0.8}

# %% [markdown]
# The shipped experiment: answers call a shell or a search, some fan out to sub-agents, and memory
# holds the contexts of some sessions, not of all. `trace describe` shows the same of a file.

# %%
policies = ["fcfs", "program_fcfs", "plas", "infercept", "continuum"]
results = {
    policy: sl.run("sessions", sweep={}, policy=policy, **sessions).run for policy in policies
}

# %% [markdown]
# ## Where the time of a session goes
#
# Tools and users take the same time whatever the policy: the rest is queueing, and running. (Calls
# that run side by side count each, so the bars may exceed the length of a session.)

# %%
parts = {
    "tools and users": "mean_session_away_s",
    "in the queue": "mean_session_queue_s",
    "on the GPU": "mean_session_running_s",
}
figure, axes = plt.subplots(figsize=(6.4, 3.2))
left = np.zeros(len(policies))
for label, metric in parts.items():
    values = np.array([results[policy].metric(metric) for policy in policies])
    axes.barh(policies, values, left=left, label=label)
    left += values
axes.invert_yaxis()
axes.set_xlabel("mean time of a session (s)")
axes.legend(frameon=False, ncol=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Who gains, and who pays
#
# Least attained service (`plas`) serves short sessions at once and lets long ones wait. Keeping the
# memory of a session while its tool works (`infercept`) saves work, most of it for the long ones.
# `continuum` keeps little here, where contexts are soon computed again and nobody can tell how many
# calls are left.

# %%
figure, axes = plt.subplots(figsize=(6.4, 3.6))
for policy in policies:
    sessions = results[policy].observation().sessions
    done = sessions["finish_ns"] >= 0
    times_s = np.sort((sessions["finish_ns"] - sessions["start_ns"])[done]) / 1e9
    axes.step(times_s, np.arange(1, len(times_s) + 1) / len(times_s), label=policy, where="post")
axes.set_xscale("log")
axes.set_xlabel("time of a session (s)")
axes.set_ylabel("share of sessions")
axes.legend(frameon=False)
figure.tight_layout()
plt.show()

# %% [markdown]
# The prefix cache explains it: what is kept is found, and need not be computed again.

# %%
for policy in policies:
    share = results[policy].metric("prefix_hit_share")
    print(f"{policy:13} finds {share:.0%} of the prompt tokens")
