"""Who is in the pipeline, batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from schedlab.sim.core.micro_batch import MicroBatch
from schedlab.sim.request import RequestState


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
    num_lost : int
        How many were preempted: what comes out for them is thrown away.
    """

    __slots__ = ("chunks", "decodes", "num_lost", "running")

    def __init__(
        self,
        running: dict[int, RequestState],
        chunks: dict[int, int],
        decodes: MicroBatch | None,
    ) -> None:
        self.running = running
        self.chunks = chunks
        self.decodes = decodes
        self.num_lost = 0


class Pipeline:
    """Requests with seat and memory whose batch is in flight; they run again when it is back.

    A collection of requests, by batch.

    Attributes
    ----------
    size : int
        How many there are.
    batches : deque of BatchInFlight
        The oldest first.
    """

    __slots__ = ("batches", "size")

    def __init__(self) -> None:
        self.size = 0
        self.batches: deque[BatchInFlight] = deque()

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

    def leave(self) -> BatchInFlight:
        """Return the oldest batch, which is back."""
        batch = self.batches.popleft()
        self.size -= len(batch.running)
        return batch

    def take_out(self, state: RequestState) -> BatchInFlight:
        """Take a request out of its batch, which is returned; nothing comes out for it."""
        for batch in self.batches:
            if state.id in batch.running:
                del batch.running[state.id]
                batch.num_lost += 1
                self.size -= 1
                return batch
        raise ValueError(f"{state!r} is in no batch of the pipeline")
