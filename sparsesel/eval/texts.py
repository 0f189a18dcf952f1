"""The text that is scored, and how it is cut into documents.

Document i is a window of max(contexts) tokens: file i mod F, window i div F of it, windows one after another
without overlap. A smaller context is the first tokens of the same window.
"""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsesel.config import read_text
from sparsesel.errors import InputError

_CHARS_PER_TOKEN = 6  # a first guess at how much text is enough; doubled until it is
_MARGIN = 256  # tokens that must follow a window in a prefix, so that the cut cannot have changed it


@dataclass(frozen=True)
class Text:
    """One file's text, what was to be skipped already gone."""

    name: str
    content: str


@dataclass(frozen=True)
class Window:
    """The tokens of one document."""

    file: str
    start: int
    tokens: tuple[int, ...]


def load_texts(paths: Sequence[str], skip_chars: int) -> list[Text]:
    """Read the files, or the language reference that ships with Python if there are none.

    Args:
        paths: UTF-8 text files.
        skip_chars: Characters to leave out at the beginning of each.

    Raises:
        InputError: A file is missing, empty, not UTF-8, or not longer than what is to be skipped.
    """
    texts = [Text(path, read_text(Path(path), where="text")) for path in paths] or [default_text()]
    for text in texts:
        if not text.content[skip_chars:].strip():
            raise InputError(
                "skip_chars",
                expected=f"fewer than the {len(text.content)} characters of {text.name}",
                got=skip_chars,
                remedy="Skip less, or give a longer text.",
            )
    return [Text(text.name, text.content[skip_chars:]) for text in texts]


def default_text() -> Text:
    """Python's language reference as this interpreter carries it, some 465,000 characters."""
    from pydoc_data.topics import topics

    content = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return Text(f"pydoc_data.topics of Python {platform.python_version()}", content)


def texts_sha256(texts: Sequence[Text]) -> str:
    """SHA-256 of the texts' contents, in order; names do not matter."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.content.encode("utf-8", errors="surrogatepass")).digest())
    return digest.hexdigest()


def place_of(document: int, num_files: int, size: int) -> tuple[int, int]:
    """Index of a document's file, and of its first token within it."""
    return document % num_files, document // num_files * size


def cut_windows(texts: Sequence[Text], tokenizer: Any, *, size: int, documents: int) -> list[Window]:
    """Tokens of every document.

    Args:
        texts: From `load_texts`.
        tokenizer: Called as it is by default, special tokens at the beginning of a file included.
        size: Tokens in a window.
        documents: Windows in all.

    Raises:
        InputError: The texts are too short, with the number of documents that they do hold.
    """
    tokens: list[list[int]] = []
    available = documents
    for index, text in enumerate(texts):
        windows = -(-(documents - index) // len(texts))
        tokens.append(first_tokens(text.content, tokenizer, windows * size))
        whole = len(tokens[-1]) // size
        if whole < windows:
            available = min(available, whole * len(texts) + index)
    if available < documents:
        sizes = ", ".join(f"{len(known)} in {text.name}" for known, text in zip(tokens, texts, strict=True))
        raise InputError(
            "documents",
            expected=f"at most {available} of {size} tokens each" if available else f"a text of at least {size} tokens",
            got=f"{documents} from these tokens: {sizes}" if available else sizes,
            remedy="Ask for fewer documents or a smaller --context, skip less, or give more text.",
        )
    result: list[Window] = []
    for document in range(documents):
        file, start = place_of(document, len(texts), size)
        result.append(Window(texts[file].name, start, tuple(tokens[file][start : start + size])))
    return result


def first_tokens(content: str, tokenizer: Any, count: int) -> list[int]:
    """The first `count` tokens of a text, all of them if there are fewer; only as much as needed is tokenised."""
    chars = count * _CHARS_PER_TOKEN + 4096
    while chars < len(content):
        tokens = _tokenize(content[:chars], tokenizer)
        if len(tokens) >= count + _MARGIN:
            return tokens[:count]
        chars *= 2
    return _tokenize(content, tokenizer)[:count]


def _tokenize(content: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(content, verbose=False)["input_ids"])
