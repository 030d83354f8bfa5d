"""Shortest prompt first."""

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.request import RequestState


@register("shortest_prompt")
class ShortestPromptFirst(ContinuousBatching):
    """Admit the request with the shortest prompt first.

    Optimises mean time to first token, where prefill is what requests wait for. Needs the prompt
    length, which every server knows; it is blind to the length of the answer. Long prompts starve
    under sustained load. A request that was preempted is placed by what it has to compute again,
    its prompt, and the latest admission is preempted. Skip-ahead is honest because prompt lengths
    never change.
    """

    source = "the order of SLAI (arXiv:2508.01002) and of inference-sim's `sjf`"
    starves = True

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by prompt length."""
        return state.request.prompt_tokens
