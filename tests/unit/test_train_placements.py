"""What a placement may be, what is seen of a network, what is chosen and what is refused; without any process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.train.parallel.dataflow import OUTPUT, LinearUse, linear_uses
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.planner import check, choose, named_layers
from penstock.train.placement import Placement

COLUMNS, ROWS = Placement(kind="column-parallel"), Placement(kind="row-parallel")
MODEL, CLASSES, SHARDED = Placement(kind="model"), Placement(kind="vocab-parallel"), Placement(kind="fully-sharded")


class Net(nn.Module):
    """Krizhevsky's shape: convolutions, two large layers with dropout and something elementwise between, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(72, 48), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(48, 40)
        )
        self.head = nn.Linear(40, 10)

    def between(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.gelu(hidden) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.classifier(self.features(x).flatten(1))))


class Mixed(Net):
    """With something between that needs all features."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden.softmax(1)


class Shifted(Net):
    """With something between that belongs to each feature."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + torch.arange(40.0)


def seen(net: nn.Module) -> dict[str, LinearUse]:
    return linear_uses(net, torch.zeros(2, 1, 8, 8))


def test_elementwise_operations_carry_on_and_others_end_it() -> None:
    found = seen(Net())
    assert list(found) == ["classifier.1", "classifier.4", "head"]
    assert (found["classifier.1"].comes_from, found["classifier.1"].goes_to) == (frozenset(), {"classifier.4"})
    assert (found["classifier.4"].comes_from, found["classifier.4"].goes_to) == ({"classifier.1"}, {"head"})
    assert (found["head"].inputs, found["head"].outputs, found["head"].rows) == (40, 10, 1)
    assert found["head"].goes_to == {OUTPUT}
    assert seen(Mixed())["classifier.4"].goes_to == {"_softmax"}
    assert seen(Shifted())["head"].comes_from == frozenset()


def test_a_layer_over_frames_and_a_layer_called_twice_are_seen_so() -> None:
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 6)
            self.twice = nn.Linear(6, 6)

        def forward(self, x_BT4: Tensor) -> Tensor:
            return self.twice(self.twice(self.wide(x_BT4)).cumsum(1)).mean(1)

    found = linear_uses(Frames(), torch.zeros(2, 5, 4))
    assert found["wide"].rows == 5
    assert found["twice"].rows == 10
    # Once from the wide layer, once from elsewhere: there is nothing to rely on.
    assert found["twice"].comes_from == frozenset()
    assert found["twice"].goes_to == {"cumsum", "mean"}


def test_looking_changes_nothing() -> None:
    net = Net()
    net.features.append(nn.BatchNorm2d(2))
    net.head.eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    chance = torch.get_rng_state()
    seen(net)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert torch.equal(chance, torch.get_rng_state())
    assert net.training
    assert not net.head.training


def test_large_layers_are_placed_in_pairs_and_small_ones_are_not() -> None:
    chosen = choose(seen(Net()), batch=4, processes=2, loss=CrossEntropy())
    assert chosen.placements == {"classifier.1": COLUMNS, "classifier.4": ROWS, "head": CLASSES}
    assert chosen.reasons == [
        "classifier.1: column-parallel, 3,456 weights beside 480 activations of the global batch; classifier.4 takes "
        "its outputs as they are.",
        "classifier.4: row-parallel, 1,920 weights beside 352 activations of the global batch; its inputs come from "
        "classifier.1.",
        "head: vocab-parallel, 400 weights beside 200 activations of the global batch.",
    ]
    # Another loss needs all scores, and a larger batch more activations.
    assert choose(seen(Net()), 4, 2, nn.functional.cross_entropy).placements["head"] == MODEL
    assert choose(seen(Net()), 22, 2, CrossEntropy()).placements == {"classifier.1": MODEL}
    assert choose(seen(Net()), 1000, 2, CrossEntropy()).placements == {}
    # 10 outputs do not divide by 4, and what meets a softmax has no pair.
    assert "its 10 outputs do not divide by 4" in choose(seen(Net()), 4, 4, CrossEntropy()).reasons[2]
    assert choose(seen(Mixed()), 4, 2, None).placements == {
        "classifier.1": COLUMNS,
        "classifier.4": ROWS,
        "head": MODEL,
    }


def test_what_is_chosen_always_passes() -> None:
    for net in (Net(), Mixed(), Shifted()):
        for batch in (2, 8, 22, 64):
            for processes in (2, 4, 8):
                found = seen(net)
                chosen = choose(found, batch, processes, CrossEntropy()).placements
                check(net, chosen, found, [batch] * processes, CrossEntropy())


def refusal(
    net: nn.Module, wanted: Mapping[str, Placement], rows: tuple[int, ...] = (4, 4), loss: object = None
) -> str:
    with pytest.raises(TrainError) as refused:
        check(net, named_layers(net, wanted), seen(net), rows, loss)
    return str(refused.value)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"fc*": MODEL}, "'fc*' names no layer of the network; its linear layers are classifier.1, classifier.4, head"),
        ({"classifier.1": MODEL, "classifier.*": MODEL}, "'classifier.1' and 'classifier.*' both name 'classifier.1'"),
        ({"features.0": MODEL}, "'features.0' is a Conv2d and cannot be model"),
        ({"classifier.1": COLUMNS}, "they go to classifier.4; a row-parallel linear layer must come next"),
        (
            {"classifier.4": ROWS},
            "its inputs come from classifier.1; they must come from a column-parallel linear layer",
        ),
        ({"classifier.1": ROWS}, "its inputs come from elsewhere"),
        ({"head": COLUMNS}, "they go to the network's output"),
        ({"classifier.*": SHARDED, "classifier.1": MODEL}, "both name 'classifier.1'"),
        ({"classifier": SHARDED, "classifier.1": MODEL}, "'classifier' is fully-sharded, and 'classifier.1' in it"),
        ({"features.1": SHARDED}, "'features.1' is fully-sharded, but has no weights"),
        ({"head": CLASSES}, "needs the recipe's loss to be a penstock.train.parallel.losses.CrossEntropy; it is None"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(wanted: dict[str, Placement], sentence: str) -> None:
    assert sentence in refusal(Net(), wanted)


def test_features_and_batches_that_do_not_divide_are_refused() -> None:
    assert "'head' has 10 outputs, which do not divide by 4 processes" in refusal(Net(), {"head": MODEL}, (2,) * 4)
    chunked = {"head": Placement(kind="model", chunks=3)}
    assert "chunks=3, and the processes have 4 to 4 examples" in refusal(Net(), chunked)
    assert "the processes have 3 to 6 examples" in refusal(Net(), chunked, (6, 3))


def test_what_needs_all_features_between_columns_and_rows_is_refused_by_name() -> None:
    pair = {"classifier.4": COLUMNS, "head": ROWS}
    assert "but they go to _softmax" in refusal(Mixed(), pair)
    assert "but they go to add with another tensor" in refusal(Shifted(), pair)


def test_a_head_must_be_last_and_tied_weights_stay() -> None:
    assert "'classifier.4' is vocab-parallel, but it is not the network's last layer" in refusal(
        Net(), {"classifier.4": CLASSES}, loss=CrossEntropy()
    )
    tied = Net()
    tied.add_module("again", tied.head)
    tied.own = tied.head.weight
    assert "'head' shares a weight with 'own'" in refusal(tied, {"head": MODEL})


def test_weights_shared_inside_a_sharded_layer_are_refused() -> None:
    tied = Net()
    tied.classifier.shared = tied.classifier[1].weight
    assert "'classifier' has one weight under two names, 'shared' and '1.weight'" in refusal(
        tied, {"classifier": SHARDED}
    )


def test_what_a_wildcard_names_and_has_no_weights_is_left_out_of_sharded_layers() -> None:
    assert list(named_layers(Net(), {"classifier.*": SHARDED})) == ["classifier.1", "classifier.4"]
    assert "has no weights" in refusal(Net(), {"features.1": SHARDED})
    with pytest.raises(TrainError, match="names no layer of the network"):
        named_layers(nn.Sequential(nn.ReLU()), {"*": SHARDED})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "row"}, "kind 'row'; choose one of data, column-parallel, row-parallel"),
        ({"kind": "data", "chunks": 2}, "a data placement has chunks=2"),
        ({"kind": "model", "chunks": 0}, "chunks=0; it must be at least 1"),
        ({"kind": "model", "activation_checkpointing": True}, "activation_checkpointing=True; only fully-sharded can"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        Placement(**fields)


def test_the_outermost_of_sharded_layers_counts() -> None:
    assert list(named_layers(Net(), {"c*": SHARDED})) == ["classifier"]
    assert named_layers(Net(), {"head": Placement(kind="data")}) == {}
