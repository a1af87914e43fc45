"""Parameter groups by name."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.core.errors import TrainError
from penstock.train.step.parameter_groups import parameter_groups, takes_names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def described(groups: list[dict[str, Any]], network: nn.Module) -> list[tuple[list[str], float, float]]:
    names = {id(weight): name for name, weight in network.named_parameters()}
    return [([names[id(each)] for each in group["params"]], group["lr"], group["weight_decay"]) for group in groups]


def test_norms_and_biases_have_no_decay() -> None:
    network = Net()
    groups = parameter_groups(network.named_parameters(), lr=0.1, weight_decay=0.5)
    assert described(groups, network) == [
        (["embed.weight", "layers.0.weight", "layers.2.weight", "head.weight"], 0.1, 0.5),
        (["layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.bias", "head.bias"], 0.1, 0.0),
    ]


def test_lower_layers_have_lower_rates() -> None:
    network = Net()
    network.embed.weight.requires_grad_(False)
    network.layers[2].requires_grad_(False)
    groups = parameter_groups(network.named_parameters(), lr=16.0, layer_decay=0.5)
    assert described(groups, network) == [
        (["head.weight", "head.bias"], 16.0, 0.0),
        (["layers.1.weight", "layers.1.bias"], 4.0, 0.0),
        (["layers.0.weight", "layers.0.bias"], 2.0, 0.0),
    ]
    chain = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    rates = [group["lr"] for group in parameter_groups(chain.named_parameters(), lr=1.0, layer_decay=0.5)]
    assert rates == [1.0, 0.5]


def test_wrong_groups_are_refused() -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(TrainError, match="above 0 and at most 1"):
        parameter_groups(network.named_parameters(), lr=1, layer_decay=0)
    with pytest.raises(TrainError, match="needs numbered layers"):
        parameter_groups(network.named_parameters(), lr=1, layer_decay=0.5)
    with pytest.raises(TrainError, match="no parameter requires"):
        parameter_groups(network.requires_grad_(False).named_parameters(), lr=1)


def test_an_optimizer_gets_names_if_it_asks_for_them() -> None:
    assert takes_names(lambda named_parameters: None)
    assert not takes_names(torch.optim.SGD)
    assert not takes_names(lambda: None)
    seen: list[str] = []

    def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.extend(name for name, _ in named_parameters)
        # Torch takes names too.
        return torch.optim.SGD(named_parameters, lr=0.1)

    network = Net()
    given = (torch.arange(5), torch.zeros(5, dtype=torch.int64))
    plain = penstock.fit(network, given, epochs=2, device="cpu", quiet=True, optimizer=sgd)
    named = penstock.fit(network, given, epochs=2, device="cpu", quiet=True, optimizer=optimizer)
    assert seen == [name for name, _ in network.named_parameters()]
    assert named.parameter_hash == plain.parameter_hash


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_stopped_training_with_names_is_resumed(tmp_path: Any) -> None:
    def optimizer(named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=0.1)

    given = (torch.arange(5), torch.zeros(5, dtype=torch.int64))
    for _ in range(2):
        fitted = penstock.fit(
            Net(), given, epochs=2, device="cpu", quiet=True, optimizer=optimizer, out=tmp_path / "run", seed=1
        )
        assert fitted.best_step == 2


def names_of(layers: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(1, 1))) for name in layers.split()]


def test_layers_numbered_after_an_underscore_are_found() -> None:
    layers = " ".join(f"encoder.layers.encoder_layer_{place}.{part}.weight" for place in range(3) for part in "01")
    groups = parameter_groups(names_of(f"stem.weight {layers} heads.weight"), lr=16.0, layer_decay=0.5)
    assert [(group["lr"], len(group["params"])) for group in groups] == [(16, 1), (8, 2), (4, 2), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("layer1.0.w layer1.1.w layer2.0.w layer2.1.w", "in 'layer1' and in 'layer2', and cannot tell their order"),
        ("head.weight layers.0.w layers.1.w", "takes 'head.weight' for a lowest layer"),
    ],
)
def test_layers_of_unknown_order_are_refused(layers: str, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        parameter_groups(names_of(layers), lr=1, layer_decay=0.5)
    assert len(parameter_groups(names_of(layers), lr=1)) == 1


def test_parameters_in_two_groups_or_none_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    given = (torch.arange(5), torch.zeros(5, dtype=torch.int64))

    def fit(optimizer: Any) -> None:
        penstock.fit(Net(), given, steps=1, device="cpu", optimizer=optimizer)

    def twice(named_parameters: Any) -> torch.optim.Optimizer:
        weights = [weight for _, weight in named_parameters]
        return torch.optim.SGD([{"params": weights}, {"params": weights[:1]}], lr=0.1)

    with pytest.raises(TrainError, match="a parameter in two groups"):
        fit(twice)
    fit(lambda named_parameters: torch.optim.SGD([weight for _, weight in named_parameters][2:], lr=0.1))
    assert "leaves 'embed.weight' and 1 more as they are" in capsys.readouterr().out
