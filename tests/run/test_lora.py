"""LoRA: only the adapter trains and travels, the reference is the base, checkpoints are adapters that merge."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import tiny_llama
from problem import make_config, scores_of
from transformers import AutoModelForCausalLM

from tba.config import ConfigError, LoraConfig, ModelConfig, load_config
from tba.engine.native.engine import NativeEngine
from tba.engine.scoring import PolicyScorer, ReferenceScorer
from tba.models.load import LoadedModel, adapt, add_lora, merged
from tba.models.policy import PolicyModel
from tba.models.weights import CanaryMismatch, make_weights
from tba.observe.run_folder import RunFolder
from tba.run import merge_adapter, train
from tba.runtime.shared_weights import SharedWeights
from tba.searcher.process import WeightLoader

LORA = ("model.lora.rank=4", "train.learning_rate=1e-2")


def adapted(seed: int = 0, *, noise: float = 0.0):
    """A tiny model with an adapter; `noise` makes it differ from its base."""
    model = tiny_llama(max_position_embeddings=128)
    add_lora(model, LoraConfig(rank=4), base="tiny", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(noise * torch.randn(parameter.shape, generator=generator))
    return model


class SilentEngine(NativeEngine):
    """Takes the version of an adapter and not the adapter."""

    def __init__(self) -> None:
        super().__init__(tiny_llama(max_position_embeddings=128), stop_ids=[2], seed=0, slots=4, max_length=128)

    def load(self, weights) -> None:
        self.version = weights.version


def test_only_the_adapter_trains_and_it_changes_nothing_at_first():
    model = adapted()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".lora_" in name for name in names)
    tokens = torch.arange(3, 15)[None]
    assert torch.equal(model(tokens).logits, tiny_llama()(tokens).logits)
    assert set(make_weights(model, version=0).tensors) == set(names)


def test_merged_weights_compute_what_the_adapter_computes():
    model = adapted(noise=0.3)
    other = adapted(seed=5)  # a searcher's model, whose own adapter is another
    weights = merged(other, make_weights(model, version=3))
    plain = tiny_llama()
    plain.load_state_dict(dict(weights.tensors), strict=False)
    tokens = torch.arange(3, 15)[None]
    assert weights.version == 3
    assert (plain(tokens).logits - model(tokens).logits).abs().max() < 1e-4
    assert (plain(tokens).logits - tiny_llama()(tokens).logits).abs().max() > 0.1


def test_merging_an_older_adapter_leaves_the_one_that_trains_alone():
    model, older = adapted(noise=0.3), make_weights(adapted(seed=5, noise=0.2), version=1)
    before = {name: tensor.clone() for name, tensor in make_weights(model, version=4).tensors.items()}
    merged(model, older)
    assert all(torch.equal(before[name], now) for name, now in make_weights(model, version=4).tensors.items())


def test_an_adapter_on_top_of_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    loaded = LoadedModel(model=tiny_llama(), tokenizer=None, context=64)
    with pytest.raises(ConfigError, match="is a LoRA adapter itself"):
        adapt(loaded, ModelConfig(path=str(tmp_path), lora=LoraConfig()), seed=0)


def test_the_reference_is_the_base_with_the_adapter_off():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, size=4).astype(np.int32) for _ in range(3)]
    owners = [prompts[i] for i in (0, 1, 0, 2, 1)]
    responses = [rng.integers(3, 40, size=n).astype(np.int32) for n in (5, 1, 7, 3, 2)]
    want = ReferenceScorer(tiny_llama(), max_length=32).score(owners, responses, 0.7)
    for budget in (1000, 12):
        got = PolicyScorer(adapted(noise=0.3), token_budget=budget).score(owners, responses, 0.7)
        for own, expected in zip(got, want):
            assert np.abs(own - expected).max() < 1e-4


@pytest.mark.slow
def test_an_adapter_checkpoint_loads_evaluates_and_merges(folder, tmp_path):
    config = make_config(folder, "mode=sync", "name=lora", *LORA)
    summary = train(config)
    checkpoint = RunFolder(config.run_folder).checkpoints / "step-6"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").exists()
    assert scores_of(config) == summary["final"]
    merge_adapter(str(config.run_folder), tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    moved = [name for name, tensor in whole.state_dict().items() if not torch.equal(tensor, base.state_dict()[name])]
    assert moved
    assert all("proj" in name for name in moved)
    with pytest.raises(FileExistsError, match="not empty"):
        merge_adapter(str(config.run_folder), tmp_path / "whole")


@pytest.mark.slow
def test_an_asynchronous_run_sends_adapters_that_pass_the_canary(folder):
    """In bf16, where the searcher keeps them beside its matrices; the synchronous run above merges in fp32."""
    config = make_config(folder, "name=lora-async", "model.dtype=bfloat16", *LORA)
    train(config)
    records = [json.loads(line) for line in RunFolder(config.run_folder).metrics.read_text().splitlines()]
    last = [record for record in records if "loss" in record][-1]
    assert last["searcher/0/version"] > 0, "newer adapters were loaded, and their canaries agreed"


def test_the_canary_catches_an_adapter_that_never_arrives():
    trainer, engine = PolicyModel(adapted()), SilentEngine()
    slots = SharedWeights.create(make_weights(trainer.model, version=0).tensors, torch.float32)

    def publish(version: int) -> None:
        written = slots.publish(make_weights(trainer.model, version=version).tensors, version=version)
        slots.add_canary(trainer.canary(written.tensors))

    publish(0)
    loader = WeightLoader(SimpleNamespace(weights=slots), engine)
    loader.check_first()
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.5
    publish(1)
    with pytest.raises(CanaryMismatch):
        loader.load_newer()


def test_reference_resets_are_refused_with_lora():
    with pytest.raises(ConfigError, match=r"cannot be used with model\.lora"):
        load_config(None, ["model.lora.rank=4", "reference.reset_every=5"])
