"""LongBench's questions about long texts (arXiv 2308.14508), answered through the selector.

Prompts, lengths of answers and the metric are those of lm-evaluation-harness, taken from the package as it is
installed. A prompt that is too long loses its middle before the chat template is put around it, as in LongBench's own
code. The prompt is prefilled densely up to its last token; from there on every token goes through the selector.
"""

import functools
import hashlib
import importlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from sparsesel.config import MAX_COUNT, PathText, TaskConfig, read_text
from sparsesel.errors import InputError
from sparsesel.eval.answers import answer, chat_frame, encode, score_tables
from sparsesel.eval.report import Line, about, rows_by_context, work_note
from sparsesel.eval.tables import Section
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task

Subset = Literal["2wikimqa", "hotpotqa", "multifieldqa_en"]
SUBSETS: tuple[Subset, ...] = ("2wikimqa", "hotpotqa", "multifieldqa_en")

_MARK = "\ue000"  # stands for the text while prompts are filled; it is taken out of the data


class LongBenchConfig(TaskConfig):
    """Which questions, from where."""

    subsets: tuple[Subset, ...] = Field(
        default=SUBSETS, strict=False, min_length=1, description="2wikimqa, hotpotqa and multifieldqa_en, or some."
    )
    folder: PathText | None = Field(
        default=None,
        description="Where the published files are: 2wikimqa.jsonl and so on.",
        json_schema_extra={"default": "none: downloaded, with --online"},
    )
    questions: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Questions of each subset, from the first.",
        json_schema_extra={"default": "all"},
    )

    @field_validator("subsets")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("each once")
        return names


@dataclass(frozen=True)
class Question:
    """A line of the data.

    Attributes:
        context: The long text.
        question: About it.
        answers: Each is a right one.
        identity: Of the question, as published.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    identity: str


@dataclass(frozen=True)
class Data:
    """A subset: where it was read, its questions and their hash."""

    name: str
    questions: tuple[Question, ...]
    sha256: str


@dataclass(frozen=True)
class Harness:
    """What lm-evaluation-harness says of a subset.

    Attributes:
        before: Template of the prompt up to the text.
        after: From there on.
        new_tokens: Of an answer at most.
        dataset: Path, name and split for `datasets`.
        score: From (answer, right answers) to F1.
    """

    before: str
    after: str
    new_tokens: int
    dataset: tuple[str, str, str]
    score: Callable[[str, Sequence[str]], float]


@dataclass(frozen=True)
class LongBenchCase(Case):
    """A prompt, with the answers that are right."""

    answers: tuple[str, ...] = ()
    subset: Subset = "2wikimqa"


class LongBench(Task[LongBenchConfig]):
    """Document i is question i div S of subset i mod S, of S subsets in all."""

    def __init__(self, config: LongBenchConfig) -> None:
        super().__init__(config)
        self._data: dict[Subset, Data] = {}
        self._least: dict[int, int] = {}

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context of every question."""
        counts: list[int] = []
        for subset in self.config.subsets:
            harness(subset)
            there, asked = len(self._questions(setting, subset)), self.config.questions
            if asked is not None and asked > there:
                raise InputError(
                    "questions",
                    expected=f"at most {there}, those that {self._data[subset].name} has",
                    got=asked,
                    remedy="Ask for fewer questions.",
                )
            counts.append(there if asked is None else asked)
        documents = [
            question * len(counts) + index
            for question in range(max(counts))
            for index, count in enumerate(counts)
            if question < count
        ]
        return [(context, document) for document in documents for context in setting.contexts]

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """What the document is, and of which data."""
        question, subset = self._place(document)
        questions = self._questions(setting, subset)
        return {
            "subset": subset,
            "question": question,
            "id": questions[question].identity if question < len(questions) else None,
            "longbench_sha256": self._data[subset].sha256,
            "max_new_tokens": harness(subset).new_tokens,
        }

    def steps(self, context: int, document: int) -> int:
        """As many as an answer may have."""
        return harness(self._place(document)[1]).new_tokens

    def prepare(self, setting: Setting, context: int, document: int) -> LongBenchCase:
        """The prompt, without its middle if it is too long.

        Raises:
            InputError: A context that a question and its answer do not fit into.
        """
        number, subset = self._place(document)
        question, rules = self._questions(setting, subset)[number], harness(subset)
        self._check(setting, context)
        tokens, left_out = _prompt(setting.tokenizer, rules, question, context - rules.new_tokens)
        return LongBenchCase(
            tokens=tokens,
            prefill=len(tokens) - 1,
            steps=rules.new_tokens,
            truncation=f"{left_out} tokens in the middle" if left_out else "none",
            details={"text": self._data[subset].name, "answers": list(question.answers)},
            from_texts=False,
            answers=question.answers,
            subset=subset,
        )

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Let each selector answer."""
        if not isinstance(case, LongBenchCase):
            raise TypeError(f"a case of this task, not {type(case).__name__}")
        prefill = bench.prefill(case.tokens[:-1], specs)
        for spec in specs:
            known = answer(bench, prefill, spec, case.tokens[-1], limit=case.steps)
            yield spec, {"score": harness(case.subset).score(known["answer"], case.answers), **known}

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """F1 of each subset, and their mean."""
        if not lines:
            return []
        tables = [
            table
            for context, rows in rows_by_context(lines).items()
            for table in score_tables(
                rows,
                lambda parameters: (parameters["subset"],),
                title=f"LongBench, at most {context} tokens: F1 in %",
                overall=f"LongBench, at most {context} tokens: all questions, 95% bootstrap interval, and work; in %",
                percent=True,
            )
        ]
        note = "Prompts and metric of lm-evaluation-harness; what did not fit was left out of the middle."
        return [Section("LongBench", tables, about(lines), (note, work_note(lines)))]

    def _place(self, document: int) -> tuple[int, Subset]:
        question, index = divmod(document, len(self.config.subsets))
        return question, self.config.subsets[index]

    def _questions(self, setting: Setting, subset: Subset) -> tuple[Question, ...]:
        if subset not in self._data:
            self._data[subset] = _load(self.config.folder, subset, online=setting.online)
        return self._data[subset].questions

    def _check(self, setting: Setting, context: int) -> None:
        """Refuse a context in which what comes before or after the text of some question would be cut.

        Raises:
            InputError: It is too small.
        """
        if context not in self._least:
            self._least[context] = max(
                _least(setting.tokenizer, harness(subset), question)
                for subset in self.config.subsets
                for question in self._questions(setting, subset)
            )
        if context < self._least[context]:
            raise InputError(
                "context",
                expected=f"at least {self._least[context]} tokens, which the longest question needs with its answer",
                got=context,
                remedy="Choose a larger --context.",
            )


@functools.cache
def harness(subset: str) -> Harness:
    """Prompt and metric of a subset, as lm-evaluation-harness has them.

    Raises:
        InputError: It is not installed, or is of a version that has them elsewhere.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise InputError(
            "longbench",
            expected="the package lm_eval, whose prompts and metric it uses",
            got="none",
            remedy="Run `pip install 'sparsesel[lm-eval]'`.",
        )
    folder = Path(found.origin).parent / "tasks" / "longbench"
    try:
        values = yaml.load((folder / f"{subset}.yaml").read_text(encoding="utf-8"), _Loader)
        before, _, after = values["doc_to_text"].partition("{{context}}")
        if "{{question}}" not in after:
            raise KeyError("question after the context")
        metric = _metrics(folder / "metrics.py").get_qa_f1_score
        return Harness(
            before=before,
            after=after,
            new_tokens=int(values["generation_kwargs"]["max_gen_toks"]),
            dataset=(values["dataset_path"], values["dataset_name"], values["test_split"]),
            score=lambda text, answers: float(metric({"answers": list(answers)}, [text])["qa_f1_score"]),
        )
    except (OSError, KeyError, AttributeError, yaml.YAMLError, ImportError) as error:
        raise InputError(
            "longbench",
            expected="an lm_eval with tasks/longbench, as version 0.4.13 has it, and what its metric needs",
            got=f"{type(error).__name__}: {error}",
            remedy="Run `pip install 'sparsesel[lm-eval]'`.",
        ) from error


class _Loader(yaml.SafeLoader):
    """Reads the harness's files of tasks; functions in them are left as their names."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # pyright: ignore


def _metrics(path: Path) -> Any:
    """The module alone: the package around it takes seconds to import."""
    spec = importlib.util.spec_from_file_location("sparsesel_longbench_metrics", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports for other languages
        spec.loader.exec_module(module)
    return module


def _load(folder: str | None, subset: Subset, *, online: bool) -> Data:
    """The questions of a subset.

    Raises:
        InputError: There are none, or a line is no question.
    """
    if folder is None:
        return _download(subset, online=online)
    path = Path(folder) / f"{subset}.jsonl"
    if not path.is_file():
        raise InputError(
            "folder",
            expected=f"a folder with {subset}.jsonl, as LongBench publishes it",
            got=folder,
            remedy="Unpack LongBench's data.zip there, or choose other --subsets.",
        )
    content = read_text(path, where="folder")
    lines = [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]
    questions = tuple(_question(_parse(line, path, number), f"{path}, line {number}") for number, line in lines)
    return _data(str(path), questions)


def _data(name: str, questions: tuple[Question, ...]) -> Data:
    if not questions:
        raise InputError("folder", expected="questions", got=f"none in {name}", remedy="Take the published file.")
    content = json.dumps([[q.context, q.question, q.answers, q.identity] for q in questions])
    return Data(name, questions, hashlib.sha256(content.encode()).hexdigest())


def _download(subset: Subset, *, online: bool) -> Data:
    if not online:
        raise InputError(
            "folder",
            expected="a folder with the published files, or leave to download them",
            got="neither",
            remedy="Give --folder DIR with 2wikimqa.jsonl and so on, or add --online.",
        )
    path, name, split = harness(subset).dataset
    try:
        rows = importlib.import_module("datasets").load_dataset(path, name, split=split)
    except Exception as error:  # of many libraries
        raise InputError(
            "folder",
            expected=f"{path} on the Hugging Face Hub",
            got=f"{type(error).__name__}: {error}",
            remedy="Check the network, or give --folder DIR with the published files.",
        ) from error
    where = f"{path}/{name}"
    return _data(where, tuple(_question(dict(row), f"{where}, row {n}") for n, row in enumerate(rows, start=1)))


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "folder",
            expected="one JSON object in each line",
            got=f"{path}, line {number}: {error}",
            remedy="Take the published file.",
        ) from error


def _question(record: Any, where: str) -> Question:
    """A question of the published form (`input`), or of the Hub's copy that the harness uses (`question`)."""
    fields = record if isinstance(record, dict) else {}
    question, answers = fields.get("question", fields.get("input")), fields.get("answers")
    identity = str(fields.get("_id", ""))
    wrong = [
        name
        for name, fits in (
            ("context", _is_text(fields.get("context"))),
            ("input", _is_text(question)),
            ("answers", isinstance(answers, list) and answers and all(map(_is_text, answers))),
            ("_id", _is_text(identity)),
        )
        if not fits
    ]
    if wrong:
        raise InputError(
            "folder",
            expected="an object with the texts context, input and, if it is there, _id, and a list of texts answers",
            got=f"{where}: {', '.join(wrong)} missing or of another kind",
            remedy="Take the published file.",
        )
    context = fields["context"].replace(_MARK, "")
    return Question(context, str(question), tuple(answers or ()), identity)


def _is_text(value: Any) -> bool:
    """Whether it is a text that can be tokenised: JSON may hold halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _prompt(tokenizer: Any, rules: Harness, question: Question, size: int) -> tuple[tuple[int, ...], int]:
    """The prompt in at most `size` tokens, and how many were left out of its middle."""
    whole = f"{rules.before}{question.context}{_after(rules, question)}"
    plain = encode(tokenizer, whole)
    prompt, kept = _wrapped(tokenizer, whole), len(plain)
    while len(prompt) > size:  # what is put together again may be of some tokens more
        half = (kept - (len(prompt) - size)) // 2
        kept = 2 * half
        prompt = _wrapped(tokenizer, _text(tokenizer, plain[:half]) + _text(tokenizer, plain[-half:]))
    return prompt, len(plain) - kept


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def _after(rules: Harness, question: Question) -> str:
    return rules.after.replace("{{question}}", question.question)


def _wrapped(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """A prompt in the chat template if there is one."""
    before, after, special = chat_frame(tokenizer, "", _MARK, "")
    return tuple(encode(tokenizer, f"{before}{prompt}{after}", special=not special))


def _least(tokenizer: Any, rules: Harness, question: Question) -> int:
    """The smallest context that keeps what is before and after the text whole, and leaves the answer its room."""
    side = max(len(encode(tokenizer, part)) for part in (rules.before, _after(rules, question)))
    return len(_wrapped(tokenizer, "")) + 2 * (side + 8) + rules.new_tokens  # some tokens of the text beside them
