"""Needles in a haystack: numbers hidden in a long text, asked for at its end, found by greedy decoding.

The parameters are RULER's (arXiv 2404.06654): 7-digit values, depths spread evenly over 40 points, prompt and answer
together exactly as long as the context, the share of values that the answer names. The wording is our own.

The prompt is prefilled densely up to its last token; from there on every token is decoded through the selector.
"""

import functools
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from sparsesel.config import TaskConfig
from sparsesel.errors import InputError
from sparsesel.eval.report import Line, about, bootstrap, ordered, rows_by_context, work_columns, work_note
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task

DEPTHS = 40
"""Points over which depths are spread."""

Variant = Literal["single", "multikey", "multivalue"]
Haystack = Literal["noise", "prose"]

_NEW_TOKENS = {"single": 32, "multikey": 32, "multivalue": 96}
_SEVERAL = 4  # keys of multikey, values of multivalue
# Haystacks among which one that fits exactly is sought: characters more or less, and characters left out before.
_AROUND = 12
_SHIFTS = 50

_NOISE = (
    "The kettle is warm. The road bends to the east. A cart waits by the gate. Rain is on its way. The shutters are "
    "closed, and the lamps are lit. Someone will sweep the yard tomorrow. "
)
_FIRST = [
    "amber",
    "brass",
    "cedar",
    "coral",
    "crimson",
    "dusty",
    "emerald",
    "frozen",
    "gentle",
    "golden",
    "hollow",
    "indigo",
    "ivory",
    "jade",
    "lilac",
    "marble",
    "misty",
    "mossy",
    "narrow",
    "olive",
    "painted",
    "pearl",
    "plain",
    "quiet",
    "rusty",
    "scarlet",
    "silent",
    "silver",
    "slender",
    "striped",
    "velvet",
    "woven",
]
_SECOND = [
    "anchor",
    "badger",
    "barrel",
    "beacon",
    "bridge",
    "candle",
    "castle",
    "compass",
    "copper",
    "falcon",
    "feather",
    "fiddle",
    "garden",
    "hammer",
    "harbor",
    "helmet",
    "kettle",
    "ladder",
    "lantern",
    "meadow",
    "mirror",
    "orchard",
    "otter",
    "paddle",
    "pebble",
    "rabbit",
    "saddle",
    "sparrow",
    "thimble",
    "tunnel",
    "turtle",
    "walnut",
]

_INTRO = "Some locker codes are hidden in the following text. Keep them in mind; they will be asked for.\n\n"
_NEEDLE = "The locker code of the {key} is {value}."
# The answer begins in the words of a needle: what is measured is finding it, not following instructions.
_QUESTIONS = {
    "one": ("\n\nWhat is the locker code of the {key}?", "The locker code of the {key} is"),
    "all": (
        "\n\nWhat are the {count} locker codes of the {key}? Give the numbers alone.",
        "The {count} locker codes of the {key} are the numbers",
    ),
}
_MARK = "\ue000"  # stands for the haystack while a chat template is filled; no text has it


class NiahConfig(TaskConfig):
    """Which needles, in what, how often."""

    variants: tuple[Variant, ...] = Field(
        default=("single", "multikey", "multivalue"),
        strict=False,
        min_length=1,
        description="`single`: one needle. `multikey`: four of different names, one asked for. `multivalue`: four of "
        "one name, all asked for.",
    )
    haystacks: tuple[Haystack, ...] = Field(
        default=("noise", "prose"),
        strict=False,
        min_length=1,
        description="`noise`: a few short sentences again and again. `prose`: the texts.",
    )
    trials: int = Field(default=20, ge=1, le=100_000, description="Needles for each variant, haystack and context.")
    max_new_tokens: dict[Variant, int] = Field(
        default=_NEW_TOKENS,
        description="Tokens of an answer at most, by variant. They are part of the context.",
        validate_default=True,
    )

    @field_validator("variants", "haystacks")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("each once")
        return names

    @field_validator("max_new_tokens")
    @classmethod
    def _answers_have_room(cls, tokens: dict[Variant, int]) -> dict[Variant, int]:
        if min(tokens.values(), default=1) < 1:
            raise ValueError("at least 1 token")
        return {**_NEW_TOKENS, **tokens}  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Needles:
    """What is hidden, and what is asked for.

    Attributes:
        needles: (depth index, sentence), by depth.
        key: Asked for.
        values: All that the answer should name.
        depth: Index among `DEPTHS` of the (first) needle that is asked for.
    """

    needles: tuple[tuple[int, str], ...]
    key: str
    values: tuple[str, ...]
    depth: int


@dataclass(frozen=True)
class NiahCase(Case):
    """A prompt, with what its answer should name."""

    values: tuple[str, ...] = ()


class Niah(Task[NiahConfig]):
    """Document i is trial i div C of combination i mod C of variants and haystacks, C in all.

    So more trials can be added to results that are there.
    """

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context of every trial."""
        documents = self.config.trials * len(self._combinations)
        return [(context, document) for document in range(documents) for context in setting.contexts]

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """What the document is."""
        variant, haystack, trial = self._place(document)
        return {
            "variant": variant,
            "haystack": haystack,
            "trial": trial,
            "depth": round(depth_of(trial) / (DEPTHS - 1), 4),
            "max_new_tokens": self.config.max_new_tokens[variant],
        }

    def steps(self, context: int, document: int) -> int:
        """As many as an answer may have."""
        return self.config.max_new_tokens[self._place(document)[0]]

    def prepare(self, setting: Setting, context: int, document: int) -> NiahCase:
        """The prompt, filled to the token.

        Raises:
            InputError: A context that the needles and the question of some variant do not fit into.
        """
        variant, haystack, trial = self._place(document)
        least = max(self._least(setting, one) for one in self.config.variants)
        if context < least:
            raise InputError(
                "context",
                expected=f"at least {least} tokens, which needles, question and answer take without any haystack",
                got=context,
                remedy="Choose a larger --context.",
            )
        hidden = hide(variant, trial, f"{setting.seed} {haystack}")
        new = self.config.max_new_tokens[variant]
        # Each trial has a part of the text of its own.
        offset = random.Random(f"{setting.seed} {trial}").random()
        straw, name = _straw(setting, haystack, trial)
        tokens = fill(setting.tokenizer, hidden, straw, offset, context - new)
        return NiahCase(
            tokens=tokens,
            prefill=len(tokens) - 1,
            steps=new,
            details={"text": name, "values": list(hidden.values)},
            values=hidden.values,
        )

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Let each selector answer."""
        if not isinstance(case, NiahCase):
            raise TypeError(f"a case of this task, not {type(case).__name__}")
        prefill = bench.prefill(case.tokens[:-1], specs)
        ends = _end_tokens(bench)
        for spec in specs:
            answer: list[int] = []
            with prefill.decoder(spec) as decoder:
                token = case.tokens[-1]
                while len(answer) < case.steps:
                    token = int(decoder.step(token).argmax())
                    if token in ends:
                        break
                    answer.append(token)
                    text = bench.tokenizer.decode(answer, skip_special_tokens=True)
                    if found_share(text, case.values) == 1.0:  # nothing that follows changes that
                        break
                known = decoder.metrics()
            text = bench.tokenizer.decode(answer, skip_special_tokens=True)
            yield spec, {"score": found_share(text, case.values), "tokens": len(answer), **known, "answer": text}

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """Scores of each variant, haystack and context, and their mean."""
        if not lines:
            return []
        tables = [table for context, rows in rows_by_context(lines).items() for table in _tables(context, rows)]
        return [Section("Needles in a haystack", tables, about(lines), (work_note(lines),))]

    @functools.cached_property
    def _combinations(self) -> list[tuple[Variant, Haystack]]:
        return [(variant, haystack) for variant in self.config.variants for haystack in self.config.haystacks]

    def _place(self, document: int) -> tuple[Variant, Haystack, int]:
        trial, combination = divmod(document, len(self._combinations))
        return (*self._combinations[combination], trial)

    def _least(self, setting: Setting, variant: Variant) -> int:
        """The smallest context that holds a variant's needles, whichever they are."""
        frame = _frame(setting.tokenizer, hide(variant, 0, ""))
        longest = max(len(_encode(setting.tokenizer, " " + word)) for word in (*_FIRST, *_SECOND))
        hidden = hide(variant, 0, "")
        spare = (len(hidden.needles) + 2) * 2 * longest  # other words may take more tokens than those of trial 0
        return len(_tokens(setting.tokenizer, frame, hidden, "")) + spare + self.config.max_new_tokens[variant]


def depth_of(trial: int) -> int:
    """Index of a trial's depth: the first 20 trials are spread evenly, the next 20 lie between them."""
    half = DEPTHS // 2
    return 2 * (trial * 13 % half) + trial // half % 2


def hide(variant: Variant, trial: int, seed: str) -> Needles:
    """The needles of a trial, the same whenever they are asked for."""
    generator = random.Random(f"{seed} {variant} {trial}")
    keys = [
        f"{first} {second}"
        for first, second in zip(generator.sample(_FIRST, _SEVERAL), generator.sample(_SECOND, _SEVERAL), strict=True)
    ]
    values = [str(value) for value in generator.sample(range(10**6, 10**7), _SEVERAL)]
    depth = depth_of(trial)
    if variant == "single":
        chosen = [(depth, keys[0], values[0])]
    else:
        others = generator.sample([other for other in range(DEPTHS) if other != depth], _SEVERAL - 1)
        named = keys if variant == "multikey" else [keys[0]] * _SEVERAL
        chosen = list(zip([depth, *others], named, values, strict=True))
    return Needles(
        needles=tuple(sorted((depth, _NEEDLE.format(key=key, value=value)) for depth, key, value in chosen)),
        key=keys[0],
        values=tuple(values if variant == "multivalue" else values[:1]),
        depth=depth,
    )


def found_share(answer: str, values: Sequence[str]) -> float:
    """Share of `values` that stand in the answer, in upper or lower case."""
    answer = answer.casefold()
    return sum(value.casefold() in answer for value in values) / len(values)


def fill(tokenizer: Any, hidden: Needles, straw: str, offset: float, size: int) -> tuple[int, ...]:
    """A prompt of exactly `size` tokens around as much of `straw` as that takes.

    Args:
        tokenizer: Its chat template is used if it has one.
        hidden: The needles.
        straw: What the haystack is made of; it begins again at its end.
        offset: Where it begins, as a share of its length.
        size: Tokens.

    Raises:
        InputError: No length of the haystack gives exactly that many.
    """
    frame = _frame(tokenizer, hidden)
    begin = _after_sentence(straw, round(offset * len(straw)))
    straw = straw[begin:] + straw[:begin]

    def tokens(length: int, start: int = 0) -> tuple[int, ...]:
        haystack = (straw * ((start + length) // len(straw) + 1))[start : start + length]
        return _tokens(tokenizer, frame, hidden, haystack)

    low, high = 0, 8 * size + 64  # the longest that fits is in [low, high)
    while len(tokens(high)) <= size:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(tokens(middle)) <= size else (low, middle)
    # One character more is not always one token more: look around, and in haystacks that begin a little later.
    for start in range(_SHIFTS):
        for distance in range(_AROUND):
            for length in {low - distance, low + distance}:
                if length >= 0 and len(found := tokens(length, start)) == size:
                    return found
    raise InputError(
        "context",
        expected="a context that the haystack fills exactly",
        got=f"{size} tokens of prompt, which no haystack gives with this tokenizer",
        remedy="Choose another --context.",
    )


def _straw(setting: Setting, haystack: Haystack, trial: int) -> tuple[str, str]:
    """What a haystack is made of, and its name."""
    if haystack == "noise":
        return _NOISE, "noise"
    text = setting.texts[trial % len(setting.texts)]
    return " ".join(text.content.replace(_MARK, "").split()) + " ", text.name


def _frame(tokenizer: Any, hidden: Needles) -> tuple[str, str, bool]:
    """What comes before and after the haystack, and whether that holds the special tokens already."""
    question, answer = _QUESTIONS["one" if len(hidden.values) == 1 else "all"]
    count = {1: "one", 4: "four"}[len(hidden.values)]
    question, answer = (part.format(key=hidden.key, count=count) for part in (question, answer))
    if not getattr(tokenizer, "chat_template", None):
        return _INTRO, f"{question}\n\n{answer}", False
    filled = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{_INTRO}{_MARK}{question}"}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = filled.partition(_MARK)
    return before, f"{after}{answer}", True


def _tokens(tokenizer: Any, frame: tuple[str, str, bool], hidden: Needles, haystack: str) -> tuple[int, ...]:
    """The prompt: needles stand between sentences of the haystack."""
    before, after, special = frame
    parts: list[str] = []
    begin = 0
    for depth, sentence in hidden.needles:
        end = max(begin, _after_sentence(haystack, round(len(haystack) * depth / (DEPTHS - 1))))
        parts += [haystack[begin:end].rstrip(), sentence]
        begin = end
    parts.append(haystack[begin:].rstrip())
    return tuple(_encode(tokenizer, before + " ".join(part for part in parts if part) + after, special=not special))


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def _after_sentence(text: str, position: int) -> int:
    """The end of the first sentence that ends at `position` or later; of a word, or the text, if none soon does."""
    near = text[max(0, position - 1) : position + 600]
    if position <= 0:
        return 0
    for pattern in (r"[.!?]\s+", r"\s+"):
        if match := re.search(pattern, near):
            return max(0, position - 1) + match.end()
    return len(text)


def _end_tokens(bench: Bench) -> set[int]:
    """Tokens that end an answer."""
    known = getattr(bench.model.generation_config, "eos_token_id", None)
    ends = known if isinstance(known, list) else [known]
    return {token for token in (*ends, bench.tokenizer.eos_token_id) if token is not None}


def _tables(context: int, rows: Sequence[Any]) -> list[Table]:
    cells: dict[tuple[str, str], None] = {}
    for row in rows:
        for line in row.lines.values():
            parameters = line["provenance"]["parameters"]
            cells.setdefault((parameters["variant"], parameters["haystack"]))

    def of(row: Any, cell: tuple[str, str]) -> list[Line]:
        return [
            line
            for line in row.lines.values()
            if (line["provenance"]["parameters"]["variant"], line["provenance"]["parameters"]["haystack"]) == cell
        ]

    rows = ordered(rows)
    by_cell = {cell: [score_of(of(row, cell)) for row in rows] for cell in cells}
    means = [_mean([by_cell[cell][index] for cell in cells]) for index in range(len(rows))]
    columns = [
        Column(f"{variant}\n{haystack}", scores, 3, better="more") for (variant, haystack), scores in by_cell.items()
    ]
    names, references = [row.selector for row in rows], sum(row.is_reference for row in rows)
    trials = max(len(of(row, cell)) for row in rows for cell in cells)
    intervals = [
        bootstrap(list(row.lines.values()), lambda lines: score_of(lines) or 0.0) or (None, None) for row in rows
    ]
    title = f"Needles, context {context}: share of values found, up to {trials} trials each"
    return [
        Table(title, names, [*columns, Column("mean", means, 3, better="more")], references),
        Table(
            f"Needles, context {context}: all trials, 95% bootstrap interval, and work; shares in %",
            names,
            [
                Column("score", [row.mean("score") for row in rows], 3, better="more"),
                Column("from", [low for low, _ in intervals], 3),
                Column("to", [high for _, high in intervals], 3),
                *work_columns(rows),
            ],
            references,
        ),
    ]


def score_of(lines: Sequence[Line]) -> float | None:
    """Mean score, None without lines."""
    return _mean([line["metrics"]["score"] for line in lines])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
