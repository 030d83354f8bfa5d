import numpy as np
import pytest
from scipy.stats import kendalltau

from policies.predictors import registry
from policies.predictors.predictor import PredictionInputs
from sim.errors import SpecError
from sim.rng import stream

TRUE = np.maximum(1, stream(7, "lengths").exponential(200, 4_000)).astype(np.int64)


def predict(name, output_tokens=TRUE, seed=0, **params):
    inputs = PredictionInputs(
        prompt_tokens=np.full(len(output_tokens), 100),
        output_tokens=np.asarray(output_tokens),
        rng=stream(seed, "predictor"),
    )
    return registry.make(name, **params).predict(inputs)


def test_oracle_predicts_the_true_lengths():
    assert np.array_equal(predict("oracle"), TRUE)


def test_constant_predicts_the_same_for_all():
    assert set(predict("constant", tokens=99.0)) == {99.0}


def test_noisy_without_sigma_is_the_oracle():
    assert np.array_equal(predict("noisy", sigma=0.0), TRUE)


def test_noisy_error_is_lognormal_of_the_given_sigma():
    error = np.log(predict("noisy", sigma=0.5, factor=2.0) / TRUE)
    # 4,000 draws: the standard error of the mean is 0.008, of the deviation 0.006.
    assert error.mean() == pytest.approx(np.log(2.0), abs=0.03)
    assert error.std() == pytest.approx(0.5, abs=0.025)


@pytest.mark.parametrize("tau", [0.0, 0.24, 0.54, 0.74, 1.0])
def test_noisy_reaches_the_rank_correlation_asked_for(tau):
    reached = kendalltau(predict("noisy", kendall_tau=tau), TRUE).statistic
    assert reached == pytest.approx(tau, abs=0.03)


def test_noisy_by_rank_keeps_the_distribution_of_lengths():
    predicted = predict("noisy", kendall_tau=0.5)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(predicted, q) == pytest.approx(np.quantile(TRUE, q), rel=0.1)


def test_noisy_predictions_of_a_seed_are_the_same_twice_and_others_differ():
    first, again = predict("noisy", sigma=0.5, seed=3), predict("noisy", sigma=0.5, seed=3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, predict("noisy", sigma=0.5, seed=4))


def test_bucketed_puts_each_length_into_its_quantile_bucket():
    lengths = np.arange(1, 101)
    predicted = predict("bucketed", lengths, num_buckets=4)
    # Quartiles of 1..100; each bucket speaks with its middle.
    assert sorted(set(predicted)) == pytest.approx([13.375, 38.125, 62.875, 87.625])
    assert [int((predicted == p).sum()) for p in sorted(set(predicted))] == [25, 25, 25, 25]


def test_bucketed_with_half_accuracy_is_wrong_half_of_the_time_and_by_one_bucket():
    right = predict("bucketed", num_buckets=5)
    wrong = predict("bucketed", num_buckets=5, accuracy=0.5)
    middles = sorted(set(right))
    shift = np.searchsorted(middles, wrong) - np.searchsorted(middles, right)
    assert (shift == 0).mean() == pytest.approx(0.5, abs=0.03)
    assert set(shift) == {-1, 0, 1}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("orakel", {}, r"did you mean oracle\?"),
        ("noisy", {}, "exactly one of sigma and kendall_tau"),
        ("noisy", {"sigma": 0.1, "kendall_tau": 0.5}, "exactly one"),
        ("noisy", {"sigma": -1.0}, "sigma must be"),
        ("noisy", {"kendall_tau": 1.5}, "kendall_tau must be"),
        ("noisy", {"sigma": 0.1, "factor": 0.0}, "factor"),
        ("bucketed", {"num_buckets": 1}, "at least 2"),
        ("bucketed", {"accuracy": 2.0}, "accuracy"),
        ("constant", {"tokens": 0.0}, "tokens must be"),
        ("oracle", {"sigma": 0.1}, "no parameter 'sigma'"),
        ("oracle", {"latency_s": -1.0}, "latency_s"),
    ],
)
def test_predictor_on_bad_parameters_says_what_is_wrong(name, params, message):
    with pytest.raises(SpecError, match=message):
        registry.make(name, **params)


@pytest.mark.parametrize("name", registry.names())
def test_predictor_constructor_only_stores_its_parameters(name):
    params = {"sigma": 0.3} if name == "noisy" else {}
    predictor = registry.make(name, **params)
    assert predictor.get_params() == {
        **{k: p.default for k, p in registry.predictor_class(name).knobs().items()},
        **params,
    }
