"""Requests of a pipeline that decode in the same batches."""

from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.record.token_times import MICRO_BATCH_BITS


class MicroBatch(DecodeBatch):
    """Decodes of an engine with several batches in flight that stay together from one to the next.

    Its clock counts the steps that it takes itself; those of others take place between them.

    Parameters
    ----------
    block_size : int
        Tokens in a KV block.
    number : int
        Its own among the micro-batches of the engine.

    Attributes
    ----------
    soonest_end : int
        No member finishes at a smaller count of steps. Kept by the executor, who knows.
    """

    __slots__ = ("number", "soonest_end")

    def __init__(self, block_size: int, number: int) -> None:
        super().__init__(block_size)
        self.number = number
        self.numbered_from = number << MICRO_BATCH_BITS
        self.soonest_end = FOREVER
