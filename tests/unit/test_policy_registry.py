"""Which classes are policies: those whose methods can be called as the engine calls them."""

import pytest

from schedlab.policies import ContinuousBatching, registry
from schedlab.sim.errors import SpecError


class KeyOfOne(ContinuousBatching):
    def key(self, state):
        return 0


class PlanOfNothing(ContinuousBatching):
    def plan(self):
        return None


class ArrivalOfThree(ContinuousBatching):
    def on_arrival(self, state, now_ns, more):
        return None


class StartWithout(ContinuousBatching):
    def on_start(self):
        return None


class TokensOfTwo(ContinuousBatching):
    def on_tokens(self, plan, num_steps):
        return None


class FinishOfOne(ContinuousBatching):
    def on_finish(self, state):
        return None


class RejectOfOne(ContinuousBatching):
    def on_reject(self, state):
        return None


class KeyIsNumber(ContinuousBatching):
    key = 7


class HookIsText(ContinuousBatching):
    on_finish = "later"


class Misnamed(ContinuousBatching):
    def victims(self, running, now_ns):
        return running[0]


class BuiltOnMisnamed(Misnamed):
    """What a class of one's own is built on is looked at as well."""

    def key(self, state, now_ns):
        return 0


class Nothing(ContinuousBatching):
    pass


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (KeyOfOne, r"key\(\) is called with 2 arguments, and takes \(self, state\)"),
        (PlanOfNothing, r"plan\(\) is called with 2 arguments, and takes \(self\)"),
        (ArrivalOfThree, r"on_arrival\(\) is called with 2 arguments, and takes \(self, state, "),
        (StartWithout, r"on_start\(\) is called with 1 arguments, and takes \(self\)"),
        (TokensOfTwo, r"on_tokens\(\) is called with 3 arguments, and takes"),
        (FinishOfOne, r"on_finish\(\) is called with 2 arguments, and takes"),
        (RejectOfOne, r"on_reject\(\) is called with 2 arguments, and takes"),
        (KeyIsNumber, "key must be a method, not 7"),
        (HookIsText, "on_finish must be a method, not 'later'"),
        (Misnamed, r"nobody calls victims\(\); did you mean victim\(\)\?"),
        (BuiltOnMisnamed, r"nobody calls victims\(\); did you mean victim\(\)\?"),
        (Nothing, "overrides nothing, so it is ContinuousBatching; define one of "),
    ],
)
def test_policy_that_could_not_be_called_is_refused_by_its_method(cls, message):
    path = f"{__name__}:{cls.__name__}"
    with pytest.raises(SpecError, match=rf"policy '{path}'.*{message}"):
        registry.make(path)


class Lax(ContinuousBatching):
    """Takes more than it is called with, where it may; has no hook."""

    on_finish = None

    def key(self, state, now_ns, more=0, *rest, **options):
        return more

    def on_arrival(self, *given):
        self.given = given

    def helps(self):
        return self.key(None, 0)

    def chunk(self, state, tokens):
        return self.helps() or tokens


@pytest.mark.parametrize("name", ["fcfs", f"{__name__}:Lax"])
def test_policy_that_can_be_called_is_made_by_its_name_or_path(name):
    assert isinstance(registry.make(name), registry.policy_class(name))
