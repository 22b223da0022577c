"""A rollout equals the program that holds all logits and reads every text again at each step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_all_close, assert_close, normal, seeded
from torch import Tensor, nn

import gapped

transformers = pytest.importorskip("transformers", reason="needs transformers")

V, BATCH, LENGTH, STEPS = 13, 3, 4, 5


@pytest.fixture(autouse=True)
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's norm rounds to float32, whatever the dtype of the model."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()  # type: ignore[no-any-return]

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)


def reset(model: Any) -> Any:
    """A model with weights large enough for laws that are far from uniform."""
    for number, parameter in enumerate(model.parameters()):
        parameter.data = normal(*parameter.shape, seed=number) / 2
    return model.double().eval()


SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama() -> Any:
    """Queries that share keys, and a head of its own."""
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=12, num_key_value_heads=2, tie_word_embeddings=False
    )
    return reset(transformers.LlamaForCausalLM(config))


def gpt2() -> Any:
    """A tied head, and learned positions."""
    config = transformers.GPT2Config(vocab_size=V, n_positions=32, n_embd=8, n_layer=2, n_head=2)
    return reset(transformers.GPT2LMHeadModel(config))


def with_bias() -> Any:
    model = llama()
    model.lm_head = nn.Linear(8, V)
    return reset(model)


class Recurrent(nn.Module):
    """A model of one's own: its cache is the state of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, 6), nn.Linear(8, V)
        self.cell = nn.GRU(6, 8, batch_first=True)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, inputs_embeds: Tensor, past_key_values: Tensor | None = None, use_cache: bool = False
    ) -> Any:
        states, memory = self.cell(inputs_embeds, past_key_values)
        return SimpleNamespace(last_hidden_state=states, past_key_values=memory, logits=self.head(states))


def recurrent() -> Any:
    return reset(Recurrent())


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "with bias": with_bias,
    "recurrent": recurrent,
}
PADDING = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
# Options of the rollout, besides which there are those of the program.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "noise": {"estimator": gapped.GumbelRao(samples=3)},
    "levels": {
        "estimator": gapped.DecoupledGumbelSoftmax(tau_forward=torch.tensor([0.5, 1.0, 2.0]).double())
    },
    "temperature": {"temperature": 0.7},
    "shared mask": {"mask": torch.arange(V) % 3 > 0},
    "mask per text": {"mask": normal(BATCH, V, seed=9) > -0.5},
    "stop": {"stop": [2, 3, 4, 5]},
    "stop and mask": {"stop": [2, 3, 4, 5], "mask": normal(BATCH, V, seed=9) > -0.5},
    "padding": {"attention_mask": PADDING},
    "checkpoint": {"checkpoint": True, "attention_mask": PADDING},
    "chunks": {},
}


class Texts(NamedTuple):
    index: Tensor
    live: Tensor
    embeddings: Tensor
    log_prob: Tensor
    entropy: Tensor
    judged: Tensor


JUDGE = normal(V, 2, 3, seed=21)
"""A table of another model's."""


def program(
    model: Any,
    embeds: Tensor,
    steps: int,
    chunk: int = BATCH,
    estimator: gapped.Pathwise | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    stop: list[int] | None = None,
    attention_mask: Tensor | None = None,
    feedback: bool = False,
    checkpoint: bool = False,
) -> Texts:
    """Texts drawn from logits that are written out, without a cache; `chunk` texts share a key."""
    estimator, generator = estimator or gapped.GapMax(), seeded()
    table, batch = model.get_input_embeddings().weight, len(embeds)
    live, found = torch.ones(batch, dtype=torch.bool), []
    for _ in range(steps):
        where = {}
        if attention_mask is not None:
            new = embeds.shape[1] - attention_mask.shape[1]
            padding = torch.cat([attention_mask, torch.ones(batch, new, dtype=torch.int64)], 1)
            where = {"attention_mask": padding, "position_ids": (padding.cumsum(1) - 1).clamp(min=0)}
        logits = model(inputs_embeds=embeds, **where).logits[:, -1] / temperature
        exists = torch.ones(batch, V, dtype=torch.bool) if mask is None else mask.expand(batch, V)
        law = torch.log_softmax(
            logits.masked_fill(~exists, -1e9)
            / torch.as_tensor(getattr(estimator, "tau_forward", 1)).view(-1, 1),
            -1,
        )
        keys = torch.randint(2**62, (-(-batch // chunk),), generator=generator).tolist()
        choices = []
        for key, rows in zip(keys, torch.arange(batch).split(chunk), strict=True):
            own = estimator.of_rows(torch.Size([batch]), slice(int(rows[0]), int(rows[-1]) + 1))
            alive = exists[rows] & live[rows, None]
            choices.append(own.choose(logits[rows], mask=alive, generator=seeded(key)))
        drawn, row = (
            torch.cat([pick(each) for each in choices])
            for pick in (
                lambda each: each.index,
                lambda each: each.select(torch.cat([table, JUDGE.flatten(1)], 1)),
            )
        )
        row, judged = row.split([table.shape[1], 6], -1)
        index = torch.where(live, drawn, stop[0] if stop else 0)
        log_prob = torch.where(live, law.gather(1, index[:, None])[:, 0], 0.0)
        found.append(
            (
                index,
                live,
                row,
                log_prob,
                torch.where(live, -(law.exp() * law).sum(-1), 0.0),
                judged.unflatten(-1, (2, 3)),
            )
        )
        read = row if feedback else torch.where(live[:, None], table[drawn.clamp(max=V - 1)], 0.0)
        embeds = torch.cat([embeds, read[:, None]], 1)
        live = live & ~torch.isin(drawn, torch.tensor(stop or []))
        if not live.any():
            break
    return Texts(*(torch.stack(each, 1) for each in zip(*found, strict=True)))


def gradients(texts: Texts, leaves: list[Tensor]) -> list[Tensor]:
    """Those of each result, and of all together."""
    results = texts[2:]
    upstream = [normal(*each.shape, seed=n) for n, each in enumerate(results, 1)]
    single = [
        torch.autograd.grad(r, leaves, u, retain_graph=True, materialize_grads=True)
        for r, u in zip(results, upstream, strict=True)
    ]
    both = torch.autograd.grad(results, leaves, upstream, materialize_grads=True)
    return [gradient for every in (*single, both) for gradient in every]


PAIRS = [
    *((name, "plain") for name in MODELS),
    *(("llama", case) for case in CASES if case != "plain"),
    *(("gpt2", case) for case in ("padding", "checkpoint")),
    ("with bias", "temperature"),
    ("recurrent", "stop and mask"),
]


@pytest.mark.parametrize(("name", "case"), PAIRS)
@pytest.mark.parametrize("feedback", [True, False])
def test_every_value_and_gradient_is_that_of_the_program_written_out(
    name: str, case: str, feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without feedback there are no steps to be computed again.
    options = {**CASES[case], "feedback": feedback or case == "checkpoint"}
    model = MODELS[name]()
    chunk = 2 if case == "chunks" else BATCH
    monkeypatch.setattr("gapped.vocabulary.rows_of_a_chunk", lambda *_: chunk)
    width = model.get_input_embeddings().weight.shape[1]
    prompts = normal(BATCH, LENGTH, width, seed=7).requires_grad_()
    texts = gapped.rollout(model, prompts, STEPS, generator=seeded(), **options)
    ours = Texts(
        texts.index, texts.live, texts.embeddings, texts.log_prob, texts.entropy, texts.select(JUDGE)
    )
    theirs = program(model, prompts, STEPS, chunk, **options)
    assert len(theirs.index.unique()) > 3
    assert ("stop" in options) is not bool(theirs.live.all())
    assert torch.equal(ours.index, theirs.index)
    assert torch.equal(ours.live, theirs.live)
    assert_all_close(ours[2:], theirs[2:], 1e-10)
    leaves = [prompts, *model.parameters()]
    assert_all_close(gradients(ours, leaves), gradients(theirs, leaves), 1e-10)


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps_and_a_batch_of_one(steps: int) -> None:
    model = gpt2()
    texts = gapped.rollout(model, torch.tensor([[1, 2]]), steps, stop=3)
    shapes = [each.shape for each in (texts.index, texts.live, texts.log_prob, texts.entropy)]
    assert shapes == [(1, steps)] * 4
    assert texts.embeddings.shape == texts.hidden.shape == (1, steps, 8)
    assert texts.select(JUDGE).shape == (1, steps, 2, 3)
    assert texts.index.dtype == torch.int64
    texts.embeddings.sum().backward() if steps else None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_likeliest_tokens_are_those_of_generate(name: str) -> None:
    """With padding, a token that ends a text, and another one that is forbidden."""
    model, tokens = MODELS[name](), torch.tensor([[1, 2, 3, 4], [7, 8, 5, 6], [9, 1, 2, 3]])
    options: dict[str, Any] = {"estimator": "gapmax:draw=argmax", "attention_mask": PADDING}
    forbidden = gapped.rollout(model, tokens, 12, **options).index[2, 6].item()
    options["mask"] = torch.arange(V) != forbidden
    stop = gapped.rollout(model, tokens, 12, **options).index[0, 4].item()
    text = gapped.rollout(model, tokens, 12, stop=stop, **options)
    found = model.generate(
        tokens,
        attention_mask=PADDING,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop,
        suppress_tokens=[forbidden],
    )
    assert not text.live.all()
    assert torch.equal(found[:, 4:], text.index)


def test_without_gradient_it_samples_and_keeps_no_graph() -> None:
    model, tokens = llama(), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    with_graph = gapped.rollout(model, tokens, STEPS, generator=seeded())
    with torch.no_grad():
        texts = gapped.rollout(model, tokens, STEPS, generator=seeded())
    assert torch.equal(texts.index, with_graph.index)
    assert_close(texts.log_prob, with_graph.log_prob, 1e-10)
    assert not texts.embeddings.requires_grad
    assert not texts.hidden.requires_grad
    assert with_graph.embeddings.requires_grad


def test_a_frozen_head_and_parts_of_the_results() -> None:
    """One gradient leaves nothing behind that another one would find."""
    model = gpt2()
    prompts = normal(BATCH, LENGTH, 8, seed=7).requires_grad_()
    weight = model.lm_head.weight

    def texts() -> Tensor:
        return gapped.rollout(model, prompts, STEPS, generator=seeded()).embeddings

    expected = torch.autograd.grad(texts()[:, :2].square().sum(), weight)[0]
    rows = texts()
    (every,) = torch.autograd.grad(rows.sum(), prompts, retain_graph=True)
    assert_close(torch.autograd.grad(rows[:, :2].square().sum(), weight)[0], expected, 1e-12)
    weight.requires_grad_(False)
    assert_close(torch.autograd.grad(texts().sum(), prompts)[0], every, 1e-12)
    weight.requires_grad_()
    (gradient,) = torch.autograd.grad(texts().square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice|is not implemented"):
        gradient.sum().backward()
    result = texts().sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_log_probabilities_without_feedback_have_the_gradient_of_the_score() -> None:
    """As many as are re-scored: embeddings of the drawn tokens included."""
    model, prompts = gpt2(), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    text = gapped.rollout(model, prompts, STEPS, generator=seeded())
    logits = model(torch.cat([prompts, text.index], 1)).logits[:, LENGTH - 1 : -1]
    scores = torch.log_softmax(logits, -1).gather(-1, text.index.unsqueeze(-1)).squeeze(-1)
    upstream = normal(BATCH, STEPS, seed=3)
    found = [
        torch.autograd.grad(each, list(model.parameters()), upstream) for each in (text.log_prob, scores)
    ]
    assert_all_close(*found, 1e-10)


def test_with_checkpoints_of_its_own_a_model_is_read_again_by_them() -> None:
    found = []
    for model in (llama(), without_cache()):
        texts = gapped.rollout(model, torch.ones(BATCH, LENGTH, dtype=torch.int64), STEPS, generator=seeded())
        found.append(torch.autograd.grad(texts.embeddings.square().sum(), list(model.parameters())))
        assert model.is_activation_checkpointing is model.training
    assert_all_close(*found, 1e-10)


def test_training_mode_and_checkpoints_draw_one_dropout() -> None:
    model, results = gpt2().train(), []
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for checkpoint in (False, True):
        torch.manual_seed(0)
        how = {"feedback": True, "checkpoint": checkpoint, "generator": seeded()}
        texts = gapped.rollout(model, tokens, STEPS, **how)
        gradients = torch.autograd.grad(texts.embeddings.square().sum(), list(model.parameters()))
        results.append([texts.hidden, *gradients])
    assert model.training
    assert_all_close(*results, 1e-10)


def test_the_state_of_the_default_generator_does_not_depend_on_the_check_of_a_model() -> None:
    states = []
    model = gpt2().train()
    for _ in range(2):  # a model is checked once
        torch.manual_seed(0)
        gapped.rollout(model, torch.ones(1, 1, dtype=torch.int64), 2)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


OTHERS = {
    "Bloom": {},
    "Falcon": {},
    "Glm4": {"head_dim": 4, "pad_token_id": 0},
    "GPTJ": {"rotary_dim": 2},
    "GPTNeoX": {},
    "Granite": {},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Olmo2": {"eos_token_id": 0},
    "OPT": {"ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 64},
    "Phi3": {"eos_token_id": 0, "pad_token_id": 0},
    "Qwen2": {},
    "Qwen3": {"head_dim": 4},
    "SmolLM3": {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_types_have_the_law_of_their_own_logits(name: str) -> None:
    """A head that another version of transformers scales would be refused; one with a mistake would not."""
    sizes = SIZES | ({} if name == "OPT" else {"intermediate_size": 8, "num_key_value_heads": 2})
    config = getattr(transformers, f"{name}Config")(**sizes, **OTHERS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    prompt = torch.tensor([[1, 2, 3]])
    text = gapped.rollout(model, prompt, STEPS, generator=seeded())
    logits = model(torch.cat([prompt, text.index], 1)).logits[:, 2:-1]
    expected = torch.log_softmax(logits, -1).gather(-1, text.index.unsqueeze(-1)).squeeze(-1)
    assert_close(text.log_prob, expected, 1e-5)


def scaled() -> Any:
    config = transformers.Gemma2Config(**SIZES, intermediate_size=8, num_key_value_heads=2, head_dim=4)
    return transformers.Gemma2ForCausalLM(config)


def soft_capped() -> Any:
    model = scaled()
    model.set_input_embeddings(nn.Embedding(V, 8))
    return model


def encoder_decoder() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=V, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


def two_sizes() -> Any:
    model = llama()
    model.lm_head = nn.Linear(8, V + 1)
    return model


def by_tokens() -> Any:
    model = llama()
    model.model.forward = lambda input_ids: input_ids
    return model


def without_cache() -> Any:
    model = llama()
    model.activation_checkpointing_enable()
    return model.train()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2), "got an object of type Linear, expected a causal language model"),
        (lambda: llama().model, "got LlamaModel, whose head is None, expected one with a plain"),
        (encoder_decoder, "got T5ForConditionalGeneration, an encoder with a decoder"),
        (scaled, "got Gemma2ForCausalLM, whose embedding is transformers.*ScaledWordEmbedding"),
        (soft_capped, "got Gemma2ForCausalLM, which changes states before its head or logits behind it"),
        (two_sizes, "got 13 embeddings and 14 logits, expected as many embeddings as logits"),
        (by_tokens, "got LlamaModel, whose forward does not, expected one that can be called with"),
        (without_cache, "got LlamaModel, which returns no past_key_values, expected one that returns it"),
    ],
)  # fmt: skip
def test_a_wrong_model_is_one_line(model: Callable[[], Any], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=f"^model: .*{message}") as caught:
        gapped.rollout(model(), torch.ones(1, 2, dtype=torch.int64), 2, feedback=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": [1, 2]}, r"inputs: got an object of type list, expected tokens \(batch, length\)"),
        ({"inputs": torch.ones(2, 0, dtype=torch.int64)}, r"inputs: got a tensor of shape \(2, 0\)"),
        ({"inputs": torch.ones(2, 3)}, r"inputs: got a tensor of shape \(2, 3\) and torch.float32"),
        ({"inputs": torch.full((1, 2), V)}, "inputs: got tokens out of range, expected tokens from 0 to 12"),
        ({"steps": -1}, "steps: got -1, expected an integer of at least 0"),
        ({"steps": 2048}, "steps: got 2048 after a prompt of 2, expected fewer: LlamaForCausalLM has 2048"),
        ({"stop": V}, "stop: got 13, expected a token from 0 to 12"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"mask: got a tensor of shape \(2,\)"),
        ({"attention_mask": torch.tensor([[1, 0]])}, "attention_mask: got padding on the right"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask: got a tensor of shape \(1, 3\)"),
        ({"checkpoint": 2}, "checkpoint: got 2, expected True or False"),
        ({"checkpoint": True}, "checkpoint: got True, expected False without feedback"),
        ({"temperature": 0.0}, r"temperature: got 0.0, expected a positive number"),
        ({"estimator": "rloo"}, "estimator: got 'rloo', expected a pathwise estimator"),
    ],
)
def test_bad_arguments_are_one_line(changes: dict[str, Any], message: str) -> None:
    arguments = {"inputs": torch.ones(1, 2, dtype=torch.int64), "steps": 2, **changes}
    with pytest.raises(gapped.GappedError, match=message) as caught:
        gapped.rollout(llama(), **arguments)
    assert "\n" not in str(caught.value)


def test_a_function_transform_is_refused_in_one_line() -> None:
    model = llama()
    cost = lambda embeds: gapped.rollout(model, embeds, 2).embeddings.sum()  # noqa: E731
    with pytest.raises(gapped.GappedError, match=r"^inputs: got one inside of a transform"):
        torch.func.grad(cost)(torch.randn(1, 2, model.config.hidden_size))


def test_a_model_of_last_states_alone_needs_feedback() -> None:
    model = Recurrent()
    model.register_forward_hook(
        lambda _, inputs, out: setattr(out, "last_hidden_state", out.last_hidden_state[:, -1:])
    )
    assert gapped.rollout(model, torch.ones(1, 2, dtype=torch.int64), 2, feedback=True).live.all()
    with pytest.raises(
        gapped.GappedError, match="model: got Recurrent, which does not return the states of all"
    ):
        gapped.rollout(model, torch.ones(1, 2, dtype=torch.int64), 2)


def test_a_cache_that_forgets_is_refused_with_checkpoints() -> None:
    config = transformers.MistralConfig(**SIZES, intermediate_size=8, num_key_value_heads=2, sliding_window=2)
    model, tokens = transformers.MistralForCausalLM(config), torch.ones(1, 4, dtype=torch.int64)
    assert gapped.rollout(model, tokens, 3).index.shape == (1, 3)
    with pytest.raises(gapped.GappedError, match="checkpoint: got True with a DynamicCache of other layers"):
        gapped.rollout(model, tokens, 3, feedback=True, checkpoint=True)
