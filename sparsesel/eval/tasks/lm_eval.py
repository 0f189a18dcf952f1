"""Generation tasks of lm-evaluation-harness, decoded through the selector.

Prompts, data and metrics are the harness's: `lm_eval.simple_evaluate` runs with its own `HFLM` around the sparsified
model. Each prompt is prefilled densely up to its last token; that one and every token of the answer go through the
selector, as in the other tasks. Tasks that only score given continuations are refused: they never decode, so a
selector never acts in them.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field

from sparsesel.config import MAX_COUNT, PathText, TaskConfig
from sparsesel.errors import InputError
from sparsesel.eval.answers import encode
from sparsesel.eval.report import Line, Row, about, ordered, work_columns, work_note
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task

_UNKNOWN_LENGTH = 64  # tokens of an answer where a task does not say, for the time left
_MANY = 100  # questions of a task without a limit, for the time left


class LmEvalConfig(TaskConfig):
    """Which tasks of the harness, and how."""

    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Names of the harness's generation tasks: gsm8k, for example.",
        json_schema_extra={"default": "none, at least one has to be named"},
    )
    include_path: PathText | None = Field(
        default=None,
        description="A folder with more tasks: the harness's YAML files.",
        json_schema_extra={"default": "none"},
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Questions of each task, from the first.",
        json_schema_extra={"default": "all"},
    )
    num_fewshot: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="Examples before each question.",
        json_schema_extra={"default": "what the task says"},
    )
    chat: bool = Field(default=False, description="Whether to put the model's chat template around prompts.")


class LmEval(Task[LmEvalConfig]):
    """Document i is task i of the harness: all its questions; a context is how long a prompt with its answer may be."""

    def __init__(self, config: LmEvalConfig) -> None:
        super().__init__(config)
        self._loaded: dict[str, Any] = {}

    def points(self, setting: Setting) -> list[tuple[int, int]]:
        """Every context of every task named."""
        if importlib.util.find_spec("lm_eval") is None:
            raise InputError(
                "lm-eval",
                expected="the package lm_eval",
                got="none",
                remedy="Run `pip install 'sparsesel[lm-eval]'`.",
            )
        names, path = self.config.tasks, self.config.include_path
        if not names or len(set(names)) < len(names):
            raise InputError(
                "tasks",
                expected="names of tasks of lm-evaluation-harness, each once",
                got=", ".join(names) or "none",
                remedy="Name them: --tasks gsm8k.",
            )
        if path is not None and not Path(path).is_dir():
            raise InputError(
                "include_path", expected="a folder with YAML files of tasks", got=path, remedy="Check the path."
            )
        return [(context, document) for document in range(len(names)) for context in setting.contexts]

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """Which task of the harness, and how it is run."""
        name = self.config.tasks[document] if document < len(self.config.tasks) else None
        values = self.config.model_dump(mode="json", include={"limit", "num_fewshot", "chat"})
        return {"harness_task": name, **values}

    def steps(self, context: int, document: int) -> int:
        """A guess: what questions there are is known only when the harness has loaded them."""
        return _UNKNOWN_LENGTH * (self.config.limit or _MANY)

    def prepare(self, setting: Setting, context: int, document: int) -> Case:
        """All prompts of a task.

        Raises:
            InputError: No such task, one that does not generate, or a context that its answers do not fit into.
        """
        name = self.config.tasks[document]
        if setting.tokenizer.eos_token_id is None:
            raise InputError(
                "model",
                expected="a tokenizer with a token that ends a text, which lm-evaluation-harness needs",
                got="one without",
                remedy="Set eos_token in its tokenizer_config.json.",
            )
        task = self._task(name, setting)
        with _harness(online=setting.online):
            prompts = _prompts(task, self.config, setting)
        lengths = [len(tokens) for tokens, _ in prompts]
        rooms = [context - new for _, new in prompts]
        if min(rooms) < 2:
            raise InputError(
                "context",
                expected=f"more than the {context - min(rooms) + 1} tokens of an answer of {name}",
                got=context,
                remedy="Choose a larger --context.",
            )
        cut = sum(length > room for length, room in zip(lengths, rooms, strict=True))
        return Case(
            tokens=tuple(itertools.chain.from_iterable(tokens for tokens, _ in prompts)),
            prefill=sum(map(min, lengths, rooms)),
            steps=sum(new for _, new in prompts),
            truncation=f"the beginning of {cut} of {len(prompts)} prompts" if cut else "none",
            details={"text": name, "context": context, "prompts": len(prompts), "harness_version": task.VERSION},
            from_texts=False,
        )

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Let the harness evaluate each selector."""
        task = self._loaded[case.details["text"]]
        for spec in specs:
            bench.doing(spec)
            yield spec, evaluate(bench, spec, task, self.config, case.details["context"])

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """The harness's own metrics of each of its tasks."""
        tables: list[Table] = []
        groups: dict[tuple[str, int], dict[str, Row]] = {}
        for line in lines:
            place = line["provenance"]["parameters"]["harness_task"], line["context"]
            row = groups.setdefault(place, {}).setdefault(line["selector"], Row(line["selector"], line["config"]))
            row.lines[line["document"]] = line
        for (name, context), found in groups.items():
            rows = ordered(found.values())
            tables.append(_table(f"{name}, at most {context} tokens", rows))
        if not lines:
            return []
        version = ", ".join(dict.fromkeys(str(line["metrics"]["harness"]) for line in lines))
        note = f"Prompts, data and metrics of lm-evaluation-harness {version}; its own tables are in the results."
        return [Section("lm-evaluation-harness", tables, about(lines), (note, work_note(lines)))]

    def _task(self, name: str, setting: Setting) -> Any:
        """The harness's object of a task."""
        if name not in self._loaded:
            with _harness(online=setting.online):
                self._loaded[name] = _load(name, self.config, setting)
        return self._loaded[name]


def evaluate(bench: Bench, spec: str, task: Any, config: LmEvalConfig, context: int) -> dict[str, Any]:
    """What the harness says of a selector on one of its tasks, and what the selector did.

    Args:
        bench: The model.
        spec: The selector.
        task: The harness's object.
        config: How it is run.
        context: Tokens of a prompt with its answer at most; of longer prompts the harness leaves out the beginning.

    Raises:
        MeasurementError: The selector did not act in every step that generated a token.
    """
    from sparsesel.eval.decode import MeasurementError, selector_metrics
    from sparsesel.hf.inject import sparsify

    with _harness(online=False), sparsify(bench.model, bench.selectors[spec], backend=bench.backend) as session:
        harness = import_module("lm_eval")
        lm = _model(bench, context)
        found = harness.simple_evaluate(
            lm,
            tasks=[task],
            task_manager=_manager(None, defaults=False),  # the task is loaded: it need not know of any
            limit=config.limit,
            num_fewshot=config.num_fewshot,
            apply_chat_template=config.chat,
            random_seed=bench.seed,
            numpy_random_seed=bench.seed,
            torch_random_seed=bench.seed,
            fewshot_random_seed=bench.seed,
            bootstrap_iters=1000,
            log_samples=False,
        )
        stats = session.stats()
        heads = bench.model.config.get_text_config(decoder=True).num_attention_heads
        acted, expected = stats.total.get("steps", 0.0), lm.generated * len(session.selectors) * heads
    if found is None or not expected or acted != expected:
        raise MeasurementError(
            f"selector {spec} acted in {acted:.0f} of {expected} ({lm.generated} tokens generated by "
            f"{task.config.task}, {len(session.selectors)} layers, {heads} heads): this would not measure it, so "
            "nothing is reported"
        )
    (results,) = found["results"].values()
    (better,) = found["higher_is_better"].values()
    scores = {name: value for name, value in results.items() if isinstance(value, (int, float))}
    return {
        **json.loads(json.dumps(scores, default=float)),
        **selector_metrics(stats),
        "tokens": lm.generated,
        "better": [name for name, more in better.items() if more],
        "harness": harness.__version__,
        "table": import_module("lm_eval.utils").make_table(found),
    }


def _model(bench: Bench, context: int) -> Any:
    """The harness's view of the model, whose prompts' last tokens go through the selector, too."""
    from sparsesel.hf import compat

    HFLM: Any = import_module("lm_eval.models.huggingface").HFLM

    class Through(HFLM):
        generated = 0

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            return super().generate_until(requests, disable_tqdm=True)

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
            output = self.model(context[:, :-1], use_cache=True, logits_to_keep=1)
            known = {compat.CACHE_ARGUMENT: compat.cache_of(output)}
            made = super()._model_generate(context, max_length, stop, **known, **kwargs)
            new = made.shape[1] - context.shape[1]
            self.generated += new
            bench.advance(new)
            return made

    return Through(pretrained=bench.model, tokenizer=bench.tokenizer, max_length=context, batch_size=1)


def _load(name: str, config: LmEvalConfig, setting: Setting) -> Any:
    """A task of the harness by its name.

    Raises:
        InputError: There is none, its data cannot be had, or it does not generate.
    """
    manager = _manager(config.include_path, defaults=False)
    if name not in manager.all_subtasks:
        manager = _manager(config.include_path)
    if name not in manager.all_subtasks:
        group = "a group or tag; name its tasks one by one" if name in manager.all_tasks else "no task of it"
        raise InputError(
            "tasks",
            expected="a task of lm-evaluation-harness",
            got=f"{name}, {group}",
            remedy="`lm_eval ls tasks` lists them; --include-path adds a folder.",
        )
    try:
        (task,) = manager.load([name])["tasks"].values()
    except Exception as error:  # of many libraries: a missing file, no network, a YAML file with wrong fields
        remedy = "Check its YAML file and data." if setting.online else "Check its YAML file and data, or add --online."
        raise InputError(
            "tasks",
            expected=f"a task {name} that can be loaded",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            remedy=remedy,
        ) from error
    if task.OUTPUT_TYPE != "generate_until":
        raise InputError(
            "tasks",
            expected="tasks that generate: a selector acts in decode steps alone",
            got=f"{name}, which is of the kind {task.OUTPUT_TYPE}",
            remedy="Choose a task with output_type generate_until.",
        )
    return task


@functools.cache
def _manager(include_path: str | None, *, defaults: bool = True) -> Any:
    """Knows which tasks there are; the harness's own are thousands of files."""
    return import_module("lm_eval.tasks").TaskManager(include_path=include_path, include_defaults=defaults)


def _prompts(task: Any, config: LmEvalConfig, setting: Setting) -> list[tuple[list[int], int]]:
    """Tokens of each prompt and of its answer at most, as the harness will build them."""
    tokenizer = setting.tokenizer
    shots = task.get_config("num_fewshot")
    if config.num_fewshot is not None and shots != 0:
        task.set_config(key="num_fewshot", value=config.num_fewshot)
    elif shots is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=setting.seed)

    def chat(messages: Any, add_generation_prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    if config.chat and not getattr(tokenizer, "chat_template", None):
        raise InputError("chat", expected="a model with a chat template", got="one without", remedy="Leave out --chat.")
    try:
        task.build_all_requests(
            limit=config.limit,
            apply_chat_template=config.chat,
            fewshot_as_multiturn=config.chat,
            chat_template=chat if config.chat else None,
        )
    except Exception as error:  # of its templates
        raise InputError(
            "tasks",
            expected=f"prompts of {task.config.task}",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            remedy="Check its YAML file.",
        ) from error
    return [
        (encode(tokenizer, instance.args[0]), int(instance.args[1].get("max_gen_toks", 256)))
        for instance in task.instances
    ]


@contextlib.contextmanager
def _harness(*, online: bool) -> Iterator[None]:
    """The harness without its warnings, its bars and, unless `online`, without a network.

    It is told nothing of other processes: they have their own cases.
    """
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        datasets = import_module("datasets")
        stack.enter_context(_changed(import_module("lm_eval.api.task"), tqdm=lambda items, **_: items))
        if not online:
            for place in ("datasets.config", "huggingface_hub.constants"):
                stack.enter_context(_changed(import_module(place), HF_HUB_OFFLINE=True))
        for name in ("lm_eval", "datasets"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if not datasets.utils.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        rank = os.environ.pop("LOCAL_RANK", None)
        try:
            yield
        finally:
            if rank is not None:
                os.environ["LOCAL_RANK"] = rank


@contextlib.contextmanager
def _changed(target: Any, **values: Any) -> Iterator[None]:
    """Attributes of `target` set for a while."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def _table(title: str, rows: Sequence[Row]) -> Table:
    lines = [next(iter(row.lines.values())) for row in rows]
    better = {name for line in lines for name in line["metrics"]["better"]}
    names = dict.fromkeys(name for line in lines for name in line["metrics"] if "," in name)
    columns = [
        Column(
            name.replace(",", "\n"),
            [line["metrics"].get(name) for line in lines],
            3,
            better="more" if name.partition(",")[0] in better else "",
        )
        for name in names
    ]
    return Table(
        title, [row.selector for row in rows], [*columns, *work_columns(rows)], sum(row.is_reference for row in rows)
    )
