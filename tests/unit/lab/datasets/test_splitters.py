import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.datasets.splitters import Shares, classes_per_client, paper_shares
from shared.contract.errors import SplitError
from shared.learning.heterogeneity import count_classes, distributional_heterogeneity

seeds = st.integers(0, 2**32)


@st.composite
def even_splits(draw: st.DrawFn) -> tuple[int, int, int]:
    """(classes, clients, classes per client) where every class can have equally many holders."""
    classes, clients = draw(st.integers(2, 12)), draw(st.integers(1, 12))
    each = draw(st.sampled_from([u for u in range(1, classes + 1) if u * clients % classes == 0]))
    return classes, clients, each


# Classes, clients, classes per client, DH: the settings of the paper's tables.
PAPER_SETTINGS = [
    *((10, 10, each, dh) for each, dh in [(10, 0.0), (6, 0.4), (4, 0.6), (2, 0.8), (1, 1.0)]),  # CIFAR-10
    *((8, 8, each, dh) for each, dh in [(8, 0.0), (6, 0.25), (4, 0.5), (2, 0.75), (1, 1.0)]),  # CH-MNIST
    *((100, 10, each, dh) for each, dh in [(100, 0.0), (60, 0.4), (40, 0.6), (20, 0.8), (10, 1.0)]),  # CIFAR-100
    *((200, 10, each, dh) for each, dh in [(200, 0.0), (120, 0.4), (80, 0.6), (40, 0.8), (20, 1.0)]),  # Bird-200
    *((8, clients, 4, 0.5) for clients in (8, 16, 24, 40)),
    *((100, clients, 10, 0.9) for clients in (50, 100, 500)),
]


@pytest.mark.parametrize(("classes", "clients", "each", "dh"), PAPER_SETTINGS)
def test_the_papers_settings_have_the_papers_dh(classes: int, clients: int, each: int, dh: float) -> None:
    held = paper_shares(classes, clients, each, seed=0).values > 0
    assert distributional_heterogeneity(held) == pytest.approx(dh)
    assert classes_per_client(dh, classes, clients) == each


@given(setting=even_splits(), seed=seeds)
def test_every_client_holds_as_many_classes_and_every_class_has_as_many_holders(
    setting: tuple[int, int, int], seed: int
) -> None:
    classes, clients, each = setting
    held = paper_shares(classes, clients, each, seed).values > 0
    assert (held.sum(axis=1) == each).all()
    assert (held.sum(axis=0) == each * clients // classes).all()


@given(setting=even_splits(), seed=seeds)
def test_shares_sum_to_one_and_come_from_numbers_between_point_4_and_point_6(
    setting: tuple[int, int, int], seed: int
) -> None:
    values = paper_shares(*setting, seed).values
    np.testing.assert_allclose(values.sum(axis=0), 1)
    for column in values.T:
        held = column[column > 0]
        assert held.max() / held.min() <= 0.6 / 0.4 + 1e-9


def test_shares_use_the_whole_range_from_point_4_to_point_6() -> None:
    values = paper_shares(10, 200, 10, seed=0).values
    assert values.max() / values.min() > 1.4


@given(setting=even_splits(), seed=seeds, images=st.integers(30, 60))
def test_no_image_goes_to_two_clients_and_each_gets_its_share_rounded_down(
    setting: tuple[int, int, int], seed: int, images: int
) -> None:
    classes, shares = setting[0], paper_shares(*setting, seed)
    labels = np.repeat(np.arange(classes), images)
    parts = shares.split(labels, seed)
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    for part, row in zip(parts, shares.values, strict=True):
        assert (np.diff(part) > 0).all()
        cut_off = row * images - count_classes(labels[part], classes)
        assert (cut_off > -1e-6).all()
        assert (cut_off < 1).all()


def test_the_remainder_is_dropped() -> None:
    shares = Shares(np.array([[0.5, 0.35], [0.5, 0.65]]))
    sizes = [count_classes(np.repeat([0, 1], 9)[part], 2).tolist() for part in shares.split(np.repeat([0, 1], 9), 0)]
    assert sizes == [[4, 3], [4, 5]]


def test_a_whole_number_of_images_is_not_cut_by_its_binary_form() -> None:
    assert int(0.29 * 100) == 28  # what plain arithmetic makes of it
    parts = Shares(np.array([[0.29], [0.71]])).split(np.zeros(100, dtype=int), 0)
    assert [len(part) for part in parts] == [29, 71]


@given(setting=even_splits(), seed=seeds)
def test_a_split_is_a_function_of_its_seed(setting: tuple[int, int, int], seed: int) -> None:
    labels = np.repeat(np.arange(setting[0]), 40)
    one, same = paper_shares(*setting, seed), paper_shares(*setting, seed)
    assert (one.values == same.values).all()
    for first, second in zip(one.split(labels, seed), same.split(labels, seed), strict=True):
        assert (first == second).all()


def test_another_seed_gives_another_split() -> None:
    labels = np.repeat(np.arange(10), 40)
    one, other = paper_shares(10, 10, 4, seed=0), paper_shares(10, 10, 4, seed=1)
    assert ((one.values > 0) != (other.values > 0)).any()
    assert (one.split(labels, 0)[0].tolist()) != one.split(labels, 1)[0].tolist()


@given(setting=even_splits(), seed=seeds)
def test_training_and_test_images_are_shared_out_alike(setting: tuple[int, int, int], seed: int) -> None:
    classes, shares = setting[0], paper_shares(*setting, seed)
    train, test = np.repeat(np.arange(classes), 200), np.repeat(np.arange(classes), 50)[::-1]
    for train_part, test_part in zip(shares.split(train, seed), shares.split(test, seed), strict=True):
        in_train, in_test = count_classes(train[train_part], classes), count_classes(test[test_part], classes)
        assert ((in_train > 0) == (in_test > 0)).all()
        np.testing.assert_allclose(in_train / 200, in_test / 50, atol=1 / 50)


def test_an_uneven_split_is_refused_with_what_would_divide() -> None:
    with pytest.raises(SplitError) as caught:
        paper_shares(10, 4, 3, seed=0)
    assert caught.value.message == "4 clients × 3 classes each do not divide evenly over 10 classes."
    assert caught.value.next_step == "With 4 clients, these numbers of classes per client divide evenly: [5, 10]."


@pytest.mark.parametrize("each", [0, 11])
def test_a_client_cannot_hold_no_class_nor_more_than_there_are(each: int) -> None:
    with pytest.raises(SplitError, match=rf"1 … 10 classes, not {each}"):
        paper_shares(10, 10, each, seed=0)


@pytest.mark.parametrize(("names", "shown"), [((), "1"), (("cat", "dog"), "dog")])
def test_a_class_with_too_few_training_images_for_its_holders_is_named(names: tuple[str, ...], shown: str) -> None:
    labels = np.concatenate([np.zeros(50, dtype=int), np.ones(3, dtype=int)])
    with pytest.raises(SplitError) as caught:
        paper_shares(2, 4, 2, seed=0).split(labels, 0, names=names)
    assert caught.value.message == f"Class {shown} has 3 training images, too few for its 4 clients."
    assert caught.value.next_step == "Use fewer clients or fewer classes per client."


def test_bird_200_can_be_shared_by_ten_clients_though_small_classes_have_eleven_held_out_images() -> None:
    train, test = np.repeat(np.arange(200), 29), np.repeat(np.arange(200), 11)
    shares = paper_shares(200, 10, 200, seed=0)
    counts = np.array([count_classes(train[part], 200) for part in shares.split(train, 0)])
    held_out = np.array([count_classes(test[part], 200) for part in shares.split(test, 0, held_out=True)])
    assert distributional_heterogeneity(counts) == 0
    np.testing.assert_array_equal(held_out, np.floor(shares.values * 11))
    assert held_out.min() == 0
    assert held_out.sum(axis=1).min() > 0


def test_a_client_may_get_no_held_out_image_but_not_all_clients_may() -> None:
    shares = Shares(np.array([[0.3, 0.3], [0.7, 0.7]]))
    assert [len(part) for part in shares.split([0, 0, 1], 0, held_out=True)] == [0, 1]
    with pytest.raises(SplitError) as caught:
        shares.split([0, 1], 0, held_out=True)
    assert caught.value.message == "None of the 2 clients gets any held-out images; all classes together have 2."
    assert caught.value.next_step == "Use fewer clients or hold out more images."


def test_a_class_without_any_image_is_nobodys() -> None:
    parts = paper_shares(2, 4, 2, seed=0).split(np.zeros(50, dtype=int), 0)
    assert all(len(part) > 0 for part in parts)


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_outside_the_classes_are_refused(label: int) -> None:
    with pytest.raises(SplitError, match="0 … 1"):
        paper_shares(2, 2, 2, seed=0).split([0, 1, label], 0)


@given(setting=even_splits())
def test_the_number_of_classes_per_client_has_the_dh_that_was_asked_for(setting: tuple[int, int, int]) -> None:
    classes, clients, each = setting
    dh = distributional_heterogeneity(paper_shares(classes, clients, each, seed=0).values > 0)
    assert classes_per_client(dh, classes, clients) == each


def test_a_dh_that_cannot_be_had_is_refused_with_those_that_can() -> None:
    with pytest.raises(SplitError) as caught:
        classes_per_client(0.6, classes=8, clients=4)
    assert caught.value.message == "4 clients with 8 classes cannot have DH 60%."
    assert caught.value.next_step == "They can have 0%, 25%, 50%, 100%."


def test_dh_may_be_given_as_a_rounded_number() -> None:
    assert classes_per_client(0.33, classes=3, clients=3) == 2
