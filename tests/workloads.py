"""Random workloads and limits for property tests."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.request import Refinement
from tests.laws import arrival


def share(part):
    """Return so many of the examples of the profile in use: for laws that cost a lot a run."""
    return max(1, round(part * settings.default.max_examples))


KV_ALLOCATORS = (
    "paged", "contiguous_max", "contiguous_declared", "contiguous_pow2", "contiguous_exact"
)  # fmt: skip


# Lengths on the edges of blocks of 4 and 16 tokens and of the bins the tests use, and beside them.
EDGES = (3, 4, 5, 8, 10, 12, 15, 16, 17, 20, 30, 31, 32, 33)


def lengths(longest):
    """Draw a length: any, or one on an edge."""
    edges = [edge for edge in EDGES if edge <= longest]
    return st.one_of(st.integers(1, longest), st.sampled_from(edges))


def refined(output, error):
    """Return a predictor asked again every five tokens that errs now up, now down, ever less."""
    signs = [1 if k % 3 else -1 for k in range(1, output // 5 + 2)]
    off = [output * (error - 1.0) * sign / (k + 1) for k, sign in enumerate(signs)]
    return Refinement(5, [output + tokens for tokens in off])


@st.composite
def workloads(draw, max_requests=24, max_prompt=60, max_output=40):
    """Draw requests of three tenants whose gaps range from none to far longer than a step.

    Some come at the very end of a step that computes nothing but the prompt before them.
    """
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1, 700, 3_000, 40_000, None]),
                lengths(max_prompt),
                lengths(max_output),
                st.integers(0, 2),
                st.one_of(st.just(1.0), st.floats(0.3, 3.0)),
                st.sampled_from("abc"),
            ),
            min_size=1,
            max_size=max_requests,
        )
    )
    now_ns, requests, before = 0, [], 1
    for i, (gap_ns, prompt, output, priority, error, tenant) in enumerate(rows):
        now_ns += 1000 + 10 * before if gap_ns is None else gap_ns
        before = prompt
        requests.append(
            arrival(
                i,
                now_ns,
                prompt,
                output,
                priority=priority,
                predicted_tokens=output * error,
                tenant=tenant,
                refinement=refined(output, error) if i % 2 else None,
            )
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
        max_num_resident=draw(st.sampled_from([None, None, None, 1, 3, 30])),
    )


@st.composite
def kv_tiers(draw, config):
    """Return limits with one or two tiers of memory below, and what these need."""
    below = tuple(
        KVTier(
            name,
            num_blocks=draw(st.sampled_from([1, 7, 30, 500])),
            load_bytes_per_s=draw(st.sampled_from([1e8, 1e9, 1e12])),
            store_bytes_per_s=draw(st.sampled_from([1e8, 1e9, 1e12])),
            load_latency_ns=draw(st.sampled_from([0, 300])),
            store_latency_ns=draw(st.sampled_from([0, 300])),
            write=draw(st.sampled_from(["through", "back"])),
        )
        for name in ("cpu", "disk")[: draw(st.integers(1, 2))]
    )
    connector = not config.num_speculative_tokens and draw(st.booleans())
    return replace(
        config,
        kv_tiers=below,
        offloading_connector=connector,
        load_takes_seat=not connector or draw(st.booleans()),
        swap_space_blocks=below[0].num_blocks,
        enable_prefix_caching=config.enable_prefix_caching or config.preemption_mode != "swap",
        kv_load=draw(st.sampled_from(["when_faster", "always"])),
    )
