"""Random workloads and limits for property tests."""

from hypothesis import strategies as st

from schedlab.sim.config import EngineConfig
from tests.laws import arrival

KV_ALLOCATORS = ("paged", "contiguous_max", "contiguous_pow2", "contiguous_exact")


@st.composite
def workloads(draw, max_requests=24, max_prompt=60, max_output=40):
    """Draw requests whose gaps range from none to far longer than a step."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1, 700, 3_000, 40_000]),
                st.integers(1, max_prompt),
                st.integers(1, max_output),
                st.integers(0, 2),
                st.floats(0.3, 3.0),
            ),
            min_size=1,
            max_size=max_requests,
        )
    )
    now_ns, requests = 0, []
    for i, (gap_ns, prompt, output, priority, error) in enumerate(rows):
        now_ns += gap_ns
        requests.append(
            arrival(i, now_ns, prompt, output, priority=priority, predicted_tokens=output * error)
        )
    return requests


@st.composite
def configs(draw, longest=100):
    """Draw limits that range from roomy to barely enough for one request."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    least = -(-longest // block_size)
    swap_space_blocks = draw(st.sampled_from([0, 0, 3, 500]))
    modes = ["recompute", "swap"] if swap_space_blocks else ["recompute"]
    return EngineConfig(
        num_blocks=least + draw(st.sampled_from([0, 1, 3, 20, 400])),
        max_model_len=longest,
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([1, 2, 5, 16])),
        max_num_batched_tokens=draw(st.sampled_from([3, 17, 64, 500])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 8])),
        watermark=draw(st.sampled_from([0.0, 0.05])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        kv_allocator=draw(st.sampled_from(KV_ALLOCATORS)),
        preemption_mode=draw(st.sampled_from(modes)),
        swap_space_blocks=swap_space_blocks,
        kv_block_bytes=100,
    )
