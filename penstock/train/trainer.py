"""One training step, on one process or many."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.named_network import NamedCall
from penstock.train.checkpoint.state import full_state
from penstock.train.data.collate import joined_tensors, traced_tensors
from penstock.train.data.examples import Examples
from penstock.train.data.length_order import epoch_order
from penstock.train.data.loader import Loader, ReadingLoader
from penstock.train.data.readers import reading_threads
from penstock.train.data.resident import keep_on_device, make_loader
from penstock.train.data.sampler import equal_shares, one_pass, training_order
from penstock.train.data.trees import Tree, leaves, mapped, split
from penstock.train.named_values import (
    check_chosen,
    checked_loss,
    described_error,
    loss_values,
    metric_values,
    noted,
    total_loss,
)
from penstock.train.parallel.batch_norm import RunningStatistics
from penstock.train.parallel.buckets import GradientBuckets
from penstock.train.parallel.dataflow import Call, plain_call
from penstock.train.parallel.gathered import gathered, rows_of_outputs
from penstock.train.parallel.layout import cast_of, lay_out
from penstock.train.parallel.losses import CrossEntropy, start_targets
from penstock.train.parallel.tensor_parallel import layers_that_wait
from penstock.train.parallel.world import World
from penstock.train.recipe import Predictions, Recipe
from penstock.train.report.throughput import mfu_of_one
from penstock.train.step.capturable_optimizer import check_optimizer, share_norms
from penstock.train.step.compile import compiled, should_split
from penstock.train.step.cuda_graph import Steps
from penstock.train.step.ema import EMA
from penstock.train.step.fine_tuning import check_scaled, freeze, layers_of, scale_rates
from penstock.train.step.optimizer_step import OptimizerStep
from penstock.train.step.parameter_groups import left_out, optimizer_of, untrained_loss_notices
from penstock.train.step.seeds import DROPOUT, seed_of_step, seed_torch

# B examples of this process

# Of a batch of a validation.
MAX_ROWS_PER_RANK = 1024
MAX_BYTES_PER_RANK = 1 << 26
# Of a batch of records, for each row of a training batch.
RECORDS_PER_ROW = 4


@final
class Trainer:
    """A network placed on the processes, its optimizer and schedule, and the step that trains it.

    Args:
        module: The network, whole.
        recipe: The training recipe.
        total_steps: Number of steps that the schedule spans.
        world: The processes.
        inputs: Some raw inputs, `[B, ...]`, to trace the network with.
        record: The named tensors of one input, where the inputs are records.

    Attributes:
        notify: Called with a sentence when a step runs in an unexpected way.
        mfu_of_one: The MFU at one example a second, or None and the reason.

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
        record: RecordSpec | None = None,
    ) -> None:
        self.notify: Callable[[str], object] = lambda notice: None
        self.world = world = world or World()
        self.recipe = recipe
        self.total_steps = total_steps
        # The shapes of the loss's arguments are checked in the first step only.
        self._sizes_checked = False
        self._call: Call = plain_call if record is None else NamedCall(module, record)
        examples_B = traced_tensors(inputs, record)
        varies = record is not None and bool(record.dims)
        frozen_norms = freeze(module, recipe)
        # Counted before the network is placed.
        self.mfu_of_one = mfu_of_one(module, examples_B, recipe, world, call=self._call, varies=varies)
        self.layout = lay_out(module, recipe, world, examples_B, self._call, frozen_norms)
        self.parallel_model = self.layout.model
        self.module = self.parallel_model.module
        self._frozen_norms = layers_of(self.parallel_model, frozen_norms)
        self._enter_training()
        self.optimizer = optimizer_of(recipe, self.parallel_model)
        scale_rates(self.optimizer, self.parallel_model, recipe.lr_scale)
        check_optimizer(self.optimizer, self.parallel_model.slices)
        self.layout.notices.extend(left_out(self.optimizer, self.parallel_model))
        self.layout.notices.extend(untrained_loss_notices(recipe.loss))
        share_norms(self.optimizer, self.parallel_model, world)
        self.optimizer_step = OptimizerStep(self.module, self.optimizer, recipe, world, examples_B, self._call)
        self.layout.notices.extend(self.optimizer_step.notices)
        # An optimizer of the user's may have no rate at all.
        rates = [float(group["lr"]) for group in self.optimizer.param_groups] if recipe.lr_scale else []
        self.schedule = recipe.schedule(self.optimizer, total_steps) if recipe.schedule else None
        if recipe.lr_scale:
            check_scaled(self.optimizer, rates, self.schedule)
        self.gradients = GradientBuckets(
            self.optimizer_step.leaves,
            list(self.parallel_model.slices),
            world,
            precision=recipe.parallel.gradient_precision,
            ready=self.optimizer_step.ready if self.optimizer_step.steps_in_backward else None,
            keep_comm_dtype=self.optimizer_step.has_compute_copies,
        )
        self._statistics = RunningStatistics(self.module, world, self._frozen_norms)
        self.ema = None if recipe.ema is None else EMA(self.module, recipe.ema.decay, warm_up=recipe.ema.warm_up)
        self._network = self._compiled() if recipe.execution.compile else self.module
        why_eager = self.optimizer_step.capturable.why_eager if recipe.execution.graph else "the recipe has graph=False"
        self.steps = Steps(self._compute, world, why_eager, lambda notice: self.notify(notice), self._captured)

    def _enter_training(self) -> None:
        self.module.train()
        for norm in self._frozen_norms:
            norm.eval()

    def _compiled(self) -> Callable[..., Any]:
        example_s = self.mfu_of_one[0]
        least_s = None if example_s is None else example_s * self.recipe.batch_size
        splits = should_split(self.gradients.all_reduce_bytes, least_s)
        segment_starts = map(self.optimizer_step.weight_of, self.gradients.bucket_boundaries if splits else ())
        return compiled(self.module, list(segment_starts), layers_that_wait(self.module))

    @property
    def rows(self) -> slice:
        """This process's rows of each global batch."""
        parts = self.recipe.execution.accumulation_steps
        first = sum(self.layout.rows[: self.world.rank]) * parts
        return slice(first, first + self.layout.rows[self.world.rank] * parts)

    def close(self) -> None:
        """Release the network: remove hooks, gradients and the captured step."""
        self.steps.restart()
        self.gradients.close()

    def feed(self, examples: Examples, first_step: int, notify: Callable[[str], object]) -> Loader:
        """Load this process's rows of the batches, from a step on."""
        recipe, world, workers = self.recipe, self.world, self._workers()
        order = training_order(
            recipe.seed,
            len(examples),
            recipe.batch_size,
            first_step=first_step,
            rows=self.rows,
            order=epoch_order(examples, recipe.order, batch_size=recipe.batch_size, seed=recipe.seed, notify=notify),
        )
        on_bad = recipe.loading.bad_examples
        kept = keep_on_device(examples, world.device, workers=workers, notify=notify, on_piece=world.mark_progress)
        return make_loader(
            kept,
            order,
            workers=workers,
            on_bad=on_bad,
            device=world.device,
            notify=notify,
            # A captured or compiled step has one shape.
            to_max=self.steps.captures or recipe.execution.compile or self._shares_rows,
        )

    @property
    def _shares_rows(self) -> bool:
        """True if layers gather the rows of all processes, which must then be equally long."""
        kinds = {placement.kind for placement in self.layout.placements.values()}
        return self.world.size > 1 and bool(kinds - {"fully-sharded"})

    def _workers(self) -> int:
        return self.recipe.loading.workers or reading_threads(self.world.local_size)

    def step(self, batch: tuple[Tree, Tree], step: int) -> Tensor:
        """Take one step with this process's rows of the batch.

        Args:
            batch: Raw inputs and their targets, tensors or trees of them.
            step: The step's number, which determines all its random numbers.

        Returns:
            This process's share of the global batch's mean loss, a scalar still on its device: the sum over the
            processes is that loss.
        """
        recipe, device = self.recipe, self.world.device
        inputs_B, targets_B = batch
        seed = seed_of_step(recipe.seed, step, self.world.rank)
        if recipe.augment is not None:
            inputs_B, targets_B = recipe.augment(inputs_B, targets_B, torch.Generator().manual_seed(seed))
        inputs_B, targets_B = (mapped(lambda part: part.to(device), tree) for tree in (inputs_B, targets_B))
        # Dropout draws from torch's global generator, which must not repeat the augmentation's numbers.
        seed_torch(seed ^ DROPOUT, device)
        # Only after a validation: it visits all layers, which takes a tenth of a short step.
        if not self.module.training:
            self._enter_training()
        # Outside the captured step.
        self.optimizer_step.capturable.upload_rates()
        share = self.steps.take(inputs_B, targets_B, self.optimizer_step.capturable.constants)
        if self.schedule is not None:
            self.schedule.step()
        return share

    def _compute(self, inputs_B: Tree, targets_B: Tree) -> Tensor:
        """Run the device's part of a step. The host reads no tensor in it, so that a CUDA graph can capture it."""
        micro_batches, rows = self.recipe.execution.accumulation_steps, self.layout.rows[self.world.rank]
        losses: list[Tensor] = []
        self.gradients.start()
        micro = zip(split(inputs_B, micro_batches), split(targets_B, micro_batches), strict=True)
        for count, (inputs, targets) in enumerate(micro, start=1):
            if count == micro_batches:
                self.gradients.begin_last_backward()
            with self.optimizer_step.compute_weights():
                # The loss is a mean over this process's examples; the step needs the mean over all processes'.
                share = self._loss(inputs, targets) * (rows / self.recipe.batch_size)
                self.optimizer_step.backward(share)
            losses.append(share.detach())
        self.gradients.finish()
        self.optimizer_step.finish(self.gradients)
        self._statistics.average()
        if self.ema is not None:
            self.ema.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _loss(self, inputs_B: Tree, targets_B: Tree) -> Tensor:
        recipe, world, rows = self.recipe, self.world, self.layout.rows
        with cast_of(recipe, world.device):
            if not self.parallel_model.vocab_parallel:
                outputs_B = self._call(self._network, inputs_B)
                loss = total_loss(checked_loss(recipe.loss, outputs_B, targets_B, sizes=not self._sizes_checked))
                self._sizes_checked = True
                if not loss.requires_grad:
                    raise TrainError(
                        "the loss does not depend on the network's trained parameters; compute it of the outputs with "
                        "torch's operations, without detach, argmax, .item() or NumPy."
                    )
                return loss
            assert isinstance(recipe.loss, CrossEntropy)
            if not isinstance(targets_B, Tensor):
                raise TrainError(
                    f"a vocab-parallel last layer needs one array of targets, not a {type(targets_B).__name__}; make "
                    f"the layer's placement 'model'."
                )
            # Gathered while the network computes.
            targets_of_all = start_targets(world, targets_B, rows)
            return recipe.loss.vocab_parallel(
                world, self._call(self._network, inputs_B), targets_B, rows, targets_of_all
            )

    def _captured(self) -> None:
        self.gradients.finish_capture()
        self.optimizer_step.finish_capture()

    def is_finite(self) -> bool:
        """Check that all weights are finite, in every process. Collective; the host waits for the device."""
        infinite = [~parameter.detach().isfinite().all() for parameter in self.module.parameters()]
        return self.world.sum_on_host(torch.stack(infinite).any()) == [0.0]

    def skips_all_steps(self) -> bool:
        """Check whether fp16 skips every step, because gradients are not finite at any loss scale. Collective."""
        scale = self.optimizer_step.loss_scale
        return scale is not None and self.world.sum_on_host(scale.is_lost) != [0.0]

    def validate(self, examples: Examples, *, bad: dict[str, int] | None = None) -> dict[str, float]:
        """Compute the loss and every metric over a whole set, the same in every process.

        Parts of a loss that is a mapping are under `loss.part`, those of such a metric under `name.key`.

        Args:
            examples: The set.
            bad: Counts examples that this process could not read, by name; the first time `notify` is called.
        """
        predictions = self.predict(examples, bad=bad)
        values = {} if predictions is None else self._values(predictions)
        # Only the first process knows the names of mappings.
        values = self.world.all_gather_objects(values)[0]
        check_chosen(self.recipe.chosen_metrics, values)
        return values

    def try_validation(self, examples: Examples, first: int) -> str | None:
        """Try the loss and every metric on the first examples of a set. Collective.

        A metric may need more examples, or others, than these: only a whole validation shows that it fails.

        Args:
            examples: The set.
            first: How many.

        Returns:
            What fails, in the first process; None if nothing does.
        """
        predictions = self.predict(examples, first=first)
        if predictions is None:
            return None
        device = self.world.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                values = self._values(predictions)
                check_chosen(self.recipe.chosen_metrics, values)
                self.recipe.selection.check(values)
        except Exception as error:  # noqa: BLE001 - a metric of the user's raises anything
            return described_error(error)
        return None

    def _values(self, predictions: Predictions) -> dict[str, float]:
        """The loss and every metric."""
        with torch.no_grad(), cast_of(self.recipe, self.world.device):
            values = loss_values(checked_loss(self.recipe.loss, *predictions))
        for name, metric in self.recipe.metrics.items():
            with noted(f"The metric {name!r}", *predictions):
                found = metric(*predictions)
            values |= metric_values(name, found)
        return values

    def predict(
        self, examples: Examples, *, bad: dict[str, int] | None = None, first: int | None = None
    ) -> Predictions | None:
        """Run the network over a whole set. Collective; the first process gets the outputs, the others None.

        Args:
            examples: The set.
            bad: As of `validate`.
            first: Only so many examples, the first ones.
        """
        recipe, world = self.recipe, self.world
        most = MAX_ROWS_PER_RANK
        if examples.record is not None:
            # The activations of long examples are much larger than their inputs.
            most = min(most, RECORDS_PER_ROW * max(1, recipe.batch_size // world.size))
        batch_rows = world.size * max(1, min(most, MAX_BYTES_PER_RANK // max(1, examples.input_nbytes)))
        number = len(examples) if first is None else min(first, len(examples))
        counts = [len(places.indices_B) for places in one_pass(number, batch_rows)]
        order = equal_shares(one_pass(number, batch_rows), world.rank, world.size)
        workers, on_bad = self._workers(), recipe.loading.bad_examples
        if examples.in_memory or first is not None:
            workers = 0
        notify = None if bad is None else self.notify
        all_outputs: list[Tree] = []
        all_targets: list[Tree] = []
        scalars: list[bool] = []
        self.module.eval()
        with (
            # Not inference_mode: a training step may use tensors that the network caches here, such as a mask.
            torch.no_grad(),
            cast_of(recipe, world.device),
            ReadingLoader(
                examples,
                order,
                workers=workers,
                on_bad=on_bad,
                device=world.device,
                notify=notify,
                to_max=self._shares_rows,
            ) as loader,
        ):
            loader.bad = {} if bad is None else bad
            for count, (inputs, targets) in zip(counts, loader, strict=True):
                outputs, scalars = rows_of_outputs(self._call(self.module, inputs), len(leaves(inputs)[0]))
                if world.size > 1:
                    outputs = gathered(world, "the outputs", outputs, count, fills=False)
                    targets = gathered(world, "the targets", targets, count, fills=True)
                if world.is_rank_zero:
                    all_outputs.append(mapped(Tensor.cpu, outputs))
                    all_targets.append(mapped(Tensor.cpu, targets))
        # Only the first process has outputs.
        if not all_outputs:
            return None
        means = iter(scalars)
        outputs = mapped(lambda part: part.mean() if next(means) else part, joined_tensors(all_outputs, fills=False))
        return Predictions(outputs, joined_tensors(all_targets, fills=True))

    def ema_weights(self) -> AbstractContextManager[None]:
        """Give the network the EMA of its weights, where the recipe has one, while the context is open."""
        return nullcontext() if self.ema is None else self.ema.swapped()

    def full_state(self) -> dict[str, Tensor]:
        """Return the network's state, whole and on the CPU; nothing in other processes than the first. Collective."""
        return full_state(self.parallel_model, self.world, self.module.state_dict())
