"""Examples of datasets that other libraries made: Hugging Face `datasets`, MosaicML streaming, rows by name."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, final

import numpy as np

from penstock.core.errors import BadExample, InvalidInput, PenstockError, TrainError
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.columns import Column, column_of, fill, fitted
from penstock.train.data.examples import Examples
from penstock.train.data.picture_reader import CENTRE
from penstock.train.data.row_inputs import Reader, decoding, plain_reader
from penstock.train.data.row_source import MapRows, RowSource
from penstock.train.data.row_targets import RowTargets, stacked
from penstock.train.data.sampler import Indices, Seeds
from penstock.train.data.trees import Tree, joined, leaves, row_forms

# B examples of a batch

RowFunction = Callable[[Any], tuple[Any, Any]]


@final
class DatasetExamples(Examples):
    """Examples of a dataset with named columns, by index.

    Pictures and sounds that the dataset stores as files are decoded by the reading threads of Penstock, JPEG at a
    reduced size where that is enough. Numbers and lists of numbers become arrays. Text needs a `decode` or a `row`.

    Args:
        dataset: A `datasets.Dataset`; MosaicML's `StreamingDataset` or `LocalDataset`; or any dataset whose
            `dataset[i]` is a dictionary.
        spec: The raw input, `app.input`.
        inputs: The column of the input; for several inputs, their columns by the names of the tensors. By default the
            columns that are called as the tensors are.
        targets: The column of the targets, or a dictionary or tuple of columns. Floats become float32, whole numbers
            int64. A `ClassLabel`, or a text with `classes`, becomes its number.
        row: In place of columns: a function of a row as `dataset[i]` gives it, which returns its input (an array, or a
            dictionary of arrays by name) and its target (a number, an array, or a dictionary or tuple of them).
        decode: The application's `decode`: it gets the bytes of a picture, sound or text and their content type.
        random: Random crops of pictures, mirrored half of the time, another one in every epoch; else the centre crop.
        share: The sides of the centre crop, as a share of the largest crop with the spec's ratio.
        classes: The classes in the order of their targets, such as the labels of an application's output.
        sample_rate_hz: The sample rate of sounds; by default that of the column, if it has one.
        target_axes: For targets that are as long as the inputs, see `Examples`.

    Attributes:
        classes: The names of the targets; empty if they have none.

    Raises:
        TrainError: There is no such column, it does not fit, there are no rows, or they cannot be read at random.
    """

    in_processes: ClassVar[bool] = True

    def __init__(
        self,
        dataset: Any,
        spec: ChunkSpec,
        *,
        inputs: str | Mapping[str, str] | None = None,
        targets: Any = None,
        row: RowFunction | None = None,
        decode: Callable[[bytes, str], Any] | None = None,
        random: bool = False,
        share: float = CENTRE,
        classes: tuple[str, ...] | None = None,
        sample_rate_hz: int | None = None,
        target_axes: Any = None,
    ) -> None:
        self._source, self._spec, self._row = _source_of(dataset), spec, row
        self.declare(spec)
        self.target_axes, self.classes = target_axes, tuple(classes or ())
        self._columns: dict[str, str] = {}
        self._targets: RowTargets | None = None
        self._decoding: Reader | None = None
        self._readers: dict[str, Reader] = {}
        if row is not None:
            if inputs is not None or targets is not None or decode is not None or random:
                raise TrainError("there is a row function, which makes inputs and targets; leave the columns out.")
            return
        if targets is None:
            raise TrainError(
                f"there is no column of the targets; give targets='COLUMN', one of {_names(self._source)}."
            )
        targets = tuple(targets) if isinstance(targets, list) else targets
        columns = self._named_columns(inputs, whole=decode is not None)
        for name in (*columns.values(), *leaves(targets)):
            self._check_column(name)
        self._columns = columns
        self._targets = RowTargets(self._source, targets, classes, target_axes, self.record)
        self.classes = self._targets.classes
        if decode is not None:
            (column,) = columns.values()
            self._decoding = decoding(self._source.kinds[column], column, spec, decode, random=random)
            return
        pictures = False
        for name, column in columns.items():
            kind = self._source.kinds[column]
            rate_hz = sample_rate_hz or self._source.rates_hz.get(column)
            tensor = spec if isinstance(spec, TensorSpec) else spec.by_name[name]
            self._readers[name] = plain_reader(kind, column, tensor, random=random, share=share, rate_hz=rate_hz)
            pictures = pictures or self._readers[name].is_picture
        if random and not pictures:
            raise TrainError("DatasetExamples has random=True, and no column of pictures to crop; leave it out.")
        self.varies = random

    def _named_columns(self, inputs: str | Mapping[str, str] | None, *, whole: bool) -> dict[str, str]:
        """Return the column of each input tensor; with `whole`, of the one that `decode` makes all tensors of."""
        tensors = [self._spec.name] if isinstance(self._spec, TensorSpec) else list(self._spec.by_name)
        if isinstance(inputs, str) and (whole or len(tensors) == 1):
            return {tensors[0]: inputs}
        if whole:
            raise TrainError(f"decode takes one column, and inputs is {inputs!r}; give inputs='COLUMN'.")
        if inputs is None and not (isinstance(self._spec, TensorSpec) and self._spec.name not in self._source.kinds):
            return {name: name for name in tensors}
        if not isinstance(inputs, Mapping):
            wanted = "inputs='COLUMN'" if len(tensors) == 1 else f"a column for each of {', '.join(tensors)}"
            raise TrainError(f"inputs is {inputs!r}; give {wanted}. The columns are {_names(self._source)}.")
        if isinstance(self._spec, RecordSpec):
            try:
                return self._spec.named(inputs)
            except InvalidInput as error:
                raise TrainError(f"inputs is {dict(inputs)}: {error}") from None
        if len(inputs) != 1:
            raise TrainError(f"inputs is {dict(inputs)}, and the input is one tensor; give inputs='COLUMN'.")
        return dict(inputs)

    def _check_column(self, name: Any) -> None:
        if name not in self._source.kinds:
            near = get_close_matches(str(name), self._source.kinds, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise TrainError(f"the dataset has no column {name!r}; it has {_names(self._source)}.{meant}")

    def __len__(self) -> int:
        return len(self._source)

    def fingerprint(self) -> dict[str, str]:
        """See `Examples`; of a dataset, by its columns."""
        # A row function may read any column.
        used = list(self._source.kinds)
        if self._targets is not None:
            used = list(dict.fromkeys([*self._columns.values(), *self._targets.columns]))
        classes = {"classes": ", ".join(self.classes)} if self.classes else {}
        described = {"examples": f"{len(self):,}", "inputs": self.describe()} | classes
        return described | self._source.fingerprint(used)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Tree:
        """See `Examples`."""
        if self._row is not None:
            return self._read_by_function(self._row, indices_B, inputs_B)
        assert self._targets is not None
        values = self._source.read(indices_B, list(dict.fromkeys([*self._columns.values(), *self._targets.columns])))
        if self._decoding is not None:
            (column,) = self._columns.values()
            made = self._decoding.column(values[column], indices_B, seeds_B)
            for place in range(len(indices_B)):
                inputs_B[place] = made[place]
        else:
            columns = {
                name: self._readers[name].column(values[column], indices_B, seeds_B)
                for name, column in self._columns.items()
            }
            self._fill(inputs_B, columns, indices_B)
        return self._targets.read(values, indices_B)

    def _fill(self, inputs_B: Array, columns: dict[str, Column], indices_B: Indices) -> None:
        """Copy columns into raw inputs; one row that does not fit is a bad example."""
        try:
            self._copy(inputs_B, columns)
        except PenstockError as error:
            for place, index in enumerate(indices_B.tolist()):
                one = {name: column[place : place + 1] for name, column in columns.items()}
                try:
                    self._copy(inputs_B[place : place + 1], one)
                except PenstockError as own:
                    raise _unfitting(index, str(own).replace(" of example 0 ", " ")) from None
            raise AssertionError(f"no row alone fails: {error}") from error

    def _copy(self, inputs_B: Array, columns: dict[str, Column]) -> None:
        if isinstance(self._spec, RecordSpec):
            made, lengths = fitted(columns, self._spec)
            inputs_B[...] = np.zeros((), inputs_B.dtype)
            for name, column in made.items():
                fill(inputs_B[name], column, np.arange(len(inputs_B)))
            for name, lengths_B in lengths.items():
                inputs_B[name] = lengths_B
            return
        (column,) = columns.values()
        if isinstance(column, np.ndarray) and column.ndim > 1 and self._spec.accepts(column.shape[1:]):
            # All rows at once: one at a time, threads hold one another back by Python's lock.
            inputs_B[...] = self._spec.cast(column)
            return
        for place in range(len(inputs_B)):
            array = self._spec.cast(np.asarray(column[place]))
            inputs_B[place] = self._spec.check(array)

    def _read_by_function(self, function: RowFunction, indices_B: Indices, inputs_B: Array) -> Tree:
        targets: list[Tree] = []
        first: Tree = None
        for place, (index, row) in enumerate(zip(indices_B.tolist(), self._source.rows(indices_B), strict=True)):
            try:
                given, target = function(row)
                self._fill_one(inputs_B[place : place + 1], given)
                targets.append(stacked(target, self.target_axes, self.record))
            except PenstockError as error:
                raise _unfitting(index, str(error)) from error
            except Exception as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
                raise _unfitting(index, f"the row function fails ({said})") from error
            form = row_forms(targets[-1])
            first = form if place == 0 else first
            if form != first:
                raise TrainError(
                    f"the target of row {index:,} is {form}, and that of row {indices_B[0]:,} is {first}; let the row "
                    f"function give all rows the same names, dtypes and shapes."
                )
        return joined(targets)

    def _fill_one(self, inputs_1: Array, given: Any) -> None:
        if isinstance(self._spec, RecordSpec):
            named = given if isinstance(given, Mapping) else {next(iter(self._spec.by_name)): given}
            self._copy(inputs_1, {name: [np.asarray(array)] for name, array in named.items()})
        else:
            self._copy(inputs_1, {"input": column_of([np.asarray(given)], "the input")})


def _source_of(dataset: Any) -> RowSource:
    """Choose how the rows of a dataset are read, by the library that it comes from."""
    kind = type(dataset)
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "datasets" in modules:
        from datasets import Dataset, DatasetDict, IterableDatasetDict

        from penstock.train.data.hugging_face import ArrowRows

        if isinstance(dataset, Dataset):
            return ArrowRows(dataset)
        if isinstance(dataset, DatasetDict | IterableDatasetDict):
            raise TrainError(
                f"the dataset is a {kind.__name__} of the splits {', '.join(map(repr, dataset))}; give one of them, "
                f"such as dataset[{next(iter(dataset), 'train')!r}]."
            )
        raise TrainError(
            f"the dataset is {_article(kind.__name__)} (streaming=True), whose rows cannot be read at random, so that "
            f"no run could be resumed exactly; load it without streaming, or save it once: "
            f"Dataset.from_generator(lambda: iter(dataset), features=dataset.features).save_to_disk(FOLDER)."
        )
    if not hasattr(dataset, "__getitem__") or not (hasattr(dataset, "__len__") or hasattr(dataset, "size")):
        raise TrainError(
            f"the dataset is {_article(kind.__name__)}, whose rows cannot be read at random; give one with dataset[i] "
            f"and a length, or write its rows to disk once."
        )
    return MapRows(dataset)


def _unfitting(index: int, said: str) -> BadExample:
    return BadExample(f"row {index:,} does not fit: {said.rstrip('.')}.", index=index, name=f"row {index}")


def _names(source: RowSource) -> str:
    return ", ".join(map(repr, source.kinds))


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
