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
# were measured (`schedlab compare`), and measures a very small one itself if PyTorch is there.

# %%
import json
import os
from importlib.util import find_spec
from pathlib import Path

from schedlab import experiments
from schedlab.experiments.figures import plots
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.figures.style import show_in_notebooks

show_in_notebooks()
fast = bool(os.environ.get("FAST"))

# %% [markdown]
# ## Recorded comparisons
#
# One folder a machine under `docs/results`: this laboratory's CPU, and a GPU where one was
# measured.

# %%
root = Path(experiments.__file__).resolve().parent.parent
found = {}
for path in sorted((root / "docs" / "results").glob("compare-*/comparison.json")):
    found[path.parent.name] = json.loads(path.read_text())
if not found:
    print("no recorded comparison here: schedlab compare experiments/compare-cpu.yaml makes one")

# %% [markdown]
# A latency is off for two reasons: a step takes another time than predicted, and because of that
# a decision falls differently. The first is the error of the cost model alone, on the steps of
# the measured run. The second cannot be blamed on the policy: with equal step times both
# backends must decide alike.

# %%
for name, comparison in found.items():
    print(name)
    for point in comparison["points"]:
        error, decisions = point["cost_error_by_step"], point["decisions"]
        print(
            f"  {point['label']:34} steps: mean error {error['mape']:6.1%}, bias {error['bias']:+6.1%}"
            f" | decisions with equal step times: {decisions['same_step_times']}"
        )

# %%
figures = [plots.measured_against_simulated(data, name) for name, data in found.items()]
figures[0] if figures else None

# %%
figures[1] if len(figures) > 1 else None

# %% [markdown]
# Comparing policies needs less than exact times: the simulator has to rank them as the machine
# does. Kendall's tau of the two rankings is 1 if they agree.

# %%
for name, comparison in found.items():
    for load, taus in comparison["rank_agreement_kendall_tau"].items():
        said = ", ".join(f"{metric} {tau:.2f}" for metric, tau in taus.items() if tau is not None)
        print(f"{name}, {load}: {said}")

# %% [markdown]
# ## One made here
#
# A model so small that it takes seconds. `clock: modelled` runs the kernels but takes the step
# times of the cost model: decisions, tokens and times must then be equal to the last digit. A
# roofline of a CPU is not calibrated, so with measured times the errors are large, and the
# comparison says so.

# %%
tiny = make_spec(
    {
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
            "num_requests": 12 if fast else 40,
            "request_rate": "inf",
        },
        "real": {"repeats": 2},
        "sweep": {"policy": ["fcfs", "prefill_first", {"name": "static", "max_batch_size": 3}]},
    }
)
figure = None
if find_spec("torch") is None:
    print("PyTorch is not installed: pip install 'schedlab[gpu]' to run this part")
else:
    from schedlab.experiments.comparing.compare import compare
    from schedlab.experiments.comparing.comparison_files import to_data

    points = compare(tiny)
    assert all(point.modelled_difference is None for point in points)
    print("with equal step times, all decisions are equal")
    figure = plots.measured_against_simulated(to_data(points, tiny), tiny.name)
figure
