"""The one step that moves a network, for one process or many."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.average import Average
from penstock.train.batch_norm import RunningStatistics
from penstock.train.chance import DROPOUT, seed_of_step, seed_torch
from penstock.train.checkpoint import Checkpoint
from penstock.train.compiled import compiled, worth_parting
from penstock.train.data import training_order
from penstock.train.evaluation import seen_of
from penstock.train.examples import Examples
from penstock.train.feed import Feed
from penstock.train.gradients import Gradients
from penstock.train.graph import Steps
from penstock.train.layout import EXAMPLES_SEEN, cast_of, lay_out
from penstock.train.losses import CrossEntropy, start_targets
from penstock.train.pace import mfu_of_one
from penstock.train.placed import layers_that_wait
from penstock.train.reading import reading_threads
from penstock.train.recipe import Recipe, Seen
from penstock.train.resident import make_feed, settle
from penstock.train.saver import Saver
from penstock.train.scaling import LossScale
from penstock.train.snapshot import Part
from penstock.train.state import (
    check_optimizer,
    load_optimizer,
    load_whole,
    own_optimizer,
    own_state,
    parts_of,
    tell_optimizer,
    whole_names,
    whole_state,
)
from penstock.train.stepper import Stepper
from penstock.train.stored import Stored, read_whole
from penstock.train.working import WorkingWeights, why_not
from penstock.train.world import World

# B examples of this process


@dataclass(slots=True)
class History:
    """How far a run is and the best it has seen; of the best weights and of what was bad, each process has its part."""

    step: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_value: float | None = None
    best_metrics: dict[str, float] | None = None
    best_weights: dict[str, Tensor] | None = None
    bad_examples: dict[str, int] = field(default_factory=dict)


@final
class Trainer:
    """A network laid over the processes, its optimizer and schedule, and the one step that moves them.

    Args:
        module: The network, whole.
        recipe: How it is trained.
        total_steps: How many steps the schedule spans.
        world: The processes.
        inputs: Some raw inputs, `[B, ...]`, to see by what goes where.

    Attributes:
        say: Called with a sentence on what a step does otherwise than one would expect.

    Raises:
        TrainError: The recipe does not fit the network or the processes.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        total_steps: int,
        world: World | None = None,
        *,
        inputs: Array,
    ) -> None:
        self.say: Callable[[str], object] = lambda sentence: None
        self.world = world or World()
        self.recipe = recipe
        self.total_steps = total_steps
        # Of the network as it is before it is laid out.
        of_one = mfu_of_one(module, inputs, recipe, self.world)[0] if recipe.compile and self.world.size > 1 else None
        self.layout = lay_out(module, recipe, self.world, torch.from_numpy(inputs))
        self.placed = self.layout.placed
        self.module = self.placed.module
        self.module.train()
        self._whole_names = whole_names(self.placed)
        self.optimizer = recipe.optimizer(self.module.parameters())
        check_optimizer(self.optimizer, self.placed.shards)
        tell_optimizer(self.optimizer, self.placed, self.world)
        self._scale = LossScale(self.world) if recipe.precision == "fp16" else None
        self._stepper = Stepper(
            self.optimizer, self.world.device, skips=self._scale is not None, sparse=_is_sparse(self.module)
        )
        self.schedule = recipe.schedule(self.optimizer, total_steps) if recipe.schedule else None
        self._working = self._working_weights(inputs) if recipe.working_weights else None
        self.gradients = Gradients(
            self._working.leaves if self._working else dict(self.module.named_parameters()),
            list(self.placed.shards),
            self.world,
            precision=recipe.gradient_precision,
            ready=self._step_early if self._steps_early else None,
            as_sent=self._working is not None,
        )
        self._statistics = RunningStatistics(self.module, self.world)
        self._average: Average | None = None
        if recipe.average_decay is not None:
            self._average = Average(self.module, recipe.average_decay, warm_up=recipe.average_warm_up)
        self._network: Callable[[Tensor], Tensor] = self.module
        if recipe.compile:
            least_s = None if of_one is None else of_one * recipe.batch_size
            parted = worth_parting(self.gradients.travel_bytes, least_s)
            firsts = [self._weight_of(leaf) for leaf in self.gradients.first_of_buckets] if parted else []
            self._network = compiled(self.module, firsts, layers_that_wait(self.module))
        why_eager = self._stepper.why_eager if recipe.graph else "the recipe has graph=False"
        self.steps = Steps(self._compute, self.world, why_eager, lambda sentence: self.say(sentence), self._settle)

    @property
    def rows(self) -> slice:
        """Which rows of each global batch are this process's."""
        first = sum(self.layout.rows[: self.world.rank]) * self.recipe.accumulate
        return slice(first, first + self.layout.rows[self.world.rank] * self.recipe.accumulate)

    def close(self) -> None:
        """Leave the network to whoever wants it: nothing of the training hangs on it any more."""
        self.steps.restart()
        self.gradients.close()

    def feed(self, examples: Examples, first_step: int, notice: Callable[[str], object]) -> Feed:
        """This process's rows of the batches of the steps from one on."""
        recipe, world = self.recipe, self.world
        order = training_order(recipe.seed, len(examples), recipe.batch_size, first_step=first_step, rows=self.rows)
        on_bad, workers = recipe.bad_examples, self._workers()
        settled = settle(examples, world.device, workers=workers, say=notice, got_on=world.got_on)
        return make_feed(settled, order, workers=workers, on_bad=on_bad, device=world.device, notice=notice)

    def _workers(self) -> int:
        return self.recipe.workers or reading_threads(self.world.local_size)

    def step(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Take one step with this process's rows of the batch.

        Args:
            batch: Raw inputs and their targets.
            step: Its number, of which all chance is a function.

        Returns:
            This process's share of the global batch's mean loss, a scalar still on its device: the sum over the
            processes is that loss.
        """
        recipe, world = self.recipe, self.world
        inputs_B, targets_B = batch
        seed = seed_of_step(recipe.seed, step, world.rank)
        if recipe.augment is not None:
            inputs_B, targets_B = recipe.augment(inputs_B, targets_B, torch.Generator().manual_seed(seed))
        inputs_B, targets_B = inputs_B.to(world.device), targets_B.to(world.device)
        # Dropout has no generator of its own; its chance must not be the augmentation's.
        seed_torch(seed ^ DROPOUT, world.device)
        # After a validation; it goes through all layers, which takes a tenth of a short step.
        if not self.module.training:
            self.module.train()
        self._stepper.carry()
        share = self.steps.take(inputs_B, targets_B, self._stepper.constants)
        if self.schedule is not None:
            self.schedule.step()
        return share

    def _compute(self, inputs_B: Tensor, targets_B: Tensor) -> Tensor:
        """All of a step that the device does. The host reads nothing of it: on a GPU it is captured."""
        recipe, world = self.recipe, self.world
        self.gradients.start()
        parts = zip(inputs_B.chunk(recipe.accumulate), targets_B.chunk(recipe.accumulate), strict=True)
        losses: list[Tensor] = []
        for part, (inputs, targets) in enumerate(parts, 1):
            if part == recipe.accumulate:
                self.gradients.travel()
            # A mean over this process's examples; what is wanted is the mean over all processes' examples.
            with self._working.entered() if self._working else nullcontext():
                share = self._loss(inputs, targets) * (self.layout.rows[world.rank] / recipe.batch_size)
                (share if self._scale is None else self._scale.scaled(share)).backward()
            losses.append(share.detach())
        self.gradients.finish()
        if self._scale is not None:
            self._scale.unscale(self.gradients.tensors)
        if recipe.clip_norm is not None:
            self.gradients.clip(recipe.clip_norm)
        if not self._steps_early:
            self._stepper.step(None if self._scale is None else self._scale.found_inf)
        elif self._working is not None:
            self._working.check()
            # Nothing is left to step; schedules want to know that it was done.
            self._stepper.step(only=())
        if self._scale is not None:
            self._scale.move()
        self._statistics.average()
        if self._average is not None:
            self._average.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @property
    def _steps_early(self) -> bool:
        """Whether parameters are stepped as soon as their gradients are there, beside the backward pass."""
        if self._working is not None:
            return True
        whole = self.recipe.clip_norm is not None or self._scale is not None
        return self.world.device.type == "cuda" and self._stepper.steps_apart and not whole

    def _working_weights(self, inputs: Array) -> WorkingWeights | None:
        why = why_not(self.recipe, self.optimizer)
        if why is not None:
            self.layout.sentences.append(f"Weights are turned to bf16 in every step: {why}.")
            return None
        examples_B = torch.from_numpy(inputs[:EXAMPLES_SEEN]).to(self.world.device)
        with cast_of(self.recipe, self.world.device):
            working = WorkingWeights(self.module, self.optimizer, self._stepper.rate_of, examples_B)
        self.layout.sentences.append(working.describe())
        return working

    def _settle(self) -> None:
        """The step was captured."""
        self.gradients.settle()
        if self._working is not None:
            self._working.settle()

    def _weight_of(self, leaf: nn.Parameter) -> nn.Parameter:
        return self._working.weight_of(leaf) if self._working else leaf

    def _step_early(self, leaves: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        if self._working is None:
            self._stepper.step(only=leaves)
        else:
            self._working.step(leaves, gradients)

    def _loss(self, inputs_B: Tensor, targets_B: Tensor) -> Tensor:
        recipe, world, rows = self.recipe, self.world, self.layout.rows
        with cast_of(recipe, world.device):
            if not self.placed.head:
                return recipe.loss(self._network(inputs_B), targets_B)
            assert isinstance(recipe.loss, CrossEntropy)
            # On their way while the network computes.
            targets_of_all = start_targets(world, targets_B, rows)
            return recipe.loss.over_classes(world, self._network(inputs_B), targets_B, rows, targets_of_all)

    def is_finite(self) -> bool:
        """Whether all weights are finite, in every process. The host waits for the device, and all must ask."""
        strange = [~parameter.detach().isfinite().all() for parameter in self.module.parameters()]
        return self.world.total(torch.stack(strange).any()) == [0.0]

    def validate(
        self,
        examples: Examples,
        *,
        bad: dict[str, int] | None = None,
        notice: Callable[[str], object] | None = None,
    ) -> dict[str, float]:
        """The loss and every metric over a whole set, the same in every process.

        Args:
            examples: The set.
            bad: What this process could not read, by name, is counted here.
            notice: Called with a sentence when an example is first found to be damaged.
        """
        names = ["loss", *self.recipe.metrics]
        values = [0.0] * len(names)
        seen = self.seen(examples, bad=bad, notice=notice)
        if seen is not None:
            with torch.inference_mode(), cast_of(self.recipe, self.world.device):
                values[0] = self.recipe.loss(*seen).item()
            values[1:] = [float(metric(*seen)) for metric in self.recipe.metrics.values()]
        return dict(zip(names, self.world.of_first(values), strict=True))

    def seen(
        self,
        examples: Examples,
        *,
        bad: dict[str, int] | None = None,
        notice: Callable[[str], object] | None = None,
    ) -> Seen | None:
        """What the network makes of a whole set, in the first process; all must ask, and the others get None.

        Args:
            examples: The set.
            bad: As of `validate`.
            notice: As of `validate`.
        """
        self.module.eval()
        with torch.inference_mode(), cast_of(self.recipe, self.world.device):
            workers = 0 if examples.in_memory else self._workers()
            counted = {} if bad is None else bad
            return seen_of(self.module, examples, self.world, self.recipe, workers=workers, bad=counted, notice=notice)

    def averaged(self) -> AbstractContextManager[None]:
        """While it is entered, the network has the running mean of its weights, where the recipe asks for one."""
        return nullcontext() if self._average is None else self._average.swapped()

    def keep_best(self, history: History, metrics: dict[str, float]) -> None:
        """Remember these weights as the best."""
        history.best_step, history.best_value, history.best_metrics = history.step, metrics[self.recipe.best], metrics
        history.best_weights = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def whole_state(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The network's state, whole and on the CPU, in the first process; all must ask.

        Args:
            weights: Of which, as `keep_best` left them; by default the network's own.
        """
        return whole_state(self.placed, self.world, self.module.state_dict() if weights is None else weights)

    def save(self, saver: Saver, history: History) -> None:
        """Begin a checkpoint of all that the next step depends on; all processes must ask.

        Raises:
            TrainError: The checkpoint before could not be written.
        """
        weights = history.best_weights
        state = {
            "model": self._own(self.module.state_dict()),
            "optimizer": own_optimizer(self.placed, self.optimizer),
            "scale": None if self._scale is None else self._scale.state_dict(),
            "average": None if self._average is None else self._average.state_dict(self._own),
            "schedule": _plain(self.schedule.state_dict()) if self.schedule else None,
            "seconds": history.seconds,
            "bad_examples": self.world.counts(history.bad_examples),
            "best": {
                "step": history.best_step,
                "value": history.best_value,
                "metrics": history.best_metrics,
                "weights": None if weights is None else self._own(weights),
            },
        }
        saver.save(history.step, state, {"best": None if weights is None else history.best_step})

    def _own(self, weights: Mapping[str, Tensor]) -> dict[str, Part]:
        return own_state(self.placed, self._whole_names, weights)

    def restore(self, checkpoint: Checkpoint) -> History:
        """Go back to where a checkpoint was written, by whatever number of processes.

        Raises:
            TrainError: It is of another network.
        """
        state, best = checkpoint.state, checkpoint.state["best"]
        for name, own in {"scale": self._scale, "average": self._average, "schedule": self.schedule}.items():
            if (state.get(name) is None) != (own is None):
                raise TrainError(
                    f"the checkpoint is of a training {'without' if own else 'with'} what the recipe calls {name!r}; "
                    f"go on with the recipe that it began with, or begin a new run."
                )
        load_whole(self.placed, self.world, state["model"])
        optimizer = state["optimizer"]
        optimizer = optimizer | {"param_groups": self._stepper.flagged(read_whole(optimizer["param_groups"]))}
        load_optimizer(self.placed, self.world, self.optimizer, optimizer)
        self._stepper.settle()
        if self._working is not None:
            self._working.refresh()
        self.steps.restart()
        if self._scale is not None:
            self._scale.load_state_dict(read_whole(state["scale"]))
        if self._average is not None:
            average = state["average"] | {"steps": read_whole(state["average"].get("steps"))}
            self._average.load_state_dict(average, self._parts_of)
        if self.schedule is not None:
            self.schedule.load_state_dict(read_whole(state["schedule"]))
        return History(
            step=checkpoint.step,
            seconds=state["seconds"],
            best_step=best["step"],
            best_value=best["value"],
            best_metrics=best["metrics"],
            best_weights=None if best["weights"] is None else self._parts_of(best["weights"]),
            # Counted together, they are the first process's from here on.
            bad_examples=state.get("bad_examples", {}) if self.world.is_first else {},
        )

    def _parts_of(self, weights: Mapping[str, Stored]) -> dict[str, Tensor]:
        parts = parts_of(self.placed, self.world, weights)
        return {name: part.to(self.world.device, copy=True) for name, part in parts.items()}


def _is_sparse(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse for layer in module.modules())


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    # A schedule's state names its functions and its optimizer's hooks; numbers, texts and lists of them are the state.
    return {name: value for name, value in state.items() if isinstance(value, int | float | str | list | bool | None)}
