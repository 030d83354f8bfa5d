"""Settings of property tests: the same examples every time, however slow the machine.

``HYPOTHESIS_PROFILE=explore`` draws new examples, ten times as many.
"""

import os

from hypothesis import HealthCheck, settings

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
