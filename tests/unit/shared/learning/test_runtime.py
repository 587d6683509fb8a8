import pytest
import torch
from torch import nn

from shared.contract.errors import DistransError
from shared.learning.runtime import Runtime, select_device

CPU = torch.device("cpu")


class TestSelectDevice:
    @pytest.mark.parametrize(
        ("cuda", "mps", "chosen"),
        [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
    )
    def test_auto_prefers_cuda_then_mps_then_cpu(
        self, monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, chosen: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        assert select_device() == select_device("auto") == torch.device(chosen)

    def test_auto_selects_a_working_device(self) -> None:
        assert torch.ones(2, device=select_device()).sum().item() == 2

    def test_cpu_is_always_available(self) -> None:
        assert select_device("cpu") == CPU

    @pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
    def test_missing_cuda_is_refused(self) -> None:
        with pytest.raises(DistransError, match="Device 'cuda' is not available") as caught:
            select_device("cuda")
        assert caught.value.next_step == "Use --device auto or --device cpu."

    @pytest.mark.parametrize("name", ["", "gpu", "cuda:99", "cuda:x", "cpu:-1", "hpu:99", "vulkan", "privateuseone"])
    def test_unknown_devices_are_refused(self, name: str) -> None:
        with pytest.raises(DistransError, match=f"Device '{name}' is not available: .") as caught:
            select_device(name)
        assert "\n" not in str(caught.value)


class TestRuntime:
    def test_defaults_to_fp32_on_cpu_without_compilation(self) -> None:
        runtime = Runtime()
        assert (runtime.device, runtime.precision) == (CPU, "fp32")
        assert not runtime.channels_last
        assert not runtime.compile

    @pytest.mark.parametrize("device", ["cpu", "mps"])
    def test_fp16_is_refused_without_cuda(self, device: str) -> None:
        with pytest.raises(DistransError, match=f"fp16 needs CUDA, but this site computes on {device}") as caught:
            Runtime(torch.device(device), precision="fp16")
        assert caught.value.next_step == "Use bf16 or fp32."

    def test_fp16_is_accepted_with_cuda(self) -> None:
        assert Runtime(torch.device("cuda"), precision="fp16").precision == "fp16"

    @pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
    def test_autocast_computes_in_the_chosen_precision(self, precision: str, dtype: torch.dtype) -> None:
        net, x = nn.Linear(3, 2), torch.ones(1, 3)
        with Runtime(CPU, precision=precision).autocast():  # type: ignore[arg-type]
            assert net(x).dtype == dtype
        assert net(x).dtype == torch.float32

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_scaler_does_nothing_outside_fp16(self, precision: str) -> None:
        scaler = Runtime(CPU, precision=precision).scaler()  # type: ignore[arg-type]
        weight = torch.tensor([2.0], requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        assert not scaler.is_enabled()
        assert scaler.get_scale() == 1
        scaler.scale(weight.square().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [0]

    @pytest.mark.parametrize("channels_last", [False, True])
    def test_memory_format_follows_channels_last(self, channels_last: bool) -> None:
        runtime = Runtime(CPU, channels_last=channels_last)
        net, images = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
        expected = net(images)
        assert runtime.prepare(net) is net
        moved = runtime.move(images)
        for tensor in (net.weight, moved):
            assert tensor.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert torch.equal(moved, images)
        torch.testing.assert_close(net(moved), expected)

    def test_forward_is_the_network_itself_without_compilation(self) -> None:
        net = nn.Linear(2, 2)
        assert Runtime().forward_of(net) is net
