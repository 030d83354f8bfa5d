import json

import pytest

from schedlab.experiments.bench import distserve
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model

CURVES = {
    "prefill": [10.0, 0.1, 0.001],
    "decoding_large_small_bs_threshold": 3,
    "decoding_smallbs": [20.0, 0.01, 0.5],
    "decoding_largebs": [5.0, 0.02, 1.0],
}


@pytest.fixture
def checkout(tmp_path):
    file = tmp_path / distserve._PROFILE
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"facebook/opt-13b": {"1": CURVES}}))
    return tmp_path


def test_profile_of_the_peer_prices_steps_by_its_curves_and_what_it_adds(checkout):
    deployment = Deployment(model("opt-13b"), gpu("a100-80gb"))
    profile = distserve.PeerProfile(deployment, str(checkout / distserve._PROFILE))
    # 10 + 0.1 * 300 + 0.001 * (100^2 + 200^2), 1 of the pipeline, 2 and 0.0001 * 300 of Ray
    assert profile.step_ns(BatchShape(0, 0, 0, ((100, 0), (200, 0)))) == [93_030_000]
    # 20 + 0.01 * (1000 + 2) + 0.5 * 2 and 2.1; then each has one token more
    assert profile.step_ns(BatchShape(2, 1000, 600), 2) == [33_120_000, 33_140_200]
    assert profile.step_ns(BatchShape(3, 1000, 600)) == [5_000_000 + 20_060_000 + 5_100_000]


def test_run_here_has_the_metrics_of_every_request(checkout):
    spec = distserve.specification(checkout, 1.0, 5)
    assert make_spec(spec).name == "distserve"
    found = distserve.ours(spec)
    for first, between, whole in zip(*found.values(), strict=True):
        assert 0.023 < first <= whole
        assert between == 0 or between > 0.01


def test_command_line_goes_to_the_table_with_this_peers_rates_and_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(distserve, "beside_peer", lambda *given: asked.append(given))
    distserve.main(["--peer", "p"])
    ((peer, *given),) = asked
    assert given == [(1.0, 2.0, 3.0), 500, ["--peer", "p"]]
    runs = distserve.specification, distserve.ours, distserve.theirs
    assert (peer.name, *peer[2:]) == ("DistServe", *runs)
