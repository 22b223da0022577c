"""Hugging Face's wav2vec 2.0 with our quantizer, by the recipe of docs/migration.md."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from doc_pages import ROOT, blocks_of
from torch import Tensor

wav2vec2 = pytest.importorskip("transformers.models.wav2vec2", reason="needs transformers")
GROUPS, CODES, TAU = 2, 6, 2.0
BATCH, STEPS, NEGATIVES = 2, 8, 4
CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "num_codevector_groups": GROUPS,
    "num_codevectors_per_group": CODES,
    "codevector_dim": 8,
    "proj_codevector_dim": 8,
    # The quantizer is the only source of randomness.
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "feat_quantizer_dropout": 0.0,
    "layerdrop": 0.0,
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with random weights, for training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = wav2vec2.Wav2Vec2ForPreTraining(wav2vec2.Wav2Vec2Config(**CONFIG))
        # Its weights of the codes start at variance 1, which makes every choice certain.
        with torch.no_grad():
            model.quantizer.weight_proj.weight.mul_(0.5)
    return model.train()


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    """Sound, the time steps to predict, and the steps that each of them is to be told from."""
    masked = torch.rand(BATCH, STEPS, generator=seeded()) < 0.6
    negatives = torch.randint(BATCH * STEPS, (BATCH, STEPS, NEGATIVES), generator=seeded(1))
    sound = normal(BATCH, 16 * STEPS, dtype=torch.float32)
    return {
        "input_values": sound,
        "mask_time_indices": masked,
        "sampled_negative_indices": negatives,
    }


def trained(model: Any, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The outputs of one step, and the gradients that it leaves."""
    torch.manual_seed(3)
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    for name in ("loss", "contrastive_loss", "diversity_loss", "codevector_perplexity"):
        assert_close(ours[0][name], theirs[0][name], 1e-5)
    assert_close(ours[0].projected_quantized_states, theirs[0].projected_quantized_states, 1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        expected = theirs[1][name]
        assert_close(gradient, expected, 2e-5 * max(1.0, float(expected.abs().max())))


def test_the_recipe_of_the_page(model: Any, batch: dict[str, Tensor]) -> None:
    """The page's own code: with torch's estimator in the place of the default, the step is the original's."""
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    (code,) = (block.code for block in blocks_of(page) if "def swap(model)" in block.code)
    names: dict[str, Any] = {}
    exec(code.replace("gapped.GapMax(", "gapped.GumbelSoftmax(self.temperature, "), names)
    twin = copy.deepcopy(model)
    names["swap"](twin)
    assert list(twin.state_dict()) == list(model.state_dict())
    for tau in (TAU, 0.5):
        twin.set_gumbel_temperature(tau)
        theirs = copy.deepcopy(model)
        theirs.set_gumbel_temperature(tau)
        assert_same_step(trained(twin, batch), trained(theirs, batch))
    twin.eval()
    theirs.eval()
    assert_same_step(trained(twin, batch), trained(theirs, batch))
    exec(code, names)
    names["swap"](twin.train())
    assert trained(twin, batch)[0].loss.isfinite()
