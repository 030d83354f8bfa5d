"""A tiny model on the CPU behind an engine, for tests of the real backend."""

import os
from dataclasses import replace

import numpy as np
import torch

from schedlab.gpu_backend import cpu_ops
from schedlab.gpu_backend.block_pool import BlockPool
from schedlab.gpu_backend.clock import ModelledClock
from schedlab.gpu_backend.decoder_config import DecoderConfig, decoder_config
from schedlab.gpu_backend.executor import TorchExecutor
from schedlab.gpu_backend.file_blocks import open_block_file
from schedlab.gpu_backend.model import Decoder
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.weights import assemble_weights, random_source
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from tests.laws import LinearCost

torch.set_num_threads(1)

CONFIG = EngineConfig(
    num_blocks=64, max_model_len=128, block_size=4, max_num_seqs=8, max_num_batched_tokens=64
)
TINY = decoder_config("schedlab-tiny")
TIGHT = replace(CONFIG, num_blocks=26, max_model_len=104)
"""Barely more than one longest sequence fits: requests are preempted."""


def variant(**changes) -> DecoderConfig:
    """Return the tiny decoder with another shape."""
    return DecoderConfig(shape=replace(TINY.shape, **changes), rope_theta=10_000.0)


def random_tensors(config, seed=0):
    """Return random weights by Hugging Face name."""
    tensors = {}
    source = random_source(config, seed, torch.device("cpu"), torch.float32)

    def remember(name, size):
        tensors[name] = source(name, size)
        return tensors[name]

    assemble_weights(config, remember)
    return tensors


def decoder_of(config, tensors, ops=cpu_ops, max_model_len=128):
    weights = assemble_weights(config, lambda name, size: tensors[name].view(size))
    return Decoder(config, weights, ops, max_model_len)


def tiny_runner(config=CONFIG, decoder_config=TINY, temperature=0.0, ops=cpu_ops):
    decoder = decoder_of(decoder_config, random_tensors(decoder_config), ops, config.max_model_len)
    block_bytes = decoder_config.shape.kv_bytes_per_token("fp32") * config.block_size
    files = [
        open_block_file(tier.num_blocks * block_bytes, None, tier.name)
        for tier in config.kv_tiers[1:]
    ]
    return ModelRunner(decoder, config, temperature, tier_files=files)


def paged_logits(runner, tokens, cuts=(), config=CONFIG, pool=None):
    """Return the logits of every token of a sequence, computed in chunks that end at `cuts`."""
    pool = pool or BlockPool(
        config.num_blocks, config.block_size, config.max_num_seqs, config.max_model_len
    )
    history = np.zeros((config.max_num_seqs, config.max_model_len), dtype=np.int32)
    batch = runner.new_batch()
    logits = []
    start = 0
    for end in (*cuts, len(tokens)):
        seat = pool.grow(0, end)
        history[seat, : len(tokens)] = tokens
        new = np.array([end - start])
        batch.fill(
            history, pool.tables, config.block_size, np.array([seat]), np.array([start]),
            new if end - start > 1 else None,
        )  # fmt: skip
        step = batch.tensors(batch.views)._replace(sample_rows=torch.arange(end - start))
        logits.append(runner.decoder.forward(step, runner.kv_pools))
        start = end
    return torch.cat(logits)


def run_real(policy, workload, config=CONFIG, clock=None, runner=None, observer=None, **options):
    """Run a workload on the tiny model, proving conservation after every step."""
    executor = TorchExecutor(
        runner or tiny_runner(config),
        config,
        clock or ModelledClock(Pricing(LinearCost())),
        **options,
    )

    def observe(engine):
        check_conservation(engine)
        executor.check(engine)
        if observer is not None:
            observer(engine)

    if isinstance(policy, str):
        policy = registry.make(policy)
    engine = Engine(config, policy, executor, observer=observe)
    log = simulate(engine, workload)
    assert executor.pool.num_used == 0, "the run ended with blocks held"
    assert executor.runner.swap.num_used == 0, "the run ended with host blocks held"
    return log, executor


def generated(executor, workload):
    """Return what every request generated, by id."""
    return {a.request.id: executor.generated(a.request.id).tolist() for a in workload}


def files_in(folder):
    """Return what this process has open in a folder, by whatever name."""
    opened = []
    for number in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # what listed them
            continue
    return [name for name in opened if name.startswith(f"{folder}/")]
