"""Devices that are named are there, and each role takes memory of its own device."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from tba.config import ConfigError, load_config
from tba.launch import defaults, devices
from tba.launch.defaults import with_defaults, with_objective_defaults, with_searchers
from tba.launch.devices import KV_BYTES, check_devices, kv_bytes, published_on_gpu, tokens_for, trainer_memory
from tba.launch.run import load_inputs
from tba.launch.slots import slots_for
from tba.runtime.placement import RolePlacement
from tba.tasks.registry import max_prompt_tokens

GIB = 2**30


def shaped(config) -> SimpleNamespace:
    """A model of this shape without weights."""
    model = SimpleNamespace(config=config, dtype=torch.bfloat16)
    return SimpleNamespace(model=model, context=config.max_position_embeddings, num_parameters=300_000)


QWEN_7B = shaped(
    Qwen2Config(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
    )
)
LLAMA_7B = shaped(
    LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, max_position_embeddings=4096)
)
GPT_350M = shaped(GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_positions=1024))


@pytest.fixture
def gpus(monkeypatch):
    """Memory of GPUs that this machine may not have."""
    memory = {"cuda:0": 140 * GIB, "cuda:1": 24 * GIB}
    monkeypatch.setattr(devices, "gpu_bytes", memory.__getitem__)
    return memory


def placement(*overrides: str) -> RolePlacement:
    return RolePlacement.of(load_config(None, overrides))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.device=cuda:7", "model.device=cuda:7"),
        ("runtime.placement.trainer=[cuda:7]", "runtime.placement.trainer=cuda:7"),
        ("runtime.placement.searchers=[cpu, cuda:7]", "runtime.placement.searchers=cuda:7"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(override, key):
    with pytest.raises(ConfigError) as error:
        check_devices(load_config(None, [override]))
    assert str(error.value).startswith(f"{key} is not there: this machine has cpu")
    assert "tba doctor" in str(error.value)


def test_cpus_are_always_there_and_a_device_that_nobody_uses_need_not_be():
    everything = "runtime.placement={trainer: cpu, searchers: cpu}"
    check_devices(load_config(None, [everything, "model.device=cuda:7"]))


def test_devices_that_nobody_uses_are_told(caplog):
    check_devices(load_config(None, ["runtime.placement={trainer: cpu, searchers: [cpu, cpu, cpu]}"]))
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("runtime.placement.searchers names 3 devices for search.num_searchers=1")


def activation_bytes(*overrides: str) -> int:
    config = load_config(None, overrides)
    return trainer_memory(config, GPT_350M, RolePlacement.of(config), keys_and_values=GIB).activations


def test_a_trainer_takes_more_of_a_gpu_that_no_searcher_uses(gpus):
    assert activation_bytes("model.device=cuda") == int(0.35 * gpus["cuda:0"])
    assert activation_bytes("runtime.placement={trainer: cuda, searchers: cuda:1}") == 70 * GIB
    assert activation_bytes("runtime.placement={trainer: cpu, searchers: cuda:1}") == GIB


SEVEN = 7 * GIB
"""Parameters of the model below."""


def seven(*overrides: str, dtype: torch.dtype = torch.bfloat16):
    config = with_objective_defaults(load_config(None, ["model.device=cuda", *overrides]))
    model = SimpleNamespace(config=QWEN_7B.model.config, dtype=dtype)
    loaded = SimpleNamespace(model=model, num_parameters=SEVEN, context=32768)
    return config, loaded, RolePlacement.of(config)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("overrides", "dtype", "kept"),
    [
        # In GiB: 2 bytes a weight, 4 of its master, 4 of its gradient; a searcher has an engine and a reference of 14 each,
        # 16 of keys and values, and 2 GiB for each of the two processes. Published weights, 3 x 14, go through the host.
        (["train.offload_optimizer=true"], torch.bfloat16, 14 + 28 + 28 + 28 + 16 + 4),
        ([], torch.bfloat16, 14 + 28 + 28 + 56 + 28 + 16 + 4),
        (["model.lora={}"], torch.bfloat16, 14 + 28 + 16 + 4),
        ([], torch.float32, 28 + 28 + 56 + 56 + 16 + 4),
        # Evaluations keep the start model where the reference is reset, and a trainer one that rescores with it.
        (["train.offload_optimizer=true", "reference.reset_every=50"], torch.bfloat16, 14 + 28 + 28 + 42 + 16 + 4),
        (
            ["train.offload_optimizer=true", "reference.reset_every=50", "replay.on_reference_reset=recompute"],
            torch.bfloat16,
            14 + 28 + 28 + 56 + 16 + 4,
        ),
        (["runtime.placement={trainer: cuda, searchers: cuda:1}"], torch.bfloat16, 14 + 28 + 28 + 56 + 2),
        # One process where the roles take turns; with a lag another engine, the weights in use and 3 that wait.
        (["train.offload_optimizer=true", "mode=sync"], torch.bfloat16, 14 + 28 + 28 + 28 + 16 + 2),
        (["mode=fixed_lag", "lag_steps=3"], torch.bfloat16, 14 + 28 + 28 + 56 + 28 + 5 * 14 + 16 + 2),
        (["model.lora={}", "mode=fixed_lag", "lag_steps=3"], torch.bfloat16, 14 + 14 + 14 + 16 + 2),
        # A critic with a trunk of its own is trained as the policy is.
        (
            ["train.offload_optimizer=true", "objective.name=ppo", "objective.critic=separate"],
            torch.bfloat16,
            2 * (14 + 28 + 28) + 28 + 16 + 4,
        ),
    ],
)  # fmt: skip
def test_what_lies_on_the_gpu_is_counted_by_part(overrides, dtype, kept):
    config, loaded, placement = seven("reference.reset_every=0", *overrides, dtype=dtype)
    keys_and_values = 16 * GIB if placement.num_searchers_on("cuda:0") else 0
    memory = trainer_memory(config, loaded, placement, keys_and_values=keys_and_values)
    assert sum(memory.kept.values()) == kept * GIB
    most = 70 * GIB if "searchers" in str(overrides) else 49 * GIB
    assert memory.activations == min(most, (140 - kept) * GIB)


@pytest.mark.usefixtures("gpus")
def test_a_micro_batch_has_what_weights_and_searchers_leave_and_too_little_is_told(caplog):
    """28 layers x (20 x 3584 + 6 x 22016) x 2 bytes = 11,411,456 a token: 22 GiB hold 2,070."""
    config, loaded, placement = seven("reference.reset_every=0", "train.offload_optimizer=true")
    assert QWEN_7B.model.config.intermediate_size == 22016
    with caplog.at_level(logging.INFO, logger="tba"):
        assert tokens_for(config, loaded, placement, keys_and_values=16 * GIB) == 2070
    (told,) = caplog.records
    assert told.levelname == "INFO"
    assert (
        "weights 14.0, masters 28.0, gradients 28.0, engines and references 28.0, keys and values 16.0" in caplog.text
    )
    assert "22.0 for activations, of 140.0 GiB" in caplog.text
    caplog.clear()
    assert tokens_for(*seven("reference.reset_every=0"), keys_and_values=16 * GIB) == 512
    assert "cuda:0 may run out of memory: weights 14.0" in caplog.text
    assert "train.offload_optimizer=true" in caplog.text


def test_references_that_are_reset_have_slots_of_their_own(gpus):
    """1 GiB of weights: two slots and a copy of the searcher for the weights, and as many for references."""
    config, loaded, placement = seven("reference.reset_every=50")
    loaded.num_parameters = GIB // 2
    memory = trainer_memory(config, loaded, placement, keys_and_values=0)
    assert memory.kept["published weights"] == 6 * GIB


def test_a_small_model_on_a_small_gpu_has_large_micro_batches(gpus, caplog):
    """Its searcher may take 8.4 of the 24 GiB, but 256 slots of this model need no more than 1.6."""
    gpus["cuda:0"] = 24 * GIB
    shape = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    )
    loaded = shaped(shape)
    loaded.num_parameters = 494_000_000
    config = load_config(None, ["model.device=cuda", "generate.max_new_tokens=256"])
    filled = with_defaults(config, loaded, longest_prompt=lambda: 256)
    assert filled.generate.slots == 256
    assert filled.train.tokens_per_micro_batch > 2000
    assert "may run out of memory" not in caplog.text


def test_of_a_cpu_nothing_is_told(caplog):
    config = load_config(None, ["model.device=cpu"])
    assert tokens_for(config, QWEN_7B, RolePlacement.of(config), keys_and_values=GIB) == 512
    assert not caplog.records


@pytest.mark.usefixtures("gpus")
def test_nothing_is_planned_for_a_training_that_there_is_none_of(caplog):
    """`tba evaluate` of a model that could never be trained here."""
    config, loaded, _ = seven()
    found = with_defaults(config, loaded, longest_prompt=lambda: 256, trains=False)
    assert found.generate.slots == 256
    assert found.train.tokens_per_micro_batch is None
    assert "memory of cuda" not in caplog.text
    assert "may run out of memory" not in caplog.text


def test_searchers_divide_what_a_gpu_has_for_them(gpus):
    assert kv_bytes(placement("model.device=cuda"), "cuda:0") == KV_BYTES["cuda"]
    apart = "runtime.placement={trainer: cuda, searchers: cuda:1}"
    assert kv_bytes(placement(apart), "cuda:1") == 12 * GIB
    assert kv_bytes(placement(apart, "search.num_searchers=3"), "cuda:1") == 4 * GIB
    assert kv_bytes(placement(apart), "cpu") == GIB


@pytest.mark.parametrize(
    ("overrides", "parameters", "cores", "count"),
    [
        (["model.device=cpu"], 15_000_000, 2, 2),
        (["model.device=cpu"], 15_000_000, 1, 1),
        (["model.device=cpu"], 4_900_000, 2, 1),
        (["model.device=cpu"], 300_000_000, 2, 1),  # two copies are 2.4 GB of 16 GB, of which an eighth is 2
        (["model.device=cuda"], 15_000_000, 16, 1),
        (["model.device=cpu", "runtime.placement.searchers=[cuda:1]"], 15_000_000, 16, 1),
        (["model.device=cpu", "search.num_searchers=1"], 15_000_000, 2, 1),
        (["model.device=cpu", "search.max_searchers=1"], 15_000_000, 2, 1),
        (["model.device=cpu", "mode=sync"], 15_000_000, 2, 1),
        (["model.device=cpu", "runtime.kind=ray"], 15_000_000, 2, 1),
    ],
)
def test_two_searchers_share_a_cpu_where_cores_and_memory_allow(monkeypatch, overrides, parameters, cores, count):
    monkeypatch.setattr(defaults, "usable_cores", lambda: cores)
    monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: SimpleNamespace(total=16_000_000_000))
    config = load_config(None, overrides)
    assert with_searchers(config, SimpleNamespace(num_parameters=parameters)).search.count == count


def test_of_several_devices_the_one_with_the_least_memory_decides_the_slots(gpus):
    both = "runtime.placement={trainer: cpu, searchers: [cuda:0, cuda:1]}"
    config = load_config(None, [both, "search.num_searchers=2", "task.num_train_prompts=3"])
    loaded, found = load_inputs(config).loaded, RolePlacement.of(config)
    assert with_defaults(config, loaded).generate.slots == 256
    gpus["cuda:1"] = GIB // 64
    small = slots_for(config, loaded, found, "cuda:1", longest_prompt=max_prompt_tokens(config, loaded.context))
    assert with_defaults(config, loaded).generate.slots == small.slots < 256
    assert with_defaults(load_config(None, [both, "generate.slots=7"]), loaded).generate.slots == 7


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("loaded", "prompt", "response", "slots", "tokens", "bytes_per_token"),
    [
        # 2 x 28 layers x 4 heads x 128 x 2 bytes = 57,344 a token, so 16 GiB hold 299,593. In pages of 64 a slot takes half
        # of 256 and a page; one prompt of 8192 is at work and one waits for every 8 slots: 135 x 192 + (17 + 16) x 8192.
        (QWEN_7B, 8192, 256, 135, 296_256, 57_344),
        # 2048 + 64: 138 x 2112 + (18 + 17) x 200 = 298,456; 139 would be 300,568.
        (QWEN_7B, 200, 4096, 138, 298_456, 57_344),
        # 2 x 32 x 32 x 128 x 2 = 524,288 a token: 32,768 of them. Half of 53 and a page are two pages: 128 x 128 + 32 x 512.
        (LLAMA_7B, 512, 53, 128, 32_768, 524_288),
        # never more than 256, though 16 GiB would hold more: 256 x 128 + 64 x 16
        (QWEN_7B, 16, 64, 256, 33_792, 57_344),
        # Learned positions have no fused kernels, and so no pages. 2 x 24 x 16 x 64 x 2 = 98,304 a token: 174,762 of them,
        # of which a slot takes 512 + 256: 210 x 768 + 26 x 512 = 174,592; 211 would be 175,360.
        (GPT_350M, 512, 256, 210, 174_592, 98_304),
    ],
)
def test_slots_fill_16_gib_with_the_longest_prompt_in_the_dtype_of_the_cache(
    loaded, prompt, response, slots, tokens, bytes_per_token
):
    config = load_config(
        None, ["model.device=cuda", f"generate.max_new_tokens={response}", "train.samples_per_prompt=8"]
    )
    budget = slots_for(config, loaded, RolePlacement.of(config), "cuda:0", longest_prompt=prompt)
    assert (budget.slots, budget.bytes_per_token) == (slots, bytes_per_token)
    assert budget.used == tokens * bytes_per_token <= 16 * GIB


def test_a_cache_on_a_cpu_is_fp32_and_has_one_gib():
    config = load_config(None, ["model.device=cpu", "model.dtype=bfloat16", "generate.max_new_tokens=256"])
    # 114,688 bytes a token: 9362 tokens in 1 GiB. 2 x (1024 + 256) + 1 x 1024 = 3584; 6 x 1280 + 1024 = 8704 fits, 7 not
    budget = slots_for(config, QWEN_7B, RolePlacement.of(config), "cpu", longest_prompt=1024)
    assert (budget.slots, budget.bytes_per_token, budget.memory) == (6, 114_688, GIB)


def test_a_response_that_does_not_fit_alone_is_told_and_tried(caplog):
    config = load_config(None, ["model.device=cpu", "generate.max_new_tokens=256"])
    assert slots_for(config, QWEN_7B, RolePlacement.of(config), "cpu", longest_prompt=8192).slots == 1
    assert "one response on cpu needs 1 slots of 8448 tokens" in caplog.text
    assert "task.max_prompt_tokens" in caplog.text


def test_searchers_beside_a_trainer_divide_the_memory_that_is_free(gpus, monkeypatch):
    """20 GiB are free for all, and of the 3 GiB that this process keeps it uses 1: 35% of 22 GiB."""
    for name, value in (
        ("is_available", True),
        ("mem_get_info", (20 * GIB, 140 * GIB)),
        ("memory_reserved", 3 * GIB),
        ("memory_allocated", GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    assert kv_bytes(placement("model.device=cuda"), "cuda:0") == int(0.35 * 22 * GIB)
    assert kv_bytes(placement("model.device=cuda", "search.num_searchers=2"), "cuda:0") == int(0.35 * 22 * GIB) // 2
    apart = "runtime.placement={trainer: cuda, searchers: cuda:1}"
    assert kv_bytes(placement(apart), "cuda:1") == 12 * GIB, "nothing of this run is there to be asked"


@pytest.mark.parametrize(
    ("overrides", "gib", "taken"),
    [
        (["model.device=cuda"], 1, 3),  # two slots and one copy
        (["model.device=cuda", "search.num_searchers=2"], 1, 4),
        (["model.device=cuda"], 13, 0),  # 39 GiB of what a GPU has
        (["model.device=cpu"], 1, 0),
        (["runtime.placement={trainer: cuda, searchers: cuda:1}"], 1, 0),
    ],
)
def test_published_weights_that_would_fill_the_gpu_go_through_the_host(gpus, overrides, gib, taken):
    assert published_on_gpu(placement(*overrides), gib * GIB) == taken * GIB


def test_the_chosen_slots_are_logged_with_what_they_take(caplog, monkeypatch):
    config = load_config(None, ["model.device=cpu", "task.num_train_prompts=3"])
    inputs = load_inputs(config)
    longest = inputs.longest_prompt("train", config.evaluate.split)
    assert longest == max(len(p.token_ids) for split in ("train", "held_out") for p in inputs.task.prompts(split))
    monkeypatch.setattr("tba.launch.slots.kv_bytes", lambda *_: 2**20)
    with caplog.at_level(logging.INFO, logger="tba"):
        filled = with_defaults(config, inputs.loaded, longest_prompt=lambda: longest)
    assert f"generate.slots on cpu: {filled.generate.slots} slots of " in caplog.text
    assert f"prompts of {longest} tokens at most" in caplog.text
    assert filled.generate.slots > with_defaults(config, inputs.loaded).generate.slots, "allowed prompts are longer"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="tba"):
        with_defaults(load_config(None, ["model.device=cpu", "generate.slots=9"]), inputs.loaded)
    assert "slots" not in caplog.text


@pytest.mark.parametrize("slots", [[], ["generate.slots=9"]], ids=["all", "given"])
def test_where_memory_is_plenty_nobody_looks_for_the_longest_prompt(slots):
    """The prompts of an embedded task are made when they are asked for: looking at 20,000 of them takes five seconds."""
    config = load_config(None, ["model.device=cpu", *slots])
    loaded = load_inputs(config).loaded
    filled = with_defaults(config, loaded, longest_prompt=lambda: pytest.fail("it was asked for"))
    assert filled.generate.slots == with_defaults(config, loaded).generate.slots


def test_slots_that_no_memory_could_hold_are_refused_with_the_most_that_fit():
    loaded = load_inputs(load_config(None)).loaded
    with pytest.raises(
        ConfigError, match=r"generate\.slots=100000000 does not fit on cpu: .* Give at most \d+, or leave it"
    ):
        with_defaults(load_config(None, ["model.device=cpu", "generate.slots=100000000"]), loaded)


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [(15_000_000, 1111), (135_000_000, 512), (300_000, 4096)],  # 10^11 / (6 x 15 x 10^6) = 1111
)
def test_a_micro_batch_on_a_cpu_is_about_a_second_of_work(parameters, tokens):
    loaded = shaped(
        Qwen2Config(
            hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6
        )
    )
    loaded.num_parameters = parameters
    config = load_config(None, ["model.device=cpu"])
    assert tokens_for(config, loaded, RolePlacement.of(config), keys_and_values=0) == tokens
