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
# # Simulated against measured
#
# The same policy objects, the same trace and the same seeds on a real paged decoder and on the
# simulator: how far apart are they, and why? Takes a few seconds: it reads the comparisons that
# were measured (`schedlab measure`), and measures a very small one itself if PyTorch is there.

# %%
import os
from importlib.util import find_spec
from pathlib import Path

import schedlab as sl

fast = bool(os.environ.get("FAST"))

# %% [markdown]
# ## Recorded comparisons
#
# One folder a machine under `docs/results`: this laboratory's CPU, and a GPU where one was
# measured. Errors are simulated / measured - 1.
#
# A latency is off for two reasons: a step takes another time than predicted, and because of that
# a decision falls differently. The first is the error of the cost model alone, on the steps of
# the measured run. The second cannot be blamed on the policy: with equal step times both
# backends must decide alike, which the column of decisions tells.

# %%
results = Path(sl.__file__).resolve().parents[1] / "docs" / "results"
recorded = [sl.load_measurement(folder) for folder in sorted(results.glob("compare-*"))]
if not recorded:
    print("no recorded comparison here: schedlab measure experiments/compare-cpu.yaml makes one")
recorded[0] if recorded else None

# %%
figures = [measurement.plot() for measurement in recorded]
figures[0] if figures else None

# %%
figures[1] if len(figures) > 1 else None

# %% [markdown]
# Comparing policies needs less than exact times: the simulator has to rank them as the machine
# does. Kendall's tau of the two rankings is 1 if they agree.

# %%
for measurement in recorded:
    for load, taus in measurement.ranking.items():
        said = ", ".join(f"{metric} {tau:.2f}" for metric, tau in taus.items() if tau is not None)
        print(f"{measurement.name}, {load}: {said}")

# %% [markdown]
# ## One made here
#
# A model so small that it takes seconds. The run is repeated by a modelled clock, which executes
# the kernels but takes the step times of the cost model: decisions must then be identical. A
# roofline of a CPU is not calibrated, so with measured times the errors are large, and the
# comparison says so.

# %%
tiny = {
    "name": "tiny, on this CPU",
    "model": "schedlab-tiny",
    "hardware": "cpu",
    "engine": {
        "dtype": "fp32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "num_gpu_blocks_override": 12,
    },
    "workload": {
        "prompt_tokens": {"distribution": "uniform", "low": 4, "high": 40},
        "output_tokens": {"distribution": "uniform", "low": 2, "high": 20},
        "num_requests": 6 if fast else 40,
        "request_rate": "inf",
    },
    "real": {"repeats": 1 if fast else 2},
    "sweep": {"policy": ["fcfs", "prefill_first", {"name": "static", "max_batch_size": 3}]},
}
here = None
if find_spec("torch") is None:
    print("PyTorch is not installed: pip install 'schedlab[gpu]' to run this part")
else:
    here = sl.measure(tiny)
    assert all(point["decisions"]["same_step_times"] == "identical" for point in here.points)
here

# %%
here.plot() if here is not None else None
