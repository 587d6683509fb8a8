"""Local training as the authors' scripts write it: the baseline of `bench train`.

Images are opened and transformed one by one, each channel of Eq. 1 passes through the network separately, two
optimizers take their steps, and loss and accuracy are read after every batch.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision.models
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from shared.contract.plan import FederationPlan
from shared.learning.preprocessing import IMAGENET_MEAN, IMAGENET_STD

_ALPHA, _OFFSET_LR = 0.3, 1e-3


class _ImageFiles(Dataset[tuple[Tensor, int]]):
    """The images of a folder with a subfolder for each class."""

    def __init__(self, folder: Path, plan: FederationPlan) -> None:
        self._files = sorted(folder.glob("*/*"))
        self._classes = {name: number for number, name in enumerate(plan.classes)}
        steps = [transforms.ToTensor(), transforms.Normalize(plan.image.mean, plan.image.std)]
        self._transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        file = self._files[number]
        with Image.open(file) as image:
            return self._transform(image.convert("RGB")), self._classes[file.parent.name]


class PlainDouble(nn.Module):
    """The double-channel model without anything that makes it fast."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__()
        self.features = _features(plan.model.backbone)
        with torch.no_grad():
            width = self.features.eval()(torch.zeros(1, *plan.image.shape)).shape[1]
        self.logits = nn.Linear(2 * width, len(plan.classes))

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        """(B, C, H, W), (C, H, W) → logits (B, classes)."""
        left = (1 - _ALPHA) * x + _ALPHA * offset
        right = (1 + _ALPHA) * x - _ALPHA * offset
        return self.logits(torch.cat([self.features(left), self.features(right)], dim=1))  # type: ignore[no-any-return]


def _features(backbone: str) -> nn.Module:
    if backbone == "lenet":
        layers = [nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5)]
        return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(100))
    if backbone == "cnn":
        first = [nn.Conv2d(3, 16, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        second = [nn.Conv2d(16, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        dense = [nn.LazyLinear(120), nn.ReLU(inplace=True), nn.Linear(120, 84), nn.ReLU(inplace=True)]
        return nn.Sequential(*first, *second, nn.Flatten(), *dense)
    net: nn.Module = torchvision.models.get_model(backbone, weights=None)
    if backbone.startswith("resnet"):
        net.fc = nn.Identity()
    return net  # AlexNet's last layer, 1000 wide, is the dense layer


class WrittenLoop:
    """One client's training loop over a folder of images."""

    def __init__(self, plan: FederationPlan, folder: Path, device: torch.device) -> None:
        self._loader = DataLoader(_ImageFiles(folder, plan), batch_size=plan.training.batch_size, shuffle=True)
        self._device = device
        self._net = PlainDouble(plan).to(device).train()
        pixels = transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)(torch.rand(plan.image.shape))
        self._offset = pixels.to(device).requires_grad_()
        self._model_optimizer = torch.optim.SGD(self._net.parameters(), lr=plan.training.lr)
        self._offset_optimizer = torch.optim.SGD([self._offset], lr=_OFFSET_LR)

    def run(self) -> tuple[float, float]:
        """Train for one epoch; return the mean loss and the accuracy."""
        loss_sum, correct, images = 0.0, 0, 0
        for batch in self._loader:
            x, y = (part.to(self._device) for part in batch)
            self._model_optimizer.zero_grad()
            self._offset_optimizer.zero_grad()
            logits = self._net(x, self._offset)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            self._model_optimizer.step()
            self._offset_optimizer.step()
            loss_sum += loss.item() * len(y)
            correct += int((logits.argmax(dim=1) == y).sum().item())
            images += len(y)
        return loss_sum / images, correct / images
