"""Vectors of prompts: which hidden states of a model become one, and whose they are."""

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.policies.predictors.sentence_encoder import SentenceEncoder, model_folder
from schedlab.sim.errors import SpecError

torch = pytest.importorskip("torch")


def encoder(causal):
    """Return an encoder of letters: the hidden state of the i-th is (its number, i, 0)."""

    def tokenizer(texts, max_length, **_):
        longest = min(max(map(len, texts)), max_length)
        letters = torch.zeros(len(texts), longest)
        mask = torch.zeros(len(texts), longest, dtype=torch.long)
        for i, text in enumerate(texts):
            for j, letter in enumerate(text[:max_length]):
                letters[i, j] = "abcdefgh".index(letter)
                mask[i, j] = 1
        return {"letters": letters, "attention_mask": mask}

    def model(letters, attention_mask):
        places = torch.arange(letters.shape[1]).expand_as(letters).float()
        # What stands behind the end of a prompt must not be seen.
        padded = torch.where(attention_mask > 0, torch.zeros(()), torch.full((), 99.0))
        return SimpleNamespace(last_hidden_state=torch.stack([letters, places, padded], dim=2))

    made = object.__new__(SentenceEncoder)
    made._torch, made._tokenizer, made._model, made._causal = torch, tokenizer, model, causal
    return made


@pytest.mark.parametrize(
    ("kind", "causal"),
    [("bert", False), ("distilbert", False), ("roberta", False), ("qwen2", True), ("gpt2", True)],
)
def test_model_is_loaded_from_its_folder_alone_and_looks_back_only_unless_it_is_of_bert(
    monkeypatch, tmp_path, kind, causal
):
    loaded = []

    class Tokenizer:
        pad_token, eos_token, padding_side = None, "<end>", "left"

    class Model:
        config = SimpleNamespace(model_type=kind)

        def eval(self):
            return self

    def loads(made):
        def from_pretrained(folder, **how):
            loaded.append((folder, how))
            return made()

        return SimpleNamespace(from_pretrained=from_pretrained)

    transformers, utils = types.ModuleType("transformers"), types.ModuleType("transformers.utils")
    transformers.AutoTokenizer, transformers.AutoModel = loads(Tokenizer), loads(Model)
    utils.logging = SimpleNamespace(disable_progress_bar=lambda: loaded.append("quiet"))
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "transformers.utils", utils)
    (tmp_path / "config.json").write_text("{}")
    made = SentenceEncoder(f"hf:{tmp_path}")
    safely = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    assert loaded == ["quiet", (tmp_path, {"local_files_only": True}), (tmp_path, safely)]
    assert made._causal is causal
    assert (made._tokenizer.pad_token, made._tokenizer.padding_side) == ("<end>", "right")


def test_model_that_looks_back_only_gives_the_state_of_the_last_token():
    # Letter 4 at place 3, and 6 at 8: each of length 5 or 10.
    found = encoder(causal=True).embed(["aaaaaaaag", "aaae"])
    np.testing.assert_allclose(found, [[0.6, 0.8, 0], [0.8, 0.6, 0]], rtol=1e-6)


def test_model_that_looks_both_ways_gives_the_mean_over_the_prompt():
    # Means of 6 / 5 and 2, and of 2 and 1.
    found = encoder(causal=False).embed(["aadad", "aag"])
    third = np.array([2.0, 1.0, 0.0]) / np.sqrt(5)
    first = np.array([6 / 5, 2.0, 0.0]) / np.hypot(6 / 5, 2.0)
    np.testing.assert_allclose(found, [first, third], rtol=1e-6)


def test_folder_of_a_model_is_one_with_its_config(tmp_path):
    with pytest.raises(SpecError, match="holds no Hugging Face model"):
        model_folder(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(f"hf:{tmp_path}") == tmp_path


@pytest.mark.parametrize("folder", ["house", "f", "hf:hf", ":x", "of/hf:models"])
def test_encoder_of_a_folder_is_in_the_folder_of_that_very_name(monkeypatch, tmp_path, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"encoder hf:{folder}: {folder} holds no Hugging Face"):
        model_folder(f"hf:{folder}")
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "config.json").write_text("{}")
    assert str(model_folder(f"hf:{folder}")) == folder
    absolute = tmp_path / folder
    assert model_folder(f"hf:{absolute}") == absolute
