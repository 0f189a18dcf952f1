"""Principal components read from a file."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from sparsesel.errors import InputError
from sparsesel.selector import LayerSpec
from sparsesel_loki.header import REMEDY, read_header

# How far a basis rounded to float32 may be from orthonormal.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Calibration:
    """What a calibration file holds.

    Attributes:
        path: Where it was read from.
        header: Its metadata.
        bases: Layer index to `[Hkv, D, D]` float32, components as columns by descending variance.
    """

    path: Path
    header: dict[str, str]
    bases: dict[int, Float[Tensor, "Hkv D D"]]

    def basis(self, layer: LayerSpec) -> Float[Tensor, "Hkv D D"]:
        """The components of a layer.

        Raises:
            InputError: The file is of another model or of other shapes, or what it holds are no components.
        """
        of = self.header.get("model_fingerprint", "")
        if layer.model and of and layer.model != of:
            raise self._refusal(
                f"a calibration of this model (fingerprint {layer.model[:12]})",
                f"one of {self.header.get('model', 'another')} (fingerprint {of[:12]})",
            )
        shape = (layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        basis = self.bases.get(layer.layer_idx)
        where = f"layer {layer.layer_idx}"
        if basis is None:
            raise self._refusal(where, f"layers {', '.join(map(str, sorted(self.bases))) or 'none'}")
        if tuple(basis.shape) != shape:
            raise self._refusal(f"components of shape {shape} in {where}", f"shape {tuple(basis.shape)}")
        error = basis.transpose(1, 2) @ basis - torch.eye(layer.head_dim)
        if not bool((error.abs() < _ROUNDING).all()):
            raise self._refusal(f"orthonormal components in {where}", "others: the file is damaged")
        return basis

    def _refusal(self, expected: str, got: str) -> InputError:
        return InputError("loki.calibration", expected=expected, got=f"{got}, in {self.path}", remedy=REMEDY)


def load(path: Path) -> Calibration:
    """Read a calibration file; one that has not changed is read once.

    Raises:
        InputError: As `read_header`.
    """
    header = read_header(path)
    stat = path.stat()
    return _load(path, stat.st_size, stat.st_mtime_ns, json.dumps(header))


@functools.lru_cache(maxsize=4)
def _load(path: Path, size: int, time: int, header: str) -> Calibration:
    bases = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- not a mapping
            layer, _, what = name.removeprefix("layers.").partition(".")
            if what == "basis" and layer.isdecimal():
                bases[int(layer)] = file.get_tensor(name).float()
    return Calibration(path, json.loads(header), bases)
