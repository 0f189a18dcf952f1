"""A tiny model with a tokenizer of its own, saved as users have them, and a text."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = "\n\n".join(topics[name] for name in sorted(topics))


def save_model(folder: Path, *, seed: int = 0, bos: bool = False) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([CORPUS[:20000]], trainer)
    if bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # peaked attention, so that what is attended to matters
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory, monkeypatch):
    """Keep what tests of other models cache out of the folder that stays between runs."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder)
    return folder


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "other"
    save_model(folder, seed=1, bos=True)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(CORPUS[30000:40000], encoding="utf-8")
    return path
