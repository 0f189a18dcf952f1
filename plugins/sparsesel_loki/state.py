"""What Loki remembers: the components it ranks by, and every key along them."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops import row_topk
from sparsesel.per_token import PerTokenState, with_room, write_tokens
from sparsesel.selector import LayerSpec
from sparsesel_loki.pca import Moments


@dataclass(kw_only=True)
class LokiState(PerTokenState):
    """State of one layer.

    Attributes:
        basis: `[B, Hkv, D, r]` float32 orthonormal components as columns; 0 where they are not fitted yet.
        reduced: `[B, Hkv, C, r]` keys along them.
        fitted: `[B]` int64 how many of a sequence's first keys its components were fitted to, 0 for none yet;
            meaningless where they come from a file.
        from_prompt: Whether they come from the sequence's own keys.
        is_fitted: Whether no sequence lacks them; known on the host.
    """

    basis: Float[Tensor, "B Hkv D R"]
    reduced: Float[Tensor, "B Hkv C R"]
    fitted: Int[Tensor, " B"]
    from_prompt: bool = field()
    is_fitted: bool = field()

    @classmethod
    def empty(cls, layer: LayerSpec, rank: int, basis: Float[Tensor, "Hkv D R"] | None) -> "LokiState":
        """State that has seen nothing; without a `basis` it is fitted when it is needed."""
        rows, heads, dim, device = layer.batch_size, layer.num_key_value_heads, layer.head_dim, layer.device
        with torch.inference_mode(mode=False):
            known = torch.zeros(heads, dim, rank) if basis is None else basis
            return cls(
                layer=layer,
                indexed=torch.zeros(rows, dtype=torch.int64, device=device),
                basis=known.to(device).expand(rows, -1, -1, -1).clone(),
                reduced=torch.empty(rows, heads, 0, rank, dtype=layer.dtype, device=device),
                fitted=torch.zeros(rows, dtype=torch.int64, device=device),
                from_prompt=basis is None,
                is_fitted=basis is not None,
            )

    def reset(self) -> None:
        """Forget every sequence."""
        super().reset()
        if self.from_prompt:
            self.basis = torch.zeros_like(self.basis)
            self.fitted = torch.zeros_like(self.fitted)
            self.is_fitted = False

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Forget keys at positions ≥ `lengths`, and components that were fitted to any of them."""
        super().crop(lengths)
        if self.from_prompt:
            self.fitted = torch.where(lengths.to(self.fitted.device) < self.fitted, 0, self.fitted)
            self.is_fitted = self.is_fitted and bool((self.fitted > 0).all())  # cropping may wait for the device

    def fit(self, kv: KVView, topk: int | str) -> None:
        """Fit the components of each sequence that has to choose among its keys for the first time.

        It is done once per sequence, to the keys before the current one: of a prompt longer than K, its own. Until
        the last sequence is fitted, a step waits for its device.
        """
        if self.is_fitted or (isinstance(topk, int) and kv.max_length <= topk):
            return
        due = (self.fitted == 0) & (kv.lengths > row_topk(topk, kv.lengths))
        rows = due.nonzero().flatten().tolist()
        if rows:
            keys, lengths = kv.logical_keys(), kv.lengths.tolist()
            rank = self.basis.shape[3]
            basis = self.basis.clone()
            for row in rows:
                moments = Moments(keys.shape[1], keys.shape[3], keys.device)
                moments.add(keys[row, :, : lengths[row] - 1])
                basis[row] = moments.components()[0][..., :rank].float()
            self.basis = basis
            self.fitted = torch.where(due, kv.lengths - 1, self.fitted)
            self.indexed = torch.where(due, 0, self.indexed)
            self.reached = None
        self.is_fitted = bool((self.fitted > 0).all())

    def record(self, kv: KVView) -> None:
        """Take in every key of `kv` that is not there yet."""
        positions, real = self.pending(kv)
        if positions.shape[1]:
            self.reduced = with_room(self.reduced, kv.max_length, dim=2)
            keys = kv.gather_keys(positions[:, None].expand(-1, kv.num_heads, -1)).float()
            write_tokens(self.reduced, positions, real, keys @ self.basis)
        self.recorded(kv)

    def seen(self, length: int) -> Float[Tensor, "B Hkv L R"]:
        """The first `length` keys along the components: what is read to rank them."""
        return self.reduced[:, :, :length]
