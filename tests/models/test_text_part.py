"""Models with a text part inside (Gemma 3 4B and larger): the text part is read, trained, published and adapted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tba.config import GenerateConfig, LoraConfig, ModelConfig
from tba.engine.make_engine import make_engine, make_scorer, stop_ids_of, with_adapters
from tba.models.load import add_lora, load_model
from tba.models.packing import pack
from tba.models.policy import PolicyModel
from tba.models.weights import make_weights
from tba.types import Prompt, Request, Sampling

CPU = torch.device("cpu")


def make_config():
    text = transformers.Gemma3TextConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=7, max_position_embeddings=96, eos_token_id=2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, image_token_index=59)


@pytest.fixture
def loaded(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    model.save_pretrained(tmp_path)
    words = WordLevel({f"t{index}": index for index in range(60)}, unk_token="t3")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    tokenizer.save_pretrained(tmp_path)
    return load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def sequences():
    generator = torch.Generator().manual_seed(3)
    tokens = lambda n: torch.randint(5, 58, (n,), generator=generator)  # noqa: E731
    return [tokens(5), tokens(2)], [[tokens(17), tokens(4)], [tokens(8)]]


def plain_log_probs(model) -> torch.Tensor:
    parts = []
    for prompt, own in zip(*sequences()):
        for response in own:
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
            parts.append(torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0])
    return torch.cat(parts)


def test_context_and_stop_ids_are_those_of_the_text_part(loaded):
    assert loaded.context == 96
    assert stop_ids_of(loaded.model) == [2]


def test_the_text_part_trains_packed_and_the_rest_stands_still(loaded):
    model = loaded.model
    want = plain_log_probs(model)
    policy = PolicyModel(model)
    assert policy.packed
    got = policy.forward(pack(*sequences(), device=CPU), temperature=1.0).log_pi_N
    assert (got - want).abs().max() < 1e-4
    got.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not any("vision" in name or "projector" in name for name in trained)
    assert policy.canary(make_weights(model, version=0).tensors).shape == (64,)


def test_published_weights_of_the_text_part_reach_engine_and_scorer(loaded):
    model = loaded.model
    engine = make_engine(model, [2], GenerateConfig(), seed=0, max_length=96)
    scorer = make_scorer(model, max_length=96)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    weights = make_weights(model, version=4)
    engine.load(weights)
    scorer.load(weights)
    prompts, responses = sequences()
    want = plain_log_probs(model).detach()[:17].numpy()
    for scores in (engine.score, scorer.score):
        (got,) = scores([prompts[0].numpy()], [responses[0][0].numpy()], 1.0)
        assert np.abs(got - want).max() < 1e-4


def test_an_adapter_on_all_linear_layers_leaves_the_images_out(loaded):
    model = loaded.model
    engine = make_engine(model, [2], GenerateConfig(), seed=0, max_length=96)
    add_lora(model, LoraConfig(rank=2), base="tiny", seed=0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("language_model" in name for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    lora = with_adapters(engine, model)
    lora.load(make_weights(model, version=1))
    prompt = Prompt(id="p", token_ids=np.array([7, 8, 9], np.int32), text="")
    (found,) = lora.generate([Request(prompt=prompt)], samples_per_prompt=1, sampling=Sampling(max_new_tokens=6))
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, found.token_ids]).astype(np.int64))
    with torch.no_grad():
        log_probs = torch.log_softmax(model(input_ids=ids[None]).logits[0, 2:-1], -1)
    want = log_probs.gather(1, ids[3:, None])[:, 0].numpy()
    assert np.abs(found.policy_log_probs - want).max() < 1e-4
