"""Who gives way to a decode that needs memory: one after the other from the end of a list."""

import pytest

from schedlab.policies import ContinuousBatching
from schedlab.policies.preemption import grant_or_preempt
from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import PolicyError
from schedlab.sim.request import Status
from tests import laws
from tests.laws import arrival
from tests.traced import AsksOnce, batches, limits


class GrantsOne(AsksOnce):
    """Grants one decode."""

    def __init__(self, number, victims, left):
        super().__init__(left)
        self.number = number
        self.victims = victims

    def answer(self, view, builder):
        by_number = {state.id: state for state in view.running}
        victims = [by_number[number] for number in self.victims]
        granted = grant_or_preempt(builder, by_number[self.number], victims)
        gone = sorted(state.id for state in builder.preempted)
        return f"{granted}, {gone} gone, {[state.id for state in victims]} left"


@pytest.mark.parametrize(
    ("prompt", "number", "victims", "left", "told"),
    [
        # Every block is full: who is granted a token needs one of another.
        (4, 0, [0, 1, 2], 9, "True, [2] gone, [1] left"),
        (4, 1, [0, 1, 2], 9, "True, [2] gone, [0] left"),
        (4, 1, [1, 0], 9, "True, [0] gone, [] left"),
        (4, 2, [0, 1, 2], 9, "False, [2] gone, [0, 1] left"),  # its own turn came
        (4, 0, [0], 9, "False, [0] gone, [] left"),
        (3, 0, [0, 1, 2], 9, "True, [] gone, [1, 2] left"),  # there is room in its block
        (3, 0, [0, 1, 2], 1, "True, [] gone, [1, 2] left"),
        # Nobody gives memory where tokens are used up.
        (3, 0, [0, 1, 2], 0, "False, [] gone, [0, 1, 2] left"),
        (4, 0, [0, 1, 2], 0, "False, [] gone, [0, 1, 2] left"),
    ],
)
def test_decode_takes_memory_from_the_end_of_its_victims_until_it_fits(
    prompt, number, victims, left, told
):
    config = EngineConfig(num_blocks=3, max_model_len=12, block_size=4, max_num_batched_tokens=20)
    work = [arrival(i, prompt=prompt, output=5) for i in range(3)]
    with pytest.raises(PolicyError) as error:
        laws.run(GrantsOne(number, victims, left), work, config)
    assert told in str(error.value)


class TakesFromWhoHasEnded(ContinuousBatching):
    """Takes the memory of one who has finished in the step under way, where there are several."""

    def __init__(self):
        self.taken = []

    def plan(self, view, builder):
        ended = [state for state in view.seated if state.status is Status.FINISHED]
        if len(ended) > 1:
            one = ended[len(self.taken) % 2]
            builder.preempt(one)
            self.taken.append(one.id)
        return super().plan(view, builder)


def test_memory_of_one_who_has_ended_is_taken_and_that_of_others_stays():
    config = EngineConfig(
        num_blocks=40, max_model_len=40, block_size=4, max_num_seqs=5, async_scheduling=True
    )
    work = [arrival(i, prompt=5, output=3 + i // 2) for i in range(5)]
    policy = TakesFromWhoHasEnded()
    log = laws.run(policy, work, config)  # all memory is accounted for after every step
    assert len(policy.taken) == 2
    assert log.requests()["generated_tokens"].tolist() == [3, 3, 4, 4, 5]
    assert log.requests()["num_preemptions"].tolist() == [0] * 5


@pytest.mark.parametrize("max_decodes", [1, 2, 3])
@pytest.mark.parametrize("tbt_s", [1e-9, 1.0])
def test_slai_computes_no_more_decodes_than_it_may_whether_or_not_they_are_due(max_decodes, tbt_s):
    work = [arrival(i, prompt=4, output=6) for i in range(3)]
    knobs = {"token_budget": 16, "tbt_s": tbt_s, "dynamic_offset": False, "offset": 1}
    got, log = batches("slai", work, limits(), **knobs, max_decodes=max_decodes)
    decodes = [batch for batch in got if set(batch.values()) == {1}]
    assert max(map(len, decodes)) == max_decodes
    assert log.requests()["generated_tokens"].tolist() == [6] * 3
