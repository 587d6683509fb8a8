"""Max pooling that is fast on a CPU."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.learning.memory_format import uses_onednn


class MaxPool(nn.MaxPool2d):
    """nn.MaxPool2d through oneDNN where it applies.

    torch's own kernel handles one value at a time. The maxima are the same, and so are the gradients, except that where
    windows overlap a sum may differ in its last bit. oneDNN ignores NaN.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the maximum of each window."""
        if not _applies(x) or self.ceil_mode or self.return_indices or self.dilation != 1:
            return super().forward(x)  # type: ignore[no-any-return]
        kernel, stride, padding = (_pair(size) for size in (self.kernel_size, self.stride, self.padding))
        return torch.mkldnn_max_pool2d(x.to_mkldnn(), kernel, stride, padding).to_dense()

    @classmethod
    def in_place_of(cls, layer: nn.MaxPool2d) -> "MaxPool":
        """Return a layer with the same settings."""
        return cls(layer.kernel_size, layer.stride, layer.padding, layer.dilation, ceil_mode=layer.ceil_mode)


def _applies(x: Tensor) -> bool:
    # torch's kernel for channels-last tensors is as fast.
    return uses_onednn(x) and x.dtype == torch.float32 and x.is_contiguous()


def _pair(size: int | tuple[int, ...]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)
