import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend.sampling import sample  # noqa: E402


def test_greedy_sampling_takes_the_largest_logit():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0]])
    assert sample(logits, torch.zeros(2, dtype=torch.int64)).tolist() == [1, 0]


def test_random_sampling_follows_the_softmax():
    num_draws = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -2.0])
    keys = torch.arange(num_draws) + (3 << 31)
    tokens = sample(logits.expand(num_draws, 4), keys, temperature=0.8)
    share = torch.bincount(tokens, minlength=4) / num_draws
    expected = torch.softmax(logits / 0.8, dim=0)
    # Four standard deviations of a multinomial share; seeds are fixed, so it never flickers.
    assert (share - expected).abs().max() < 4 * 0.5 / num_draws**0.5


def test_random_sampling_of_a_row_depends_on_its_key_alone():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([5, 9, 5, 1 << 60, 0, 7])
    together = sample(logits, keys, 1.0)
    for row in range(6):
        assert sample(logits[row : row + 1], keys[row : row + 1], 1.0) == together[row]
    assert sample(logits[:1].expand(64, 50), torch.arange(64), 1.0).unique().numel() > 5


def test_low_temperature_is_nearly_greedy():
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(200)
    assert torch.equal(sample(logits, keys, 1e-4), sample(logits, keys))
