"""Generators of reasoning-gym: splits, prompts, scores, options, and what is refused."""

import importlib.util
import random

import pytest
from builders import completion

from recipes.arithmetic import make_tokenizer
from tba.config import TaskConfig, load_config
from tba.run.checks import check_inputs
from tba.tasks.data.make_prompt import question_key
from tba.tasks.reasoning_gym.generators import Generator, Scorer
from tba.tasks.registry import make_task
from tba.tasks.rewards.pool import WorkerRewards, score_all
from tba.tasks.task import FinishedGroup

is_there = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not is_there, reason="reasoning-gym is not installed")


def make(name, tokenizer=None, max_prompt_tokens=4000, **settings):
    config = TaskConfig(name=f"reasoning_gym:{name}", settings=settings)
    return make_task(config, tokenizer or make_tokenizer(), max_prompt_tokens=max_prompt_tokens)


@needs_package
def test_splits_have_no_question_in_common_and_are_always_the_same():
    # Sums of 0 to 9 and 0 to 9: one hundred questions, of which splits must not share any.
    settings = {"options": {"min_terms": 2, "max_terms": 2, "max_digits": 1}, "size": 300, "num_held_out": 15}
    tasks = [make("chain_sum", **settings) for _ in range(2)]
    first, second = ({split: task.prompts(split) for split in ("train", "validation", "held_out")} for task in tasks)
    keys = {split: {question_key(prompt.text) for prompt in prompts} for split, prompts in first.items()}
    assert not keys["train"] & keys["held_out"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["held_out"]
    assert [len(prompts) for prompts in first.values()] == [300, 15, 15]
    assert [p.text for p in first["train"][:20]] == [p.text for p in second["train"][:20]]
    assert len({p.id for prompts in first.values() for p in prompts}) == 330


@needs_package
def test_a_generator_whose_questions_are_all_held_out_is_refused():
    task = make(
        "chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, num_held_out=3000
    )
    with pytest.raises(ValueError, match="too few different questions for the split train"):
        task.prompts("train")[0]


@needs_package
def test_a_problem_is_the_same_whatever_was_drawn_before_and_leaves_random_numbers_alone():
    # quantum_lock draws from global random numbers.
    forwards, backwards = (Generator("quantum_lock", {}, seed=5, size=3) for _ in range(2))
    random.seed(1)
    wanted = random.random()
    random.seed(1)
    first = [forwards.problem(place)["question"] for place in (0, 1)]
    assert random.random() == wanted
    assert [backwards.problem(place)["question"] for place in (1, 0)] == first[::-1]


@needs_package
def test_a_problem_whose_prompt_is_too_long_is_replaced_by_the_next(caplog):
    # Three to ten numbers, so that prompts have different lengths.
    lengths = [len(make("number_sorting").prompts("held_out")[i].token_ids) for i in range(10)]
    limit = sorted(lengths)[5]
    prompts = make("number_sorting", max_prompt_tokens=limit).prompts("held_out")
    assert max(len(prompts[i].token_ids) for i in range(10)) <= limit
    assert caplog.text.count("Reported for the first only") == 1


@needs_package
def test_an_answer_is_read_from_tags_or_is_the_whole_text():
    problem = {"question": "", "answer": "4", "metadata": {"source_dataset": "gcd"}}
    texts = ["4", " 4\n", "2 <answer> 4 </answer>", "<answer>4</answer> or <answer>5</answer>", "no"]
    by_place = {place: Scorer("gcd", {}, place)(texts, [problem] * 5) for place in ("auto", "tags", "text")}
    # The package gives a part of the score where the answer is somewhere in the text: 1 of 22 and of 40 characters.
    assert by_place["auto"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert by_place["tags"] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert by_place["text"] == pytest.approx([1.0, 1.0, 1 / 22, 1 / 40, 0.0])


@needs_package
def test_a_scorer_that_raises_scores_0(capsys):
    # prime_factorization calls int() on what stands between the signs.
    problem = Generator("prime_factorization", {}).problem(0)
    scorer = Scorer("prime_factorization", {}, "auto")
    assert scorer([problem["answer"], "two", "three"], [problem] * 3) == [1.0, 0.0, 0.0]
    assert capsys.readouterr().out.count("score_answer raised") == 1


@needs_package
def test_scores_come_from_a_reward_worker(tmp_path):
    task = make("leg_counting")
    prompt = task.prompts("train")[3]
    texts = [prompt.columns["problem"]["answer"], "none"]
    completions = [completion(prompt, index) for index in range(2)]
    rewards = WorkerRewards(task.isolated_rewards, timeout_seconds=30.0, log=tmp_path / "rewards.log")
    try:
        group = FinishedGroup(prompt=prompt, completions=completions, texts=texts)
        (outcomes,) = score_all(rewards, [group])
    finally:
        rewards.close()
    assert outcomes == [{"score": 1.0}, {"score": 0.0}] == task.score(prompt, texts, completions)
    assert [task.solved(outcome) for outcome in outcomes] == [True, False]


@needs_package
def test_a_chat_model_is_asked_by_a_message():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (message,) = make("gcd", tokenizer).prompts("held_out")[0].text
    assert message["role"] == "user"
    assert message["content"].endswith("\n\nGive the final answer between <answer> and </answer> tags.")
    (message,) = make("gcd", tokenizer, answer="text").prompts("held_out")[0].text
    assert "<answer>" not in message["content"]


@needs_package
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("countdwn", {}, "no generator 'countdwn'; did you mean countdown"),
        ("", {}, "the package has .*countdown.*word_sorting"),
        ("gcd", {"options": {"max_valu": 9}}, "no such option. Did you mean max_value. It takes .*max_value=1000"),
        ("gcd", {"options": {"seed": 9}}, "options.seed is set by the task"),
        ("gcd", {"options": {"max_value": -1}}, "refuses them .*AssertionError"),
        ("gcd", {"sise": 9}, "sise"),
    ],
)
def test_unknown_generators_and_options_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, **settings)


@pytest.mark.skipif(is_there, reason="reasoning-gym is installed")
def test_without_the_package_the_extra_is_named_before_a_model_loads():
    config = load_config(None, ["task.name=reasoning_gym:gcd"])
    with pytest.raises(ValueError, match=r"^task.name=reasoning_gym:NAME needs .*tba-rl\[reasoning-gym\]"):
        check_inputs(config)
