"""Settings of property tests, and what several tests need that takes a while to make.

Property tests draw the same examples every time, however slow the machine;
``HYPOTHESIS_PROFILE=explore`` draws new examples, ten times as many.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.data_folder import data_folder

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "default",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=_SLOW,
    print_blob=True,
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=_SLOW, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import the kernel timings of both recorded runs, once."""
    from schedlab.sim.cost.importers.llmservingsim import Options, import_bundle

    root = tmp_path_factory.mktemp("profiles")
    for name in ("RTX4090", "RTXPRO6000"):
        path = data_folder() / "vllm_ground_truth/perf" / name / "meta-llama/Llama-3.1-8B/bf16"
        import_bundle(path, Options()).save(root / name.lower())
    return root
