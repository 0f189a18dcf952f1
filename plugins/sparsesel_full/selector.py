"""Dense attention, put through the same protocol as every selector that it is compared with."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention
from sparsesel.selector import LayerSpec, SelectorState, StepCost, Support, discover_and_aggregate
from sparsesel_full.config import FullConfig


@dataclass(frozen=True)
class FullSelector:
    """Softmax attention over every visible key: `o = softmax(q · K^T * scale) · V`. It remembers nothing."""

    config: FullConfig

    def init_state(self, layer: LayerSpec) -> SelectorState:
        """Empty state."""
        return SelectorState(layer)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: SelectorState, *, scale: float
    ) -> None:
        """Nothing to remember."""

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SelectorState, *, scale: float) -> Support:
        """Everything, without listing it."""
        support = Support.everything(kv)
        state.counters.add_step(support, kv, query.shape[1])
        return support

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: SelectorState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Dense attention."""
        return dense_attention(query, kv, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SelectorState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One dense decode step."""
        if backend.current(query.device) == "triton":
            from sparsesel.ops.dense_attention import dense_attention as counting

            counters = state.counters.table(("steps", "selected", "visible"), query.shape[1], query.device)
            return counting(query, kv, scale=scale, counters=counters)
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Every key and value once per key-value head: 2·L·D numbers."""
        cache = layer.batch_size * layer.num_key_value_heads * length * layer.head_dim * layer.dtype.itemsize
        flops = 4 * layer.batch_size * layer.num_attention_heads * length * layer.head_dim
        return StepCost(
            key_bytes=cache,
            value_bytes=cache,
            metadata_bytes=0,
            score_bytes=0,
            flops=flops,
            state_bytes=0,
            attended=length,
        )
