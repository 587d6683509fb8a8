"""Simulated clients: their images, negatives and shifts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.image_folders import loaded

from lab.datasets.clients import Negatives, Shift, make_clients, shifted
from lab.datasets.image_set import ImageSet, Part
from lab.datasets.registry import DataSettings, dataset_info, load_image_set
from lab.datasets.splitters import Shares, paper_shares
from shared.contract.errors import SplitError
from shared.contract.plan import ImagePlan
from shared.learning.evaluation import evaluate


class TestClients:
    @pytest.fixture
    def digits(self, tmp_path: Path) -> ImageSet:
        return loaded("digits", tmp_path)

    def test_hold_indices_into_one_copy_and_see_what_the_network_sees(self, digits: ImageSet) -> None:
        clients = make_clients(digits, paper_shares(10, 10, 4, seed=0), seed=0)
        assert all(client.train.part is digits.train for client in clients)
        images, labels = next(iter(clients[3].train.batches(16, seed=5)))
        assert images.shape == (16, 1, 16, 16)
        assert set(labels.tolist()) <= clients[3].own_classes
        order = torch.randperm(clients[3].train.samples, generator=torch.Generator().manual_seed(5))
        first = digits.train.images[clients[3].train.indices[order[0]]]
        doubled = torch.nn.functional.interpolate(first[None].float() / 255, size=(16, 16), mode="bilinear")
        torch.testing.assert_close(images[:1], (doubled - 0.5) / 0.5)
        taken = torch.cat([client.train.indices for client in clients])
        assert len(taken.unique()) == len(taken)

    def test_with_one_class_each_have_as_many_negatives(self, digits: ImageSet) -> None:
        clients = make_clients(digits, paper_shares(10, 10, 1, seed=0), seed=0)
        for client in clients:
            (own,) = client.own_classes
            positive = client.test.labels == own
            assert int(positive.sum()) * 2 == client.test.samples == 2 * int((digits.test.labels == own).sum())

        def own_class(images: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.full((len(images),), own), 10).float()

        result = evaluate(own_class, client.test.batches(64, 0), client.own_classes)
        assert (result.accuracy, result.positive_accuracy, result.negative_accuracy) == (0.5, 1, 0)
        assert (result.negatives_as_own, result.binary_accuracy) == (result.negatives, 0.5)

    def test_negatives_follow_the_seed(self, digits: ImageSet) -> None:
        def drawn(seed: int) -> list[int]:
            client = make_clients(digits, paper_shares(10, 10, 1, seed=0), seed)[0]
            return [int(index) for index in client.test.indices[client.test.samples // 2 :]]

        assert drawn(1) == drawn(1) != drawn(2)

    @pytest.mark.parametrize("shift", ["none", "rotated", "inverted"])
    def test_images_prepared_once_have_the_same_bits(
        self, shift: Shift, digits: ImageSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def drawn() -> list[tuple[torch.Tensor, torch.Tensor]]:
            clients = make_clients(digits, paper_shares(10, 5, 4, seed=0), 0, shift=shift)
            return [batch for client in clients for batch in client.train.batches(7, seed=3)]

        at_once = drawn()
        monkeypatch.setattr("lab.datasets.clients._MAX_PREPARED_BYTES", 0)
        for (images, labels), (others, same) in zip(at_once, drawn(), strict=True):
            assert torch.equal(images, others)
            assert torch.equal(labels, same)

    @pytest.mark.parametrize(
        ("clients", "each", "negatives", "added"),
        [
            (10, 2, "auto", False),
            (5, 2, "auto", False),
            (20, 1, "auto", False),
            (5, 2, "always", True),
            (10, 1, "never", False),
        ],
    )
    def test_negatives_are_added_only_for_single_classes_of_ones_own_or_on_request(
        self, clients: int, each: int, negatives: str, added: bool, digits: ImageSet
    ) -> None:
        sites = make_clients(digits, paper_shares(10, clients, each, seed=0), 0, negatives)
        site = sites[0]
        foreign = [label for label in site.test.labels.tolist() if label not in site.own_classes]
        assert (len(foreign) > 0) == added


class TestClientsOfFewImages:
    SHARES = Shares(np.array([[0.3, 0.3], [0.7, 0.7]]))

    def few(self, *, train: int, test: int) -> ImageSet:
        """Two classes with this many images each."""
        parts = (Part(torch.zeros(2 * n, 1, 4, 4).byte(), torch.arange(2 * n) % 2) for n in (train, test))
        return ImageSet(("cat", "dog"), ImagePlan(channels=1, height=4, width=4), *parts)

    @pytest.mark.parametrize("negatives", ["never", "always"])
    def test_may_have_none_for_testing_and_then_have_no_accuracy(self, negatives: Negatives) -> None:
        clients = make_clients(self.few(train=10, test=2), self.SHARES, 0, negatives)
        assert [(client.own_classes, client.test.samples) for client in clients] == [({0, 1}, 0), ({0, 1}, 2)]
        scores = [
            evaluate(lambda batch: torch.zeros(len(batch), 2), client.test.batches(8, 0), client.own_classes)
            for client in clients
        ]
        assert [score.accuracy for score in scores] == [None, 0.5]
        assert (scores[0] + scores[1]).accuracy == 0.5

    def test_must_have_a_training_image_of_each_of_their_classes(self) -> None:
        with pytest.raises(SplitError, match="Class cat has 2 training images, too few for its 2 clients"):
            make_clients(self.few(train=2, test=10), self.SHARES, 0)

    def test_cannot_all_be_without_test_images(self) -> None:
        with pytest.raises(SplitError, match="None of the 2 clients gets any held-out images"):
            make_clients(self.few(train=10, test=1), self.SHARES, 0)


class TestShifts:
    IMAGES = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 3, 4)

    @pytest.mark.parametrize("client", range(5))
    def test_rotate_by_quarter_turns(self, client: int) -> None:
        found = shifted(self.IMAGES, "rotated", client)
        assert torch.equal(found, torch.rot90(self.IMAGES, client % 4, (2, 3)))

    def test_invert_every_other_client(self) -> None:
        assert torch.equal(shifted(self.IMAGES, "inverted", 2), self.IMAGES)
        assert torch.equal(shifted(self.IMAGES, "inverted", 3), 255 - self.IMAGES)

    def test_apply_to_training_and_test_images_and_leave_labels_alone(self) -> None:
        image = dataset_info("digits").image
        images = load_image_set(DataSettings(name="digits", shift="inverted"), image, Path("unused"))
        shares = paper_shares(10, 5, 4, seed=0)
        kinds: tuple[Shift, Shift] = ("none", "inverted")
        plain, inverted = (make_clients(images, shares, 0, shift=shift) for shift in kinds)
        for part in ("train", "test"):
            for one, other, same in zip(plain, inverted, (True, False, True, False, True), strict=True):
                (x, y), (changed, labels) = (next(getattr(c, part).batches(4, seed=1)) for c in (one, other))
                assert torch.equal(y, labels)
                expected = x if same else -x  # digits are normalized to -1 … 1
                torch.testing.assert_close(changed, expected)
