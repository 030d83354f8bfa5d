"""Experiments that come with the program run, and write what they found, with fewer requests."""

import numpy as np
import pytest

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import load_spec
from schedlab.experiments.specification.shipped import shipped_experiments
from schedlab.experiments.specification.sweep import points
from schedlab.sim.record.columns import FINISHED
from schedlab.sim.record.saved_log import read_table

NEED_FILES = {
    "azure-replay", "compare-h200", "compare-vllm-cpu", "compare-vllm-h200", "validate-rtx4090",
    "validate-rtx4090-vllm", "validate-rtxpro6000", "validate-rtxpro6000-vllm",
}  # fmt: skip
"""A trace to be fetched, or a profile to be measured or imported."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped_experiments().keys() - NEED_FILES))
def test_shipped_experiment_runs_with_every_policy(name, tmp_path):
    # Every row of its trace is a request; a measured part must remain after the warm-up.
    fewer = [] if name == "static-toys" else ["workload.num_requests=70"]
    spec = load_spec(shipped_experiments()[name], fewer)
    # At the last setting of all else, as a rule the heaviest load.
    chosen = {str(point.spec.policy): point.spec for point in points(spec)}
    for point in chosen.values():
        result = run(point)
        result.save(tmp_path)
        gone = read_table(tmp_path / "preemptions.parquet")
        requests = result.requests
        never = gone["id"][gone["resumed_ns"] < 0]
        assert len(set(never)) == len(never)
        assert not np.isin(never, requests["id"][requests["status"] == FINISHED]).any()
