"""The networks for training: their sizes, their names, and that they learn. Large ones are never given memory."""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.core.errors import ApplicationError
from penstock.models.alexnet import AlexNet
from penstock.models.flops import flops
from penstock.models.image_classifier import ImageNetwork
from penstock.models.mlp import MLP
from penstock.models.mobile import STAGES, InvertedResidual, MobileNet
from penstock.models.resnet import Bottleneck, ResNet50
from penstock.models.speech import SpeechNet
from penstock.models.vgg import VGG16
from penstock.models.vit import ViT

# Of each: parameters; multiply-adds of one picture in millions; the digest of all names and shapes of torchvision's own
# alexnet, vgg16, resnet50 and vit_b_16 (version 0.28), as `described` makes it.
NETWORKS: list[tuple[Callable[[], ImageNetwork], int, int, str]] = [
    (AlexNet, 61_100_840, 714, "12a60b133d7b54dc"),
    (VGG16, 138_357_544, 15_470, "26a44a8d3cab16c6"),
    (ResNet50, 25_557_032, 4_089, "2d5b8870b35e1530"),
    (ViT, 86_567_656, 17_564, "55c98fb7dfaa7147"),
]
PICTURES = torch.empty(2, 224, 224, 3, dtype=torch.uint8, device="meta")


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def described(network: nn.Module) -> str:
    lines = [f"{name} {list(tensor.shape)}" for name, tensor in sorted(network.state_dict().items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("make", "count", "million_multiply_adds", "names"), NETWORKS)
def test_the_networks_are_those_of_the_papers(
    make: Callable[[], ImageNetwork], count: int, million_multiply_adds: int, names: str
) -> None:
    with torch.device("meta"):
        network = make()
    assert parameters(network) == count
    assert described(network) == names
    assert network(PICTURES).shape == (2, 1000)
    assert network.predict(PICTURES).shape == (2, 1000)
    forward = flops(network, PICTURES)
    assert round(forward / 4e6) == million_multiply_adds
    # The gradients of inputs and of weights, but no gradient of the pictures.
    assert 2.85 * forward < flops(network, PICTURES, backward=True) < 3 * forward


def test_pixels_are_prepared_as_published_weights_expect_them() -> None:
    network = small_vit()
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 8, 8, 3)
    prepared = network.prepare(pixels)
    assert prepared.shape == (2, 3, 8, 8)
    for channel, (mean, deviation) in enumerate([(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]):
        assert prepared[0, channel].unique().item() == pytest.approx(-mean / deviation, rel=1e-5)
        assert prepared[1, channel].unique().item() == pytest.approx((1 - mean) / deviation, rel=1e-5)
    assert torch.equal(network.prepare(pixels.float()), prepared)


def small_vit() -> ViT:
    torch.manual_seed(0)
    return ViT(4, side=8, patch=4, layers=2, width=12, heads=3, hidden=24)


def test_vit_is_an_encoder_as_torch_has_it() -> None:
    network = small_vit().eval()
    for parameter in network.heads.parameters():
        nn.init.normal_(parameter)
    nn.init.normal_(network.class_token)
    image = torch.randn(3, 3, 8, 8)
    reference = nn.TransformerEncoderLayer(
        12, 3, 24, 0.0, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    ).eval()
    tokens = torch.cat([network.class_token.expand(3, -1, -1), network.conv_proj(image).flatten(2).transpose(1, 2)], 1)
    tokens = tokens + network.encoder.pos_embedding
    renamed = {"self_attention": "self_attn", "ln_": "norm", "mlp.0": "linear1", "mlp.3": "linear2"}
    for layer in network.encoder.layers:
        weights = layer.state_dict()
        for ours, theirs in renamed.items():
            weights = {name.replace(ours, theirs): tensor for name, tensor in weights.items()}
        reference.load_state_dict(weights)
        tokens = reference(tokens)
    wanted = network.heads(network.encoder.ln(tokens)[:, 0])
    torch.testing.assert_close(network.logits(image), wanted, atol=1e-5, rtol=1e-5)


def test_vit_refuses_parts_that_do_not_divide() -> None:
    with pytest.raises(ApplicationError, match="side 225 in patches of 16"):
        ViT(side=225)
    with pytest.raises(ApplicationError, match="width 768 in 7 heads"):
        ViT(heads=7)


def test_resnet_learns_and_may_begin_with_blocks_that_add_nothing() -> None:
    torch.manual_seed(0)
    network = ResNet50(5, zero_last_gamma=True)
    blocks = [module for module in network.modules() if isinstance(module, Bottleneck)]
    assert len(blocks) == 16
    assert all(not block.bn3.weight.any() for block in blocks)
    assert all(module.bn3.weight.all() for module in ResNet50(5).modules() if isinstance(module, Bottleneck))
    pixels = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    network(pixels).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())
    assert blocks[3].conv2.stride == (2, 2)
    assert blocks[3].conv1.stride == (1, 1)


@pytest.mark.parametrize("classes", [10_000, 1_400_000])
def test_a_head_may_be_very_wide(classes: int) -> None:
    with torch.device("meta"):
        network = MLP(inputs=2048, hidden=(512,), classes=classes, activation="relu")
    assert network.head.weight.shape == (classes, 512)
    assert parameters(network) == 2048 * 512 + 512 + 513 * classes
    assert network(torch.empty(3, 2048, device="meta")).shape == (3, classes)


@pytest.mark.thorough
def test_the_streaming_speech_network_is_trained_on_whole_signals() -> None:
    torch.manual_seed(0)
    network = SpeechNet(hidden=24, layers=2, symbols=5, bands=20, convolved=16)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    sound = torch.randint(-3000, 3000, (4, 8000), dtype=torch.int16)
    symbols = torch.tensor([[1, 2], [3, 4], [2, 1], [4, 4]])
    losses: list[float] = []
    for _ in range(12):
        scores_UBV = network(sound).transpose(0, 1)
        lengths = torch.full((4,), len(scores_UBV)), torch.full((4,), 2)
        loss = nn.functional.ctc_loss(scores_UBV, symbols, *lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert losses[-1] < 0.5 * losses[0]
    seconds = 10
    counted = flops(network, torch.empty(1, 16_000 * seconds, dtype=torch.int16)) / seconds
    spectrogram = 2 * 100 * (2 * 400 * 201 + 201 * 20)
    convolutions = 2 * 50 * (2 * 20 * 8 * 5 + 8 * 16 * 3)
    recurrent = 6 * 50 * 24 * (16 + 24 + 24 + 24)
    assert counted == pytest.approx(spectrogram + convolutions + recurrent + 2 * 50 * 24 * 5, rel=0.02)


@pytest.mark.thorough
def test_the_small_network_is_that_of_its_paper_but_for_its_end() -> None:
    with torch.device("meta"):
        network = MobileNet(1000, width=1.0, embedding=1280)
    # MobileNetV2 as it is published: its size, and its cost for a picture of 224 x 224.
    assert parameters(network) == 3_504_872
    assert round(flops(network.eval(), PICTURES) / 4e6) == 301
    assert network(PICTURES).shape == (2, 1000)
    assert network.embed(PICTURES).shape == (2, 1280)
    blocks = [module for module in network.modules() if isinstance(module, InvertedResidual)]
    assert len(blocks) == sum(stage[2] for stage in STAGES) == 17
    assert sum(block.adds for block in blocks) == 10
    with torch.device("meta"):
        assert parameters(MobileNet(18)) == 526_418


def test_the_small_network_learns() -> None:
    torch.manual_seed(0)
    network = MobileNet(3, width=0.25)
    pixels = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    network(pixels).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())
    kinds = {type(module) for module in network.modules() if not list(module.children())}
    assert nn.ReLU6 in kinds
    assert kinds <= {nn.Conv2d, nn.BatchNorm2d, nn.ReLU6, nn.Linear, nn.Dropout, type(network.prepare)}
