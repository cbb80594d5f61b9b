"""The task: embedded and real edition, its rewards and gold scores, and what is wrong said in words."""

import gzip
import json
import logging

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from recipes.start_models import make_word_tokenizer
from tba.config import TaskConfig, TLDRConfig, load_config
from tba.run.start import train
from tba.tasks.outcomes import RewardFailed
from tba.tasks.task import TaskInputs
from tba.tasks.tldr.posts import WORDS, first_posts, gold_score, reference_summary
from tba.tasks.tldr.reward_model import load_scorer
from tba.tasks.tldr.summarising import TLDRTask, reward_model_path
from tba.types import Completion

TOKENIZER = make_word_tokenizer(WORDS)
POST = "so place harbour day friday TL;DR:"


def rows(num_rows, **columns):
    return [
        {"query": f"{post.text}", "reference_response": f" {reference_summary(post)}<eos>"} | columns
        for post in first_posts("train", num_rows)
    ]


def write_rows(path, *given):
    content = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in given)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def save_classifier(folder, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, num_labels=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return TLDRConfig(reward_model=save_classifier(folder / "rm", 0), gold_model=save_classifier(folder / "gold", 1))


def make(**task):
    return TLDRTask(
        TaskInputs(config=TaskConfig(**({"name": "tldr"} | task)), tokenizer=TOKENIZER, max_prompt_tokens=40)
    )


def completion(finish="stop"):
    return Completion(
        prompt_id="train-1",
        sample_index=0,
        token_ids=np.array([5, 2], np.int32),
        behaviour_log_probs=np.zeros(2, np.float32),
        policy_log_probs=np.zeros(2, np.float32),
        version_spans=((0, 0),),
        finish=finish,
    )


def test_embedded_prompts_are_the_posts_of_their_split_with_references():
    task = make(num_train_prompts=30)
    posts = first_posts("held_out", 2000)
    prompts = task.prompts("held_out")
    assert [prompt.text for prompt in prompts] == [post.text for post in posts]
    assert prompts[0].columns == {"reference": reference_summary(posts[0])}
    assert len(prompts[0].token_ids) == 25
    assert len(task.prompts("train")) == 30
    assert len(task.prompts("validation")) == 1000
    assert not {p.text for p in task.prompts("validation")} & {p.text for p in prompts}


def test_embedded_rewards_are_the_shipped_models_scores_and_gold_is_the_rule():
    task = make(num_train_prompts=2)
    prompt, texts = task.prompts("train")[0], ["who aunt", "who aunt"]
    outcomes = task.score(prompt, texts, [completion(), completion("length")])
    expected = load_scorer(str(reward_model_path()), device="cpu").score([prompt.text] * 2, texts, [True, False])
    assert [outcome["reward_model"] for outcome in outcomes] == pytest.approx(expected.tolist(), abs=1e-5)
    assert expected[0] != expected[1]
    assert task.reward_weights == {"reward_model": 1.0}
    gold = task.gold_scores([POST, POST], ["place harbour", "day friday"], [True, False])
    assert gold.tolist() == [gold_score(POST, "place harbour", finished=True), 0.5 - 0.3]


def test_a_score_above_0_counts_as_solved():
    task = make()
    assert task.solved({"reward_model": 0.1})
    assert not task.solved({"reward_model": -0.1})
    assert not task.solved(RewardFailed("lost"))


def test_nothing_is_loaded_before_the_first_score(monkeypatch, models, tmp_path):
    monkeypatch.setattr("tba.tasks.tldr.summarising.load_scorer", lambda *_, **__: pytest.fail("loaded"))
    make().prompts("validation")
    make(data=write_rows(tmp_path / "train.jsonl", *rows(4)), num_validation_prompts=0, tldr=models).prompts("train")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_the_real_edition_reads_a_folder(tmp_path, models, suffix, held_out):
    write_rows(tmp_path / f"train{suffix}", *rows(12))
    write_rows(tmp_path / f"{held_out}{suffix}", {"prompt": POST, "summary": "day friday"})
    task = make(data=str(tmp_path), num_validation_prompts=4, tldr=models)
    assert (len(task.prompts("train")), len(task.prompts("validation"))) == (8, 4)
    (prompt,) = task.prompts("held_out")
    assert (prompt.id, prompt.text, prompt.columns) == ("held_out-1", POST, {"reference": " day friday"})
    # The EOS that the paper's data has as text is gone: scorers add the token.
    assert all("<eos>" not in prompt.columns["reference"] for prompt in task.prompts("train"))


def test_of_a_folder_with_both_the_validation_rows_are_held_out(tmp_path, models):
    for split, post in (("train", "so TL;DR:"), ("validation", POST), ("test", "well TL;DR:")):
        write_rows(tmp_path / f"{split}.jsonl", {"query": post, "reference": "day friday"})
    task = make(data=str(tmp_path), num_validation_prompts=0, tldr=models)
    assert [prompt.text for prompt in task.prompts("held_out")] == [POST]


def test_the_real_edition_scores_with_the_models_of_the_config(tmp_path, models):
    data = write_rows(tmp_path / "train.jsonl", *rows(4))
    evaluation = write_rows(tmp_path / "eval.jsonl", *rows(2))
    task = make(data=data, eval_data=evaluation, num_validation_prompts=0, tldr=models)
    assert len(task.prompts("held_out")) == 2
    prompt, texts = task.prompts("train")[0], ["day friday", "so"]
    outcomes = task.score(prompt, texts, [completion(), completion()])
    given = ([prompt.text] * 2, texts, [True, True])
    expected = {
        path: load_scorer(path, device="cpu").score(*given) for path in (models.reward_model, models.gold_model)
    }
    assert [o["reward_model"] for o in outcomes] == pytest.approx(expected[models.reward_model].tolist(), abs=1e-5)
    np.testing.assert_allclose(task.proxy_scores(*given), expected[models.reward_model], atol=1e-5)
    np.testing.assert_allclose(task.gold_scores(*given), expected[models.gold_model], atol=1e-5)


def test_what_the_real_edition_lacks_is_said_in_words(tmp_path, models):
    data = write_rows(tmp_path / "rows.jsonl", *rows(4))
    with pytest.raises(ValueError, match=r"task\.tldr\.reward_model is needed with task\.data"):
        make(data=data)
    with pytest.raises(ValueError, match=r"task\.tldr\.gold_model='/no/such': there is no such folder"):
        make(tldr=TLDRConfig(gold_model="/no/such"))
    with pytest.raises(ValueError, match=r"task\.tldr\.gold_model is needed with task\.data"):
        make(data=data, tldr=TLDRConfig(reward_model=models.reward_model))
    task = make(data=data, num_validation_prompts=0, tldr=models)
    with pytest.raises(ValueError, match=r"rows\.jsonl is one file.*Give the rows to report on as task\.eval_data"):
        task.prompts("held_out")
    with pytest.raises(ValueError, match=r"task\.num_validation_prompts is 0"):
        task.prompts("validation")
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "train.jsonl", *rows(4))
    with pytest.raises(
        ValueError, match=r"has no validation\.jsonl or validation\.jsonl\.gz or test\.jsonl or test\.jsonl\.gz"
    ):
        make(data=str(tmp_path / "folder"), num_validation_prompts=0, tldr=models)


GOOD = {"query": POST, "reference_response": "day friday"}


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("missing column", {"query": POST}),
        ("missing column", {"reference": "day friday"}),
        ("wrong type", GOOD | {"reference_response": 3}),
        ("empty reference", GOOD | {"reference_response": " <eos>"}),
        ("empty prompt", GOOD | {"query": " "}),
        ("not JSON", b"{"),
        ("no object", "text"),
        ("over-long prompt", GOOD | {"query": "so " * 41}),
    ],
)
def test_bad_rows_are_told_with_their_lines(tmp_path, caplog, models, reason, row):
    task = {"data": write_rows(tmp_path / "rows.jsonl", GOOD, row, GOOD, row), "tldr": models}
    with pytest.raises(ValueError, match=f"line 2.*2 bad rows: 2 x {reason} \\(lines 2, 4\\)"):
        make(**task, num_validation_prompts=0).prompts("train")
    with caplog.at_level(logging.WARNING):
        prompts = make(**task, num_validation_prompts=0, on_bad_row="skip").prompts("train")
    assert [prompt.id for prompt in prompts] == ["train-1", "train-3"]
    assert f"2 x {reason} (lines 2, 4)" in caplog.text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_real_edition_trains_on_rows_and_models_of_its_own(models, mode, tmp_path):
    write_rows(tmp_path / "train.jsonl", *rows(40))
    write_rows(tmp_path / "validation.jsonl", *rows(50)[40:])
    settings = ["train.max_steps=2", "train.responses_per_step=16", "train.samples_per_prompt=8", "name=run"]
    settings += ["task.num_validation_prompts=5", "generate.max_new_tokens=8", "observe.progress=false", f"mode={mode}"]
    config = load_config(
        None,
        [*settings, "model.path=tba:tldr", "model.device=cpu", f"output={tmp_path}", "train.truncated=penalise"],
        task={"name": "tldr", "data": str(tmp_path), "tldr": models.model_dump()},
    )
    summary = train(config)
    assert summary["steps"] == 2
    assert {"win_rate", "win_rate_greedy", "kl", "perplexity", "regularised_reward"} <= summary["final"].keys()


def test_a_bad_train_row_shows_before_there_is_a_run_folder(models, tmp_path):
    long = {"query": " ".join(["so"] * 80), "reference_response": "day friday"}
    write_rows(tmp_path / "train.jsonl", *rows(5), long)
    write_rows(tmp_path / "validation.jsonl", *rows(8)[5:])
    task = {"name": "tldr", "data": str(tmp_path), "num_validation_prompts": 0, "tldr": models.model_dump()}
    overrides = [
        "model.path=tba:tldr",
        "model.device=cpu",
        "generate.max_new_tokens=8",
        f"output={tmp_path}",
        "name=run",
    ]
    with pytest.raises(ValueError, match=r"train\.jsonl line 6"):
        train(load_config(None, overrides, task=task))
    assert not (tmp_path / "run").exists()


def test_what_training_maximises_cannot_be_its_judge(models):
    same = TLDRConfig(reward_model=models.reward_model, gold_model=models.reward_model)
    with pytest.raises(ValueError, match="is also the reward model"):
        make(tldr=same)
