"""What is asked for by its name: each name gives its own, and nearly a name is no name."""

import pytest

from schedlab.policies import registry as policies
from schedlab.policies.autoscalers import registry as autoscalers
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.predictors import registry as predictors
from schedlab.policies.routers import registry as routers
from schedlab.policies.speculation import registry as draft_lengths
from schedlab.sim.cost import registry as cost_models
from schedlab.sim.errors import SchedlabError
from schedlab.sim.metrics import registry as metrics
from schedlab.traces import readers
from schedlab.traces.presets import PRESETS, preset
from schedlab.traces.published import PUBLISHED, published

BY_NAME = {
    "policy": (policies._POLICIES.names, policies._POLICIES.class_of),
    "router": (routers._ROUTERS.names, routers._ROUTERS.class_of),
    "autoscaler": (autoscalers._AUTOSCALERS.names, autoscalers._AUTOSCALERS.class_of),
    "migrator": (migrators._MIGRATORS.names, migrators._MIGRATORS.class_of),
    "predictor": (predictors._PREDICTORS.names, predictors._PREDICTORS.class_of),
    "draft length": (draft_lengths._LENGTHS.names, draft_lengths._LENGTHS.class_of),
    "cost model": (cost_models._MAKERS.names, cost_models._MAKERS.get),
    "metric": (metrics.names, metrics.described),
    "preset": (lambda: sorted(PRESETS), preset),
    "published trace": (lambda: sorted(PUBLISHED), published),
    "trace format": (lambda: sorted(readers.READERS), readers.reader_of),
}


@pytest.mark.parametrize("kind", BY_NAME)
def test_name_gives_another_thing_than_any_other_and_the_same_each_time(kind):
    names, get = BY_NAME[kind]
    found = [get(name) for name in names()]
    assert len({id(one) for one in found}) == len(found) > 2 or kind in ("migrator", "cost model")
    assert [get(name) for name in names()] == found


@pytest.mark.parametrize("kind", BY_NAME)
def test_name_in_capitals_or_with_a_letter_more_or_less_is_refused_with_the_nearest(kind):
    names, get = BY_NAME[kind]
    every = names()
    for name in every[:: max(len(every) // 4, 1)]:
        for other in (name.upper(), f"{name}x", f" {name}", name[:-1]):
            if other in every:
                continue
            with pytest.raises(SchedlabError) as refused:
                get(other)
            text = str(refused.value)
            assert repr(other) in text, text
            if other not in (name.upper(), name[:-1]):
                assert name in text, text
