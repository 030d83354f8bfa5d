"""Prove your own work: checks that a policy, reader, cost model or executor must pass.

They are what the project holds its own parts to, as scikit-learn's `check_estimator` is. They
need nothing but the package itself:

    from schedlab.testing import check_policy
    check_policy(MyPolicy)

raises `LawBroken`, which says what law is broken, with the smallest workload found and how to
repeat it. To see each law as a test of its own:

    @pytest.mark.parametrize("law", POLICY_LAWS)
    def test_my_policy_keeps(law):
        check_policy(MyPolicy, only=law)
"""

from schedlab.testing.cases import Case, random_cases
from schedlab.testing.check import LawBroken
from schedlab.testing.cost_model import COST_MODEL_LAWS, check_cost_model
from schedlab.testing.executor import EXECUTOR_LAWS, check_executor
from schedlab.testing.laws import LinearCost, arrival
from schedlab.testing.policy import POLICY_LAWS, check_policy, policy_verdicts
from schedlab.testing.reader import READER_LAWS, check_reader
from schedlab.testing.router import ROUTER_LAWS, check_router, fleet_cases

__all__ = [
    "COST_MODEL_LAWS",
    "EXECUTOR_LAWS",
    "POLICY_LAWS",
    "READER_LAWS",
    "ROUTER_LAWS",
    "Case",
    "LawBroken",
    "LinearCost",
    "arrival",
    "check_cost_model",
    "check_executor",
    "check_policy",
    "check_reader",
    "check_router",
    "fleet_cases",
    "policy_verdicts",
    "random_cases",
]
