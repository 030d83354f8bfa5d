"""Fewer tokens the more requests decode, by a table."""

import itertools
from collections.abc import Sequence

from schedlab.policies.speculation.draft_length import DraftLength
from schedlab.policies.speculation.registry import register
from schedlab.sim.core.draft_length import Decoding


@register("by_batch_size")
class ByBatchSize(DraftLength):
    """Draft as many tokens as a table says for so many requests.

    With one row, ``[[N, 0]]``, it is vLLM's ``disable_by_batch_size: N`` (V0, N and more); the
    table itself is its ``num_speculative_tokens_per_batch_size``, whose rows ``[first, last,
    tokens]`` hold up to the next one. Here those are counted who decode in the step that verifies;
    vLLM counts all who were in the step before, prompts too. Needs to be tuned to model and device:
    the table of one is wrong for another.

    Parameters
    ----------
    schedule : sequence of (int, int)
        Pairs of a number of requests and the tokens to draft from that many on, ascending. Below
        the first, `num_speculative_tokens` are drafted; no row drafts more than those.
    """

    source = "vLLM, speculative_config.disable_by_batch_size"

    def __init__(self, schedule: Sequence[Sequence[int]]) -> None:
        if any(type(number) is not int for row in schedule for number in row):
            raise ValueError(f"schedule must be pairs of whole numbers, got {schedule!r}")
        sizes = [row[0] for row in schedule if len(row) == 2]
        if not sizes or len(sizes) < len(schedule):
            raise ValueError(f"schedule must be pairs of requests and tokens, got {schedule!r}")
        if sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"schedule must ascend in its numbers of requests, got {schedule!r}")
        if any(tokens < 0 for _, tokens in schedule):
            raise ValueError(f"schedule must draft no negative number of tokens, got {schedule!r}")
        self.schedule = schedule

    def choose(self, decoding: Decoding) -> Sequence[int]:
        """Look the number of requests up."""
        count = len(decoding.requests)
        drafts = decoding.most
        for least, tokens in self.schedule:
            if count >= least:
                drafts = min(tokens, decoding.most)
        return [drafts] * count
