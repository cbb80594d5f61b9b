"""Every default has its value after `resolve`; devices that are named are there, and each role takes memory of its own."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from tba.config import Config, ConfigError, load_config
from tba.run import memory
from tba.run.checks import check_capacity, check_devices
from tba.run.memory import KV_BYTES, Machine, MemoryPlan, ModelShape, free_bytes, published_on_gpu
from tba.run.modes import load_inputs
from tba.run.resolve import FILLED, resolve
from tba.runtime.placement import RolePlacement

GIB = 2**30


def shaped(config) -> ModelShape:
    """A model of this shape without weights."""
    model = SimpleNamespace(config=config, dtype=torch.bfloat16)
    return ModelShape.of(SimpleNamespace(model=model, context=config.max_position_embeddings, num_parameters=300_000))


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
SMALL = ModelShape(
    num_parameters=300_000,
    num_layers=3,
    hidden_size=96,
    inner_size=256,
    key_size=48,
    weight_bytes=4,
    context=256,
)
"""About the model of the embedded task."""
GPUS = Machine(auto="cuda:0", cores=16, memory=128 * GIB, gpus={"cuda:0": 140 * GIB, "cuda:1": 24 * GIB})
LAPTOP = Machine(auto="cpu", cores=2, memory=16_000_000_000)
APART = ("model.device=cuda", "search.devices=cuda:1")


def test_every_setting_that_resolve_fills_is_none_before_and_has_a_value_after():
    before, after = load_config(None), resolve(load_config(None), SMALL, LAPTOP)
    for key in FILLED:
        section, _, name = key.partition(".")
        assert getattr(getattr(before, section), name) is None, key
        assert getattr(getattr(after, section), name) is not None, key
    assert resolve(after, SMALL, LAPTOP) == after


def test_what_was_given_stays():
    given = {
        "replay": {"max_lag": 5, "deduplicate": True, "max_replay_ratio": 2.0, "capacity_per_prompt": 300},
        "objective": {"beta": 0.2, "reward_unit": 3.0, "max_kl_penalty": 0.7},
        "train": {"second_update_after": 1, "tokens_per_micro_batch": 77},
        "search": {"num_searchers": 3},
        "generate": {"slots": 9},
    }
    after = resolve(load_config(None, **given), SMALL, LAPTOP).model_dump(mode="python")
    for section, values in given.items():
        found = {name: after[section][name] for name in values}
        assert found | {"beta": 0} == values | {"beta": 0}


def test_without_a_model_only_what_follows_from_its_size_stays_open():
    after = resolve(load_config(None), None, LAPTOP)
    open_keys = [key for key in FILLED if getattr(getattr(after, key.partition(".")[0]), key.partition(".")[2]) is None]
    assert open_keys == ["replay.max_lag", "train.tokens_per_micro_batch", "search.num_searchers", "generate.slots"]


@pytest.mark.parametrize(
    ("overrides", "room"),
    [
        ([], 512),  # four steps of 128
        (["train.responses_per_step=16"], 100),
        (["search.samples_multiplier=2"], 1024),
        (["replay.capacity_per_prompt=130"], 130),
    ],
)
def test_a_prompt_has_room_for_four_steps_in_which_it_is_the_only_one(overrides, room):
    assert resolve(load_config(None, overrides), None, LAPTOP).replay.capacity_per_prompt == room


def test_room_for_less_than_a_step_brings_is_refused_where_prompts_are_few():
    config = load_config(None, ["replay.capacity_per_prompt=100"])
    check_capacity(config, num_prompts=2)  # 8 rollouts of 8 each
    with pytest.raises(ValueError, match=r"with 1 prompts one is drawn 16 times for the 16 of a step, 128 responses"):
        check_capacity(config, num_prompts=1)


@pytest.mark.parametrize(
    ("overrides", "max_lag"),
    [
        (["generate.slots=128"], 3),  # 2, and one step's worth of 128 responses in slots
        (["generate.slots=128", "search.num_searchers=3", "train.publish_every=4"], 8),  # 2 + 3 + 3
        # and 16 - 1 rollouts of 8 responses with the workers of rewards: (128 + 120) / 128 steps' worth, rounded up
        (["generate.slots=128", "search.reward_workers=16"], 4),
        (["generate.slots=128", "replay.max_lag=1"], 1),
        (["replay.on_policy_probability=0.5"], None),
        (["reference.reset_every=50"], None),
        (["mode=sync"], None),
        (["mode=fixed_lag"], 1),
        (["mode=fixed_lag", "replay.max_lag=4"], 4),
    ],
)
def test_the_pace_leaves_room_for_what_is_in_the_slots(overrides, max_lag):
    assert resolve(load_config(None, overrides), SMALL, LAPTOP).replay.max_lag == max_lag


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.device=cuda:7", "model.device=cuda:7"),
        ("search.devices=[cpu, cuda:7]", "search.devices=cuda:7"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(override, key):
    with pytest.raises(ConfigError) as error:
        check_devices(load_config(None, [override]))
    assert str(error.value).startswith(f"{key} is not there: this machine has cpu")
    assert "tba doctor" in str(error.value)


def test_devices_that_nobody_uses_are_told(caplog):
    check_devices(load_config(None, ["model.device=cpu", "search.devices=[cpu, cpu, cpu]"]))
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("search.devices names 3 devices for search.num_searchers=1")


def activation_bytes(*overrides: str) -> int:
    plan = MemoryPlan(load_config(None, overrides), GPT_350M, GPUS)
    return plan.activations(plan.kept(GIB))


def test_a_trainer_takes_more_of_a_gpu_that_no_searcher_uses():
    assert activation_bytes("model.device=cuda") == int(0.35 * 140 * GIB)
    assert activation_bytes(*APART) == 70 * GIB
    assert activation_bytes("model.device=cpu", "search.devices=cuda:1") == GIB


SEVEN = 7 * GIB
"""Parameters of the model below."""


def seven(*overrides: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Config, ModelShape, Machine]:
    config = resolve(load_config(None, ["model.device=cuda", *overrides]), None, GPUS)
    return config, replace(QWEN_7B, num_parameters=SEVEN, weight_bytes=dtype.itemsize), GPUS


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
        (["search.devices=cuda:1"], torch.bfloat16, 14 + 28 + 28 + 56 + 2),
        # One process where the roles take turns; with a lag another engine, the weights in use and 3 that wait.
        (["train.offload_optimizer=true", "mode=sync"], torch.bfloat16, 14 + 28 + 28 + 28 + 16 + 2),
        (["mode=fixed_lag", "replay.max_lag=3"], torch.bfloat16, 14 + 28 + 28 + 56 + 28 + 5 * 14 + 16 + 2),
        (["model.lora={}", "mode=fixed_lag", "replay.max_lag=3"], torch.bfloat16, 14 + 14 + 14 + 16 + 2),
    ],
)  # fmt: skip
def test_what_lies_on_the_gpu_is_counted_by_part(overrides, dtype, kept):
    apart = "search.devices" in str(overrides)
    plan = MemoryPlan(*seven("reference.reset_every=0", *overrides, dtype=dtype))
    found = plan.kept(0 if apart else 16 * GIB)
    assert sum(found.values()) == kept * GIB
    assert plan.activations(found) == min(70 * GIB if apart else 49 * GIB, (140 - kept) * GIB)


def test_a_micro_batch_has_what_weights_and_searchers_leave_and_too_little_is_told(caplog):
    """28 layers x (20 x 3584 + 6 x 22016) x 2 bytes = 11,411,456 a token: 22 GiB hold 2,070."""
    offloaded = seven("reference.reset_every=0", "train.offload_optimizer=true")
    assert QWEN_7B.inner_size == 22016
    with caplog.at_level(logging.INFO, logger="tba"):
        assert MemoryPlan(*offloaded).tokens(16 * GIB) == 2070
    (told,) = caplog.records
    assert told.levelname == "INFO"
    assert (
        "weights 14.0, masters 28.0, gradients 28.0, engines and references 28.0, keys and values 16.0" in caplog.text
    )
    assert "22.0 for activations, of 140.0 GiB" in caplog.text
    caplog.clear()
    assert MemoryPlan(*seven("reference.reset_every=0")).tokens(16 * GIB) == 512
    assert "cuda:0 may run out of memory: weights 14.0" in caplog.text
    assert "train.offload_optimizer=true" in caplog.text


def test_references_that_are_reset_have_slots_of_their_own():
    """1 GiB of weights: two slots and a copy of the searcher for the weights, and as many for references."""
    config, model, machine = seven("reference.reset_every=50")
    found = MemoryPlan(config, replace(model, num_parameters=GIB // 2), machine).kept(0)
    assert found["published weights"] == 6 * GIB


def test_a_small_model_on_a_small_gpu_has_large_micro_batches(caplog):
    """Its searcher may take 8.4 of the 24 GiB, but 256 slots of this model need no more than 1.6."""
    shape = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    )
    model, machine = replace(shaped(shape), num_parameters=494_000_000), replace(GPUS, gpus={"cuda:0": 24 * GIB})
    config = load_config(None, ["model.device=cuda", "generate.max_new_tokens=256"])
    filled = resolve(config, model, machine, longest_prompt=lambda: 256)
    assert filled.generate.slots == 256
    assert filled.train.tokens_per_micro_batch > 2000
    assert "may run out of memory" not in caplog.text


def test_of_a_cpu_nothing_is_told(caplog):
    config = load_config(None, ["model.device=cpu"])
    assert MemoryPlan(config, QWEN_7B, LAPTOP).tokens(GIB) == 512
    assert not caplog.records


def test_nothing_is_planned_for_a_training_that_there_is_none_of(caplog):
    """`tba evaluate` of a model that could never be trained here."""
    found = resolve(*seven(), longest_prompt=lambda: 256, trains=False)
    assert found.generate.slots == 256
    assert found.train.tokens_per_micro_batch is None
    assert "memory of cuda" not in caplog.text
    assert "may run out of memory" not in caplog.text


def kv(device: str, *overrides: str, machine: Machine = GPUS) -> int:
    return MemoryPlan(load_config(None, overrides), SMALL, machine).kv_bytes(device)


def test_searchers_divide_what_a_gpu_has_for_them():
    assert kv("cuda:0", "model.device=cuda") == KV_BYTES["cuda"]
    assert kv("cuda:1", *APART) == 12 * GIB
    assert kv("cuda:1", *APART, "search.num_searchers=3") == 4 * GIB
    assert kv("cpu", *APART) == GIB


@pytest.mark.parametrize(
    ("overrides", "parameters", "cores", "count"),
    [
        (["model.device=cpu"], 15_000_000, 2, 2),
        (["model.device=cpu"], 15_000_000, 1, 1),
        (["model.device=cpu"], 4_900_000, 2, 1),
        (["model.device=cpu"], 300_000_000, 2, 1),  # two copies are 2.4 GB of 16 GB, of which an eighth is 2
        (["model.device=cuda"], 15_000_000, 16, 1),
        (["model.device=cpu", "search.devices=[cuda:1]"], 15_000_000, 16, 1),
        (["model.device=cpu", "search.num_searchers=1"], 15_000_000, 2, 1),
        (["model.device=cpu", "mode=sync"], 15_000_000, 2, 1),
        (["model.device=cpu", "runtime.kind=ray"], 15_000_000, 2, 1),
    ],
)
def test_two_searchers_share_a_cpu_where_cores_and_memory_allow(overrides, parameters, cores, count):
    machine = replace(GPUS, cores=cores, memory=16_000_000_000)
    filled = resolve(load_config(None, overrides), replace(SMALL, num_parameters=parameters), machine)
    assert filled.search.num_searchers == count


def test_of_several_devices_the_one_with_the_least_memory_decides_the_slots():
    both = ["model.device=cpu", "search.devices=[cuda:0, cuda:1]", "search.num_searchers=2"]
    config = load_config(None, both)
    assert resolve(config, SMALL, GPUS).generate.slots == 256
    small = replace(GPUS, gpus={"cuda:0": 140 * GIB, "cuda:1": GIB // 64})
    alone = load_config(None, ["model.device=cpu", "search.devices=[cuda:1]"])
    assert resolve(config, SMALL, small).generate.slots == resolve(alone, SMALL, small).generate.slots < 256
    assert resolve(load_config(None, [*both, "generate.slots=7"]), SMALL, GPUS).generate.slots == 7


def most_slots(config: Config, model: ModelShape, device: str, *, prompt: int):
    """The budget of as many slots as the plan finds for the one searcher."""
    plan = MemoryPlan(config, model, GPUS, prompt)
    return plan.budget(device, plan.slots())


@pytest.mark.parametrize(
    ("model", "prompt", "response", "slots", "tokens", "bytes_per_token"),
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
    model, prompt, response, slots, tokens, bytes_per_token
):
    config = load_config(
        None, ["model.device=cuda", f"generate.max_new_tokens={response}", "train.samples_per_prompt=8"]
    )
    budget = most_slots(config, model, "cuda:0", prompt=prompt)
    assert (budget.slots, budget.bytes_per_token) == (slots, bytes_per_token)
    assert budget.used == tokens * bytes_per_token <= 16 * GIB


def test_a_cache_on_a_cpu_is_fp32_and_has_one_gib():
    config = load_config(None, ["model.device=cpu", "model.dtype=bfloat16", "generate.max_new_tokens=256"])
    # 114,688 bytes a token: 9362 tokens in 1 GiB. 2 x (1024 + 256) + 1 x 1024 = 3584; 6 x 1280 + 1024 = 8704 fits, 7 not
    budget = most_slots(config, QWEN_7B, "cpu", prompt=1024)
    assert (budget.slots, budget.bytes_per_token, budget.memory) == (6, 114_688, GIB)


def test_a_response_that_does_not_fit_alone_is_told_and_tried(caplog):
    config = load_config(None, ["model.device=cpu", "generate.max_new_tokens=256"])
    assert MemoryPlan(config, QWEN_7B, LAPTOP, 8192).slots() == 1
    assert "one response on cpu needs 1 slots of 8448 tokens" in caplog.text
    assert "task.max_prompt_tokens" in caplog.text


def test_searchers_beside_a_trainer_divide_the_memory_that_is_free(monkeypatch):
    """20 GiB are free for all, and of the 3 GiB that this process keeps it uses 1: 35% of 22 GiB."""
    for name, value in (
        ("is_available", True),
        ("mem_get_info", (20 * GIB, 140 * GIB)),
        ("memory_reserved", 3 * GIB),
        ("memory_allocated", GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    monkeypatch.setattr(memory, "gpu_bytes", GPUS.gpus.__getitem__)
    assert free_bytes("cuda:0") == 22 * GIB
    machine = Machine.found(load_config(None, ["model.device=cuda"]))
    assert kv("cuda:0", "model.device=cuda", machine=machine) == int(0.35 * 22 * GIB)
    assert kv("cuda:0", "model.device=cuda", "search.num_searchers=2", machine=machine) == int(0.35 * 22 * GIB) // 2
    apart = Machine.found(load_config(None, APART))
    assert kv("cuda:1", *APART, machine=apart) == 12 * GIB, "nothing of this run is there to be asked"


@pytest.mark.parametrize(
    ("overrides", "gib", "taken"),
    [
        (["model.device=cuda"], 1, 3),  # two slots and one copy
        (["model.device=cuda", "search.num_searchers=2"], 1, 4),
        (["model.device=cuda"], 13, 0),  # 39 GiB of what a GPU has
        (["model.device=cpu"], 1, 0),
        (APART, 1, 0),
    ],
)
def test_published_weights_that_would_fill_the_gpu_go_through_the_host(overrides, gib, taken):
    found = RolePlacement.of(load_config(None, overrides))
    assert published_on_gpu(found, gib * GIB, gpu=140 * GIB) == taken * GIB


def test_the_chosen_slots_are_logged_with_what_they_take(caplog, monkeypatch):
    config = load_config(None, ["model.device=cpu", "task.num_train_prompts=3"])
    inputs = load_inputs(config)
    longest = inputs.longest_prompt("train", config.evaluate.split)
    assert longest == max(len(p.token_ids) for split in ("train", "held_out") for p in inputs.task.prompts(split))
    monkeypatch.setitem(KV_BYTES, "cpu", 2**20)
    with caplog.at_level(logging.INFO, logger="tba"):
        filled = resolve(config, SMALL, LAPTOP, longest_prompt=lambda: longest)
    assert f"generate.slots on cpu: {filled.generate.slots} slots of " in caplog.text
    assert f"prompts of {longest} tokens at most" in caplog.text
    assert filled.generate.slots > resolve(config, SMALL, LAPTOP).generate.slots, "allowed prompts are longer"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="tba"):
        resolve(load_config(None, ["model.device=cpu", "generate.slots=9"]), SMALL, LAPTOP)
    assert "slots" not in caplog.text


@pytest.mark.parametrize("slots", [[], ["generate.slots=9"]], ids=["all", "given"])
def test_where_memory_is_plenty_nobody_looks_for_the_longest_prompt(slots):
    """The prompts of an embedded task are made when they are asked for: looking at 20,000 of them takes five seconds."""
    config = load_config(None, ["model.device=cpu", *slots])
    filled = resolve(config, SMALL, LAPTOP, longest_prompt=lambda: pytest.fail("it was asked for"))
    assert filled.generate.slots == resolve(config, SMALL, LAPTOP).generate.slots


def test_slots_that_no_memory_could_hold_are_refused_with_the_most_that_fit():
    config = load_config(None, ["model.device=cpu", "generate.slots=100000000"])
    with pytest.raises(
        ConfigError, match=r"generate\.slots=100000000 does not fit on cpu: .* Give at most \d+, or leave it"
    ):
        resolve(config, SMALL, LAPTOP)


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [(15_000_000, 1111), (135_000_000, 512), (300_000, 4096)],  # 10^11 / (6 x 15 x 10^6) = 1111
)
def test_a_micro_batch_on_a_cpu_is_about_a_second_of_work(parameters, tokens):
    shape = Qwen2Config(
        hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6
    )
    model, config = replace(shaped(shape), num_parameters=parameters), load_config(None, ["model.device=cpu"])
    assert MemoryPlan(config, model, LAPTOP).tokens(0) == tokens
