"""The environment that vLLM reads when it is imported."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Tell vLLM, before it is imported, to stay in this process and to be quiet."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On a CPU, oneDNN keeps the code of so many matrix products; its default of 1024 does not hold
    # those of a model's layers for every number of tokens in a step.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
