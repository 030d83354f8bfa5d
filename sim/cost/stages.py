"""What the stages of a pipeline take of a step, and what lies between them."""

from __future__ import annotations

from schedlab.sim.cost.kernel_times import KernelTimes
from schedlab.sim.cost.shape import BatchShape


class Stages:
    """Stages that each run kernels of their own, and send activations to the next.

    Parameters
    ----------
    times : list of KernelTimes
        Those of each stage, in order.
    send_ns, send_ns_per_token : float
        What a link takes: of a step, and of each new token in it.
    """

    def __init__(self, times: list[KernelTimes], send_ns: float, send_ns_per_token: float) -> None:
        self._times = times
        self._latency_ns = send_ns
        self._send_ns_per_token = send_ns_per_token

    def step_ns(self, shape: BatchShape, k: int) -> list[int]:
        """Return the durations of `k` steps that meet no others; see `CostModel.step_ns`.

        Raises
        ------
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat (chunks or swapped bytes).
        """
        of_stages = [times.step_ns(shape, k) for times in self._times]
        links_ns = (len(of_stages) - 1) * self._send_ns(shape)
        return [sum(took) + links_ns for took in zip(*of_stages, strict=True)]

    def stations_ns(self, shape: BatchShape) -> list[int]:
        """Return what stages and links take of a step; see `CostModel.stations_ns`."""
        send_ns = self._send_ns(shape)
        stations: list[int] = []
        for times in self._times:
            if stations:
                stations.append(send_ns)
            stations.append(times.step_ns(shape, 1)[0])
        return stations

    def _send_ns(self, shape: BatchShape) -> int:
        """Return what one stage takes to send its activations to the next."""
        moved_ns = shape.num_new_tokens * self._send_ns_per_token
        return int(self._latency_ns + moved_ns + 0.5)
