"""A model as vLLM opens one: a folder with a config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from schedlab.sim.errors import SpecError
from schedlab.sim.files import write_text
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import model


def model_folder(name: str, scratch: Path) -> Path:
    """Return a folder that vLLM can open.

    Parameters
    ----------
    name : str
        As for `schedlab.sim.hardware.models.model`.
    scratch : Path
        A folder for a config.json where there is none.

    Raises
    ------
    SpecError
        If the model is unknown, or is of the table and of an architecture that it only has the
        dimensions of.
    """
    shape = model(name)
    path = Path(name)
    if path.is_dir() and shape.source == str(path / "config.json"):
        return path
    if shape.source == str(path):
        shutil.copyfile(path, scratch / "config.json")
    else:
        write_text(scratch / "config.json", json.dumps(config_of(shape), indent=1) + "\n")
    return scratch


def config_of(shape: ModelShape) -> dict[str, object]:
    """Return the config.json of a model of the table: a Llama, or a Qwen3 if it has its norms.

    Raises
    ------
    SpecError
        If it is neither.
    """
    unlike = {
        "a mixture of experts": shape.num_experts > 0,
        "a plain MLP": shape.mlp == "plain",
        "learned positions": shape.num_position_embeddings > 0,
        "a sliding window": shape.sliding_window is not None,
    }
    if reasons := [reason for reason, applies in unlike.items() if applies]:
        raise SpecError(
            f"backend: vllm knows {shape.name} by its dimensions only, and it has "
            f"{', '.join(reasons)}; give its config.json as model"
        )
    kind, architecture = (
        ("qwen3", "Qwen3ForCausalLM") if shape.qk_norm else ("llama", "LlamaForCausalLM")
    )
    return {
        "architectures": [architecture],
        "model_type": kind,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
