"""Sites are found from the model's structure, or from patterns, and gaps are said."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from scout_core.errors import ScoutError
from scout_core.integration.models import Patterns, find_sites, model_device, path_class
from scout_core.lab.model import GPT, GPTConfig

SMALL = GPTConfig(layers=3, width=8, heads=2, context=4)


def roles(model: nn.Module, **patterns: str | None) -> dict[str, str]:
    return {site.name: site.role for site in find_sites(model, Patterns(**patterns))[0]}


def test_a_language_model_has_hidden_layers_embedding_head_and_others() -> None:
    assert roles(GPT(SMALL)) == {
        "tokens": "embedding",
        "positions": "other",
        "layers.0": "hidden",
        "layers.1": "hidden",
        "layers.2": "hidden",
        "norm": "other",
        "head": "head",
    }


def test_wrappers_do_not_show_in_names_and_classes() -> None:
    plain, wrapped = GPT(SMALL), GPT(SMALL)
    for i, layer in enumerate(wrapped.layers):
        wrapped.layers[i] = checkpoint_wrapper(layer)
    assert roles(wrapped) == roles(plain)
    assert path_class(wrapped.layers[0], "hidden") == path_class(plain.layers[0], "hidden")


def test_layers_of_equal_code_and_shapes_share_a_path_class() -> None:
    model = GPT(SMALL)
    classes = {path_class(layer, "hidden") for layer in model.layers}
    other = GPT(GPTConfig(layers=1, width=16, heads=2, context=4)).layers[0]
    assert len(classes) == 1
    assert path_class(other, "hidden") not in classes


def test_an_encoder_and_a_decoder_are_both_found() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.decoder = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    names = [name for name, role in roles(model).items() if role == "hidden"]
    assert names == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_what_is_not_found_is_said_with_the_way_out() -> None:
    sites, missing = find_sites(nn.ModuleDict({"only": nn.Linear(2, 2)}), Patterns())
    assert [site.role for site in sites] == ["head"]
    assert any("no repeated layers" in line for line in missing)
    assert any("no embedding found" in line for line in missing)


def test_an_empty_pattern_leaves_a_role_out_without_a_word() -> None:
    sites, missing = find_sites(GPT(SMALL), Patterns(embedding="", head=""))
    assert {site.role for site in sites} == {"hidden", "other"}
    assert missing == []


def test_patterns_override_what_structure_says() -> None:
    found = roles(GPT(SMALL), layers=r"layers\.[01]$", embedding="positions")
    assert found["layers.1"] == "hidden"
    assert "layers.2" not in {n for n, r in found.items() if r == "hidden"}
    assert found["positions"] == "embedding"


@pytest.mark.parametrize(
    ("patterns", "words"),
    [({"layers": "("}, "no regular expression"), ({"head": "nothing"}, "matches no module")],
)
def test_a_bad_pattern_is_a_clear_error(patterns: dict[str, str], words: str) -> None:
    with pytest.raises(ScoutError, match=words):
        find_sites(GPT(SMALL), Patterns(**patterns))


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ScoutError, match="no parameters"):
        model_device(nn.ReLU())
    assert model_device(nn.Linear(1, 1)) == torch.device("cpu")
