"""`sparsesel generate`: text from a model whose decode steps go through a selector."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsesel.cli.console import out, safe
from sparsesel.config import read_text
from sparsesel.errors import InputError
from sparsesel.eval.selectors import resolve_selectors

if TYPE_CHECKING:
    from sparsesel.hf.stats import Stats


def generate(
    selectors: Annotated[
        list[str],
        typer.Option(
            "--selector", metavar="SELECTOR", help="name, name:preset or a config file, then optional ,field=value"
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", help="smollm2-135m (offline), a local folder or a Hub id.")
    ] = "smollm2-135m",
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="UTF-8 file with the text to continue.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate at most.")] = 128,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field; may be given several times."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    backend: Annotated[str, typer.Option("--backend", help="What runs the selector: auto, triton or eager.")] = "auto",
    online: Annotated[bool, typer.Option("--online", help="Allow a download from the Hub.")] = False,
) -> None:
    """Continue a prompt greedily, streaming the text, then print one line of statistics."""
    if len(selectors) > 1:
        raise InputError(
            "--selector",
            expected="one selector",
            got=", ".join(selectors),
            remedy="Name one; `sparsesel eval perplexity` compares several.",
        )
    ((_, config),) = resolve_selectors(selectors, sets or []).items()
    text = _read_prompt(prompt, prompt_file)

    from sparsesel.hf.models import default_device, load_model, load_tokenizer, resolve, resolve_backend

    device = default_device()
    runs = resolve_backend(backend, device)
    source = resolve(model, online=online)
    source.check_selector(config)
    tokenizer = load_tokenizer(source)
    inputs = _encode(tokenizer, text, chat=chat)
    length = inputs["input_ids"].shape[1]
    if source.max_length is not None and length + max_new_tokens > source.max_length:
        raise InputError(
            "--max-new-tokens",
            expected=f"prompt and new tokens within the {source.max_length} positions of {model}",
            got=f"{length} prompt tokens and {max_new_tokens} new ones",
            remedy="Shorten the prompt or ask for fewer tokens.",
        )

    loaded: Any = load_model(source, device=device)

    from sparsesel.hf.inject import sparsify

    streamer = _streamer(tokenizer)
    with sparsify(loaded, config, backend=runs) as session:
        loaded.generate(
            **inputs.to(loaded.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            streamer=streamer,
        )
        out.print(statistics(streamer.times, session.stats()), soft_wrap=True)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is not None and prompt_file is not None) or (prompt is None and prompt_file is None):
        raise InputError(
            "--prompt",
            expected="one of --prompt and --prompt-file",
            got="neither" if prompt is None else "both",
            remedy='Write for example --prompt "Once upon a time".',
        )
    if prompt_file is not None:
        return read_text(prompt_file, where="--prompt-file")
    if prompt is None or not prompt.strip() or _undecodable(prompt):
        raise InputError(
            "--prompt", expected="some UTF-8 text", got=repr(prompt), remedy="Write something to continue."
        )
    return prompt


def _undecodable(text: str) -> bool:
    """Whether an argument held bytes that are not UTF-8; Python hands those on as lone surrogates."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def _encode(tokenizer: Any, text: str, *, chat: bool) -> Any:
    """Token ids and attention mask `[1, T]`."""
    if not chat:
        return tokenizer(text, return_tensors="pt")
    if not tokenizer.chat_template:
        raise InputError(
            "--chat", expected="a model with a chat template", got="one without", remedy="Leave out --chat."
        )
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def _streamer(tokenizer: Any) -> Any:
    """A streamer that writes new text as it comes and notes in `times` when each token came, in seconds."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                self.times.append(time.perf_counter())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            out.file.write(safe(text) + ("\n" if stream_end else ""))
            out.file.flush()

    return Streamer()


def statistics(times: list[float], stats: "Stats") -> str:
    """One line: tokens, milliseconds per decode step, density, share of each path, backend.

    Args:
        times: When each new token came, in seconds; the first comes from the prefill.
        stats: What the selector did.
    """
    parts = [f"{len(times)} tokens"]
    if len(times) > 1:
        parts.append(f"{1000 * (times[-1] - times[0]) / (len(times) - 1):.1f} ms per token after the first")
        parts.append(f"density {stats.density:.3f}")
    paths = ("exact", "reuse", "refresh", "fallback", "underfull", "cold", "hit", "miss")
    parts += [f"{path} {stats.share(path):.3f}" for path in paths if path in stats.total]
    return " · ".join([*parts, stats.backend])
