"""`sparsify`: put a selector into a Hugging Face model, and take it out again.

How it works. One attention function is registered with transformers under a fixed name, with the masks of sdpa.
`sparsify` makes it the model's attention implementation and gives each attention module a forward pre-hook; the
attention function is not handed the cache, so the hook adds the cache layer to the module's keyword arguments,
which every module passes on. A forward of one token on a filled cache is a decode step of the selector; any other is
prefill: dense, through the model's own implementation, then shown to the selector.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsesel.config import MAX_COUNT, BackendName, LayeredConfig, SelectorConfig, spread_layers
from sparsesel.errors import InputError, UnsupportedModelError
from sparsesel.hf import compat
from sparsesel.hf.cache import SelectorLayer, selector_layer
from sparsesel.hf.fingerprint import fingerprint
from sparsesel.hf.layers import AttentionLayer, attention_layers
from sparsesel.hf.rotary import rotary_of
from sparsesel.hf.stats import Stats
from sparsesel.kv import KVView
from sparsesel.ops import backend as backends
from sparsesel.ops import workspace
from sparsesel.registry import make_selector, registry
from sparsesel.selector import Counters, LayerSpec, Selector

IMPLEMENTATION = "sparsesel"
"""Name under which the attention function is registered with transformers."""

_CALL = "sparsesel_call"  # keyword that carries a Call from the pre-hook to the attention function
_NEW_STEPS = "sparsesel_new_steps"  # keyword that carries how many of a first forward's tokens are decode steps

_replaced: dict[int, str] = {}
"""Attention implementation of each configuration object (by id) that a session has replaced."""

AnySelector = str | SelectorConfig | Selector
Selection = AnySelector | LayeredConfig | Mapping[Any, AnySelector]
"""What `sparsify` accepts: one selector for all layers, or selectors by layers, which are named by int or str."""

MultiToken = Literal["dense", "select"]


@dataclass
class Call:
    """One forward of one attention module, on its way to the attention function."""

    session: "Session"
    layer_idx: int
    selector: Selector | None
    cache_layer: SelectorLayer | None = None
    new_steps: int = 0
    answered: bool = False


def sparsify(
    model: PreTrainedModel,
    selector: Selection,
    *,
    multi_token: MultiToken = "dense",
    backend: BackendName = "auto",
    capacity: int | None = None,
    **overrides: Any,
) -> "Session":
    """Let `selector` choose, at every decode step of `model`, the keys that each head attends to.

    Use it as a context manager, or call `close` on what it returns. Any generation mode works within. The model is
    for inference: its cache is written in place, and a backward pass through decode steps is refused.

    Args:
        model: A causal language model, loaded with `attn_implementation` "sdpa" (the default) or "eager".
        selector: A spec (`"retopk:quality,topk=128"`), a configuration, a `Selector`, or a mapping from layers (`3`,
            `"0-1"`, `"2-"`) to any of these; also a file with such a mapping in its table `layers`. Layers that no key
            names stay dense, as do sliding-window layers.
        multi_token: What several new tokens at once are. `"dense"`: prefill. `"select"`: on a filled cache, each is
            a decode step of its own, so that assisted decoding gives what greedy decoding with the selector gives.
        backend: What runs the selectors' operations: `"triton"`, `"eager"`, or `"auto"`, the best one for the device
            that a layer lies on. Prefill itself runs through the model's own attention.
        capacity: Tokens of a sequence that caches have room for from the start, so that up to there nothing is moved;
            by default, and beyond, they grow by half.
        overrides: Fields that win over the spec's.

    Raises:
        UnsupportedModelError: The model's attention cannot be served faithfully.
        InputError: Unknown selector, preset, field or layer; a backend that cannot run where the model lies; the
            model is sparsified already.
    """
    return Session(model, selector, multi_token=multi_token, backend=backend, capacity=capacity, overrides=overrides)


class Session:
    """A model with selectors in it, until closed. Made by `sparsify`.

    Attributes:
        model: The model.
        selectors: Layer index to the selector that serves it.
        multi_token: See `sparsify`.
        capacity: See `sparsify`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        selector: Selection,
        *,
        multi_token: MultiToken,
        backend: BackendName,
        capacity: int | None,
        overrides: Mapping[str, Any],
    ) -> None:
        self._undo: list[Callable[[], object]] = []
        if not isinstance(model, PreTrainedModel):
            raise InputError(
                "model",
                expected="a transformers PreTrainedModel",
                got=type(model).__name__,
                remedy="Unwrap it first.",
            )
        if multi_token not in ("dense", "select"):
            raise InputError(
                "multi_token",
                expected='"dense" or "select"',
                got=repr(multi_token),
                remedy="Choose one of the two.",
            )
        if capacity is not None and (type(capacity) is not int or not 1 <= capacity <= MAX_COUNT):
            raise InputError(
                "capacity",
                expected=f"a number of tokens, 1 to {MAX_COUNT}",
                got=repr(capacity),
                remedy="Give the prompt and the new tokens, or leave it out.",
            )
        text_config = model.config.get_text_config(decoder=True)
        if text_config._attn_implementation == IMPLEMENTATION:
            raise InputError(
                "model",
                expected="a model that is not sparsified",
                got="one that is, or shares its configuration object with one that is",
                remedy="Close the other session first, or load the model by itself.",
            )
        layers = attention_layers(model)
        self.model = model
        self.multi_token: MultiToken = multi_token
        self.capacity = capacity
        self.selectors = _spread(selector, layers, overrides)
        self._requested: BackendName = backend
        self._backends = {
            layer.layer_idx: backends.resolve(backend, _device_of(layer.module))
            for layer in layers
            if layer.layer_idx in self.selectors
        }
        self._implementation = str(text_config._attn_implementation)
        self._rotary = {layer.layer_idx: rotary_of(model, layer) for layer in layers if layer.is_full}
        self._fingerprint = fingerprint(model, layers)
        self._counters = {layer_idx: Counters() for layer_idx in self.selectors}
        self._padding: tuple[weakref.ref[Tensor], Tensor | None] | None = None
        try:
            self._install(layers)
        except BaseException:
            self.close()
            raise

    @property
    def backend(self) -> str:
        """What runs the selectors, `triton` or `eager`; both where layers lie on different devices."""
        return ", ".join(sorted(set(self._backends.values())))

    def stats(self) -> Stats:
        """What the selectors did so far, over every cache of this session (waits for the device)."""
        counters = {layer_idx: counters.read() for layer_idx, counters in self._counters.items()}
        return Stats(counters, self.backend)

    def close(self) -> None:
        """Restore the model. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        workspace.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _install(self, layers: list[AttentionLayer]) -> None:
        configs = {
            id(config): config for config in (getattr(layer.module, "config", None) for layer in layers) if config
        }
        text_config = self.model.config.get_text_config(decoder=True)
        configs[id(text_config)] = text_config
        for config in configs.values():
            _replaced[id(config)] = config._attn_implementation
            self._undo.append(lambda config=config: _restore(config))
            config._attn_implementation = IMPLEMENTATION
        if self.multi_token == "select":
            handle = self.model.register_forward_pre_hook(_mark_new_steps, with_kwargs=True)
            self._undo.append(handle.remove)
        for layer in layers:
            hook = _Hook(self, layer.layer_idx, self.selectors.get(layer.layer_idx) if layer.is_full else None)
            before_handle = layer.module.register_forward_pre_hook(hook.before, with_kwargs=True)
            after_handle = layer.module.register_forward_hook(hook.after, with_kwargs=True)
            self._undo += [before_handle.remove, after_handle.remove]

    def _starts(self, mask: Tensor | None, cache_layer: SelectorLayer, past: int, new: int) -> Tensor | None:
        """Column of each sequence's first token, read from the mask once for all layers of a forward.

        Raises:
            InputError: The visible columns are not one run that ends at the current token, or not the one that the
                cache was filled with.
        """
        known = cache_layer.starts
        if mask is None:
            if known is not None and bool((known > 0).any()):
                raise _padding_changed()
            return None
        padding = self._padding  # read once: another thread may replace it
        if padding is not None and padding[0]() is mask:
            return padding[1]
        if known is not None and new == 1:
            known = known.to(mask.device)  # an offloaded cache took it along
            # A sequence of which nothing was visible yet starts here, or later.
            starts = known + ((known >= past) & ~mask[:, 0, -1, -1])
            _check_padding(mask, starts)
        else:
            starts = _read_starts(mask)
            if cache_layer.state is not None:
                before = (
                    torch.zeros_like(mask[:, 0, 0, 0], dtype=torch.int64) if known is None else known.to(mask.device)
                )
                now = torch.zeros_like(before) if starts is None else starts
                # A sequence of which nothing was visible yet may start anywhere from here on.
                if bool(((now != before) & (before < past)).any()):
                    raise _padding_changed()
        self._padding = (weakref.ref(mask), starts)
        return starts

    def _attention(
        self,
        call: Call,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache_layer, selector = call.cache_layer, call.selector
        if selector is None or cache_layer is None:
            return compat.dense_attention(self._implementation, module, query, key, value, mask, **kwargs)
        for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                raise InputError(
                    f"layer {call.layer_idx}",
                    expected="plain causal softmax attention",
                    got=f"{name}={kwargs[name]!r}",
                    remedy="This model cannot be sparsified.",
                )
        if torch.is_autocast_enabled(query.device.type):
            raise InputError(
                "autocast",
                expected="a model that runs in the type it was loaded in, since scores must be float32",
                got=f"torch.autocast on {query.device.type}",
                remedy="Load the model with dtype=torch.bfloat16 instead.",
            )
        batch, num_heads, new, head_dim = query.shape
        past = key.shape[2] - new
        cache_layer.starts = self._starts(mask, cache_layer, past, new)
        spec = LayerSpec(
            layer_idx=call.layer_idx,
            num_attention_heads=num_heads,
            num_key_value_heads=key.shape[1],
            head_dim=head_dim,
            dtype=query.dtype,
            device=query.device,
            batch_size=batch,
            rotary=self._rotary[call.layer_idx],
            model=self._fingerprint,
        )
        # A layer may lie elsewhere than it seemed to at the start: offloaded weights come to it when it runs.
        running = self._backends[call.layer_idx] = backends.resolve(self._requested, query.device)
        with backends.using(running):
            state = cache_layer.bind(selector, spec, self._counters[call.layer_idx])
        scale = kwargs.get("scaling")
        scale = float(scale) if scale is not None else head_dim**-0.5
        kv = KVView.dense(key, value, starts=cache_layer.starts)
        steps = self._decode_steps(new, past, call.new_steps)
        outputs: list[Tensor] = []
        weights = None
        if steps < new:
            if running == "triton":
                from sparsesel.ops.launch import query_arguments  # triton is not installed everywhere

                query_arguments(query, kv)  # refuses, before it costs anything, heads that kernels do not take
            seen = new - steps
            part = None if mask is None else mask[:, :, :seen, : past + seen]
            output, weights = compat.dense_attention(
                self._implementation,
                module,
                query[:, :, :seen],
                key[:, :, : past + seen],
                value[:, :, : past + seen],
                part,
                **kwargs,
            )
            outputs.append(output)
            with backends.using(running):
                selector.observe_prefill(query[:, :, :seen], kv.drop_last(steps), state, scale=scale)
        with backends.using(running):
            for t in range(new - steps, new):
                step = selector.attend(query[:, :, t : t + 1], kv.drop_last(new - 1 - t), state, scale=scale)
                if running == "triton" and torch.is_grad_enabled() and query.requires_grad:
                    step = _WithoutGradient.apply(step, query)
                outputs.append(step.transpose(1, 2))
        if cache_layer.is_offloaded:
            state.to("cpu")
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), weights if steps == 0 else None

    def _decode_steps(self, new: int, past: int, new_steps: int) -> int:
        """How many of `new` tokens are decode steps; the others come first and are prefill."""
        if past == 0:  # a prompt, be it of one token
            return min(new_steps, new - 1)
        return new if new == 1 or self.multi_token == "select" else 0


class _WithoutGradient(torch.autograd.Function):
    """The output of kernels in the graph of its query: a backward pass is refused there rather than cut short."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InputError(
            "backend",
            expected="no backward pass through decode steps",
            got="one through kernels of the triton backend, which have no gradients",
            remedy="Train with the model as it is, outside of sparsify.",
        )


class _Hook:
    """The hooks of one attention module."""

    def __init__(self, session: Session, layer_idx: int, selector: Selector | None) -> None:
        self.session = session
        self.layer_idx = layer_idx
        self.selector = selector

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = Call(self.session, self.layer_idx, self.selector)
        if self.selector is not None:
            cache = compat.cache_in(args, kwargs)
            if cache is None:
                raise InputError(
                    "use_cache",
                    expected="a cache to select from",
                    got="a forward without one",
                    remedy="Pass use_cache=True.",
                )
            if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()) and module.training:
                raise InputError(
                    "model",
                    expected="a model in eval mode",
                    got="one in training",
                    remedy="Call model.eval() first.",
                )
            call.cache_layer = selector_layer(cache, self.layer_idx, self.session.capacity)
            call.new_steps = kwargs.pop(_NEW_STEPS, 0)
        return args, {**kwargs, _CALL: call}

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not kwargs[_CALL].answered:
            raise RuntimeError(
                f"layer {self.layer_idx}: {type(module).__name__} did not hand its keyword arguments to the attention "
                "implementation, so the selector would never act: this model cannot be sparsified"
            )


def _device_of(module: nn.Module) -> torch.device:
    """Where an attention module's weights lie."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _restore(config: Any) -> None:
    config._attn_implementation = _replaced.pop(id(config))


def _mark_new_steps(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Assisted decoding sends the prompt and its first draft in one forward, asking for the logits from the prompt's
    last token on: the tokens after that one are decode steps."""
    keep = kwargs.get("logits_to_keep", 0)
    return args, {**kwargs, _NEW_STEPS: keep - 1 if isinstance(keep, int) and keep > 1 else 0}


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for every attention module of a sparsified model."""
    call = kwargs.pop(_CALL, None)
    kwargs.pop(_NEW_STEPS, None)
    if not isinstance(call, Call):
        # Another model that shares a sparsified model's configuration object, such as an assistant built from it.
        # (A module of ours that loses its keyword arguments lands here too; its `after` hook raises.)
        implementation = _replaced[id(module.config)]
        return compat.dense_attention(implementation, module, query, key, value, attention_mask, **kwargs)
    if call.answered and call.selector is not None:
        raise UnsupportedModelError(
            f"layer {call.layer_idx} ({type(module).__name__})",
            expected="one attention over one cache of keys and values",
            got="a second attention in the same forward",
            remedy="This model cannot be sparsified; name other layers, or leave it dense.",
        )
    call.answered = True
    return call.session._attention(call, module, query, key, value, attention_mask, **kwargs)


def _read_starts(mask: Tensor) -> Tensor | None:
    """First visible column of each sequence (Tk if there is none yet), None if it is 0 for all.

    The mask is `[B, 1, Tq, Tk]`.
    """
    if mask.dtype != torch.bool or mask.ndim != 4:
        raise InputError(
            "attention_mask",
            expected="a two-dimensional padding mask",
            got=f"{mask.dtype} with shape {tuple(mask.shape)}",
            remedy="Pass the tokenizer's attention_mask.",
        )
    visible = mask[:, 0, -1]
    starts = visible.to(torch.uint8).argmax(dim=-1)
    starts = torch.where(visible.any(-1), starts, visible.shape[1])
    expected = torch.arange(visible.shape[1], device=mask.device) >= starts[:, None]
    if not bool((visible == expected).all()):
        raise InputError(
            "attention_mask",
            expected="padding on the left only",
            got="masked tokens after the first visible one",
            remedy='Tokenise with padding_side="left".',
        )
    return starts if bool((starts > 0).any()) else None


def _check_padding(mask: Tensor, starts: Tensor) -> None:
    """Raise unless the mask shows each sequence from its start on; on a GPU without waiting for the answer."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    same = (mask[:, 0, -1] == (columns >= starts[:, None])).all()
    if mask.device.type != "cpu":
        torch._assert_async(same, "attention_mask: not the left padding that this cache was filled with")  # pyright: ignore[reportPrivateImportUsage]
    elif not bool(same):
        raise _padding_changed()


def _padding_changed() -> InputError:
    return InputError(
        "attention_mask",
        expected="the left padding that this cache was filled with",
        got="another one, or none",
        remedy="Pass the attention mask of all tokens so far.",
    )


def selectors_by_layer(model: PreTrainedModel, selector: Selection) -> dict[int, Selector]:
    """The selector of each layer that `sparsify` would give one.

    Raises:
        UnsupportedModelError: The model's attention cannot be served faithfully.
        InputError: Unknown selector, preset, field or layer.
    """
    return _spread(selector, attention_layers(model), {})


def _spread(selector: Selection, layers: list[AttentionLayer], overrides: Mapping[str, Any]) -> dict[int, Selector]:
    """Layer index to selector."""
    full = [layer.layer_idx for layer in layers if layer.is_full]
    if isinstance(selector, str):
        chosen, overrides = registry().resolve(selector, overrides), {}
    else:
        chosen = selector
    if isinstance(chosen, LayeredConfig):
        return spread_layers({key: _make(one, overrides) for key, one in chosen.layers.items()}, full)
    if isinstance(chosen, Mapping):
        return spread_layers({key: _make(one, overrides) for key, one in chosen.items()}, full)
    return dict.fromkeys(full, _make(chosen, overrides))


def _make(selector: AnySelector, overrides: Mapping[str, Any]) -> Selector:
    if isinstance(selector, str | SelectorConfig):
        return make_selector(selector, **overrides)
    if not isinstance(selector, Selector):
        raise InputError(
            "selector",
            expected="a spec, a SelectorConfig or a Selector",
            got=type(selector).__name__,
            remedy='Pass for example "retopk:quality".',
        )
    if overrides:
        raise InputError(
            "overrides",
            expected="none beside a Selector object",
            got=dict(overrides),
            remedy="Configure it before.",
        )
    return cast(Selector, selector)


compat.register_attention(IMPLEMENTATION, _attention_function)
