import torch

from shared.learning.preprocessing import normalize


def test_each_channel_has_its_own_statistics_or_all_share_one() -> None:
    pixels = torch.ones(4, 3, 2, 2)
    found = normalize(pixels, (0.0, 0.5, 1.0), (1.0, 0.5, 0.25))
    assert found[:, :, 0, 0].tolist() == [[1.0, 1.0, 0.0]] * 4
    assert torch.equal(normalize(pixels, (0.5,), (0.25,)), torch.full_like(pixels, 2.0))
