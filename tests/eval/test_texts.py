"""Documents are exactly the windows that the complete token sequence has."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sparsesel import InputError
from sparsesel.eval.texts import Text, cut_windows, default_text, first_tokens, load_texts, texts_sha256

LOREM = default_text().content


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def bos_tokenizer(other_model_folder):
    return AutoTokenizer.from_pretrained(other_model_folder)


@pytest.mark.parametrize("which", ["tokenizer", "bos_tokenizer"])
def test_a_prefix_gives_the_tokens_of_the_whole_text(which, request):
    tokenizer = request.getfixturevalue(which)
    content = LOREM[:60000]
    whole = tokenizer(content, verbose=False)["input_ids"]
    for count in (1, 100, 1000, 1001, 5000, len(whole) - 1, len(whole), len(whole) + 1):
        assert first_tokens(content, tokenizer, count) == whole[:count]
    assert (whole[0] == 0) == (which == "bos_tokenizer")


def test_only_what_is_needed_is_tokenised(tokenizer):
    seen = []

    def counting(content, **kwargs):
        seen.append(len(content))
        return tokenizer(content, **kwargs)

    first_tokens(LOREM, counting, 500)
    assert sum(seen) < 30_000 < len(LOREM)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(300, 3000), min_size=1, max_size=3),
    size=st.integers(5, 80),
    documents=st.integers(1, 12),
)
def test_windows_are_consecutive_and_taken_from_the_files_in_turn(tokenizer, sizes, size, documents):
    texts = [Text(f"file {i}", LOREM[10_000 * i : 10_000 * i + chars]) for i, chars in enumerate(sizes)]
    whole = [tokenizer(text.content, verbose=False)["input_ids"] for text in texts]
    # Document i is the next window of file i mod F; the first one that its file does not hold ends the row.
    expected = []
    used = [0] * len(texts)
    for i in range(documents):
        file = i % len(texts)
        window = tuple(whole[file][used[file] : used[file] + size])
        if len(window) < size:
            break
        expected.append((texts[file].name, used[file], window))
        used[file] += size
    if len(expected) == documents:
        windows = cut_windows(texts, tokenizer, size=size, documents=documents)
        assert [(w.file, w.start, w.tokens) for w in windows] == expected
        return
    with pytest.raises(InputError) as error:
        cut_windows(texts, tokenizer, size=size, documents=documents)
    if expected:
        assert f"at most {len(expected)} of" in error.value.expected
        assert len(cut_windows(texts, tokenizer, size=size, documents=len(expected))) == len(expected)
    else:
        assert f"at least {size} tokens" in error.value.expected


def test_texts_are_read_and_skipped_into(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("zero one two", encoding="utf-8")
    assert [text.content for text in load_texts([str(path)], 5)] == ["one two"]
    assert texts_sha256(load_texts([str(path)], 5)) != texts_sha256(load_texts([str(path)], 6))
    with pytest.raises(InputError, match="12 characters") as error:
        load_texts([str(path)], 12)
    assert error.value.field == "skip_chars"


@pytest.mark.parametrize("content", [None, b"", b"  \n", b"caf\xe9"])
def test_unreadable_texts_are_refused(tmp_path, content):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_texts([str(path)], 0)
    assert error.value.field == "text"
    assert str(path) in error.value.got


def test_the_default_text_is_the_language_reference():
    text = default_text()
    assert text == default_text()
    assert len(text.content) > 400_000
    assert 'The "assert" statement' in text.content
