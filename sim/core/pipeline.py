"""Who is in the pipeline, batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

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
    """

    __slots__ = ("chunks", "decodes", "finished", "followed", "late", "running")

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
    draining : dict of int to int
        How many batches in flight compute tokens of each request that was preempted meanwhile. It
        waits for these.
    """

    __slots__ = ("batches", "draining", "num_followed", "size")

    def __init__(self) -> None:
        self.size = 0
        self.num_followed = 0
        self.batches: deque[BatchInFlight] = deque()
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

    def leave(self) -> BatchInFlight:
        """Return the oldest batch, which is back."""
        batch = self.batches.popleft()
        self.size -= len(batch.running)
        self.num_followed -= len(batch.followed)
        if self.draining:
            for i in (*batch.late, *batch.followed):
                if i in self.draining:
                    self.draining[i] -= 1
                    if not self.draining[i]:
                        del self.draining[i]
        return batch

    def computes(self, state: RequestState) -> bool:
        """Whether any batch in flight computes tokens of a request."""
        if self.num_followed and any([state.id in batch.followed for batch in self.batches]):
            return True
        return self.granted_tokens(state) > 0

    def take_out(self, state: RequestState) -> BatchInFlight | None:
        """Let a request be preempted: it waits until every batch is back that computes it.

        Returns
        -------
        BatchInFlight or None
            The batch that its token comes out of, in which it is late now; None if it runs.
        """
        i, num_batches, found = state.id, 0, None
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
        self.draining.clear()
        self.size = self.num_followed = 0
