"""What a step costs by: the shape of its batch."""

from typing import NamedTuple


class BatchShape(NamedTuple):
    """The composition of one step, as far as time depends on it.

    A context is the number of tokens of a request already in the KV cache *before* the step.
    A decode row computes one new token; a chunk computes several new prompt tokens.
    """

    num_decodes: int
    """Decode rows, each one new token."""
    decode_context_sum_tokens: int
    """Sum of the decode rows' contexts."""
    decode_context_max_tokens: int
    """Largest context of a decode row (0 if there is none)."""
    chunks: tuple[tuple[int, int], ...] = ()
    """Prefill chunks as (new tokens, context tokens)."""
    padding_tokens: int = 0
    """Tokens computed for nobody: prompt padding, and rows of finished requests."""
    padding_context_tokens: int = 0
    """KV tokens read on behalf of rows of finished requests."""
    rows_sampled: int = 0
    """Rows that go through the language-model head (decodes, finished prefills, padding rows)."""
    swapped_bytes: int = 0
    """KV bytes moved between device and host in this step."""
    num_running: int = 0
    """Requests in the running list, for the scheduling overhead."""
    num_waiting: int = 0
    """Requests in the waiting queue, for the scheduling overhead."""
    decode_context_min_tokens: int = 0
    """Smallest context of a decode row (0 if there is none)."""
    gathered_tokens: int = 0
    """New tokens of all engines that share experts in this step; 0 where there is one engine."""
    padding_rows: int = 0
    """Rows of finished requests computed along; each one of the `padding_tokens`."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens computed: decodes, chunks and padding."""
        return self.num_decodes + self.padding_tokens + sum(q for q, _ in self.chunks)
