"""Needles in a haystack: numbers hidden in a long text, asked for at its end, found by greedy decoding.

The parameters are RULER's (arXiv 2404.06654): 7-digit values, depths spread evenly over 40 points, prompt and answer
together exactly as long as the context, the share of values that the answer names. The wording is our own, made for
small models: a needle's name stands right before its number, and the answer begins as a needle does, so that copying is
enough. Where one name has several numbers, each needle says which of them it is, in the order of the text.

The prompt is prefilled densely up to its last token; from there on every token is decoded through the selector.
"""

import functools
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from sparsesel.config import TaskConfig
from sparsesel.errors import InputError
from sparsesel.eval.answers import answer, chat_frame, encode, mean_score, score_tables
from sparsesel.eval.figures import HeatMap
from sparsesel.eval.report import Line, about, rows_by_context, work_note
from sparsesel.eval.tables import Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task

DEPTHS = 40
"""Points over which depths are spread."""

Variant = Literal["single", "multikey", "multivalue"]
Haystack = Literal["noise", "prose"]

_NEW_TOKENS = {"single": 24, "multikey": 24, "multivalue": 96}
_BANDS = 10  # of depths, in heat maps: one for every four points
_SEVERAL = 4  # keys of multikey, values of multivalue
# Haystacks among which one that fits exactly is sought: characters more or less, and characters left out before.
_AROUND = 12
_SHIFTS = 50

# One line. Sentences of many kinds: a shorter noise has so many copies of each that a small budget is spent on them.
_NOISE = (
    "The kettle is warm. The road bends to the east. A cart waits by the gate. Rain is on its way. The shutters are "
    "closed, and the lamps are lit. Someone will sweep the yard tomorrow. Bread is baked in the morning. Two boats lie "
    "on the shore. The old dog sleeps under the table. Snow fell on the hills last night. Children play behind the "
    "mill. The bell rings at six. Wool is sold in the next village. Nobody has seen the river so high. The garden "
    "needs water. A letter came from the city. The baker sings while he works. Birds gather on the roof.\n"
)
# Common words, each of one token in most vocabularies: names that a small model can tell apart.
_NAMES = [
    "guitar",
    "piano",
    "violin",
    "drum",
    "hammer",
    "ladder",
    "bridge",
    "castle",
    "mirror",
    "candle",
    "barrel",
    "anchor",
    "rabbit",
    "tiger",
    "horse",
    "eagle",
    "salmon",
    "lemon",
    "carrot",
    "rocket",
    "bicycle",
    "tractor",
    "window",
    "blanket",
    "shirt",
    "hat",
    "clock",
    "telescope",
    "camera",
    "battery",
    "engine",
    "lantern",
]

_INTRO = "Some locker codes are hidden in the following text. Keep them in mind; they will be asked for.\n\n"
# On a line of its own, without a full stop, as items of the answer stand: with one, a small model that attends to few
# keys is apt to write it a digit early.
_NEEDLE = "Locker code: {key} #{value}"
# Of several values of one key, each has an ordinal, in the order in which they stand in the text.
_ORDINALS = ("first", "second", "third", "fourth")
# How the answer begins is given: what is measured is finding numbers, not following instructions. In a fenced list, a
# small model goes on to the next item rather than to remarks on the one before.
_QUESTIONS = {
    "one": (
        "\n\nWhat is the locker code of the {key}?",
        "The text names one locker code of the {key}:\n\n```\n1. Locker code: {key} #",
    ),
    "all": (
        "\n\nWhat are all four locker codes of the {key} that the text names?",
        "The text names four locker codes of the {key}:\n\n```\n1. Locker code: {key} first #",
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
            from_texts=haystack == "prose",
        )

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Let each selector answer."""
        if not isinstance(case, NiahCase):
            raise TypeError(f"a case of this task, not {type(case).__name__}")
        prefill = bench.prefill(case.tokens[:-1], specs)
        for spec in specs:
            known = answer(
                bench,
                prefill,
                spec,
                case.tokens[-1],
                limit=case.steps,
                done=lambda text: found_share(text, case.values) == 1.0,
            )
            yield spec, {"score": found_share(known["answer"], case.values), **known}

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """Scores of each variant, haystack and context, their mean, and for each selector where needles were found."""
        if not lines:
            return []
        tables: list[Table] = []
        for context, rows in rows_by_context(lines).items():
            trials = max(Counter(_cell(line) for row in rows for line in row.lines.values()).values())
            tables += score_tables(
                rows,
                lambda parameters: (parameters["variant"], parameters["haystack"]),
                title=f"Needles, context {context}: share of values found, up to {trials} trials each",
                overall=f"Needles, context {context}: all trials, 95% bootstrap interval, and work; shares in %",
            )
        return [Section("Needles in a haystack", tables, about(lines), (work_note(lines),), _figures(lines))]

    @functools.cached_property
    def _combinations(self) -> list[tuple[Variant, Haystack]]:
        return [(variant, haystack) for variant in self.config.variants for haystack in self.config.haystacks]

    def _place(self, document: int) -> tuple[Variant, Haystack, int]:
        trial, combination = divmod(document, len(self._combinations))
        return (*self._combinations[combination], trial)

    def _least(self, setting: Setting, variant: Variant) -> int:
        """The smallest context that holds a variant's needles, whichever they are."""
        hidden = hide(variant, 0, "")
        frame = _frame(setting.tokenizer, hidden)
        longest = max(len(encode(setting.tokenizer, " " + name)) for name in _NAMES)
        spare = (len(hidden.needles) + 3) * longest  # other names may take more tokens than those of trial 0
        return len(_tokens(setting.tokenizer, frame, hidden, "")) + spare + self.config.max_new_tokens[variant]


def depth_of(trial: int) -> int:
    """Index of a trial's depth: the first 20 trials are spread evenly, the next 20 lie between them."""
    half = DEPTHS // 2
    return 2 * (trial * 13 % half) + trial // half % 2


def hide(variant: Variant, trial: int, seed: str) -> Needles:
    """The needles of a trial, the same whenever they are asked for."""
    generator = random.Random(f"{seed} {variant} {trial}")
    keys = generator.sample(_NAMES, _SEVERAL)
    values = [str(value) for value in generator.sample(range(10**6, 10**7), _SEVERAL)]
    depth = depth_of(trial)
    depths = [depth, *generator.sample([other for other in range(DEPTHS) if other != depth], _SEVERAL - 1)]
    if variant == "single":
        named, depths = keys[:1], depths[:1]
    elif variant == "multikey":
        named = keys
    else:
        named, depths = [f"{keys[0]} {ordinal}" for ordinal in _ORDINALS], sorted(depths)
    sentences = [_NEEDLE.format(key=name, value=value) for name, value in zip(named, values, strict=False)]
    return Needles(
        needles=tuple(sorted(zip(depths, sentences, strict=True))),
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
    question, begun = (part.format(key=hidden.key) for part in _QUESTIONS["one" if len(hidden.values) == 1 else "all"])
    return chat_frame(tokenizer, _INTRO, _MARK, question, begun)


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
    text = before + "\n".join(part for part in parts if part) + after
    return tuple(encode(tokenizer, text, special=not special))


def _after_sentence(text: str, position: int) -> int:
    """The end of the first sentence that ends at `position` or later; of a word, or the text, if none soon does."""
    near = text[max(0, position - 1) : position + 600]
    if position <= 0:
        return 0
    for pattern in (r"[.!?]\s+", r"\s+"):
        if match := re.search(pattern, near):
            return max(0, position - 1) + match.end()
    return len(text)


def _cell(line: Line) -> tuple[str, ...]:
    """What trials are counted by."""
    parameters = line["provenance"]["parameters"]
    return line["selector"], parameters["variant"], parameters["haystack"]


def _figures(lines: Sequence[Line]) -> list[HeatMap]:
    """For each selector and variant: the share found at each depth of each context."""
    groups: dict[tuple[str, str], list[Line]] = {}
    rows = {row.selector: None for found in rows_by_context(lines).values() for row in found}
    for line in sorted(lines, key=lambda line: list(rows).index(line["selector"])):
        groups.setdefault((line["selector"], line["provenance"]["parameters"]["variant"]), []).append(line)
    return [_heat_map(f"{selector}: {variant}", own) for (selector, variant), own in groups.items()]


def _heat_map(title: str, lines: Sequence[Line]) -> HeatMap:
    by_place: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        band = min(int(line["provenance"]["parameters"]["depth"] * _BANDS), _BANDS - 1)
        by_place.setdefault((band, line["context"]), []).append(line)
    contexts = sorted({context for _, context in by_place})
    several = " The depth is that of one of its needles: all four are asked for." * ("multivalue" in title)
    return HeatMap(
        title=title,
        x_label="context (tokens)",
        y_label="depth of the needle asked for (% of the haystack)",
        x=[str(context) for context in contexts],
        y=[f"{100 * band // _BANDS}–{100 * (band + 1) // _BANDS}" for band in range(_BANDS)],
        values=[[mean_score(by_place.get((band, context), [])) for context in contexts] for band in range(_BANDS)],
        low=0.0,
        high=1.0,
        caption=f"Share of values found, mean over haystacks and trials.{several}",
    )
