"""What a policy inside vLLM sees of a request: what it carries, and what a predictor says."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab import core

if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from schedlab.experiments.specification.slo import SloTargets
from schedlab.gpu_backend.vllm.arrivals import Arrivals
from schedlab.policies.predictors.predictor import Predictor
from schedlab.sim.errors import SpecError
from schedlab.sim.request import Slo


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(str(i) for i in ids)


class Reads(Predictor):
    reads_text = True

    def predict(self, inputs):
        assert len(inputs.output_tokens) == 0, "nobody knows them"
        assert inputs.prompt_tokens[0] == len(inputs.prompt_ids[0])
        words = len(inputs.prompt[0].split())
        if words == 1:
            raise ValueError("too short")
        return np.array([np.nan if words == 2 else words + (inputs.application is not None) / 2])


def sent(*ids, **carried):
    return SimpleNamespace(
        num_prompt_tokens=len(ids), prompt_token_ids=list(ids), max_tokens=6, priority=3,
        sampling_params=SimpleNamespace(extra_args=carried or None),
        block_hashes=[bytes([i]) * 32 for i in ids],
    )  # fmt: skip


READS = Arrivals("tests.unit.test_vllm_arrivals:Reads", Tokenizer)


@pytest.mark.parametrize("is_text", [False, True])
def test_request_shows_what_it_carries_as_a_mapping_or_its_json(is_text):
    carried = {
        "slo": {"ttft_ms": 5, "tpot_ms": None},
        "tenant": "t",
        "session": 17,
        "predicted_tokens": -3,
    }
    seen = Arrivals().seen(sent(1, 2, schedlab=json.dumps(carried) if is_text else carried), 4, 70)
    assert (seen.id, seen.arrival_ns, seen.prompt_tokens, seen.max_tokens) == (4, 70, 2, 6)
    assert (seen.slo, seen.tenant, seen.session) == (Slo(ttft_ms=5.0), "t", 17)
    assert (seen.predicted_tokens, seen.application, seen.priority) == (-3.0, None, 3)


def test_request_that_carries_nothing_shows_what_vllm_knows():
    seen = Arrivals().seen(sent(1, 2, other=1), 4, 70)
    assert (seen.slo, seen.predicted_tokens, seen.tenant) == (None, None, None)


@pytest.mark.parametrize(
    ("carried", "said"),
    [
        ("{", "schedlab: not a mapping in JSON"),
        ("[" * 100_000, "schedlab: not a mapping in JSON"),
        (3, "schedlab must be a mapping, got 3"),
        ({"predicted_token": 3}, "unknown key 'predicted_token'; did you mean predicted_tokens"),
        ({"slo": 3}, "schedlab.slo must be a mapping"),
        ({"slo": {"tftt_ms": 3}}, "schedlab.slo: unknown key 'tftt_ms'; did you mean ttft_ms"),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms must be a number of 1e-06 to 1e+15, got 0"),
        (
            {"predicted_tokens": True},
            "predicted_tokens must be a number of -1e+15 to 1e+15, got True",
        ),
        ({"predicted_tokens": float("nan")}, "must be a number of -1e+15 to 1e+15, got nan"),
        ({"tenant": ["a"]}, "schedlab.tenant must be a name"),
        (
            {"predicted_tokens": 10**400},
            "predicted_tokens must be a number of -1e+15 to 1e+15, got",
        ),
        ({"predicted_tokens": -1e16}, "predicted_tokens must be a number of -1e+15 to 1e+15, got"),
        (
            {"slo": {"ttft_ms": 1e308}},
            "schedlab.slo.ttft_ms must be a number of 1e-06 to 1e+15, got",
        ),
        ({"slo": {"tpot_ms": 5e-324}}, "schedlab.slo.tpot_ms must be a number of 1e-06 to 1e+15"),
        ({"slo": {"e2el_ms": 10**400}}, "schedlab.slo.e2el_ms must be a number of 1e-06 to 1e+15"),
    ],
)
def test_request_that_carries_nonsense_is_told_the_key(carried, said):
    with pytest.raises(SpecError) as told:
        Arrivals().seen(sent(1, schedlab=carried), 0, 0)
    assert said in str(told.value)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("ms", [1e-6, 1e15])
def test_request_with_a_target_at_a_bound_is_told_as_in_an_experiment(ms):
    seen = Arrivals().seen(sent(1, schedlab={"slo": {"ttft_ms": ms}, "predicted_tokens": ms}), 0, 0)
    assert (seen.slo, seen.predicted_tokens) == (Slo(ttft_ms=ms), ms)
    assert SloTargets(ttft_ms=ms).ttft_ms == ms


def test_request_whose_text_cannot_be_decoded_is_told_of_the_predictor():
    class Broken:
        def decode(self, ids, skip_special_tokens):
            raise OverflowError("out of range")

    found = Arrivals("tests.unit.test_vllm_arrivals:Reads", Broken)
    with pytest.raises(SpecError, match="predictor Reads: OverflowError: out of range"):
        found.seen(sent(7), 0, 0)


def test_predictor_is_asked_with_text_and_ids_unless_the_request_carries_a_prediction():
    assert READS.seen(sent(7, 8, 9), 0, 0).predicted_tokens == 3.0
    assert READS.seen(sent(7, 8, 9, schedlab={"application": "a"}), 0, 0).predicted_tokens == 3.5
    assert READS.seen(sent(7, schedlab={"predicted_tokens": 2}), 0, 0).predicted_tokens == 2.0
    assert Arrivals({"name": "constant", "tokens": 9}).seen(sent(7), 0, 0).predicted_tokens == 9.0


def test_predictor_that_fails_or_says_no_number_is_named():
    with pytest.raises(SpecError, match="predictor Reads: ValueError: too short"):
        READS.seen(sent(7), 0, 0)
    with pytest.raises(SpecError, match="predictor Reads says nan"):
        READS.seen(sent(7, 8), 0, 0)


class Says(Predictor):
    """Says what it is told to, and keeps what it is asked."""

    def __init__(self, says):
        super().__init__()
        self.says, self.asked = says, []

    def predict(self, inputs):
        self.asked.append(inputs)
        return self.says


@pytest.mark.parametrize("says", [np.inf, -np.inf, np.nan, 1e300])
def test_prediction_that_is_no_finite_number_orders_nothing_and_is_refused(monkeypatch, says):
    found = Arrivals("constant")
    monkeypatch.setattr(found, "_predictor", Says([says]))
    with pytest.raises(SpecError) as caught:
        found.seen(sent(7, 8), 0, 0)
    expected = f"predictor Says says {says}, which is no number of -1e+15 to 1e+15"
    assert str(caught.value) == expected


@pytest.mark.parametrize("says", [[], [1.0, 2.0], None, ["long"], np.array(["7"])])
def test_predictor_that_says_other_than_one_number_is_named(monkeypatch, says):
    found = Arrivals("constant")
    monkeypatch.setattr(found, "_predictor", Says(says))
    with pytest.raises(SpecError, match=r"^predictor Says: (ValueError|TypeError): "):
        found.seen(sent(7, 8), 0, 0)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text"),
    [(None, [7, 8], None), (Tokenizer(), None, None), (Tokenizer(), [7, 8], "7 8")],
)
def test_predictor_is_told_what_there_is_of_a_request_in_columns_of_one_row(
    monkeypatch, tokenizer, ids, text
):
    found = Arrivals("constant", lambda: tokenizer)
    predictor = Says([np.float32(2.5)])
    monkeypatch.setattr(found, "_predictor", predictor)
    for application in ("chat", None):
        carried = {} if application is None else {"schedlab": {"application": application}}
        request = sent(7, 8, **carried)
        request.prompt_token_ids = ids
        seen = found.seen(request, 4, 70)
        assert (seen.predicted_tokens, type(seen.predicted_tokens)) == (2.5, float)
        inputs = predictor.asked.pop()
        assert (inputs.prompt_tokens.tolist(), inputs.output_tokens.tolist()) == ([2], [])
        for column, value in (
            (inputs.application, application),
            (inputs.prompt, text),
            (inputs.prompt_ids, ids),
        ):
            assert (None if column is None else column.tolist()) == (
                None if value is None else [value]
            )
        assert inputs.rng is found._rng


@pytest.mark.parametrize(
    ("predictor", "said"),
    [
        ("oracle", "'oracle' takes the true length"),
        ({"name": "noisy", "kendall_tau": 0.6}, "'noisy' takes the true length"),
        ("tests.unit.test_vllm_arrivals:Reads", "Reads reads text, and this server has no tok"),
        ({"tokens": 3}, "policy.predictor must be a name, or a mapping with one"),
        (3, "policy.predictor must be a name"),
    ],
)
def test_predictor_that_cannot_predict_there_is_refused_at_start(predictor, said):
    with pytest.raises(SpecError, match=said):
        Arrivals(predictor)


def test_request_has_the_names_that_vllm_gives_the_blocks_of_its_prompt():
    one, other = (Arrivals().seen(sent(*ids), 4, 70) for ids in ((1, 2), (1, 3)))
    assert one.prefix_hash_ids == (0x0101010101010101, 0x0202020202020202)
    assert other.prefix_hash_ids == (0x0101010101010101, 0x0303030303030303)
