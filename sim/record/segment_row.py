"""What the log keeps of a run of steps with the same batch."""

from __future__ import annotations

from librt.strings import BytesWriter, write_i64_le
from mypy_extensions import mypyc_attr


@mypyc_attr(free_list_len=1, acyclic=True)
class SegmentRow:
    """What is logged once for a run of steps with the same batch, as of its start.

    Attributes
    ----------
    start_ns, num_steps, num_decodes, decode_context_sum_tokens, num_prefills, prefill_tokens : int
        The first step, and how many there are.
    prefills_done : int
        Prompts whose last token is computed.
    padding_tokens, num_running, num_waiting : int
        As of the first step.
    kv_tokens : int
        Tokens in the cache, shared ones once.
    kv_allocated_blocks : int
        Blocks held, less those that the first step opens.
    kv_reserved_unused_tokens : int
        Slots that their owners will use later.
    num_preempted, recomputed_tokens : int
        At the start of the first step.
    overhead_ns : int
        In each step.
    swapped_bytes : int
        In the first step.
    """

    __slots__ = (
        "decode_context_sum_tokens", "kv_allocated_blocks", "kv_reserved_unused_tokens",
        "kv_tokens", "num_decodes", "num_preempted", "num_prefills", "num_running", "num_steps",
        "num_waiting", "overhead_ns", "padding_tokens", "prefill_tokens", "prefills_done",
        "recomputed_tokens", "start_ns", "swapped_bytes",
    )  # fmt: skip

    def __init__(
        self,
        start_ns: int,
        num_steps: int,
        num_decodes: int,
        decode_context_sum_tokens: int,
        num_prefills: int,
        prefill_tokens: int,
        prefills_done: int,
        padding_tokens: int,
        num_running: int,
        num_waiting: int,
        kv_tokens: int,
        kv_allocated_blocks: int,
        kv_reserved_unused_tokens: int,
        num_preempted: int,
        recomputed_tokens: int,
        overhead_ns: int,
        swapped_bytes: int,
    ) -> None:
        self.start_ns = start_ns
        self.num_steps = num_steps
        self.num_decodes = num_decodes
        self.decode_context_sum_tokens = decode_context_sum_tokens
        self.num_prefills = num_prefills
        self.prefill_tokens = prefill_tokens
        self.prefills_done = prefills_done
        self.padding_tokens = padding_tokens
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.kv_tokens = kv_tokens
        self.kv_allocated_blocks = kv_allocated_blocks
        self.kv_reserved_unused_tokens = kv_reserved_unused_tokens
        self.num_preempted = num_preempted
        self.recomputed_tokens = recomputed_tokens
        self.overhead_ns = overhead_ns
        self.swapped_bytes = swapped_bytes

    def write(self, rows: BytesWriter) -> None:
        """Append its numbers to a table, in the order of `SEGMENT_COLUMNS`."""
        write_i64_le(rows, self.start_ns)
        write_i64_le(rows, self.num_steps)
        write_i64_le(rows, self.num_decodes)
        write_i64_le(rows, self.decode_context_sum_tokens)
        write_i64_le(rows, self.num_prefills)
        write_i64_le(rows, self.prefill_tokens)
        write_i64_le(rows, self.prefills_done)
        write_i64_le(rows, self.padding_tokens)
        write_i64_le(rows, self.num_running)
        write_i64_le(rows, self.num_waiting)
        write_i64_le(rows, self.kv_tokens)
        write_i64_le(rows, self.kv_allocated_blocks)
        write_i64_le(rows, self.kv_reserved_unused_tokens)
        write_i64_le(rows, self.num_preempted)
        write_i64_le(rows, self.recomputed_tokens)
        write_i64_le(rows, self.overhead_ns)
        write_i64_le(rows, self.swapped_bytes)


SEGMENT_COLUMNS = (
    "start_ns", "num_steps", "num_decodes", "decode_context_sum_tokens", "num_prefills",
    "prefill_tokens", "prefills_done", "padding_tokens", "num_running", "num_waiting", "kv_tokens",
    "kv_allocated_blocks", "kv_reserved_unused_tokens", "num_preempted", "recomputed_tokens",
    "overhead_ns", "swapped_bytes",
)  # fmt: skip
"""The columns of the table that rows are written to."""
