"""Loading a model: nothing of it is made up, and its tokenizer fits."""

import json

import pytest
from builders import tiny_llama, tiny_tokenizer
from safetensors.torch import load_file, save_file

from tba.config import ModelConfig
from tba.models.load import load_model


@pytest.fixture
def model(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_special_token_that_nothing_writes_may_lie_beyond_the_embedding(model):
    """As Gemma 3's token for images does, and a padding token that was added later."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<padding>"})
    tokenizer.save_pretrained(model)
    assert len(load_model(ModelConfig(path=str(model), device="cpu")).tokenizer) == 42
    tokenizer.chat_template = "{% for m in messages %}<image>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model)
    with pytest.raises(ValueError, match=r"has none for: '<image>' \(id 4[01]\)\. Use the tokenizer"):
        load_model(ModelConfig(path=str(model), device="cpu"))


def test_an_adapter_that_lacks_a_tensor_is_refused(model, tmp_path):
    peft = pytest.importorskip("peft")
    tiny_tokenizer().save_pretrained(model)
    adapted = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.peft_config["default"].base_model_name_or_path = str(model)
    adapted.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    loaded = ModelConfig(path=str(tmp_path / "adapter"), device="cpu")
    load_model(loaded)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    weights.pop(next(name for name in weights if "lora_B" in name))
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"Found missing adapter keys .*layers\.0.*lora_B"):
        load_model(loaded)


def test_an_adapter_without_a_tokenizer_takes_that_of_its_base_and_all_merged_weights_train(model, tmp_path):
    """What PEFT's save_pretrained writes."""
    peft = pytest.importorskip("peft")
    tiny_tokenizer().save_pretrained(model)
    adapted = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.peft_config["default"].base_model_name_or_path = str(model)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_model(ModelConfig(path=str(tmp_path / "adapter"), device="cpu"))
    assert len(loaded.tokenizer) == len(tiny_tokenizer())
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())


def test_weights_that_were_cut_off_are_named_by_their_file(model):
    tiny_tokenizer().save_pretrained(model)
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    message = rf"model\.safetensors \({len(whole) // 2} bytes\) is damaged or cut off .*: download or copy it again"
    with pytest.raises(ValueError, match=message):
        load_model(ModelConfig(path=str(model), device="cpu"))


def test_quantized_weights_are_refused_before_a_package_is_asked_for(model):
    tiny_tokenizer().save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    with pytest.raises(
        ValueError, match=r"is quantized \(bitsandbytes\), and weights are trained in float32 or bfloat16"
    ):
        load_model(ModelConfig(path=str(model), device="cpu"))
