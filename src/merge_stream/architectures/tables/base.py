"""What a family is: whose names these are, the rules, and the names that a repository of it may have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from merge_stream.architectures.rules import Rename, Rule, pattern_of

__all__ = ["EXPERTS_OF_QWEN", "FUSED_TEXT_NAMES", "TEXT_NAMES", "Family", "Table", "words"]

FUSED_TEXT_NAMES = (
    "{m:(?:model\\.)?}layers.{i}.{rest}",
    "{m:(?:model\\.)?}{k:embed_tokens|norm|rotary_emb}.{rest}",
    "mtp.{rest}",
)
"""Names of a text model around its layers; of the bare model (without `model.`) too."""

TEXT_NAMES = (
    "{m:(?:model\\.)?}layers.{i}.{rest:(?!.*\\.experts\\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)$).+}",
    *FUSED_TEXT_NAMES[1:],
)
"""The same without fused experts, for families whose repositories have one tensor for each expert."""

EXPERTS_OF_QWEN = (
    "{at}.mlp.experts.{e}.gate_proj.weight",
    "{at}.mlp.experts.{e}.up_proj.weight",
    "{at}.mlp.experts.{e}.down_proj.weight",
)


def words(text: str) -> frozenset[str]:
    """The words of a text, for lists of model types."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Family:
    """One layout of repositories, for the model types that have it.

    name         shown to the user
    model_types  `model_type` of config.json
    rules        from the names and shapes in memory, of any version, to those on disk
    upstream     patterns of all names that a repository may have, heads aside; any other
                 name that the rules leave over is an error, never written
    """

    name: str
    model_types: frozenset[str]
    rules: tuple[Rule | Rename, ...]
    upstream: tuple[str, ...]

    def strangers(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that no repository of the family has."""
        patterns = [pattern_of(pattern) for pattern in self.upstream]
        return [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]


@dataclass(frozen=True, slots=True)
class Table:
    """The families of one file."""

    name: str
    families: tuple[Family, ...]
