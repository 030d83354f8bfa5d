"""What a link is, of its name and of the figures given beside it."""

import pytest

from schedlab.experiments.specification.link import LinkSpec
from schedlab.sim.hardware.link import LINKS

KNOWN = LINKS["infiniband-ndr"]


@pytest.mark.parametrize(
    ("given", "bytes_per_s", "latency_s"),
    [
        ({"name": "infiniband-ndr"}, KNOWN.bytes_per_s, KNOWN.latency_s),
        ({"name": "infiniband-ndr", "gb_per_s": 12.5}, 12.5e9, KNOWN.latency_s),
        ({"name": "infiniband-ndr", "latency_us": 3}, KNOWN.bytes_per_s, 3e-6),
        ({"name": "infiniband-ndr", "latency_us": 0}, KNOWN.bytes_per_s, 0.0),
        ({"gb_per_s": 2}, 2e9, 0.0),
        ({"gb_per_s": 0.5, "latency_us": 7}, 0.5e9, 7e-6),
    ],
)
def test_figures_given_of_a_link_take_the_place_of_the_known_ones(given, bytes_per_s, latency_s):
    assert KNOWN.latency_s > 0
    link = LinkSpec(**given).link()
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((bytes_per_s, latency_s))


@pytest.mark.parametrize("given", [{}, {"latency_us": 3}])
def test_link_without_a_name_or_a_bandwidth_is_refused(given):
    with pytest.raises(ValueError, match="give a name"):
        LinkSpec(**given)
