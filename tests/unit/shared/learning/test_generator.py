import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensors import assert_same_tensors
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from shared.contract.method_options import GeneratorOptions
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.generator import GeneratorTrainer, OffsetGenerator
from shared.tensors.wire import encode

INPUTS = ["embedding", "embedding+offset"]
SHAPE = (1, 16, 16)
EMBEDDING = torch.tensor([0.75, 0.25, 0.5])
SMALL = {"hidden": 12, "width": 32}


def plan_for(shape: tuple[int, int, int], seed: int = 0, classes: int = 3) -> FederationPlan:
    channels, height, width = shape
    return validate_plan(
        {
            "name": "generator",
            "classes": [str(number) for number in range(classes)],
            "seed": seed,
            "image": {"channels": channels, "height": height, "width": width},
            "model": {"backbone": "resnet18"},  # accepts images of any size
        }
    )


def trainer_with(shape: tuple[int, int, int] = SHAPE, seed: int = 0, **options: object) -> GeneratorTrainer:
    return GeneratorTrainer(plan_for(shape, seed), GeneratorOptions.model_validate({**SMALL, **options}))


def offset_like(shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class AuthorsGenerator(nn.Module):
    """The network as the authors run it: BatchNorm in training mode, one embedding at a time."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            spectral_norm(nn.Linear(classes, 100)),
            nn.ReLU(),
            spectral_norm(nn.Linear(100, 100)),
            nn.Linear(100, 100),
        )
        layers: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False)]
        for before, after in [(512, 256), (256, 128), (128, 64), (64, 3)]:
            layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
        self.decoder = nn.Sequential(*layers, nn.Tanh())

    def forward(self, embedding: Tensor) -> Tensor:
        image: Tensor = self.decoder(self.mlp(embedding[None]).view(1, 100, 1, 1))
        return image[0]


def test_network_for_ten_classes_has_as_many_parameters_as_the_authors() -> None:
    net = OffsetGenerator(10, (3, 64, 64), GeneratorOptions())
    assert sum(weight.numel() for weight in net.parameters()) == 3_598_004


def test_network_matches_the_authors_with_batchnorm_in_training_mode() -> None:
    net, authors = OffsetGenerator(10, (3, 64, 64), GeneratorOptions()), AuthorsGenerator(10)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.startswith("decoder"):
                weight.mul_(1 + 0.2 * torch.rand_like(weight))  # to make the affine parts matter
    taken = authors.load_state_dict(net.state_dict(), strict=False)
    assert not taken.unexpected_keys
    assert all("running" in name or "num_batches" in name for name in taken.missing_keys)
    embedding, nothing = torch.rand(10), torch.zeros(3, 64, 64)
    with torch.no_grad():
        expected = authors.train()(embedding)
        torch.testing.assert_close(net.train()(embedding, nothing), expected, rtol=1e-4, atol=1e-5)
        in_eval_mode = authors.eval()(embedding)
    assert float((in_eval_mode - expected).square().mean().sqrt()) > 0.1  # eval mode would be something else


@pytest.mark.parametrize("inputs", INPUTS)
def test_linear_layers_start_with_kaiming_uniform_weights_and_without_biases(inputs: str) -> None:
    net = GeneratorTrainer(plan_for((3, 16, 16)), GeneratorOptions.model_validate({"inputs": inputs})).net
    linear = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    assert len(linear) == (3 if inputs == "embedding" else 4)
    for layer in linear:
        normed = getattr(layer, "parametrizations", None)  # spectral norm divides by the largest singular value
        weight = (layer.weight if normed is None else normed.weight.original).detach()
        assert not layer.bias.any()
        assert float(weight.abs().max()) == pytest.approx((6 / layer.in_features) ** 0.5, rel=0.02)


def embeddings(classes_each: int, seed: int) -> Tensor:
    """Ten clients with some of ten classes each; shares in proportion to U(0.4, 0.6), as in the paper's splitter."""
    holds = torch.tensor([[(number - client) % 10 < classes_each for number in range(10)] for client in range(10)])
    shares = holds * (0.4 + 0.2 * torch.rand(10, 10, generator=torch.Generator().manual_seed(seed)))
    return shares / shares.sum(dim=0)


@pytest.mark.parametrize(("classes_each", "low", "high"), [(10, 0.04, 0.12), (6, 0.2, 0.4), (2, 0.25, 0.45)])
@pytest.mark.parametrize("seed", range(3))
def test_clients_with_different_classes_start_with_clearly_different_offsets(
    classes_each: int, low: float, high: float, seed: int
) -> None:
    """With torch's random biases, the network nearly ignores the embedding: about .006, .04 and .1."""
    trainer = GeneratorTrainer(plan_for((3, 64, 64), seed, classes=10), GeneratorOptions())
    offsets = torch.stack([trainer.generate(each, torch.zeros(3, 64, 64)) for each in embeddings(classes_each, seed)])
    between_clients = float((offsets - offsets.mean(dim=0)).square().mean().sqrt())
    assert low < between_clients < high
    assert float(offsets.square().mean().sqrt()) == pytest.approx(0.61, abs=0.03)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "shape",
    [(1, 28, 28), (3, 128, 128), (1, 16, 16), (2, 5, 9), (1, 4, 4), (1, 1, 9), (2, 1, 1)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_offsets_of_every_shape_are_generated_and_learned(shape: tuple[int, int, int], inputs: str) -> None:
    trainer, target = trainer_with(shape, inputs=inputs), offset_like(shape)
    generated = trainer.generate(EMBEDDING, target)
    assert generated.shape == shape
    assert float(generated.abs().max()) < 1
    assert trainer.fit(EMBEDDING, target) > 0
    assert not torch.equal(trainer.generate(EMBEDDING, target), generated)


@pytest.mark.parametrize(("side", "doublings"), [(4, 0), (5, 1), (28, 3), (32, 3), (64, 4), (128, 5)])
def test_number_of_doublings_follows_from_the_image_size(side: int, doublings: int) -> None:
    net = OffsetGenerator(3, (1, side, side), GeneratorOptions.model_validate(SMALL))
    strides = [layer.stride[0] for layer in net.decoder if isinstance(layer, nn.ConvTranspose2d)]
    assert strides == [1] + [2] * doublings


def test_output_is_cropped_at_the_center() -> None:
    net = OffsetGenerator(3, (1, 28, 26), GeneratorOptions.model_validate(SMALL)).eval()
    whole: list[Tensor] = []
    net.decoder.register_forward_hook(lambda *arguments: whole.append(arguments[2]))
    found = net(EMBEDDING, torch.zeros(1, 28, 26))
    assert whole[0].shape == (1, 1, 32, 32)
    assert torch.equal(found, whole[0][0, :, 2:30, 3:29])


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@given(seed=st.integers(0, 20))
def test_one_small_step_lowers_the_error(reduction: str, inputs: str, seed: int) -> None:
    trainer = trainer_with(seed=seed, reduction=reduction, inputs=inputs, lr=1e-3 if reduction == "mean" else 1e-5)
    target = offset_like(SHAPE, seed)
    before = trainer.fit(EMBEDDING, target)
    squares = (trainer.generate(EMBEDDING, target) - target).square()
    assert float(squares.mean() if reduction == "mean" else squares.sum()) < before


def test_error_is_averaged_or_summed_over_pixels() -> None:
    target = offset_like(SHAPE)
    mean, total = (trainer_with(reduction=reduction).fit(EMBEDDING, target) for reduction in ("mean", "sum"))
    assert total == pytest.approx(mean * target.numel(), rel=1e-5)


def test_several_steps_equal_single_ones_and_return_the_error_before_the_first() -> None:
    at_once, one_by_one, target = trainer_with(steps=3), trainer_with(), offset_like(SHAPE)
    errors = [one_by_one.fit(EMBEDDING, target) for _ in range(3)]
    assert at_once.fit(EMBEDDING, target) == errors[0]
    assert_same_tensors(at_once.state(), one_by_one.state())
    assert errors[2] < errors[0]


def test_sgd_step_is_the_rate_times_the_gradient_of_the_mean_squared_error() -> None:
    trainer, reference, target = trainer_with(lr=0.1), trainer_with().net.train(), offset_like(SHAPE)
    trainer.fit(EMBEDDING, target)
    ((reference(EMBEDDING, target) - target) ** 2).mean().backward()
    expected = {name: weight.detach() - 0.1 * weight.grad for name, weight in reference.named_parameters()}
    found = {name: weight.detach() for name, weight in trainer.net.named_parameters()}
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, msg=name)


def test_offsets_are_equal_exactly_for_equal_embeddings() -> None:
    trainer = trainer_with()
    trainer.fit(EMBEDDING, offset_like(SHAPE))
    one = trainer.generate(EMBEDDING, offset_like(SHAPE, 1))
    assert torch.equal(trainer.generate(EMBEDDING.clone(), offset_like(SHAPE, 2)), one)
    assert not torch.equal(trainer.generate(1 - EMBEDDING, offset_like(SHAPE, 1)), one)


def test_network_that_sees_the_offset_depends_on_it() -> None:
    trainer = trainer_with(inputs="embedding+offset")
    assert not torch.equal(
        trainer.generate(EMBEDDING, offset_like(SHAPE, 1)), trainer.generate(EMBEDDING, offset_like(SHAPE, 2))
    )


@pytest.mark.parametrize("inputs", INPUTS)
def test_generating_is_repeatable_to_the_bit_and_changes_nothing(inputs: str) -> None:
    trainer, last = trainer_with(inputs=inputs), offset_like(SHAPE)
    trainer.fit(EMBEDDING, last)
    before = trainer.state()
    first = trainer.generate(EMBEDDING, last)
    trainer.generate(1 - EMBEDDING, last)
    assert torch.equal(trainer.generate(EMBEDDING, last), first)
    assert_same_tensors(trainer.state(), before)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_resumes_from_a_stored_state_to_the_bit(optimizer: str, inputs: str) -> None:
    trainer = trainer_with(optimizer=optimizer, inputs=inputs)
    for seed in range(3):
        trainer.fit(EMBEDDING, offset_like(SHAPE, seed))
    stored = encode(trainer.state())
    resumed = trainer_with(seed=99, optimizer=optimizer, inputs=inputs)  # other initial weights
    resumed.restore(safetensors.torch.load(stored))
    assert_same_tensors(resumed.state(), trainer.state())
    for seed in range(3, 6):
        target = offset_like(SHAPE, seed)
        assert resumed.fit(EMBEDDING, target) == trainer.fit(EMBEDDING, target)
    assert_same_tensors(resumed.state(), trainer.state())
    assert torch.equal(resumed.generate(EMBEDDING, target), trainer.generate(EMBEDDING, target))


def test_state_includes_adam_s_moments() -> None:
    trainer = trainer_with(optimizer="adam")
    assert not any(name.startswith("optimizer.") for name in trainer.state())
    trainer.fit(EMBEDDING, offset_like(SHAPE))
    kinds = {name.split(":")[0] for name in trainer.state() if name.startswith("optimizer.")}
    assert kinds == {"optimizer.step", "optimizer.exp_avg", "optimizer.exp_avg_sq"}


def test_state_is_a_copy() -> None:
    trainer = trainer_with()
    state = trainer.state()
    before = {name: value.clone() for name, value in state.items()}
    trainer.fit(EMBEDDING, offset_like(SHAPE))
    assert_same_tensors(state, before)


@given(mix=st.floats(0, 1))
def test_mix_blends_the_network_s_output_with_the_client_s_offset(mix: float) -> None:
    own = offset_like(SHAPE)
    generated = trainer_with().generate(EMBEDDING, own)
    torch.testing.assert_close(trainer_with(mix=mix).generate(EMBEDDING, own), mix * generated + (1 - mix) * own)


def test_mix_zero_returns_the_client_s_offset_to_the_bit() -> None:
    own = offset_like(SHAPE)
    assert torch.equal(trainer_with(mix=0).generate(EMBEDDING, own), own)


def test_initial_network_follows_from_the_plan_s_seed() -> None:
    assert_same_tensors(trainer_with(seed=4).state(), trainer_with(seed=4).state())
    assert not torch.equal(
        trainer_with(seed=5).generate(EMBEDDING, offset_like(SHAPE)),
        trainer_with(seed=4).generate(EMBEDDING, offset_like(SHAPE)),
    )
