"""The text that is scored, and how it is cut into documents.

Document i is a window of max(contexts) tokens: file i mod F, window i div F of it, windows one after another
without overlap. A smaller context is the first tokens of the same window.
"""

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsesel.config import read_text, reading_text
from sparsesel.errors import InputError

_PIECE = 1 << 14  # characters read at a time
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
        InputError: A file is missing, empty, not UTF-8, named twice, or not longer than what is to be skipped.
    """
    texts = [Text(path, read_text(Path(path), where="text")) for path in paths] or [default_text()]
    refuse_repeated(paths)
    for text in texts:
        if not text.content[skip_chars:].strip():
            raise InputError(
                "skip_chars",
                expected=f"fewer than the {len(text.content)} characters of {text.name}",
                got=skip_chars,
                remedy="Skip less, or give a longer text.",
            )
    return [Text(text.name, text.content[skip_chars:]) for text in texts]


def refuse_repeated(paths: Sequence[str]) -> None:
    """Refuse one file named twice: it would count twice without adding anything.

    Raises:
        InputError: The first such, as it was named both times.
    """
    known: dict[str, str] = {}
    for path in paths:
        file = os.path.realpath(path)
        if file in known:
            raise InputError(
                "text", expected="each file once", got=f"{known[file]} and {path}", remedy="Leave one of them out."
            )
        known[file] = path


def default_text() -> Text:
    """Python's language reference as this interpreter carries it, some 465,000 characters."""
    from pydoc_data.topics import topics

    content = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return Text(f"pydoc_data.topics of Python {platform.python_version()}", content)


def text_sha256(path: str) -> bytes:
    """SHA-256 of a text's characters as UTF-8, for which all of it is read once.

    Raises:
        InputError: The file is missing, unreadable, empty, not UTF-8, or a pipe or device: texts are read repeatedly.
    """
    digest, empty = hashlib.sha256(), True
    with reading_text(path, where="text"):
        file = Path(path)
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError("a pipe or device, which cannot be read repeatedly")
        for piece in pieces(path):
            digest.update(piece.encode())
            empty = empty and not piece.strip()
        if empty:
            raise ValueError("an empty file")
    return digest.digest()


def pieces(path: str) -> Iterator[str]:
    """A text in pieces, so that a large one is never in memory as a whole."""
    with Path(path).open(encoding="utf-8") as file:
        while piece := file.read(_PIECE):
            yield piece


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
