"""`sparsesel calibrate`: let a selector learn from text what it then uses with one model."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsesel.cli.console import err, out, safe
from sparsesel.errors import InputError
from sparsesel.eval.texts import refuse_repeated, text_sha256
from sparsesel.registry import registry

if TYPE_CHECKING:
    from sparsesel.selector import Calibrator

_CONTEXT = 2048


def calibrate(
    selector: Annotated[str, typer.Argument(metavar="SELECTOR", help="Name of a selector that is calibrated: loki.")],
    texts: Annotated[list[str], typer.Option("--text", metavar="FILE", help="UTF-8 text; repeatable.")],
    target: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")],
    model: Annotated[
        str, typer.Option("--model", help="smollm2-135m (offline), a local folder or a Hub id.")
    ] = "smollm2-135m",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="Stop after that many tokens. [default: all of the text]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=2, help=f"Tokens of each window run through the model. [default: {_CONTEXT}, or its limit]"
        ),
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="Allow a download from the Hub.")] = False,
) -> None:
    """Run text through a model and write what a selector learns from it to a file.

    Name the file in the selector's configuration: `--selector loki,calibration=FILE`. It holds for this model alone.
    """
    _check_target(target)
    digests = [text_sha256(path) for path in texts]
    refuse_repeated(texts)

    from sparsesel.hf.models import load_model, load_tokenizer, quiet, resolve

    source = resolve(model, online=online)
    calibrator = registry().make_calibrator(selector)

    from sparsesel.eval import provenance
    from sparsesel.eval.calibration import calibrate as run
    from sparsesel.eval.calibration import token_windows
    from sparsesel.eval.progress import TerminalProgress

    limit = source.max_length
    if context is not None and limit is not None and context > limit:
        raise InputError(
            "--context",
            expected=f"at most {limit}, the limit of {model}",
            got=context,
            remedy="Choose smaller windows.",
        )
    size = context or min(_CONTEXT, limit or _CONTEXT)
    tokenizer = load_tokenizer(source)
    with TerminalProgress(err) as progress, quiet():
        progress.say(f"Loading {safe(model)} …")
        loaded = load_model(source)
        progress.start(sum(len(window) for window in token_windows(texts, tokenizer, size=size, max_tokens=max_tokens)))
        progress.doing(f"calibrating {selector}")
        windows = token_windows(texts, tokenizer, size=size, max_tokens=max_tokens)
        tokens = run(loaded, windows, calibrator, advance=progress.advance)
    summary = _save(
        calibrator,
        target,
        {
            "selector": selector,
            "model": source.name,
            "model_identity": source.identity,
            "texts": json.dumps([os.path.basename(path) for path in texts]),
            "text_sha256": hashlib.sha256(b"".join(digests)).hexdigest(),
            "tokens": str(tokens),
            "context": str(size),
            "versions": json.dumps(provenance.versions()),
            "time": provenance.now(),
        },
    )
    out.print(f"{safe(target)}: from {tokens} tokens in windows of {size}.", soft_wrap=True)
    out.print(safe(summary), soft_wrap=True)


def _check_target(target: Path) -> None:
    """Refuse a file that could not be written, before there is anything to lose."""
    problem = ""
    try:
        if target.is_dir():
            problem = "a folder"
        else:
            tempfile.TemporaryFile(dir=target.parent).close()
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        raise InputError(
            "--out", expected="a file that can be written", got=f"{target} ({problem})", remedy="Name another file."
        )


def _save(calibrator: "Calibrator", target: Path, provenance: dict[str, str]) -> str:
    """Write the file completely or not at all; returns the calibrator's summary."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as part:
            written = Path(part) / "calibration"
            summary = calibrator.save(written, provenance)
            written.replace(target)
    except OSError as error:
        raise InputError(
            "--out", expected="a file that can be written", got=f"{target} ({error})", remedy="Name another file."
        ) from error
    return summary
