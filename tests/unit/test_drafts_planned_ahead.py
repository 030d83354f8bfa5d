"""Drafts under asynchronous scheduling: a step is planned as if those under way were all right."""

from dataclasses import replace
from random import Random

import pytest

from schedlab.policies import Policy, registry
from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.preemption import grant_or_preempt
from schedlab.policies.speculation.by_batch_size import ByBatchSize
from schedlab.policies.speculation.slo import SloDrafts
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.core.track import SpeculatingState, look_ahead, new_state
from schedlab.sim.request import Slo, Status
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws
from tests.property.test_speculation import require_laws

CONFIG = EngineConfig(
    num_blocks=60, max_model_len=60, block_size=1, num_speculative_tokens=3, async_scheduling=True
)
COST = laws.LinearCost(base_ns=100, token_ns=0, context_ns=0)


def run(workload, config=CONFIG, rates=(0.0,), policy=None, length=None):
    return laws.run(
        policy or registry.make("fcfs"), workload, config, COST, draft_length=length,
        make_executor=lambda pricing: SpeculativeExecutor(
            pricing, config, DrawnAcceptance(rates), NgramDrafter(0.0)
        ),
    )  # fmt: skip


def test_verification_is_given_slots_behind_all_drafts_under_way():
    work = [laws.arrival(0, 0, 10, 5)]
    # 10 of the prompt, of which surely one token comes out; then 4 more, of which nobody knows
    # how many; then 4 behind these, and so on, while one of them is right.
    assert run(work).steps()["kv_allocated_tokens"].tolist() == [10, 14, 18, 19, 20]
    at_once = replace(CONFIG, async_scheduling=False)
    assert run(work, at_once).steps()["kv_allocated_tokens"].tolist() == [10, 14, 15, 16, 17]


def test_verification_of_right_drafts_needs_no_more_than_where_nothing_is_planned_ahead():
    work = [laws.arrival(0, 0, 10, 13)]
    held = run(work, rates=(1.0,)).steps()["kv_allocated_tokens"].tolist()
    assert held[:4] == [10, 14, 18, 22]
    at_once = run(work, replace(CONFIG, async_scheduling=False), (1.0,)).steps()
    assert at_once["kv_allocated_tokens"].tolist() == held[:4]


@pytest.mark.parametrize(
    ("rate", "output_tokens", "padding"),
    [
        (1.0, 9, [0, 0, 0, 4]),  # 1, then 4 twice: 5 were there, and one more would not end it
        (0.0, 3, [0, 0, 0]),  # 2 are there, and one more comes out in any case
        (1.0, 6, [0, 0, 0]),  # 5 are there
        (1.0, 7, [0, 0, 0, 4]),
        (1.0, 1, [0]),
    ],
)
def test_answer_that_right_drafts_end_is_verified_once_more(rate, output_tokens, padding):
    log = run([laws.arrival(0, 0, 10, output_tokens)], rates=(rate,))
    assert log.steps()["padding_tokens"].tolist() == padding
    assert log.steps()["draft_tokens"].tolist()[len(padding) :] == []
    assert log.requests()["finish_ns"].tolist() == [100 * sum(tokens == 0 for tokens in padding)]


def test_answer_that_ends_before_its_limit_is_verified_once_more_whoever_was_right():
    config = replace(CONFIG, overrun_at_stop=True)
    log = run([laws.arrival(0, 0, 10, 3, max_tokens=20)], config)
    assert log.steps()["padding_tokens"].tolist() == [0, 0, 0, 4]
    # 12 tokens are in the cache, 3 drafts of the step before may be right: 15, and 4 more.
    assert log.steps()["kv_tokens"].tolist() == [10, 11, 12, 0]
    limited = run([laws.arrival(0, 0, 10, 3, max_tokens=3)], config)
    assert limited.steps()["padding_tokens"].tolist() == [0, 0, 0]


def test_verification_too_many_takes_memory_from_others():
    work = [laws.arrival(0, 0, 4, 9), laws.arrival(1, 0, 1, 20)]
    config = replace(CONFIG, num_blocks=28, max_model_len=28, preempt_in_order=True)
    log = run(work, config, (1.0,))
    # The third step ends answer 0, with 12 tokens in the cache, which who plans the fourth does not
    # know: 4 more, and 13 of request 1, are one too many. Without it there is no such step.
    assert log.requests()["num_preemptions"].tolist() == [0, 1]
    assert log.requests()["finish_ns"].tolist()[0] == 300
    roomy = run(work, replace(config, num_blocks=29), (1.0,))
    assert roomy.requests()["num_preemptions"].tolist() == [0, 0]


def test_request_that_sits_a_step_out_begins_behind_what_it_has():
    class SkipsOneStep(ContinuousBatching):
        def plan(self, view, builder):
            skips = view.now_ns == 300
            for state in view.running:
                if not (skips and state.id == 0):
                    builder.grant(state)
            for state in view.waiting:
                builder.grant(state)
            return builder.build()

    work = [laws.arrival(0, 0, 10, 20), laws.arrival(1, 0, 1, 20)]
    log = run(work, policy=SkipsOneStep())
    held = log.steps()["kv_allocated_tokens"].tolist()
    # Request 0 holds 10, 14, 18, 18 and, of 12 in its cache, 16 of which it has already, again 18;
    # then 4 behind what is under way. Request 1 holds 1, 5, 9, 10, 11 and so on.
    assert [held[i] - (1, 5, 9, 10, 11, 12)[i] for i in range(6)] == [10, 14, 18, 18, 18, 20]


def test_draft_length_that_changes_leaves_what_is_under_way_where_it_is():
    # Alone it drafts three, beside another one. The prompt of that one is in the fourth step, and
    # the fifth is planned with one draft behind three: 10 + 2 + 4 + 2, in the 19 slots that
    # request 0 has; request 1 has 1, then 3.
    work = [laws.arrival(0, 0, 10, 20), laws.arrival(1, 150, 1, 20)]
    steps = run(work, length=ByBatchSize([[1, 3], [2, 1]])).steps()
    assert steps["draft_tokens"].tolist()[:6] == [0, 3, 3, 3, 2, 2]
    assert steps["kv_allocated_tokens"].tolist()[:6] == [10, 14, 18, 20, 22, 24]


class OneByOne(Policy):
    """Grants who runs by name, at the expense of the latest admission."""

    def plan(self, view, builder):
        victims = list(view.running)
        for state in list(view.running):
            if state not in builder.preempted and builder.tokens_left:
                grant_or_preempt(builder, state, victims)
        for state in view.waiting if not builder.preempted else ():
            if not builder.grant(state):
                break
        return builder.build()


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_granted_by_name_take_the_slots_that_their_requests_then_hold(lookahead, seed):
    # Up to the longest sequence, and where memory is short; blocks are counted after each step.
    draw, longest = Random(seed), 22 + 8 * (seed % 2)
    prompts = [draw.randrange(1, 12) for _ in range(6)]
    work = [laws.arrival(i, 150 * i, n, longest - n) for i, n in enumerate(prompts)]
    config = replace(
        CONFIG, num_blocks=2 * longest, max_model_len=longest, num_lookahead_tokens=lookahead
    )
    log = run(work, config, (0.6,), policy=OneByOne())
    assert log.requests()["num_preemptions"].sum() > 0


def test_request_denied_for_what_it_might_need_is_asked_again_after_a_step():
    lengths = ((1, 5), (1, 27), (47, 26))
    work = [
        laws.arrival(i, 0, prompt, output, predicted_tokens=float(output))
        for i, (prompt, output) in enumerate(lengths)
    ]
    config = EngineConfig(
        num_blocks=25, max_model_len=100, block_size=4, max_num_seqs=2, max_num_batched_tokens=17,
        num_speculative_tokens=1, async_scheduling=True, swap_space_blocks=30, kv_block_bytes=100,
    )  # fmt: skip
    require_laws("srtf", (work, config, [0.0], None))


def drafting(entry_ns, rate=1.0):
    """Have a request that drafts two tokens for each, behind its prompt of ten, in a batch."""
    config = EngineConfig(
        num_blocks=99, max_model_len=200, block_size=4, num_speculative_tokens=2,
        async_scheduling=True,
    )  # fmt: skip
    state = new_state(laws.arrival(0, prompt=10, output=40).request, config)
    state.status, state._computed, state._generated = Status.RUNNING, 10, 1
    state._entry_ns = entry_ns
    outcome = DrawnAcceptance([rate, rate]).outcome(state.request, 40)
    state.track = look_ahead(config, state, outcome, 40)
    batch = SpeculativeBatch(config)
    batch.join(state)
    return state, batch


NOW_NS = 900


@pytest.mark.parametrize(
    ("entry_ns", "steps", "leaves", "known", "granted"),
    [
        (-1, 0, False, 0, 1),  # nothing of it is under way: all is known, the next token as well
        (300, 0, False, 0, 1),
        (NOW_NS, 0, False, 0, 0),  # the step under way computes the end of its prompt
        (NOW_NS, 0, True, 0, 0),
        # Two drafts were accepted, which have no name yet; one more is not known where the step
        # was planned while one before it ran.
        (-1, 1, False, -2, -2),
        (300, 1, False, -3, -2),
        (-1, 2, False, -3, -2),
        (-1, 1, True, -2, -2),
        (300, 1, True, -3, -2),
        (-1, 2, True, -3, -2),
        (300, 0, True, 0, 0),  # left before its first step, while its prompt ends
        (0, 0, True, 0, 0),  # which may be at the very beginning
        (-1, 0, True, 0, 1),
    ],
)
def test_tokens_known_ahead_are_those_before_what_is_under_way(
    entry_ns, steps, leaves, known, granted
):
    state, batch = drafting(entry_ns)
    if steps:
        batch.advance(steps)
    if leaves:
        batch.leave(state)
    assert state.num_output_tokens == 1 + 3 * steps
    assert state.num_computed_tokens == 10 + 3 * steps
    assert state.known_ahead(False, NOW_NS) == known
    assert state.known_ahead(True, NOW_NS) == granted
    if leaves and entry_ns != NOW_NS:
        state.resolve()  # it sat a step out
        assert [state.known_ahead(is_granted, NOW_NS) for is_granted in (False, True)] == [0, 1]


@pytest.mark.parametrize(
    ("steps_before", "steps_after", "known"), [(1, 0, -2), (2, 0, -3), (1, 1, -3), (2, 1, -3)]
)
def test_tokens_known_ahead_of_who_joins_again_at_once_are_those_of_its_last_step(
    steps_before, steps_after, known
):
    state, batch = drafting(-1)
    batch.advance(steps_before)
    batch.leave(state)
    batch.join(state)
    if steps_after:
        batch.advance(steps_after)
    assert state.known_ahead(False, NOW_NS) == known
    assert state.known_ahead(True, NOW_NS) == -2
    batch.leave(state)
    state.lost_memory()
    assert (state.spare_tokens, state.track) == (0, None)


@pytest.mark.parametrize(("rate", "fresh"), [(1.0, 2), (0.0, 0)])
def test_drafts_that_were_accepted_last_are_fresh_until_they_are_resolved(rate, fresh):
    state, batch = drafting(-1, rate)
    assert state.fresh_tokens == 0
    batch.advance(1)
    assert state.fresh_tokens == fresh
    batch.leave(state)
    assert state.fresh_tokens == fresh
    state.resolve()
    assert (state.fresh_tokens, state.unresolved_tokens) == (0, 0)
    named = SpeculatingState(state.request, 2, names_accepted=True)
    named._fresh = 2
    assert named.fresh_tokens == 0


@pytest.mark.parametrize("overruns", [False, True])
@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_answers_that_end_at_the_longest_sequence_give_all_slots_of_drafts_back(
    rate, slots, overruns
):
    for longest in (14, 15, 17):
        for output_tokens in range(2, longest - 9):
            config = replace(
                CONFIG, max_model_len=longest, num_lookahead_tokens=slots, overrun_at_stop=overruns
            )
            # Nothing is lost or held twice, which is proved after every step.
            work = [laws.arrival(i, 0, 10, output_tokens) for i in range(2)]
            log = run(work, config, rates=(rate,) * 3)
            assert log.requests()["generated_tokens"].tolist() == [output_tokens] * 2


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize(
    ("knobs", "tokens", "who"),
    [
        # All are late. Of 9 tokens 5 are drafts: 1.2 even shares are 2.7, so 2, 2 and 1.
        ({"budget_tokens": 9}, 5, 3),
        ({"budget_tokens": 9, "target_share": 99.0}, 5, 2),
        # 8 / 4 - 1 each; when two decode, 8 / 2 - 1.
        ({"budget_tokens": 8, "min_depth": 1}, 4, 4),
    ],
)
def test_drafts_by_targets_are_shared_whether_or_not_steps_are_planned_ahead(
    plans_ahead, knobs, tokens, who
):
    config = replace(CONFIG, num_blocks=400, async_scheduling=plans_ahead)
    late = Slo(tpot_ms=1e-6)
    work = [laws.arrival(i, 0, 10, 6 if i < 2 else 12, slo=late) for i in range(4)]
    steps = run(work, config, length=SloDrafts(**knobs)).steps()
    assert steps["draft_tokens"].tolist() == [0] + [tokens] * 5 + [6] * 6
    assert steps["num_drafts"].tolist() == [0] + [who] * 5 + [2] * 6
