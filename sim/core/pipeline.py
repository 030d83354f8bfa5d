"""Who is in the pipeline, batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Set

from schedlab.sim.core.micro_batch import MicroBatch
from schedlab.sim.request import RequestState


class LateRequest:
    """A request that was preempted while its batch was in the pipeline.

    Attributes
    ----------
    state : RequestState
        The request: it waits.
    gets_token : bool
        Whether a token comes out for it, or only a part of its prompt was computed.
    decodes : bool
        Whether it decoded.
    is_last : bool
        Whether its answer is whole then.
    spared_tokens : int
        Computed tokens that it lost and need not compute again, as its answer is whole.
    """

    __slots__ = ("decodes", "gets_token", "is_last", "spared_tokens", "state")

    def __init__(self, state: RequestState, gets_token: bool, decodes: bool, is_last: bool) -> None:
        self.state = state
        self.gets_token = gets_token
        self.decodes = decodes
        self.is_last = is_last
        self.spared_tokens = 0


class BatchInFlight:
    """The requests of a batch in the pipeline.

    Attributes
    ----------
    running : dict of int to RequestState
        Those that were not preempted since it began, in order of admission.
    chunks : dict of int to int
        How many tokens it computes of those of them that are in their prompt.
    decodes : MicroBatch or None
        Those of them that decode, if there were any.
    followed : dict of int to (RequestState, int)
        Those who run on meanwhile, as the rest of their prompt follows at once, and how many tokens
        it computes of them: they are in `RequestState.num_computed_tokens` already.
    finished : list of RequestState
        Who has a whole answer when it is back.
    late : dict of int to LateRequest
        Those who were preempted since it began. What they computed is lost, the token that comes
        out is not.
    number : int
        Which plan it is of, those of nobody counted as well; 0 where nothing is planned ahead.
    unnamed : set of int
        Those who decode a token that was under way when this was planned: what it computes of
        them is in no block that can be found again before it is back.
    sampled : set of int
        Those for whom a token comes out; known when it is `Pipeline.settling`.
    decoded : tuple of RequestState
        Those who decoded in it, for policies that are told of tokens; likewise.
    last_decode : int
        The log's name of their decode step; likewise.
    """

    __slots__ = (
        "chunks", "decoded", "decodes", "finished", "followed", "last_decode", "late", "number",
        "running", "sampled", "unnamed",
    )  # fmt: skip

    def __init__(
        self,
        running: dict[int, RequestState],
        chunks: dict[int, int],
        decodes: MicroBatch | None,
        followed: dict[int, tuple[RequestState, int]],
        finished: list[RequestState],
    ) -> None:
        self.running = running
        self.chunks = chunks
        self.decodes = decodes
        self.followed = followed
        self.finished = finished
        self.late: dict[int, LateRequest] = {}
        self.number = 0
        self.unnamed: Set[int] = frozenset()
        self.sampled: Set[int] = frozenset()
        self.decoded: tuple[RequestState, ...] = ()
        self.last_decode = 0


class Pipeline:
    """Requests with seat and memory whose batch is in flight; they run again when it is back.

    A collection of requests, by batch.

    Attributes
    ----------
    size : int
        How many there are.
    num_followed : int
        How many chunks are in flight whose requests run on, so that the next may follow.
    batches : deque of BatchInFlight
        The oldest first.
    settling : BatchInFlight or None
        The one before those, if its requests run again although it is in flight still: what
        follows of them is planned ahead.
    draining : dict of int to int
        How many batches in flight compute tokens of each request that was preempted meanwhile. It
        waits for these.
    """

    __slots__ = ("batches", "draining", "num_followed", "settling", "size")

    def __init__(self) -> None:
        self.size = 0
        self.num_followed = 0
        self.batches: deque[BatchInFlight] = deque()
        self.settling: BatchInFlight | None = None
        self.draining: dict[int, int] = {}

    def __len__(self) -> int:
        return self.size

    def __contains__(self, state: object) -> bool:
        return isinstance(state, RequestState) and self.granted_tokens(state) > 0

    def __iter__(self) -> Iterator[RequestState]:
        return iter([state for batch in self.batches for state in batch.running.values()])

    def granted_tokens(self, state: RequestState) -> int:
        """Count the tokens of a request that its batch computes; 0 if it is in none."""
        if self.size:
            for batch in self.batches:
                if state.id in batch.running:
                    return batch.chunks.get(state.id, 1)
        return 0

    def enter(self, batch: BatchInFlight) -> None:
        """Take in the batch that began last."""
        self.batches.append(batch)
        self.size += len(batch.running)
        self.num_followed += len(batch.followed)

    def settle(self) -> BatchInFlight:
        """Return the oldest batch, whose requests run again from now on, back or not."""
        batch = self.batches.popleft()
        self.size -= len(batch.running)
        self.num_followed -= len(batch.followed)
        self.settling = batch
        return batch

    def leave(self) -> BatchInFlight:
        """Return the oldest batch, which is back."""
        batch = self.settling
        if batch is None:
            batch = self.settle()
        self.settling = None
        if self.draining:
            for i in (*batch.late, *batch.followed):
                if i in self.draining:
                    self.draining[i] -= 1
                    if not self.draining[i]:
                        del self.draining[i]
        return batch

    def computes(self, state: RequestState) -> bool:
        """Whether any batch in flight computes tokens of a request."""
        settling = self.settling
        if settling is not None and (state.id in settling.running or state.id in settling.followed):
            return True
        if self.num_followed and any([state.id in batch.followed for batch in self.batches]):
            return True
        return self.granted_tokens(state) > 0

    def unnamed_tokens(self, state: RequestState, granted_tokens: int) -> int:
        """Count the tokens of a request that were allocated before their content was known.

        Parameters
        ----------
        state : RequestState
            A request whose batches are planned ahead.
        granted_tokens : int
            What the plan that is being made gives it, or its batch in flight has.
        """
        for batch in self.batches:
            if state.id in batch.running:
                return int(state.id in batch.unnamed)
        settling = self.settling
        if settling is None or state.id not in settling.sampled:
            return 0
        return 1 if granted_tokens else int(state.id in settling.unnamed)

    def awaited(self, decodes: Collection[int]) -> frozenset[int]:
        """Return those of some requests whose last token is under way."""
        settling = self.settling
        if settling is None:
            return frozenset()
        return frozenset(decodes).intersection(settling.sampled)

    @property
    def is_awaited(self) -> bool:
        """Whether the first stage waits for what the batch samples that is `settling`.

        vLLM's does with every batch, whoever is in it (vllm/v1/worker/gpu/pp_utils.py of 0.32),
        unless nobody goes on who was sampled.
        """
        settling = self.settling
        if settling is None or not settling.sampled:
            return False
        for state in settling.running.values():  # mostly it is the first
            if state.id in settling.sampled and state.request.max_tokens > 1:
                return True
        return False

    def take_out(self, state: RequestState) -> BatchInFlight | None:
        """Let a request be preempted: it waits until every batch is back that computes it.

        Returns
        -------
        BatchInFlight or None
            The batch that its token comes out of, in which it is late now; None if it runs.
        """
        i, found, settling = state.id, None, self.settling
        num_batches = int(settling is not None and i in settling.followed)
        for batch in self.batches:
            if i in batch.running:
                tokens = batch.chunks.get(i, 1)
                batch.late[i] = LateRequest(
                    state,
                    tokens == state.num_uncomputed_tokens,
                    i not in batch.chunks,
                    state in batch.finished,
                )
                del batch.running[i]
                self.size -= 1
                found = batch
            elif i not in batch.followed:
                continue
            num_batches += 1
        if num_batches:
            self.draining[i] = num_batches
        return found

    def forget(self, state: RequestState) -> int:
        """Forget a request that waits for its batch; return what it was spared to compute."""
        for batch in self.batches:
            late = batch.late.get(state.id)
            if late is not None:
                late.gets_token = False
                return late.spared_tokens
        return 0

    def clear(self) -> None:
        """Lose all batches."""
        self.batches.clear()
        self.settling = None
        self.draining.clear()
        self.size = self.num_followed = 0
