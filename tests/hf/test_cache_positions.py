"""StreamingLLM's positions within the cache, in a model, against the model computed plainly.

The plain computation keeps keys as they are before rotation and rotates the kept ones, at each step, to their
positions among the kept: the published rule, word for word.
"""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sparsesel import InputError, sparsify
from sparsesel.hf import compat

TOPK, SINKS = 12, 3


class Plain:
    """A Llama model computed from its parts."""

    def __init__(self, model):
        self.model = model.model
        self.head = model.lm_head
        self.past = [([], []) for _ in self.model.layers]  # per layer: keys before rotation and values, by position

    def __call__(self, ids, kept):
        """Logits of the new tokens, `[T, vocabulary]`.

        Args:
            ids: `[T]`.
            kept: From a position to the positions that it attends to, at which it renumbers them or None.
        """
        hidden = self.model.embed_tokens(ids)
        for layer, (keys, values) in zip(self.model.layers, self.past, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            queries, new_keys, new_values = (
                project(normed).view(len(ids), -1, attention.head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            outputs = []
            for query, key, value in zip(queries, new_keys, new_values, strict=True):
                keys.append(key)
                values.append(value)
                positions, numbers = kept(len(keys) - 1)
                outputs.append(self.attend(attention, query, keys, values, positions, numbers))
            hidden = hidden + attention.o_proj(torch.stack(outputs))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.head(self.model.norm(hidden))

    def attend(self, attention, query, keys, values, positions, numbers):
        group = attention.config.num_attention_heads // attention.config.num_key_value_heads
        chosen_keys, chosen_values = (
            torch.stack([part[at] for at in positions], dim=1).repeat_interleave(group, dim=0)
            for part in (keys, values)
        )  # [Hq, K, D]
        cos, sin = self.model.rotary_emb(chosen_keys, torch.tensor([numbers]))
        _, chosen_keys = apply_rotary_pos_emb(chosen_keys[None], chosen_keys[None], cos, sin)
        now, _ = apply_rotary_pos_emb(query[None, :, None], query[None, :, None], cos[:, -1:], sin[:, -1:])
        weights = (now @ chosen_keys.transpose(2, 3) * attention.scaling).softmax(-1)
        return (weights[0] @ chosen_values).flatten()


def everything(position):
    return range(position + 1), list(range(position + 1))


def streaming(position):
    window = range(max(SINKS, position + 1 - (TOPK - SINKS)), position + 1)
    positions = [*range(min(SINKS, position + 1)), *window]
    return positions, list(range(len(positions)))


@torch.no_grad()
def test_model_under_cache_positions_equals_the_plain_computation(tiny, prompt):
    model = tiny()
    plain, following = Plain(model), torch.randint(1, 128, (8,), generator=torch.Generator().manual_seed(3))
    expected = plain(prompt[0], everything)[-1:]
    selector = f"streaming_llm,topk={TOPK},sink_size={SINKS},positions=cache"
    with sparsify(model, selector):
        output = model(prompt, use_cache=True)
        torch.testing.assert_close(output.logits[0, -1:], expected, rtol=1e-3, atol=1e-3)
        for token in following:
            cache = {compat.CACHE_ARGUMENT: compat.cache_of(output)}
            output = model(token.view(1, 1), **cache)
            expected = plain(token[None], streaming)
            torch.testing.assert_close(output.logits[0], expected, rtol=1e-3, atol=1e-3)


def test_a_model_whose_rotation_is_not_known_is_refused(tiny, prompt):
    model = tiny("gpt2")
    with sparsify(model, "streaming_llm:paper"), pytest.raises(InputError, match="positions=original"):
        model.generate(prompt, max_new_tokens=2)
    with sparsify(model, "streaming_llm:strict"):
        model.generate(prompt, max_new_tokens=2)
