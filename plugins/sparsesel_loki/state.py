"""What Loki remembers: the components it ranks by, and every key along them."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops import backend, row_topk
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
        fit_next: `max_length` at which a sequence lacks them next, as long as all grow alike and none has moved; 0
            where it has to be found out.
    """

    basis: Float[Tensor, "B Hkv D R"]
    reduced: Float[Tensor, "B Hkv C R"]
    fitted: Int[Tensor, " B"]
    from_prompt: bool = field()
    is_fitted: bool = field()
    fit_next: int = field(default=0)

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
            self.basis.zero_()
            self.fitted.zero_()
            self.is_fitted, self.fit_next = False, 0

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Forget keys at positions ≥ `lengths`, and components that were fitted to any of them."""
        super().crop(lengths)
        if self.from_prompt:
            self.fitted.masked_fill_(lengths.to(self.fitted.device) < self.fitted, 0)
            self.is_fitted = self.is_fitted and bool((self.fitted > 0).all())  # cropping may wait for the device

    def fit(self, kv: KVView, topk: int | str) -> None:
        """Fit the components of each sequence that has to choose among its keys for the first time.

        It is done once per sequence, to the keys before the current one: of a prompt longer than K, its own. That waits
        for the device, and so does looking whether it is to be done, where that cannot be foreseen: sequences whose
        lengths the device alone knows (paged, static) are looked at until the last one is fitted.
        """
        if self.reached is None:
            self.fit_next = 0
        if self.is_fitted or (kv.aligned and kv.max_length < self.fit_next):
            return
        if isinstance(topk, int) and kv.max_length <= topk:
            return
        if kv.device.type == "meta":
            self.is_fitted = True  # there is nothing to be fitted to, and the steps that follow are to be seen
            return
        due = (self.fitted == 0) & (kv.lengths > row_topk(topk, kv.lengths))
        rows = due.nonzero().flatten().tolist()
        lengths = kv.lengths.tolist()
        if rows:
            keys, rank = kv.logical_keys().detach(), self.basis.shape[3]
            for row in rows:
                moments = Moments(keys.shape[1], keys.shape[3], keys.device)
                moments.add(keys[row, :, : lengths[row] - 1])
                self.basis[row] = moments.components()[0][..., :rank].float()
            self.fitted.copy_(torch.where(due, kv.lengths - 1, self.fitted))
            self.indexed.masked_fill_(due, 0)
            self.reached = None
        waiting = [n for n, fitted in zip(lengths, self.fitted.tolist(), strict=True) if not fitted]
        self.is_fitted = not waiting
        # A budget in percent leaves no sequence of two tokens or more waiting.
        self.fit_next = kv.max_length + (topk + 1 - max(waiting, default=0) if isinstance(topk, int) else 0)

    def record(self, kv: KVView) -> None:
        """Take in every key of `kv` that is not there yet."""
        self.make_room(kv)
        if backend.current(kv.device) == "triton":
            from sparsesel_loki import kernels

            kernels.record(kv, self)
        else:
            positions, real = self.pending(kv)
            if positions.shape[1]:
                keys = kv.gather_keys(positions[:, None].expand(-1, kv.num_heads, -1)).float()
                write_tokens(self.reduced, positions, real, keys @ self.basis)
        self.recorded(kv)

    def make_room(self, kv: KVView) -> None:
        """Let `reduced` hold the keys of `kv`."""
        self.reduced = with_room(self.reduced, kv.max_length, dim=2)

    def seen(self, length: int) -> Float[Tensor, "B Hkv L R"]:
        """The first `length` keys along the components: what is read to rank them."""
        return self.reduced[:, :, :length]
