"""The network of an EAGLE draft, and its checkpoint: EAGLE (2401.15077) and EAGLE-3 (2503.01840)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from splitspec.errors import ConfigError, HandshakeError

MODEL_TYPE = "splitspec_eagle"
FEATURE_SETS = ("eagle", "eagle3")


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """The target that a draft was trained for. The hashes bind, the name is for people."""

    name: str
    weights_hash: str
    vocabulary_hash: str


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of the network, and whose features it reads.

    feature_set: "eagle3" fuses features of several layers, "eagle" reads those of the last. feature_layers:
    the target's layers, counted from 0, whose outputs they are.
    """

    feature_set: str
    feature_layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    draft_vocabulary_size: int
    target: TargetIdentity

    @classmethod
    def load(cls, directory: Path) -> EagleConfig:
        """Read config.json. Raises ConfigError unless it is one of an EAGLE draft."""
        path = directory / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields.pop("model_type") != MODEL_TYPE:
                raise ValueError(f"its model_type is not {MODEL_TYPE}")
            fields["feature_layers"] = tuple(fields["feature_layers"])
            fields["target"] = TargetIdentity(**fields["target"])
            config = cls(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _wrong(
                directory, f"a directory with the config.json of an EAGLE draft ({error})"
            ) from error
        if config.feature_set not in FEATURE_SETS or not config.feature_layers:
            raise _wrong(directory, f"a feature set out of {', '.join(FEATURE_SETS)} with layers")
        return config

    def save(self, directory: Path) -> None:
        fields = {"model_type": MODEL_TYPE, **dataclasses.asdict(self)}
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    def check_target(self, name: str, weights_hash: str, vocabulary_hash: str) -> None:
        """Raise HandshakeError unless the draft was trained for this very target."""
        for what, ours, theirs in (
            ("vocabulary", self.target.vocabulary_hash, vocabulary_hash),
            ("weights", self.target.weights_hash, weights_hash),
        ):
            if ours != theirs:
                raise HandshakeError(
                    f"the EAGLE draft was trained for {self.target.name} with the {what} hash {ours}, "
                    f"{name} has {theirs}: expected the target that the draft was trained for"
                )


class Norm(nn.Module):
    """Root mean square norm, in its input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class EagleNetwork(nn.Module):
    """One decoder layer between the target's features and a small head.

    At position i the draft reads the feature of token i (what the target computed from tokens up to i) and
    the embedding of token i + 1, and its logits are for token i + 2. Rotary position: i. Without a feature
    for i, the draft's own output at i - 1 takes its place: EAGLE-3's training-time test makes it used to it.

        hidden    = fuse(features of token i)          or output(i - 1)
        embedding = embedding_norm(embedding of token i + 1)
        x         = concat(embedding, feature_norm(hidden))           [2 * hidden_size] to q, k, v
        residual  = hidden + embedding_gate * embedding
        residual += o(attention(q, k, v))
        output    = residual + mlp(mlp_norm(residual))
        logits    = head(final_norm(output))                          [draft vocabulary]

    In EAGLE-3 the embedding comes in through the attention alone: a narrow way where there are few
    key-value heads. Here it also joins the residual, through a gate for each channel that begins closed.
    """

    draft_token_ids: torch.Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> Norm:
            return Norm(hidden, config.rms_norm_eps)

        self.fuse = linear(len(config.feature_layers) * hidden, hidden)
        self.embedding_norm = norm()
        self.embedding_gate = nn.Parameter(torch.zeros(hidden))
        self.feature_norm = norm()
        self.q_proj = linear(2 * hidden, queries)
        self.k_proj = linear(2 * hidden, keys)
        self.v_proj = linear(2 * hidden, keys)
        self.o_proj = linear(queries, hidden)
        self.mlp_norm = norm()
        self.gate_proj = linear(hidden, config.intermediate_size)
        self.up_proj = linear(hidden, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, hidden)
        self.final_norm = norm()
        self.head = linear(hidden, config.draft_vocabulary_size)
        #: Id in the target's vocabulary of each id of the draft's.
        self.register_buffer("draft_token_ids", torch.zeros(config.draft_vocabulary_size, dtype=torch.int32))

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """[..., layers, hidden] of the target to [..., hidden].

        Each layer's vector is first divided by its root mean square: a few tokens have values in the
        thousands.
        """
        scaled = functional.rms_norm(features, features.shape[-1:], eps=self.config.rms_norm_eps)
        output: torch.Tensor = self.fuse(scaled.flatten(-2))
        return output

    def project(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Residual [batch, length, hidden], and q, k, v [batch, heads, length, head_dim] for the attention.

        embeddings, hidden: [batch, length, hidden]; cos, sin: [length, head_dim], as `rotary` gives them.
        """
        embedding = self.embedding_norm(embeddings)
        x = torch.cat([embedding, self.feature_norm(hidden)], dim=-1)

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(*projected.shape[:2], -1, self.config.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        return hidden + self.embedding_gate.to(hidden.dtype) * embedding, q, k, heads(self.v_proj(x))

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output [batch, length, hidden], from attention's [batch, heads, length, head_dim]."""
        residual = residual + self.o_proj(attended.transpose(1, 2).flatten(-2))
        x = self.mlp_norm(residual)
        output: torch.Tensor = residual + self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [length, head_dim] of positions [length], in float32."""
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device) / self.config.head_dim
        angles = positions.float()[:, None] * self.config.rope_theta**-half
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    @classmethod
    def load(cls, directory: Path, config: EagleConfig) -> EagleNetwork:
        """The weights in `directory`, in bfloat16. Raises ConfigError unless they are those of `config`."""
        with torch.device("meta"):
            network = cls(config)
        try:
            network.load_state_dict(load_file(directory / "model.safetensors"), assign=True)
        except Exception as error:  # the libraries raise nothing more specific
            reason = " ".join(str(error).split())[:300]
            raise _wrong(directory, f"the weights that its config.json tells of ({reason})") from error
        return network

    def save(self, directory: Path) -> None:
        """Write config.json and model.safetensors, bfloat16, into an existing directory."""
        tensors: dict[str, Any] = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in self.state_dict().items()
        }
        save_file(tensors, directory / "model.safetensors")
        self.config.save(directory)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves paired: x [batch, heads, length, head_dim], in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def _wrong(directory: Path, expected: str) -> ConfigError:
    return ConfigError(f"checkpoint is {str(directory)!r}, expected {expected}", field="checkpoint")
