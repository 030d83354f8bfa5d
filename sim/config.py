"""The engine's limits, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

KVAllocator = Literal[
    "paged", "contiguous_max", "contiguous_declared", "contiguous_pow2", "contiguous_exact"
]
PreemptionMode = Literal["recompute", "swap"]
KVWrite = Literal["through", "back"]
KVLoad = Literal["when_faster", "always"]


def vllm_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes for which vLLM captures CUDA graphs by default.

    Source: vLLM 0.19, VllmConfig: 1, 2, 4, then steps of 8 below 256 and of 16 from there on, up
    to twice `max_num_seqs` and no further than 512.

    Examples
    --------
    >>> vllm_capture_sizes(16)
    (1, 2, 4, 8, 16, 24, 32)
    """
    most = min(2 * max_num_seqs, 512)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return tuple(size for size in sizes if size <= most)


@dataclass(frozen=True, slots=True)
class KVTier:
    """Memory below the GPU's that keeps KV blocks, and the link to it, one a direction.

    Attributes
    ----------
    name : str
        How results call it.
    num_blocks : int
        KV blocks that fit.
    load_bytes_per_s, store_bytes_per_s : float
        Bandwidth towards the GPU, and away from it, for each GPU.
    load_latency_ns, store_latency_ns : int
        From the last byte on the link until it is there.
    write : {"through", "back"}
        When blocks come here: as soon as they are in the memory above, or only when they lose
        their place there.
    is_shared : bool
        Whether all engines of a fleet have it together, each with a link of its own. One engine by
        itself has it alone.

    Raises
    ------
    ValueError
        If a figure is impossible.
    """

    name: str
    num_blocks: int
    load_bytes_per_s: float
    store_bytes_per_s: float
    load_latency_ns: int = 0
    store_latency_ns: int = 0
    write: KVWrite = "through"
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"tier {self.name} must hold at least one block of KV")
        for way, bytes_per_s in (
            ("load", self.load_bytes_per_s),
            ("store", self.store_bytes_per_s),
        ):
            if not bytes_per_s > 0.0:
                raise ValueError(
                    f"tier {self.name}: {way} bandwidth must be > 0, got {bytes_per_s}"
                )
        if self.load_latency_ns < 0 or self.store_latency_ns < 0:
            raise ValueError(f"tier {self.name}: latencies must be >= 0")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine enforces whatever the policy wants.

    Attributes
    ----------
    num_blocks, block_size : int
        KV cache: blocks, and tokens in a block.
    max_model_len : int
        Longest sequence (prompt and output) in tokens; must fit the KV cache alone.
    max_num_seqs : int
        Rows of a step: most requests computed in one.
    max_num_resident : int or None
        Seats: most requests with KV memory at a time, those left out of steps among them. None is
        `max_num_seqs`, as in vLLM, or what memory holds where a policy pauses requests
        (`Policy.pauses`). Below `max_num_seqs` it is vLLM's ``max_num_active_seqs``.
    max_num_batched_tokens : int
        Token budget of a step; a decode counts one.
    enable_chunked_prefill : bool
        Whether the token budget may cut a prompt in pieces. Policies that cut by a rule of their
        own, and `long_prefill_token_threshold`, do so in any case.
    long_prefill_token_threshold : int
        Largest piece of a prompt in one step, or of a token and its drafts; 0 means no limit.
    threshold_spares_lone_request : bool
        That limit does not hold for the only request there is.
    watermark : float
        Share of the blocks, the null block among them, that admission keeps free (not when nobody
        runs, those admitted in the very step included).
    null_blocks : int
        Blocks that exist beside `num_blocks` and are never handed out.
    scheduler_reserve_full_isl : bool
        Admit only if the whole sequence fits now, not just its first chunk.
    kv_allocator : str
        ``paged``, or one of the contiguous reservations of the time before paging.
    preempt_in_order : bool
        Running requests are served one by one, and whoever lacks memory takes it from a victim
        then and there, as vLLM does; off = victims are chosen before anybody is served. For
        policies whose victim need not be the latest admission.
    serve_behind_preempted : bool
        With `preempt_in_order`, go on with those behind a running request that is its own victim;
        off = no other running request is served in that step.
    preemption_mode : str
        What becomes of the KV of a preempted request, unless the policy says otherwise:
        ``recompute`` throws it away, ``swap`` moves it to host memory as long as there is room
        and throws it away where there is none.
    swap_space_blocks : int
        Host memory for swapped requests, in KV blocks.
    kv_block_bytes : int
        Size of a KV block on one GPU, for the time that swapping takes.
    enable_prefix_caching : bool
        Reuse the KV blocks of equal prefixes (`Request.prefix_hash_ids`, in blocks of
        `block_size`) and of preempted requests, as long as nobody else was given them.
    free_uncached_first : bool
        Freed blocks that cannot be found again are the next to be handed out; off = the last, as
        all others.
    kv_tiers : tuple of KVTier
        Memory below the GPU's, the nearest first. Copies to and from it run beside the steps. Then
        requests that are preempted by swap go to the first of them, and `swap_space_blocks` is its
        size.
    kv_load : {"when_faster", "always"}
        Whether a prefix that lies in a lower tier is loaded only where that takes less time than
        computing it again.
    offloading_connector : bool
        Copy to and from `kv_tiers` when vLLM's OffloadingConnector does; see
        `schedlab.sim.core.tiering`.
    load_takes_seat : bool
        Whether a prompt that is loaded from a lower tier has a seat meanwhile, and not only when
        its KV is there, as in vLLM.
    async_scheduling : bool
        Plan each step while the one before it runs: it knows neither the requests that arrive
        meanwhile nor the seats and blocks of those that finish in it, nor how many drafts are right
        that it verifies: it plans as if all were. In a pipeline, plan a batch while the one before
        it of the same requests is in flight, as vLLM does from 0.32 on; needs
        `arrivals_between_steps`.
    overrun_at_stop : bool
        Nor whose answer ends in it before its limit: of those a token too many is computed.
    arrivals_between_steps : bool
        Requests enter the engine only when a step ends, and are counted as queued from then.
    cudagraph_capture_sizes : tuple of int
        Batch sizes of captured CUDA graphs, increasing: the tokens of a step are padded to the
        next one. Empty = no padding.
    num_speculative_tokens : int
        Most tokens drafted for a request in one step, which verifies them; 0 = no speculation.
    names_accepted_drafts : bool
        Blocks of accepted drafts can be found again when the step that verifies them ends; off =
        once the request is scheduled anew.
    num_lookahead_tokens : int
        KV slots given to a request beyond the tokens that a step computes of it, as vLLM gives them
        to drafts made with a cache of their own.
    pipeline_parallel_size : int
        Stages of the pipeline, and batches in flight at a time: one planned while others are under
        way knows nothing of the requests in those. With `async_scheduling` one batch more.
        1 = no pipeline.
    chunked_pipeline_parallelism : bool
        Let the next chunk of a prompt follow while those before it are in the pipeline, as vLLM and
        SGLang do; off = once they are back, as in Sarathi-Serve.
    first_launch_ns : int
        How long the engine is busy launching its first step (no warm-up): the step planned ahead
        meanwhile is planned only then, and knows who came until then.
    fast_forward : bool
        Take steps at once where the plan promises it; off = the slow oracle, same results.
    check_horizon : bool
        Re-plan at every skipped step and raise `PolicyLied` on a broken promise.

    Raises
    ------
    ValueError
        If a limit is impossible.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_resident: int | None = None
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    threshold_spares_lone_request: bool = False
    watermark: float = 0.0
    null_blocks: int = 0
    scheduler_reserve_full_isl: bool = False
    kv_allocator: KVAllocator = "paged"
    preempt_in_order: bool = False
    serve_behind_preempted: bool = False
    preemption_mode: PreemptionMode = "recompute"
    swap_space_blocks: int = 0
    kv_block_bytes: int = 0
    enable_prefix_caching: bool = False
    free_uncached_first: bool = False
    kv_tiers: tuple[KVTier, ...] = ()
    kv_load: KVLoad = "when_faster"
    offloading_connector: bool = False
    load_takes_seat: bool = True
    async_scheduling: bool = False
    overrun_at_stop: bool = False
    arrivals_between_steps: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    num_speculative_tokens: int = 0
    names_accepted_drafts: bool = False
    num_lookahead_tokens: int = 0
    pipeline_parallel_size: int = 1
    chunked_pipeline_parallelism: bool = False
    first_launch_ns: int = 0
    fast_forward: bool = True
    check_horizon: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens",
            "pipeline_parallel_size",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_resident is not None and self.max_num_resident < 1:
            raise ValueError(f"max_num_resident must be at least 1, got {self.max_num_resident}")
        for name in (
            "swap_space_blocks", "kv_block_bytes", "first_launch_ns", "null_blocks",
            "num_speculative_tokens", "num_lookahead_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.preemption_mode == "swap" and not self.swap_space_blocks:
            raise ValueError("preemption_mode swap needs room: set swap_space above 0")
        if self.enable_prefix_caching and self.kv_allocator != "paged":
            raise ValueError(f"prefix caching needs paged memory, not {self.kv_allocator}")
        if self.kv_tiers:
            self._check_tiers()
        if self.num_speculative_tokens:
            if self.num_speculative_tokens > 254:  # what comes out of a step is logged in a byte
                raise ValueError(
                    f"num_speculative_tokens must be <= 254, got {self.num_speculative_tokens}"
                )
            if self.kv_allocator != "paged":
                raise ValueError(f"speculation needs paged memory, not {self.kv_allocator}")
        if self.overrun_at_stop and not self.async_scheduling:
            raise ValueError("overrun_at_stop needs async_scheduling: true")
        if self.overrun_at_stop and self.kv_allocator != "paged":
            raise ValueError(f"overrun_at_stop needs paged memory, not {self.kv_allocator}")
        if self.pipeline_parallel_size > 1:
            self._check_pipeline()
        sizes = self.cudagraph_capture_sizes
        if sizes and (sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes))):
            raise ValueError("cudagraph_capture_sizes must be >= 1 and strictly increasing")
        if self.long_prefill_token_threshold < 0:
            raise ValueError("long_prefill_token_threshold must be >= 0 (0 = no limit)")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit the KV cache of "
                f"{self.num_blocks * self.block_size} tokens ({self.num_blocks} blocks of "
                f"{self.block_size}); lower max_model_len or give the cache more memory"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill, max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}), or long prompts could never run"
            )

    def _check_pipeline(self) -> None:
        """Refuse what is not simulated with several batches in flight."""
        if self.check_horizon:
            raise ValueError(
                "check_horizon is not simulated with pipeline_parallel_size > 1; set "
                "check_horizon: false"
            )
        if self.async_scheduling and not self.arrivals_between_steps:
            raise ValueError(
                "async_scheduling with pipeline_parallel_size > 1 is simulated as vLLM has it, "
                "which takes requests in when a batch is back; set arrivals_between_steps: true"
            )
        if self.kv_tiers:
            raise ValueError("kv_offload is not simulated with pipeline_parallel_size > 1")
        if self.num_speculative_tokens:
            raise ValueError("speculation is not simulated with pipeline_parallel_size > 1")

    def _check_tiers(self) -> None:
        names = [tier.name for tier in self.kv_tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"kv_tiers need different names, got {', '.join(names)}")
        if any(tier.is_shared for tier in (self.kv_tiers[0], *self.kv_tiers[:-1])):
            raise ValueError(
                "of kv_tiers the last one may be shared, below one that each engine has for itself"
            )
        if self.kv_allocator != "paged":
            raise ValueError(f"kv_tiers need paged memory, not {self.kv_allocator}")
        if not self.enable_prefix_caching and self.preemption_mode != "swap":
            raise ValueError(
                "kv_tiers would hold nothing: blocks are found there with enable_prefix_caching, "
                "and preempted requests go there with preemption_mode: swap"
            )
        if self.num_speculative_tokens and self.offloading_connector:
            raise ValueError(
                "offloading_connector was not held against vLLM with speculation; set "
                "offloading_connector: false"
            )
        if self.kv_tiers[-1].is_shared and self.offloading_connector:
            raise ValueError(
                "offloading_connector waits for what is being stored by its own engine, and has no "
                "shared tier; set offloading_connector: false"
            )
        if self.swap_space_blocks != self.kv_tiers[0].num_blocks:
            raise ValueError(
                f"with kv_tiers the room for swapped requests is that of {names[0]}, "
                f"{self.kv_tiers[0].num_blocks} blocks, not {self.swap_space_blocks}"
            )

    @property
    def drafts_ahead(self) -> bool:
        """Whether verifications are planned while the ones before them run."""
        return self.async_scheduling and self.num_speculative_tokens > 0

    @property
    def pipelines_ahead(self) -> bool:
        """Whether batches of a pipeline are planned while the tokens to compute are under way."""
        return self.async_scheduling and self.pipeline_parallel_size > 1

    @property
    def most_batches(self) -> int:
        """Most batches in flight: one a stage, and one that is planned ahead."""
        if self.pipeline_parallel_size == 1:
            return 1
        return self.pipeline_parallel_size + self.async_scheduling

    @property
    def most_resident(self) -> int:
        """Most requests with KV memory at a time."""
        return self.max_num_seqs if self.max_num_resident is None else self.max_num_resident

    def for_policy(self, pauses: bool, seats_loaded: bool) -> EngineConfig:
        """Return the limits that hold with a policy.

        Parameters
        ----------
        pauses, seats_loaded : bool
            Whether it pauses requests, and whether it gives those seats that were loaded; see
            `schedlab.policies.policy.Policy`.
        """
        if not (self.load_takes_seat or seats_loaded):
            return replace(self, load_takes_seat=True).for_policy(pauses, seats_loaded)
        if self.max_num_resident is not None or not pauses:
            return self
        # Who is resident holds a block of its own at least.
        return replace(self, max_num_resident=max(self.max_num_seqs, self.num_blocks))

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission keeps free."""
        return int(self.watermark * (self.num_blocks + self.null_blocks))
