"""Host memory for the KV of preempted requests, and the copies to and from it."""

from __future__ import annotations

from schedlab.gpu_backend.host_blocks import HostBlocks, Int64
from schedlab.sim.core.engine import Engine
from schedlab.sim.errors import SchedlabError


class SwapSpace:
    """A pool of host blocks, each with the keys and values of all layers of one KV block.

    Copies are only noted when a plan asks for them, and carried out in that order by `run` at the
    start of the step, so that they are timed with it. All of them go through the device's current
    stream: a block is read before the kernels behind overwrite it, and written before they read it.

    Parameters
    ----------
    host : HostBlocks
        The blocks. If their memory is not taken yet, the first block that is swapped out takes it,
        and its step bears the time.
    """

    def __init__(self, host: HostBlocks) -> None:
        self._host = host
        self.num_blocks = host.num_blocks
        self._free = list(range(host.num_blocks - 1, -1, -1))
        self._held: dict[int, list[int]] = {}
        self._pending: list[tuple[bool, Int64, list[int]]] = []

    @property
    def num_used(self) -> int:
        """Host blocks that requests hold."""
        return self.num_blocks - len(self._free)

    def swap_out(self, request_id: int, blocks: Int64) -> None:
        """Note that a request's blocks are to be copied to the host.

        Raises
        ------
        SchedlabError
            If there is no room, which the engine's accounting rules out.
        """
        if len(blocks) > len(self._free):
            raise SchedlabError(
                f"request {request_id} needs {len(blocks)} blocks of swap space and "
                f"{len(self._free)} of {self.num_blocks} are free"
            )
        host = [self._free.pop() for _ in blocks]
        self._held[request_id] = host
        self._pending.append((True, blocks, host))

    def swap_in(self, request_id: int, blocks: Int64) -> None:
        """Note that a request's KV is to be copied back, into as many blocks of the cache."""
        host = self._held.pop(request_id)
        self._pending.append((False, blocks[: len(host)], host))
        # Free at once: whatever is copied there later is copied later.
        self._free.extend(host)

    def forget(self, request_id: int) -> None:
        """Free the host blocks of a request that does not come back, if it has any."""
        self._free.extend(self._held.pop(request_id, ()))

    def run(self) -> None:
        """Carry out what was noted, asynchronously on a GPU.

        Raises
        ------
        SpecError
            If the memory is only taken now and there is not enough of it.
        """
        for is_out, blocks, host in self._pending:
            if is_out:
                self._host.copy_out(blocks, host)
            else:
                self._host.copy_in(host, blocks)
        self._pending.clear()

    def check(self, engine: Engine) -> None:
        """Prove that engine and swap space agree, or raise AssertionError."""
        counted = engine.config.swap_space_blocks - engine.requests.free_swap_blocks
        assert self.num_used == counted, f"{self.num_used} host blocks held, {counted} counted"
