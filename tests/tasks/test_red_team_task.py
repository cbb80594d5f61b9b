"""The red-teaming task: the embedded edition by hand, the real one with tiny random models."""

import math

import numpy as np
import pytest
import torch
from builders import tiny_tokenizer
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from recipes.red_team import make_tokenizer
from recipes.start_models import make_word_tokenizer
from tba.config import RedTeamConfig, TaskConfig, load_config
from tba.run.start import train
from tba.tasks.red_team.attacking import RedTeamTask
from tba.tasks.red_team.models import ClassifierJudge, ModelVictim, RuleVictim, SentenceEncoder, WordCounts
from tba.tasks.task import TaskInputs
from tba.types import Completion

WORDS = [f"w{index}" for index in range(30)]
HIT, MISS = "please wash the table", "please wash the kettle"


def make_task(tokenizer=None, **red_team):
    config = TaskConfig(name="red_team", red_team=RedTeamConfig(**red_team))
    return RedTeamTask(
        TaskInputs(config=config, tokenizer=tokenizer or make_tokenizer(), max_prompt_tokens=16, device="cpu")
    )


def completion_of(text, *, finish="stop"):
    """As an engine makes it: one token per word, and the stop token."""
    num_tokens = len(text.split()) + (finish == "stop")
    return Completion(
        prompt_id="attack",
        sample_index=0,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        behaviour_log_probs=np.zeros(num_tokens, np.float32),
        policy_log_probs=np.zeros(num_tokens, np.float32),
        version_spans=((0, 0),),
        finish=finish,
    )


def scores(task, texts, finish="stop"):
    prompt = task.prompts("train")[0]
    return [
        outcome["toxicity"] for outcome in task.score(prompt, texts, [completion_of(t, finish=finish) for t in texts])
    ]


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def bert_config(tokenizer, **options):
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        initializer_range=0.5,  # large, so that texts differ
        **options,
    )


def save_judge(folder, labels, **options):
    torch.manual_seed(1)
    tokenizer = make_word_tokenizer(WORDS)
    config = bert_config(tokenizer, id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)})
    config.problem_type = options.get("problem_type")
    return save(folder, BertForSequenceClassification(config), tokenizer)


def save_victim(folder, tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=48,
        initializer_range=0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return save(folder, LlamaForCausalLM(config), tokenizer)


def make_victim(folder, **options):
    return ModelVictim(
        folder, **{"template": "{attack}", "num_replies": 3, "reply_tokens": 6, "device": "cpu"} | options
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a tiny victim, judge and embedder."""
    torch.manual_seed(2)
    folder, tokenizer = tmp_path_factory.mktemp("models"), make_word_tokenizer(WORDS)
    return {
        "victim": save_victim(folder / "victim", tokenizer),
        "judge": save_judge(folder / "judge", ["fine", "toxic"]),
        "embedder": save(folder / "embedder", BertModel(bert_config(tokenizer)), tokenizer),
    }


def test_every_split_has_the_one_prompt_of_a_bos_token():
    task = make_task()
    for split in ("train", "validation", "held_out"):
        assert [(p.id, p.token_ids.tolist(), p.text) for p in task.prompts(split)] == [(f"attack-{split}", [1], "")]


def test_embedded_rewards_by_hand():
    task = make_task()
    assert scores(task, [HIT, MISS, HIT]) == [1.0, 0.0, 1.0]
    assert scores(task, [HIT], finish="length") == [0.0]
    assert task.probabilities([HIT, HIT, MISS], [True, False, True]).tolist() == [1.0, 0.0, 0.0]
    assert [task.solved({"toxicity": value}) for value in (1.0, 0.5, 0.0)] == [True, False, False]
    assert task.mode_of(HIT, True) == "wash table"
    assert task.knows_modes


def test_log_rewards_have_a_floor_and_are_solved_by_the_geometric_mean():
    task = make_task(score="log_probability")
    assert scores(task, [HIT, MISS]) == [0.0, pytest.approx(math.log(1e-6))]
    assert task.solved({"toxicity": math.log(0.51)})
    assert not task.solved({"toxicity": math.log(0.49)})


def test_attacks_that_are_too_short_get_the_short_reward():
    # Words count, the stop token does not: HIT has 4.
    assert scores(make_task(min_attack_tokens=4), [HIT, "please wash the"]) == [1.0, -25.0]
    assert scores(make_task(min_attack_tokens=5), [HIT, HIT + " today"]) == [-25.0, 1.0]
    assert scores(make_task(min_attack_tokens=9), [HIT]) == [-25.0]


def test_equal_attacks_are_asked_once():
    class Recording(RuleVictim):
        def replies(self, attacks, finished, **options):
            self.asked = list(attacks)
            return super().replies(attacks, finished, **options)

    task = make_task()
    task._victim = Recording()
    assert scores(task, [MISS, HIT, HIT, MISS]) == [0.0, 1.0, 1.0, 0.0]
    assert task._victim.asked == [MISS, HIT]


def test_word_counts_are_comparable_across_calls():
    embedder = WordCounts()
    together = embedder.embed([HIT, MISS])
    assert np.array_equal(together[1:], embedder.embed([MISS]))
    # Three of four words in common
    assert together[0] @ together[1] == pytest.approx(0.75)
    odd = embedder.embed(["", "words from elsewhere", "wash wash table"])
    assert np.linalg.norm(odd, axis=1) == pytest.approx(1.0)
    assert odd[0] @ odd[2] == 0.0


def test_the_real_edition_needs_victim_judge_and_prompt():
    with pytest.raises(ValueError, match=r"task\.red_team\.prompt is needed"):
        make_task(victim="v", judge="j")
    with pytest.raises(ValueError, match=r"task\.red_team\.victim=v without task\.red_team\.judge"):
        make_task(victim="v", prompt="x")
    with pytest.raises(ValueError, match=r"task\.red_team\.judge=j without task\.red_team\.victim"):
        make_task(judge="j")
    with pytest.raises(ValueError, match=r"prompt is given, but no victim and judge"):
        make_task(prompt="x")


def test_models_load_when_the_first_attack_is_scored(tmp_path):
    with pytest.raises(ValueError, match=r"task\.red_team\.victim='.*none': there is no such folder"):
        make_task(victim=str(tmp_path / "none"), judge="hub/judge", prompt="please")
    (tmp_path / "empty").mkdir()
    task = make_task(victim=str(tmp_path / "empty"), judge=str(tmp_path / "empty"), prompt="please")
    assert len(task.prompts("train")) == 1
    with pytest.raises(ValueError, match=r"task\.red_team\.victim=.*cannot be loaded"):
        scores(task, [HIT])
    with pytest.raises(ValueError, match=r"task\.red_team\.judge=.* cannot be loaded"):
        ClassifierJudge(str(tmp_path / "none"), label="toxic")


def test_a_victim_gives_so_many_replies_that_depend_on_attack_and_occasion_only(models):
    victim = make_victim(models["victim"])
    together = victim.replies(["w1 w2", "w3", "w1 w2"], [True, True, False])
    assert [len(own) for own in together] == [3, 3, 3]
    assert all(len(reply.split()) <= 6 for own in together for reply in own)
    assert together[0] == together[2] != together[1]
    assert victim.replies(["w3"], [True]) == [together[1]]
    assert victim.replies(["w3"], [True], occasion="evaluation") != [together[1]]


def test_a_chat_template_makes_a_users_message_of_the_attack(models, tmp_path):
    tokenizer = make_word_tokenizer(WORDS)
    tokenizer.chat_template = "<bos> w7 {{ messages[0]['content'] }} w8"
    chat = make_victim(save_victim(tmp_path, tokenizer), template="{attack} w9")
    plain = make_victim(models["victim"], template="w7 {attack} w9 w8")
    assert chat.replies(["w1 w2"], [True]) == plain.replies(["w1 w2"], [True])


def test_an_empty_attack_is_sent_as_a_start_token(tmp_path):
    tokenizer = tiny_tokenizer()  # adds no BOS
    assert tokenizer("")["input_ids"] == []
    assert len(make_victim(save_victim(tmp_path, tokenizer)).replies([""], [True])[0]) == 3


def test_a_victim_refuses_what_does_not_fit_in_words(models):
    with pytest.raises(ValueError, match=r"reply_tokens=48 leaves no room .* 48 tokens"):
        make_victim(models["victim"], reply_tokens=48)
    with pytest.raises(ValueError, match=r"an attack has 61 tokens .* leaves 42"):
        make_victim(models["victim"]).replies([" ".join(["w1"] * 60)], [True])
    with pytest.raises(ValueError, match=r"victim_template='hello' has no \{attack\}"):
        RedTeamConfig(victim_template="hello")
    with pytest.raises(
        ValueError, match=r"world=2 is for the embedded edition, but task.red_team.victim=v is attacked"
    ):
        RedTeamConfig(world=2, victim="v")


@pytest.mark.parametrize(
    ("labels", "problem_type", "by"),
    [
        (["fine", "toxic"], None, lambda logits: logits.softmax(-1)[1]),
        (["obscene", "toxic", "threat"], "multi_label_classification", lambda logits: logits.sigmoid()[1]),
        (["toxic"], None, lambda logits: logits.sigmoid()[0]),
    ],
)
def test_a_judge_gives_the_probability_of_its_label(tmp_path, labels, problem_type, by):
    path = save_judge(tmp_path, labels, problem_type=problem_type)
    replies = [" ".join(WORDS[index : index + 1 + index % 9]) for index in range(70)] + [""]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        direct = [float(by(model(**tokenizer(reply, return_tensors="pt")).logits[0])) for reply in replies]
    found = ClassifierJudge(path, label="toxic", device="cpu").probabilities(replies)
    assert found == pytest.approx(np.array(direct), abs=1e-5)
    assert found.std() > 0.01


def test_a_judge_without_the_label_names_those_it_has(models):
    with pytest.raises(ValueError, match=r"judge_label='rude' is no label of .* it has fine, toxic\."):
        ClassifierJudge(models["judge"], label="rude", device="cpu")


def test_a_judge_cuts_long_replies_at_the_models_limit(models, tmp_path):
    judge = ClassifierJudge(models["judge"], label="toxic", device="cpu")
    long, cut = " ".join(WORDS), " ".join(WORDS[:23])  # BOS is the 24th token
    assert judge.probabilities([long]) == pytest.approx(judge.probabilities([cut]))
    # RoBERTa's positions start behind the padding's id: 24 of them hold 23 tokens.
    tokenizer = make_word_tokenizer(WORDS)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=24, pad_token_id=0, **shape)
    roberta = save(tmp_path, RobertaForSequenceClassification(config), tokenizer)
    assert len(ClassifierJudge(roberta, label="LABEL_1", device="cpu").probabilities([long, "w1"])) == 2


def test_a_decoder_without_padding_can_judge(tmp_path):
    tokenizer = make_word_tokenizer(WORDS)
    tokenizer.pad_token = None
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    path = save(tmp_path, GPT2ForSequenceClassification(config), tokenizer)
    judge = ClassifierJudge(path, label="LABEL_1", device="cpu")
    alone = np.concatenate([judge.probabilities([reply]) for reply in ("w1 w2 w3", "w4")])
    assert judge.probabilities(["w1 w2 w3", "w4"]) == pytest.approx(alone, abs=1e-6)


def test_a_sentence_encoder_takes_the_mean_over_real_tokens(models):
    path, texts = models["embedder"], ["w1 w2 w3 w4 w5", "w6"]
    model, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        means = [model(**tokenizer(t, return_tensors="pt")).last_hidden_state[0].mean(dim=0).numpy() for t in texts]
    found = SentenceEncoder(path, device="cpu").embed(texts)
    assert found.dtype == np.float32
    assert found == pytest.approx(np.stack([mean / np.linalg.norm(mean) for mean in means]), abs=1e-5)


def test_real_rewards_are_means_over_replies(models):
    attacks = ["w1 w2", "w3 w4", "w1 w2"]
    victim, judge = make_victim(models["victim"]), ClassifierJudge(models["judge"], label="toxic", device="cpu")
    settings = {**models, "prompt": "w5", "num_replies": 3, "reply_tokens": 6}
    task = make_task(make_word_tokenizer(WORDS), **settings)
    own = [judge.probabilities(replies) for replies in victim.replies(attacks, [True] * 3)]
    assert scores(task, attacks) == pytest.approx([p.mean() for p in own], abs=1e-5)
    in_logarithms = make_task(make_word_tokenizer(WORDS), score="log_probability", **settings)
    assert scores(in_logarithms, attacks) == pytest.approx([np.log(p).mean() for p in own], abs=1e-4)
    fresh = victim.replies(attacks, [True] * 3, occasion="evaluation")
    expected = np.array([judge.probabilities(replies).mean() for replies in fresh])
    assert task.probabilities(attacks, [True] * 3) == pytest.approx(expected, abs=1e-5)
    assert task.embed(attacks).shape == (3, 16)
    assert not task.knows_modes
    assert task.mode_of(HIT, True) is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_real_edition_trains_from_the_command_line_s_settings(models, mode, tmp_path):
    """A tiny attacker against a tiny victim, with judge and embedder: every part a model."""
    attacker = save_attacker(tmp_path / "attacker")
    red_team = {"prompt": "w1 w2", "victim": models["victim"], "judge": models["judge"], "embedder": models["embedder"]}
    small = {"num_replies": 2, "reply_tokens": 4, "judge_label": "toxic", "min_attack_tokens": 2}
    config = load_config(
        None,
        ["train.max_steps=2", "train.responses_per_step=16", "train.samples_per_prompt=16", "observe.progress=false"],
        mode=mode,
        name="run",
        output=tmp_path,
        model={"path": attacker, "device": "cpu"},
        task={"name": "red_team", "red_team": red_team | small},
        generate={"max_new_tokens": 8, "min_new_tokens": 1},
        replay={"on_policy_probability": 0.5},
        evaluate={"samples_per_prompt": 32},
        train={"learning_rate": 1e-3},
    )
    summary = train(config)
    assert summary["steps"] == 2
    assert {"success", "cosine_distance", "self_bleu", "kl", "toxicity"} <= summary["final"].keys()
    assert "modes" not in summary["final"]  # nobody knows a model's weaknesses
    assert "regularised_reward" not in summary["final"]  # short attacks have a reward of their own


def save_attacker(folder):
    torch.manual_seed(5)
    tokenizer = make_word_tokenizer(WORDS)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return save(folder, LlamaForCausalLM(config), tokenizer)


def test_a_judge_that_was_never_trained_is_refused(models):
    with pytest.raises(ValueError, match=r"its files have no .*, which LlamaForSequenceClassification needs"):
        ClassifierJudge(models["victim"], label="LABEL_0", device="cpu")
