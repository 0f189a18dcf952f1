"""Learns principal components of keys from text, and writes them to a file."""

import json
from collections.abc import Mapping
from pathlib import Path

from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.selector import LayerSpec
from sparsesel_loki.header import KIND, VERSION
from sparsesel_loki.pca import Moments


class LokiCalibrator:
    """Principal components of each layer's post-rotary keys, per key-value head; a `sparsesel.selector.Calibrator`."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[LayerSpec, Moments]] = {}

    def observe(self, layer: LayerSpec, query: Float[Tensor, "B Hq Tq D"], kv: KVView) -> None:
        """Take in the keys of the last Tq tokens; memory does not grow."""
        if layer.layer_idx not in self._layers:
            moments = Moments(layer.num_key_value_heads, layer.head_dim, kv.device)
            self._layers[layer.layer_idx] = (layer, moments)
        moments = self._layers[layer.layer_idx][1]
        keys, count = kv.logical_keys(), query.shape[2]
        for row, length in enumerate(kv.lengths.tolist()):
            moments.add(keys[row, :, max(0, length - count) : length])

    def save(self, path: Path, provenance: Mapping[str, str]) -> str:
        """Write the components of every layer seen; returns a summary of a few lines.

        Raises:
            InputError: There were fewer tokens than a key has components.
        """
        needed = max((layer.head_dim for layer, _ in self._layers.values()), default=2)
        count = min((int(moments.count.min()) for _, moments in self._layers.values()), default=0)
        if count < needed:
            raise InputError(
                "text",
                expected=f"at least {needed} tokens, as many as a key has components",
                got=count,
                remedy="Give more text.",
            )
        tensors: dict[str, Tensor] = {}
        shares: list[Tensor] = []
        for layer_idx, (_, moments) in sorted(self._layers.items()):
            basis, variance = moments.components()
            tensors[f"layers.{layer_idx}.basis"] = basis.float().contiguous().cpu()
            tensors[f"layers.{layer_idx}.variance"] = variance.float().contiguous().cpu()
            shares.append((variance.cumsum(-1) / variance.sum(-1, keepdim=True).clamp_min(1e-300)).mean(0).cpu())
        explained = _explained(shares)
        layers = [layer for layer, _ in self._layers.values()]
        save_file(
            tensors,
            path,
            metadata={
                **provenance,
                "kind": KIND,
                "version": VERSION,
                "keys": "post-rotary",
                "model_fingerprint": layers[0].model,
                "shapes": json.dumps({i: list(tensors[f"layers.{i}.basis"].shape[:2]) for i in sorted(self._layers)}),
                "explained_variance": json.dumps(explained),
            },
        )
        parts = [f"{rank}: {share:.3f}" for rank, share in explained.items()]
        shape = f"{layers[0].num_key_value_heads} key-value heads, {layers[0].head_dim} components"
        return (
            f"{len(layers)} layers of {shape}.\n"
            f"Variance explained by the first components, mean over layers and heads: {', '.join(parts)}."
        )


def _explained(shares: list[Tensor]) -> dict[int, float]:
    """Mean share of variance in the first D/8, D/4, D/2 and D components, over layers of the smallest D."""
    dim = min(len(share) for share in shares)
    ranks = sorted({max(1, dim // part) for part in (8, 4, 2, 1)})
    return {rank: round(sum(float(share[rank - 1]) for share in shares) / len(shares), 6) for rank in ranks}
