import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import TrainError
from penstock.train.data.augment import Augment, in_turn, mixup, on_tensors, random_flip
from penstock.train.parallel.losses import CrossEntropy


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int = 64) -> tuple[Tensor, Tensor]:
    pixels = torch.arange(count * 2 * 3 * 1).reshape(count, 2, 3, 1).remainder(251).to(torch.uint8)
    return pixels, torch.arange(count) % 5


@pytest.mark.parametrize("augment", [mixup(5), random_flip(), in_turn(random_flip(), mixup(5))])
def test_all_chance_comes_from_the_generator(augment: Augment) -> None:
    torch.manual_seed(1)
    first = augment(*batch(), generator())
    torch.manual_seed(2)
    again = augment(*batch(), generator())
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(augment(*batch(), generator(1))[0], first[0])


@pytest.mark.parametrize("augment", [mixup(5), random_flip(), in_turn(random_flip(), mixup(5))])
def test_batches_are_changed_where_they_are(augment: Augment) -> None:
    # "meta" stands for a GPU: it refuses what is on another device as well.
    pixels, targets = (tensor.to("meta") for tensor in batch())
    changed, shares = augment(pixels, targets, generator())
    assert changed.is_meta
    assert shares.is_meta
    assert changed.shape == pixels.shape


@pytest.mark.parametrize("wrong", [-100, 5])
def test_mixup_refuses_targets_that_are_no_class(wrong: int) -> None:
    with pytest.raises(
        TrainError, match=rf"5 classes, and a batch has targets from {min(0, wrong)} to {max(1, wrong)}"
    ):
        mixup(5)(torch.zeros(3, 2), torch.tensor([0, 1, wrong]), generator())


@pytest.mark.parametrize("dim", [2, 0, -2])
def test_a_flip_of_what_is_no_dimension_of_an_input_is_refused(dim: int) -> None:
    with pytest.raises(TrainError, match=rf"random_flip has dim={dim}, and a batch of inputs is \[3, 2\]"):
        random_flip(dim)(torch.zeros(3, 2), torch.zeros(3), generator())
    assert random_flip(-1)(torch.zeros(3, 2), torch.zeros(3), generator())[0].shape == (3, 2)


def test_mixup_mixes_inputs_and_targets_alike() -> None:
    # One-hot pictures: what is mixed of the target can be read from the input.
    inputs = F.one_hot(torch.arange(200) % 5, 5).view(200, 5, 1) * 100
    mixed, targets = mixup(5, alpha=1.0)(inputs, torch.arange(200) % 5, generator())
    assert targets.shape == (200, 5)
    torch.testing.assert_close(mixed[:, :, 0], 100 * targets)
    torch.testing.assert_close(targets.sum(1), torch.ones(200))
    # Of Beta(1, 1) all shares are as likely, and each example has a share of its own.
    own = targets[torch.arange(200), torch.arange(200) % 5]
    assert len(own.unique()) > 150
    assert 0.2 < (own < 0.5).float().mean() < 0.5
    again, twice = mixup(5)(mixed, targets, generator())
    torch.testing.assert_close(again[:, :, 0], 100 * twice)


def test_a_flip_mirrors_half_and_nothing_else() -> None:
    pixels, targets = batch(400)
    flipped, same = random_flip()(pixels, targets, generator())
    mirrored = (flipped == pixels.flip(2)).flatten(1).all(1)
    assert ((flipped == pixels).flatten(1).all(1) ^ mirrored).all()
    assert 0.4 < mirrored.float().mean() < 0.6
    assert flipped.dtype == torch.uint8
    assert same is targets


def test_smoothed_targets_are_spread_over_all_classes() -> None:
    logits, targets = torch.randn(6, 5), torch.arange(6) % 5
    spread = F.one_hot(targets, 5) * 0.9 + 0.1 / 5
    wanted = -(spread * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(CrossEntropy(0.1)(logits, targets), wanted)
    torch.testing.assert_close(CrossEntropy(0.1)(logits, F.one_hot(targets, 5).float()), wanted)
    torch.testing.assert_close(CrossEntropy()(logits, targets), F.cross_entropy(logits, targets))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(TrainError, match=r"smoothing is 1.0; it must be from 0"):
        CrossEntropy(1.0)
    with pytest.raises(TrainError, match="alpha 0; it must be above 0"):
        mixup(3, alpha=0)


def test_a_change_to_one_tensor_among_several_leaves_the_others() -> None:
    pixels, kinds = batch()
    inputs, targets = {"picture": pixels, "age": torch.arange(64)}, {"kind": kinds, "size": torch.arange(64)}
    flipped, same = on_tensors(random_flip(), input="picture")(inputs, targets, generator())
    assert torch.equal(flipped["picture"], random_flip()(pixels, kinds, generator())[0])
    assert flipped["age"] is inputs["age"]
    assert same is targets
    mix = on_tensors(mixup(5), input="picture", target="kind")
    mixed, shares = in_turn(mix, on_tensors(random_flip(), input="picture"))(inputs, targets, generator())
    assert torch.equal(shares["kind"], mixup(5)(pixels, kinds, generator())[1])
    assert shares["size"] is targets["size"]
    assert mixed["picture"].shape == pixels.shape
    # What was given stays as it was.
    assert inputs["picture"] is pixels
    assert targets["kind"] is kinds


def test_a_change_to_a_tensor_that_is_not_there_is_refused() -> None:
    pixels, kinds = batch()
    with pytest.raises(TrainError, match="names neither an input nor a target"):
        on_tensors(random_flip())
    with pytest.raises(TrainError, match="has input='photo', and the examples have 'picture', 'age'; give one of"):
        on_tensors(random_flip(), input="photo")({"picture": pixels, "age": kinds}, kinds, generator())
    with pytest.raises(TrainError, match="has target='kind', and the examples have one without a name"):
        on_tensors(mixup(5), input="picture", target="kind")({"picture": pixels}, kinds, generator())
    with pytest.raises(TrainError, match=r"random_flip changes one tensor, .* name it by on_tensors"):
        random_flip()({"picture": pixels}, kinds, generator())
