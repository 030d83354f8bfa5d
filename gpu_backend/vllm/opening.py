"""An engine core that stays open for many runs, having run every size of batch beforehand."""

from __future__ import annotations

from schedlab.gpu_backend.calibration_design import BatchPoint
from schedlab.gpu_backend.vllm.engine import Core, VllmSetup
from schedlab.sim.config import EngineConfig
from schedlab.sim.request import Arrival, Request

WARM_TOKENS = 512
"""Largest number of tokens in a step that is run beforehand."""

_NUM_FIRST, _FIRST_ANSWER = 64, 12

_opened: list[Core] = []


def open_core(setup: VllmSetup) -> Core:
    """Return an engine core; the last one that was opened, if it was opened alike.

    Raises
    ------
    SpecError
        As `Core`.
    """
    if _opened and _opened[0].setup == setup:
        return _opened[0]
    while _opened:
        _opened.pop().close()
    core = Core(setup)
    _opened.append(core)
    if setup.device == "cpu":
        warm_up(core)
    return core


def warm_up(core: Core) -> None:
    """Run a step of every number of tokens, and of every number of rows that sample.

    On a CPU, oneDNN generates code for a matrix product of a number of rows when it first meets
    it: a step of a new size takes half as long again, and a short run is made of new sizes. A
    server has met them all after a while. Steps of more than `WARM_TOKENS` are left out: what is
    generated for them is little beside what they compute.
    """
    from schedlab.gpu_backend.vllm.step_timer import VllmStepTimer

    timer = VllmStepTimer(core)
    for point in every_size(core.setup.config):
        timer.run(point)


def every_size(config: EngineConfig) -> list[BatchPoint]:
    """Return prompts of each number of tokens up to the budget, and decodes of each number of rows.

    Examples
    --------
    >>> config = EngineConfig(num_blocks=8, max_model_len=64, max_num_seqs=2,
    ...                       max_num_batched_tokens=100)
    >>> sizes = every_size(config)
    >>> sizes[0].chunks, sizes[-3].chunks, sizes[-1].decodes
    (((1, 0),), ((50, 0), (50, 0)), (1, 1))
    """
    longest = config.max_model_len
    points = []
    for num_tokens in range(1, min(config.max_num_batched_tokens, WARM_TOKENS) + 1):
        num_prompts = -(-num_tokens // longest)
        each, more = divmod(num_tokens, num_prompts)
        chunks = tuple((each + (i < more), 0) for i in range(num_prompts))
        points.append(BatchPoint("prefill", (), chunks))
    most = min(config.max_num_seqs, config.max_num_batched_tokens, WARM_TOKENS)
    points += [BatchPoint("decode", (1,) * rows, ()) for rows in range(1, most + 1)]
    return [point for point in points if point.fits(config)]


def first_requests(config: EngineConfig) -> list[Arrival]:
    """Return a few short requests, all at once, that go before a run that is timed.

    The first steps of a process that did something else are slow, and the reference clock's first
    sentinels, timed one right after the other, are fast: together the first twenty steps of a run
    seemed to take a quarter longer than later ones. A server is always at work.

    Examples
    --------
    >>> config = EngineConfig(num_blocks=8, max_model_len=64, max_num_seqs=2,
    ...                       max_num_batched_tokens=100)
    >>> some = first_requests(config)
    >>> len(some), some[0].request.prompt_tokens, [one.output_tokens for one in some[:3]]
    (64, 25, [1, 2, 3])
    """
    prompt_tokens = max(1, min(config.max_num_batched_tokens // 4, config.max_model_len // 2))
    longest = min(_FIRST_ANSWER, config.max_model_len - prompt_tokens)
    return [
        Arrival(Request(number, 0, prompt_tokens, longest), 1 + number % longest, 0)
        for number in range(_NUM_FIRST)
    ]
