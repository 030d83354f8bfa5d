"""What a fleet is told of prompts and answers that have engines of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from schedlab.sim.drive.members import Role
from schedlab.sim.drive.router import Router

FirstToken = Literal["prefill", "transfer", "decode"]


@dataclass(frozen=True)
class Disaggregation:
    """Which engines do what, and who goes on.

    Attributes
    ----------
    roles : sequence of {"mixed", "prefill", "decode"}
        Of each engine: serves requests whole, computes their prompts, or goes on from there.
    router : Router
        Says which engine goes on with a request whose prompt is computed.
    local_prompt_tokens : int
        A request with no longer a prompt is served whole by an engine that goes on with others.
    local_queue_tokens : int, optional
        So is one that would find more prompt tokens before it wherever prompts are computed.
    keeps_when_full : bool
        A request for which no engine that goes on has room, when its prompt is computed, goes on
        where that was.
    first_token : {"prefill", "transfer", "decode"}
        Where the first token of an answer comes from: it is told as soon as the prompt is computed,
        or when its KV is where the answer goes on; or it is dropped, and the engine that goes on
        computes the last token of the prompt again.
    local_uncached_tokens : int, optional
        A request is served whole if no more tokens of its prompt are not in the cache of the engine
        that would go on with it; `router` then chooses that when the request comes.
    local_queue_requests : int, optional
        So is one that comes while more requests wait where prompts are computed, in all of these
        engines together.
    overhead_ns : int
        What each handover takes beside the latency of the link and the bytes, with the link idle:
        after there is seat and memory, and the prompt is computed.

    Raises
    ------
    ValueError
        If requests whose token is not told where it is computed are to go on there.
    """

    roles: Sequence[Role]
    router: Router
    local_prompt_tokens: int = 0
    local_queue_tokens: int | None = None
    keeps_when_full: bool = False
    first_token: FirstToken = "prefill"
    local_uncached_tokens: int | None = None
    local_queue_requests: int | None = None
    overhead_ns: int = 0

    @property
    def serves_some_whole(self) -> bool:
        """Whether engines that go on with others serve any request whole."""
        most = (self.local_queue_tokens, self.local_uncached_tokens, self.local_queue_requests)
        return self.local_prompt_tokens > 0 or any(one is not None for one in most)

    def __post_init__(self) -> None:
        if self.keeps_when_full and self.first_token != "prefill":
            raise ValueError(
                "keeps_when_full: where an engine that goes on tells the first token, none is told "
                "where the prompt is computed, and no request goes on there"
            )
