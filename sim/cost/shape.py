"""What a step costs by: the shape of its batch, and the protocol that prices it."""

from typing import NamedTuple, Protocol


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

    @property
    def num_new_tokens(self) -> int:
        """Tokens computed: decodes, chunks and padding."""
        return self.num_decodes + self.padding_tokens + sum(q for q, _ in self.chunks)

    padding_rows: int = 0
    """Rows of finished requests computed along; each one of the `padding_tokens`."""


class CostModel(Protocol):
    """Price a step, and the k steps that follow it with the same batch."""

    name: str
    """How results and YAML name this model, e.g. ``"roofline"``."""

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps of the same batch.

        Parameters
        ----------
        shape : BatchShape
            The first step. Step j (0-based) has ``num_decodes * j`` more tokens in
            `decode_context_sum_tokens` and j more in `decode_context_max_tokens` and `_min_`.
        k : int
            Number of steps, >= 1; only 1 is allowed when `shape.chunks` is not empty.

        Returns
        -------
        list of int
            `k` durations in nanoseconds, each >= 1. Element j equals
            ``step_ns(shape_of_step_j, 1)[0]`` exactly: asking at once or one by one must not
            change a bit.

        Notes
        -----
        Scheduling overhead is not part of it: see `SchedulingOverhead`.
        """
        ...

    def describe(self) -> dict[str, object]:
        """Return what a result must say about this model: source, calibration, known error."""
        ...
