"""How laws are asked: in what order, on which cases, how far those shrink, and what is said."""

from dataclasses import replace

from schedlab.sim.config import EngineConfig
from schedlab.sim.request import Arrival, Slo, Turn
from schedlab.testing import LinearCost, fleet_cases
from schedlab.testing.cases import Case, _smaller
from tests.laws import arrival

LIMITS = EngineConfig(num_blocks=9, max_model_len=60, block_size=16)


def test_smaller_case_keeps_turns_and_the_names_of_the_blocks_that_are_left_of_a_prompt():
    one = arrival(0, 5, 70, 6, prefix_hash_ids=(4, 5, 6, 7), session="s")
    late = Arrival(one.request, 6, 70, Turn())
    shorter, brief = _smaller(Case((late,), LIMITS))
    assert repr(shorter.workload) == repr((replace(late, output_tokens=3),))
    half = replace(one.request, prompt_tokens=35, prefix_hash_ids=(4, 5))
    assert repr(brief.workload) == repr((replace(late, request=half),))


def test_case_of_fleets_is_written_down_with_its_sessions_and_prefixes():
    names = {"Case": Case, "EngineConfig": EngineConfig, "LinearCost": LinearCost, "Slo": Slo,
             "arrival": arrival}  # fmt: skip
    others = {"session": "", "prefix_hash_ids": (3,), "predicted_session_tokens": 0.0}
    for case in (*fleet_cases(0, 8), Case((arrival(0, 0, 40, 2, **others),), LIMITS)):
        again = eval(str(case), names)
        assert repr(again) == repr(case)
