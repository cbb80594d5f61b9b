"""Environments in their processes: every kind, tools that fail, hang or end the process, and a host that dies."""

import os
import signal
import threading

import cloudpickle
import games
import pytest

from tba.tasks.environments.host import EnvironmentHost, EnvironmentSpec
from tba.tasks.environments.playground import Kind, Playground
from tba.tasks.environments.workers import Environments
from tba.tasks.rewards.pool import RewardUnusable

COLUMNS = {"prompt": [{"role": "user", "content": "Play."}], "secret": 4}


def playground(kind, *functions, copies=False):
    made = Playground({"it": Kind.of(kind.__name__, kind)}, {own.__name__: own for own in functions}, copies=copies)
    return made


def test_methods_and_functions_are_tools_and_errors_are_results():
    made = playground(games.Guess, games.double)
    assert made.start("it", COLUMNS, 0).observation == " Guess a number from 1 to 9."
    assert made.call([("guess", {"number": 3}), ("guess", {"number": 4})]) == ["higher", "right"]
    assert made.call([("double", {"number": 21})]) == ["42"]
    assert made.call([("wait", {})]) == ['{"waited": true}']
    assert made.call([("fail", {})]) == ['{"error": "KeyError: \'no such door\'"}']
    (unexpected,) = made.call([("guess", {"guess": 3})])
    assert "unexpected keyword argument" in unexpected
    (unknown,) = made.call([("reset", {})])
    assert unknown.startswith('{"error": "there is no tool')
    found = made.finish()
    assert (found.rewards, found.tool_errors) == ({"Guess": 1.0}, 3)
    made.start("it", {**COLUMNS, "secret": 9}, 0)  # the same instance, reset
    assert made.finish() == ({"Guess": 0.0}, None, 0)


def test_luck_is_that_of_the_seed():
    made = playground(games.Guess)
    secrets = []
    for seed in (1, 2, 3, 1, 2, 3):
        made.start("it", {}, seed)
        secrets.append(made._environment.secret)
    assert secrets[:3] == secrets[3:]
    assert len(set(secrets)) > 1


def test_gymnasium_steps():
    made = playground(games.Echo)
    assert made.start("it", COLUMNS, 123) == (" Seed 23.", False, True)
    assert [made.step("ab"), made.step(""), made.step("abc")] == [
        ("2 characters", False, True),
        ("0 characters", False, True),
        ("3 characters", True, True),
    ]
    assert made.finish().rewards == {"Echo": 0.75}


def test_textarena_and_skyrl():
    made = playground(games.Arena)
    assert made.start("it", COLUMNS, 0).observation == "move 0"
    assert [made.step("a"), made.step("b")] == [("move 1", False, True), ("", True, True)]
    assert made.finish().rewards == {"Arena": 1.5}
    made = playground(games.Gym)
    assert made.start("it", COLUMNS, 0) == (None, False, True)
    assert [made.step("go"), made.step("stop")] == [("again", False, True), ("again", True, True)]
    assert made.finish().rewards == {"Gym": 1.0}


def test_rewards_get_a_copy_of_the_environment():
    made = playground(games.Guess, copies=True)
    made.start("it", COLUMNS, 0)
    made.call([("guess", {"number": 7})])
    assert cloudpickle.loads(made.finish().copy).guesses == [7]


class Connected(games.Guess):
    """As clients of servers are: it holds a lock."""

    def __init__(self):
        self.lock = threading.Lock()


def test_a_copy_lacks_what_cannot_be_sent():
    made = playground(Connected, copies=True)
    made.start("it", COLUMNS, 0)
    made.call([("guess", {"number": 7})])
    copy = cloudpickle.loads(made.finish().copy)
    assert (type(copy), vars(copy)) == (Connected, {"secret": 4, "guesses": [7]})


@pytest.fixture
def environments(tmp_path):
    made = []

    def make(kind=games.Guess, tools=(), **options):
        spec = EnvironmentSpec(classes={"it": kind}, rewards={"it": "Guess"}, tools=tools, **options)
        made.append(Environments(spec, log=tmp_path / "environments.log"))
        return made[-1]

    yield make
    for own in made:
        own.close()


def answers_of(environments, count):
    found = {}
    while len(found) < count:
        found.update(environments.answers(10.0))
    return found


def test_one_that_hangs_or_dies_costs_its_episode_alone(environments):
    own = environments(timeout_seconds=1.0)
    keys = [("p", sample) for sample in range(4)]
    for key in keys:
        own.ask(key, "start", "it", COLUMNS, 0)
    assert {answer.value.observation for answer in answers_of(own, 4).values()} == {" Guess a number from 1 to 9."}
    own.ask(keys[0], "call", [("hang", {})])
    own.ask(keys[1], "call", [("die", {})])
    own.ask(keys[2], "call", [("guess", {"number": 4})])
    found = answers_of(own, 3)
    assert "took longer than 1 s" in found[keys[0]].error
    assert "died" in found[keys[1]].error
    assert found[keys[2]].value == ["right"]
    own.ask(keys[2], "finish")
    own.ask(keys[3], "finish")
    assert [answer.value.rewards for _, answer in sorted(answers_of(own, 2).items())] == [
        {"Guess": 1.0},
        {"Guess": 0.0},
    ]


def test_a_host_that_dies_costs_its_episodes_and_another_takes_its_place(environments):
    own = environments()
    own.ask(("p", 0), "start", "it", COLUMNS, 0)
    own.ask(("p", 1), "start", "it", COLUMNS, 0)
    answers_of(own, 2)
    own.ask(("p", 0), "call", [("hang", {})])
    os.killpg(own._process._process.pid, signal.SIGKILL)
    (lost,) = answers_of(own, 1).values()
    assert "process died" in lost.error
    own.ask(("p", 1), "finish")  # its environment went with the first host
    assert "lost with its process" in answers_of(own, 1)["p", 1].error
    own.ask(("p", 2), "start", "it", COLUMNS, 0)
    assert not answers_of(own, 1)["p", 2].error


def test_an_environment_that_cannot_be_loaded_stops_the_run(environments, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import this_module_is_missing\nclass Game: ...\n")
    with pytest.raises(RewardUnusable, match="this_module_is_missing"):
        _ = environments(f"{file}:Game").ready
    file.write_text("class Game:\n    def move(self, x): ...\n")
    with pytest.raises(RewardUnusable, match="move has no schema"):
        _ = environments(f"{file}:Game").ready


def test_episodes_that_are_given_up_are_forgotten(environments):
    own = environments()
    for sample in range(3):
        own.ask(("p", sample), "start", "it", COLUMNS, 0)
    own.give_up()
    assert own.waiting == 0
    own.ask(("q", 0), "start", "it", COLUMNS, 0)
    assert list(answers_of(own, 1)) == [("q", 0)]


def test_an_answer_to_an_episode_that_was_given_up_is_not_taken_for_another(environments):
    own = environments(games.Echo)
    own.ask(("p", 0), "start", "it", {}, 1)
    while not own._process.link._inbox.qsize():  # the answer is there, and nobody takes it
        pass
    own.give_up()
    own.ask(("p", 0), "start", "it", {}, 2)
    assert answers_of(own, 1)["p", 0].value.observation == " Seed 2."


TURN = "Try a code.\n\n        Args:\n            code: The code.\n        "


class Silent:
    """Tools, and no reward."""

    def reset(self, **columns):
        return None

    def turn(self, code: int) -> str:
        return "shut"

    turn.__doc__ = TURN


class Made(Silent):
    def __init__(self, level):
        self.level = level


def turn(code: int) -> str:
    return "open"


turn.__doc__ = TURN


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Made, {"copies": True}, "environment it asks for level to be made, and it gets no arguments"),
        (Silent, {}, "environment it has no get_reward, and there is no other reward"),
        (Silent, {"copies": True, "tools": (turn,)}, "two tools have the name turn: rename one of them"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_when_its_file_is_loaded(kind, options, message):
    with pytest.raises(ValueError, match=message):
        EnvironmentHost(EnvironmentSpec(classes={"it": kind}, rewards={"it": "it"}, **options))


@pytest.mark.parametrize("value", [None, "good"])
def test_a_get_reward_that_gives_no_number_is_named(value):
    made = playground(type("Odd", (Silent,), {"get_reward": lambda self: value}))
    made.start("it", COLUMNS, 0)
    with pytest.raises(ValueError, match=f"get_reward returned {value!r}, which is no number"):
        made.finish()
