import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.batch import Batch, pad_text
from trainer.flow import interpolate, loss_per_sample, shift_sigma, velocity

unit = st.floats(0, 1)
shifts = st.floats(0.1, 20)


def double(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@given(unit, shifts)
def test_shift_keeps_the_interval_and_is_undone_by_its_inverse(u, shift):
    shifted = shift_sigma(double(u), shift)
    assert 0 <= shifted.item() <= 1 + 1e-12
    assert shift_sigma(shifted, 1 / shift).item() == pytest.approx(u, abs=1e-9)


@given(unit, unit, shifts)
def test_shift_keeps_the_order(a, b, shift):
    low, high = sorted((a, b))
    assert shift_sigma(double(low), shift).item() <= shift_sigma(double(high), shift).item() + 1e-12


def test_shift_moves_towards_noise_above_one_and_towards_data_below():
    half = torch.tensor([0.5])
    assert shift_sigma(half, 3.0).item() == pytest.approx(0.75)
    assert shift_sigma(half, 0.5).item() == pytest.approx(1 / 3)
    assert torch.equal(shift_sigma(half, 1.0), half)


def test_shift_must_be_positive():
    with pytest.raises(ValueError, match="more than 0"):
        shift_sigma(torch.tensor([0.5]), 0.0)


def test_interpolation_ends_at_data_and_noise_and_its_slope_is_the_velocity():
    x0, noise = torch.randn(2, 3, 4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.0, 1.0, 0.25])
    mixed = interpolate(x0, noise, sigma)
    assert torch.equal(mixed[0], x0[0])
    assert torch.equal(mixed[1], noise[1])
    torch.testing.assert_close(mixed[2], x0[2] + 0.25 * velocity(x0, noise)[2])


def test_loss_is_each_samples_own_mean_without_given_frames():
    target = torch.zeros(2, 1, 3, 2, 2)
    prediction = target.clone()
    prediction[0, :, 0] = 100.0
    prediction[1, :, 1:] = 2.0
    assert loss_per_sample(prediction, target, skip_frames=1).tolist() == [0.0, 4.0]
    assert loss_per_sample(prediction, target)[0].item() == pytest.approx(10000 / 3)


def test_loss_is_computed_in_float32():
    prediction = torch.full((1, 1, 1, 4, 4), 1.0, dtype=torch.bfloat16)
    loss = loss_per_sample(prediction, torch.full((1, 1, 1, 4, 4), 0.999))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1e-6, rel=1e-3)


def test_a_clip_of_given_frames_alone_is_refused():
    with pytest.raises(ValueError, match="longer clips"):
        loss_per_sample(torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 1, 2, 2), skip_frames=1)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_padded_text_keeps_every_token_and_marks_it(lengths):
    texts = [torch.arange(1.0, 2 * n + 1).view(n, 2) for n in lengths]
    padded, mask = pad_text(texts)
    assert padded.shape == (len(lengths), max(lengths), 2)
    assert mask.sum(1).tolist() == lengths
    assert all(torch.equal(padded[i][mask[i]], text) for i, text in enumerate(texts))
    assert not padded[~mask].any()


def test_a_text_without_tokens_is_refused():
    with pytest.raises(ValueError, match="text 1"):
        pad_text([torch.zeros(2, 3), torch.zeros(0, 3)])
    with pytest.raises(ValueError, match="no texts"):
        pad_text([])


def test_a_batch_moves_whole_and_keeps_its_mask():
    text, mask = pad_text([torch.ones(2, 3), torch.ones(1, 3)])
    latents = torch.zeros(2, 4, 1, 2, 2)
    batch = Batch(latents, None, text, mask, torch.ones(2, 5), ["a", "b"], "16x16@1")
    moved = batch.to("cpu", torch.bfloat16)
    assert len(moved) == 2 and moved.condition_BCTHW is None
    assert moved.text_mask_BL.dtype == torch.bool
    tensors = (moved.latents_BCTHW, moved.text_BLD, moved.pooled_BD)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
