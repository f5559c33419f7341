"""Which backend runs a model: what its config.json says, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.features import parse_feature_layers
from splitspec.engine.loading import count_layers, parse_dtype
from splitspec.engine.paged import PagedLM
from splitspec.engine.simulated import SimulatedLM, is_simulated
from splitspec.errors import ConfigError

if TYPE_CHECKING:
    from splitspec.engine.parallel import Ranks


def load_model(
    directory: Path,
    *,
    name: str,
    dtype: str,
    device: str,
    kv_memory_bytes: int | None = None,
    deterministic: bool = True,
    ranks: Ranks | None = None,
    feature_layers: str = "none",
    attention: str = "auto",
) -> PagedLM:
    """The model in `directory`: simulated, or one of the transformers library.

    feature_layers: see `parse_feature_layers`. The rest: see `CausalLM.load`. A simulated model is always
    deterministic, keeps no features ("auto" is "none"), and runs in one process on the CPU. Raises
    ConfigError that names the wrong setting.
    """
    if not is_simulated(directory):
        return CausalLM.load(
            directory,
            name=name,
            dtype=dtype,
            device=device,
            kv_memory_bytes=kv_memory_bytes,
            deterministic=deterministic,
            ranks=ranks,
            feature_layers=parse_feature_layers(feature_layers, count_layers(directory, name)),
            attention=attention,
        )
    if ranks is not None or device != "cpu":
        where = device if ranks is None else f"shared by {ranks.size} ranks"
        raise ConfigError(f"device is {where}, expected cpu for a simulated model", field="device")
    if feature_layers not in ("auto", "none"):
        expected = "auto or none for a simulated model, which has no layers"
        raise ConfigError(
            f"feature_layers is {feature_layers!r}, expected {expected}", field="feature_layers"
        )
    parse_dtype(dtype)
    return SimulatedLM(directory, name, dtype, kv_memory_bytes=kv_memory_bytes)
