"""Which sub-tree of a nested state dict is the model: by paths of keys, else by the set of names."""

from __future__ import annotations

import pytest

from merge_stream.errors import AmbiguousCheckpointError, UsageError
from merge_stream.formats._roots import Selection, naming_of, select_model

HF = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
TIED = HF[:2]


def chosen(*paths: tuple[str, ...], root: str | None = None) -> Selection:
    return select_model({".".join(path): path for path in paths}, root, "ckpt")


def below(*container: str, names: tuple[str, ...] = HF) -> list[tuple[str, ...]]:
    return [(*container, name) for name in names]


@pytest.mark.parametrize("names", [HF, TIED])
@pytest.mark.parametrize("container", [(), ("model",), ("state_dict",), ("app", "model"), ("module",), ("policy",)])
def test_a_container_is_entered_and_the_names_below_it_stay_whole(
    container: tuple[str, ...], names: tuple[str, ...]
) -> None:
    noise = [("optimizer", "state", "0", "exp_avg"), ("lr_scheduler", "last_lr"), ("step",)]
    found = chosen(*below(*container, names=names), *noise)
    assert sorted(found.names.values()) == sorted(names)
    assert found.root == ".".join(container)
    assert found.ignored == {"optimizer state": 1, "scheduler state": 1, "trainer state": 1}


def test_optimizer_beside_the_model_inside_a_container_is_noise() -> None:
    found = chosen(*below("app", "model"), ("app", "optim", "state.w.exp_avg"))
    assert set(found.names.values()) == set(HF)
    assert found.ignored == {"optimizer state": 1}


def test_torchtitan_keeps_the_model_flat_at_the_top() -> None:
    found = chosen(*below(), ("optimizer", "state.w.exp_avg"), ("train_state.step",), ("dataloader", "dp_rank_0"))
    assert set(found.names.values()) == set(HF)
    assert found.root == ""


@pytest.mark.parametrize(
    ("prefix", "names"),
    [("", HF), ("", TIED), ("model.", HF), ("model.", (*TIED, "model.norm.weight")), ("state_dict.", TIED)],
)
def test_without_paths_the_set_of_names_tells_container_from_prefix(prefix: str, names: tuple[str, ...]) -> None:
    found = chosen(*[(prefix + name,) for name in names])
    assert set(found.names.values()) == set(names)


def test_keys_of_one_segment_each_are_joined() -> None:
    found = chosen(("model", "norm", "weight"), ("model", "layers", "0", "up", "weight"), ("lm_head", "weight"))
    assert set(found.names.values()) == {"model.norm.weight", "model.layers.0.up.weight", "lm_head.weight"}


def test_a_known_container_goes_first_and_the_rest_is_told() -> None:
    found = chosen(*below("model"), *below("ema"), ("best",))
    assert set(found.names.values()) == set(HF)
    assert found.ignored == {"other entries": 4}
    assert "ema" in found.notes[0]


def test_unknown_containers_are_ambiguous_until_a_root_is_given() -> None:
    paths = below("actor") + below("critic", names=TIED)
    with pytest.raises(AmbiguousCheckpointError, match="actor, critic") as caught:
        chosen(*paths)
    assert "--root" in caught.value.hint
    found = chosen(*paths, root="critic")
    assert set(found.names.values()) == set(TIED)
    assert found.ignored == {"entries outside the root": 3}


def test_a_root_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(UsageError, match="'nope'") as caught:
        chosen(*below("model"), *below("ema"), root="nope")
    assert "model, ema" in caught.value.hint


def test_a_root_may_be_nested_and_without_paths_a_prefix() -> None:
    assert set(chosen(*below("app", "ema"), *below("app", "model"), root="app.ema").names.values()) == set(HF)
    assert set(chosen(*[("net." + name,) for name in HF], ("other.w",), root="net").names.values()) == set(HF)
    # a prefix of parameter names is no root when containers are recorded
    with pytest.raises(UsageError):
        chosen(*below("state_dict"), root="state_dict.model")


def test_torchtitan_names_are_known_by_the_set() -> None:
    titan = {"tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight", "output.weight"}
    assert naming_of(titan) == "torchtitan"
    assert naming_of(set(HF)) == naming_of({"tok_embeddings.weight"}) == "hf"
