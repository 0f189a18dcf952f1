"""What an evaluation task is: the public way to add one.

A task says which cases there are, prepares each from text, and measures selectors on it. The harness does the rest:
it loads the model, takes up where an earlier run stopped, writes every result with where it came from, deals cases
out to processes, and shows progress. See docs/write-a-task.md.

Modules of tasks should import torch only where they use it: listing, refusing and reporting then stay fast.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from sparsesel.config import AnyConfig, BackendName, TaskConfig
from sparsesel.eval.tables import Section
from sparsesel.eval.texts import Text

if TYPE_CHECKING:
    from torch import Tensor

    from sparsesel.eval.decode import Prefill
    from sparsesel.selector import Selector

ConfigT = TypeVar("ConfigT", bound=TaskConfig)
Line = Mapping[str, Any]
Metrics = Mapping[str, Any]


class Setting(Protocol):
    """What a run gives to every task, before any model is loaded.

    Attributes:
        contexts: Lengths in tokens.
        seed: Of everything random.
        online: Whether a task may download its data.
    """

    @property
    def texts(self) -> Sequence[Text]:
        """The texts that the user named, or Python's language reference."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when it is first asked for, which takes seconds."""
        ...

    @property
    def model_config(self) -> Any:
        """The model's `transformers` configuration of its text decoder: how many layers and heads there are."""
        ...

    contexts: tuple[int, ...]
    seed: int
    online: bool


@dataclass(frozen=True)
class Case:
    """One prompt, which every selector is measured on. A task may derive its own from it.

    Attributes:
        tokens: What decides the result: the prompt, and what is scored if that is given. It is hashed.
        prefill: How many of them are prefilled, for the time left.
        steps: Decode steps of each selector, for the time left; at most.
        truncation: What was left out of the task's data to make it fit.
        details: More to write into the line's parameters, which need not agree when a run is resumed.
        from_texts: Whether it is made of the setting's texts, whose hash the line then has.
    """

    tokens: tuple[int, ...]
    prefill: int
    steps: int
    truncation: str = "none"
    details: Mapping[str, Any] = field(default_factory=dict)
    from_texts: bool = field(default=True, kw_only=True)


class Bench(Protocol):
    """The model that selectors are measured in.

    Attributes:
        model: In evaluation mode, nothing sparsified.
        tokenizer: Its tokenizer.
        selectors: Resolved configuration of each selector to measure, by its spec.
        device: Kind of device, `cpu` or `cuda`.
        backend: What runs the selectors, `triton` or `eager`.
        seed: Set before each prefill and before each decoder.
    """

    model: Any
    tokenizer: Any
    selectors: Mapping[str, AnyConfig]
    device: str
    backend: BackendName
    seed: int

    def tensor(self, tokens: Sequence[int]) -> "Tensor":
        """Tokens as `[T]` int64 on the model's device."""
        ...

    def prefill(
        self,
        tokens: "Sequence[int] | Tensor",
        specs: Iterable[str],
        *,
        wrap: "Callable[[Selector], Selector] | None" = None,
    ) -> "Prefill":
        """Prefill `[P]` tokens densely, once for all of `specs`.

        Args:
            tokens: The prompt without its last token.
            specs: Selectors that will decode.
            wrap: Given a layer's selector, what takes its place there: one that watches it, for example.
        """
        ...

    def doing(self, text: str) -> None:
        """Say what is being done now."""
        ...

    def advance(self, units: float = 1) -> None:
        """Say that decode steps were done; those of `prefill`'s decoders are counted by themselves."""
        ...


class Task(abc.ABC, Generic[ConfigT]):
    """A task. Derive from it and name the class in a `TaskPlugin`.

    Attributes:
        config: Its fields.
        needs_selectors: Whether it measures the selectors that the user names. One that does not has its own, see
            `selectors`, and is run without any.
        needs_model: Whether the model is run. Of one that is not, `bench.model` and `bench.tokenizer` may be None, and
            contexts may be longer than the model's positions.
        varies_budgets: Whether it compares budgets on purpose; otherwise results of unequal ones are marked.
    """

    needs_selectors: ClassVar[bool] = True
    needs_model: ClassVar[bool] = True
    varies_budgets: ClassVar[bool] = False

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @abc.abstractmethod
    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """(context, document) of every case, in the order to measure them in. Cheap: no tokenizer, no model.

        Raises:
            InputError: The task's fields do not go with the setting.
        """

    @abc.abstractmethod
    def prepare(self, setting: Setting, context: int, document: int) -> Case:
        """The case of a point, the same whenever it is asked for.

        Before any model is loaded it is asked for once for each context, so that what cannot work is refused early.

        Raises:
            InputError: There is none: for example a text or a context that is too short.
        """

    @abc.abstractmethod
    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Measure `specs` on a case: yields (spec, metrics) for each, as soon as it is known.

        Metrics are JSON values: numbers, None where one does not apply, short texts, lists of them or tables by name.

        Raises:
            MeasurementError: What was run did not measure what it claims to.
        """

    @classmethod
    @abc.abstractmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """What to show of this task's lines, computed from them alone."""

    @classmethod
    def varies_budgets_in(cls, lines: Sequence[Line]) -> bool:
        """Whether these lines, of one context, compare budgets on purpose: by default, whether the task always does."""
        return cls.varies_budgets

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """What is written into the line's provenance and must agree when a run is resumed.

        Cheap as `points` is. It is also asked of points beyond those of `points`: an earlier run may have had more.
        """
        return self.config.model_dump(mode="json")

    def steps(self, context: int, document: int) -> int:
        """About how many decode steps each selector takes on a case, for the time left."""
        return 1

    def selectors(self, given: Mapping[str, AnyConfig]) -> Mapping[str, AnyConfig]:
        """Which selectors to measure, given those that the user named: by default these."""
        return given
