"""What a step costs by: the shape of its batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr


@mypyc_attr(free_list_len=1, acyclic=True)
@dataclass(init=False, unsafe_hash=True)
class BatchShape:
    """The composition of one step, as far as time depends on it.

    A context is the number of tokens of a request already in the KV cache *before* the step.
    A decode row computes one new token; a chunk computes several new prompt tokens.

    Nobody writes to it, so that it may be a key; `dataclasses.replace` makes another. Its
    constructor is written out so that it can be compiled.
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
    draft_tokens: int = 0
    """Tokens drafted for the decode rows, to be verified with them; cost models never see any, see
    `verification`."""

    def __init__(
        self,
        num_decodes: int,
        decode_context_sum_tokens: int,
        decode_context_max_tokens: int,
        chunks: tuple[tuple[int, int], ...] = (),
        padding_tokens: int = 0,
        padding_context_tokens: int = 0,
        rows_sampled: int = 0,
        swapped_bytes: int = 0,
        num_running: int = 0,
        num_waiting: int = 0,
        decode_context_min_tokens: int = 0,
        gathered_tokens: int = 0,
        padding_rows: int = 0,
        draft_tokens: int = 0,
    ) -> None:
        self.num_decodes = num_decodes
        self.decode_context_sum_tokens = decode_context_sum_tokens
        self.decode_context_max_tokens = decode_context_max_tokens
        self.chunks = chunks
        self.padding_tokens = padding_tokens
        self.padding_context_tokens = padding_context_tokens
        self.rows_sampled = rows_sampled
        self.swapped_bytes = swapped_bytes
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.decode_context_min_tokens = decode_context_min_tokens
        self.gathered_tokens = gathered_tokens
        self.padding_rows = padding_rows
        self.draft_tokens = draft_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens computed: decodes and their drafts, chunks and padding."""
        tokens = self.num_decodes + self.draft_tokens + self.padding_tokens
        return tokens + sum(q for q, _ in self.chunks)

    def verification(self) -> BatchShape:
        """Return the shape that prices a step with drafts.

        A drafted token goes through every product of weights, and through the head, like any other
        row; the context of its request is read once for all of them.
        """
        padding_tokens = self.padding_tokens + self.draft_tokens
        rows_sampled = self.rows_sampled + self.draft_tokens
        return BatchShape(
            self.num_decodes,
            self.decode_context_sum_tokens,
            self.decode_context_max_tokens,
            self.chunks,
            padding_tokens,
            self.padding_context_tokens,
            rows_sampled,
            self.swapped_bytes,
            self.num_running,
            self.num_waiting,
            self.decode_context_min_tokens,
            self.gathered_tokens,
            self.padding_rows,
        )

    def with_chunk(self, num_tokens: int, context_tokens: int) -> BatchShape:
        """Return the shape of the same step with one more prefill, whose last row is sampled."""
        chunks = (*self.chunks, (num_tokens, context_tokens))
        rows_sampled = self.rows_sampled + 1
        return BatchShape(
            self.num_decodes,
            self.decode_context_sum_tokens,
            self.decode_context_max_tokens,
            chunks,
            self.padding_tokens,
            self.padding_context_tokens,
            rows_sampled,
            self.swapped_bytes,
            self.num_running,
            self.num_waiting,
            self.decode_context_min_tokens,
            self.gathered_tokens,
            self.padding_rows,
            self.draft_tokens,
        )

    def with_single_tokens_decoded(self) -> BatchShape:
        """Return the shape of the same step with chunks of one token as decode rows.

        That is what they are to kernels and to graphs: one new token, whatever it belongs to.

        Source: vLLM, vllm/v1/attention/backends/utils.py, `split_decodes_and_prefills`, and
        vllm/v1/worker/gpu_model_runner.py, where a batch of single tokens is one of decodes.
        """
        contexts = [context for tokens, context in self.chunks if tokens == 1]
        if not contexts:
            return self
        longest, shortest = max(contexts), min(contexts)
        if self.num_decodes:
            longest = max(longest, self.decode_context_max_tokens)
            shortest = min(shortest, self.decode_context_min_tokens)
        return replace(
            self,
            num_decodes=self.num_decodes + len(contexts),
            decode_context_sum_tokens=self.decode_context_sum_tokens + sum(contexts),
            decode_context_max_tokens=longest,
            decode_context_min_tokens=shortest,
            chunks=tuple([chunk for chunk in self.chunks if chunk[0] != 1]),
        )

    def with_contexts(self, sum_tokens: int, longest: int, shortest: int) -> BatchShape:
        """Return the shape of a step of the same batch with other contexts."""
        decode_context_sum_tokens, decode_context_max_tokens = sum_tokens, longest
        decode_context_min_tokens = shortest
        return BatchShape(
            self.num_decodes,
            decode_context_sum_tokens,
            decode_context_max_tokens,
            self.chunks,
            self.padding_tokens,
            self.padding_context_tokens,
            self.rows_sampled,
            self.swapped_bytes,
            self.num_running,
            self.num_waiting,
            decode_context_min_tokens,
            self.gathered_tokens,
            self.padding_rows,
            self.draft_tokens,
        )


class Contexts(Protocol):
    """Who knows the contexts of the requests that decode."""

    def extremes(self, num_steps: int) -> list[tuple[int, int]]:
        """Return the largest and the smallest before each of the next steps."""


class UnevenSteps:
    """Successive steps of one batch, without prompts, whose contexts grow by several tokens each.

    Parameters
    ----------
    first : BatchShape
        The first of them.
    grown_tokens : vec of i64
        By how many tokens all contexts together grow in each of them but the last.
    contexts : Contexts
        Who knows more. Who only adds contexts up need not, so it is asked when somebody wants to
        see the steps, soon after they are made.
    """

    __slots__ = ("_contexts", "_shapes", "first", "grown_tokens")

    def __init__(self, first: BatchShape, grown_tokens: vec[i64], contexts: Contexts) -> None:
        self.first = first
        self.grown_tokens = grown_tokens
        self._contexts = contexts
        self._shapes: list[BatchShape] | None = None

    def __len__(self) -> int:
        return len(self.grown_tokens) + 1

    def shapes(self) -> list[BatchShape]:
        """Return them one by one."""
        found = self._shapes
        if found is None:
            first, grown_tokens = self.first, self.grown_tokens
            found = self._shapes = [first]
            if len(self) > 1:
                sum_tokens = first.decode_context_sum_tokens
                extremes = self._contexts.extremes(len(self))
                for i in range(1, len(extremes)):
                    longest, shortest = extremes[i]
                    sum_tokens += grown_tokens[i - 1]
                    found.append(first.with_contexts(sum_tokens, longest, shortest))
        return found
