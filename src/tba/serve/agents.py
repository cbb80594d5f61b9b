"""Agents inside a run: functions of the user that speak to the served policy, each of which plays one episode.

    searcher's thread   the engine generates; calls of agents are its requests, in the order in which they come
    web thread          OpenAI's routes on this machine; the key of a session says which episode a call is of
    host's process      forks a child for each agent that runs (tasks/environments/host.py)

An episode is one trajectory: each call must begin with all tokens of the call before. Behind the tokens so far a call is a
request with a prefix, so keys and values of earlier turns are kept, and random numbers go on by the number of the token.
"""

from __future__ import annotations

import math
import secrets
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tba.config import Config
from tba.config.task import code_name
from tba.engine.contract import Engine
from tba.serve.bodies import Asked, BadRequest, Limits
from tba.serve.chat import Call
from tba.serve.driver import DriverClosed, JobQueue
from tba.serve.server import SWITCH_SECONDS, make_server, open_socket
from tba.serve.service import Service
from tba.serve.sessions import Session, Sessions, join_calls
from tba.tasks.environments.episodes import EpisodeEngine, Running, Turns, seed_of
from tba.tasks.environments.host import Answer, EnvironmentSpec, EpisodeKey
from tba.tasks.environments.playground import Finished
from tba.tasks.environments.workers import Environments
from tba.types import Completion, Prompt, Request, Sampling

MOST_CALLS = 10_000
"""Most calls that wait for slots; each agent has one at a time."""
ANY_LENGTH = 2**31
"""For the server's own checks: the session says what an episode has room for."""
WATCH_SECONDS = 0.1
"""Time between two looks for agents that hang."""
STOP_SECONDS = 10.0
"""Longest wait for the web server when it is closed."""


def with_agents(engine: Engine, config: Config, tokenizer: Any) -> Engine:
    """The engine with the agent of the config."""
    environment, log = config.task.environment, config.run_folder / "logs" / "agents.log"
    # The host sets no time limit: it cannot tell an agent that hangs from one that waits for the engine.
    spec = EnvironmentSpec(classes={}, rewards={}, agent=environment.agent, timeout_seconds=math.inf)
    return cast(
        Engine,
        AgentEngine(
            engine,
            lambda: Environments(spec, log=log, passed_on=config.search.reward_environment),
            tokenizer,
            seed=config.seed,
            max_turns=environment.max_turns,
            template=config.task.chat_template_kwargs,
            reward=code_name(cast(Any, environment.agent)),
            timeout_seconds=environment.timeout_seconds,
        ),
    )


class AgentEngine(EpisodeEngine):
    """An engine with agents: `generate` yields their whole episodes."""

    def __init__(self, *given: Any, reward: str, timeout_seconds: float, **options: Any) -> None:
        """`reward` is the name of the reward that the agent gives; `timeout_seconds` is the longest that it may work without
        a call."""
        super().__init__(*given, **options)
        self.options |= {"reward": reward, "timeout_seconds": timeout_seconds}
        self.reward, self.timeout_seconds = reward, timeout_seconds
        self.queue = JobQueue(self.engine, max_waiting=MOST_CALLS)
        self.sessions = Sessions(most=MOST_CALLS, idle_seconds=math.inf)
        self._server: tuple[Any, threading.Thread] | None = None
        self.base_url = ""

    def serve(self) -> None:
        """Start the web server, once."""
        if self._server is not None:
            return
        limits = Limits(max_length=ANY_LENGTH, vocabulary=self.engine.vocabulary, default_tokens=ANY_LENGTH)
        # Nobody knows the token: only keys of sessions open the door.
        token = secrets.token_urlsafe()
        service = Service(
            self.queue, self.tokenizer, self.sessions, name=None, token=token, template=self.template, limits=limits
        )
        server, address = make_server(service), open_socket("127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{address.getsockname()[1]}/v1"
        sys.setswitchinterval(SWITCH_SECONDS)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [address]}, name="agents", daemon=True)
        thread.start()
        self._server = server, thread

    def close(self) -> None:
        super().close()
        if self._server is not None:
            server, thread = self._server
            server.should_exit = True
            thread.join(STOP_SECONDS)

    def _turns(self, *given: Any) -> Turns:
        self.queue.engine = self.engine
        self.serve()
        return AgentTurns(self, *given)


@dataclass(kw_only=True, eq=False)
class Group:
    """The episodes of one rollout: Group(prompt=None) until the first call of one of them."""

    prompt: Prompt | None = None
    """The first call's, which all have."""


@dataclass(kw_only=True, eq=False)
class AgentSession(Session):
    """The calls of one agent, which go on from each other."""

    request: Request
    """The rollout."""
    sample_index: int
    group: Group
    sampling: Sampling
    """The run's own, whatever a call asks for."""
    max_length: int
    most_calls: float
    key: str = ""
    """The agent's API key."""
    failure: str = ""
    """Why the episode is lost; empty = it is not."""
    cut: Request | None = None
    """Answer to a call for which there was no room, and to all that follow: it is complete already; None = none came."""

    def requests(self, asked: Asked, unique: str) -> list[Request]:
        if self.cut is not None:
            return [self.cut]
        ids = np.array(asked.prompts[0], np.int32)
        # The first failure stays: an agent that goes on after it only makes others.
        self.failure = self.failure or self._why_not(asked, ids)
        if self.failure:
            raise BadRequest(f"this episode is lost: {self.failure}", code="episode_lost")
        if self.group.prompt is None:
            said = self.request.prompt.text if asked.chat is None else asked.chat.messages
            self.group.prompt = replace(self.request.prompt, token_ids=ids, text=said)
        prompt = self.group.prompt
        prefix = ids[len(prompt.token_ids) :]
        limit = min(self.sampling.max_new_tokens, self.max_length - len(prompt.token_ids))
        # Without room the prefix is the whole response, and the agent gets an empty message.
        is_cut, prefix = len(prefix) >= limit or len(self.calls) >= self.most_calls, prefix[:limit]
        most = len(prefix) if is_cut else min(limit, len(prefix) + asked.sampling.max_new_tokens)
        found = replace(
            self.request,
            prompt=prompt,
            first_sample=self.sample_index,
            samples=1,
            prefix_ids=prefix,
            sampling=replace(self.sampling, max_new_tokens=most),
            goes_on=True,
        )
        self.cut = found if is_cut else None
        return [found]

    def _why_not(self, asked: Asked, ids: np.ndarray) -> str:
        """Why a call is no part of one trajectory."""
        if len(asked.prompts) * asked.num_samples > 1:
            return "a call asked for several responses, and an episode is one trajectory"
        if not self.calls:
            if len(ids) >= self.max_length:
                return f"the first call's prompt has {len(ids)} tokens, and the model's context is {self.max_length}"
            if self.group.prompt is not None and not np.array_equal(ids, self.group.prompt.token_ids):
                return (
                    "its first call has another prompt than that of another agent of its group, so they cannot be "
                    "compared: draw at random from `seed`, `random` or `numpy.random`, which are the same for all"
                )
            return ""
        last, number = self.calls[-1], len(self.calls)
        so_far = np.concatenate((last.prompt_ids, last.token_ids))
        if np.array_equal(ids[: len(so_far)], so_far):
            return ""
        why = "" if asked.chat is None else asked.chat.why_apart(last)
        why = why or "its tokens do not begin with those of that call"
        return f"call {number + 1} of the agent does not go on from call {number}: {why}"


class AgentTurns(Turns):
    """The requests that the engine reads during one call: calls of agents, finished episodes and new rollouts."""

    _engine: AgentEngine

    def __init__(self, engine: AgentEngine, *given: Any) -> None:
        super().__init__(engine, *given)
        self._queue, self._between = engine.queue, self.between_steps
        self.between_steps = self._serve_between_steps
        self._sessions: dict[EpisodeKey, AgentSession] = {}
        self._active: dict[EpisodeKey, float] = {}
        """When each agent was last seen to wait for the engine."""
        self._ended: dict[EpisodeKey, tuple[Answer, list[Call]]] = {}
        """Agents that have ended, with the calls that they know of, while the engine still has one that they left behind."""
        self._next_look = 0.0

    def received(self, completion: Completion) -> Completion | None:
        key = completion.prompt_id, completion.sample_index
        running = self._episodes.get(key)
        if running is not None and running.result is not None:
            return super().received(completion)
        self._in_engine -= 1
        # No session of this run: an agent has begun one itself.
        if (session := self._sessions.get(key)) is not None and session.cut is None:
            self._active[key] = time.monotonic()
        self._queue.finish(completion)
        return None

    def give_up(self) -> None:
        super().give_up()
        self._engine.sessions.clear()
        self._queue.give_up(DriverClosed("the run generates no more for this agent."))

    def _serve_between_steps(self) -> None:
        self._queue.between_steps()
        self._between()

    def _start(self, request: Request, samples: range) -> None:
        group, prompt = Group(), request.prompt
        messages = [{"role": "user", "content": prompt.text}] if isinstance(prompt.text, str) else prompt.text
        for sample in samples:
            running = Running(request=request, sample_index=sample, kind="", prompt=prompt)
            session = AgentSession(
                id=f"{prompt.id}/{sample}",
                task_id=None,
                request=request,
                sample_index=sample,
                group=group,
                sampling=request.sampling or self._sampling,
                max_length=self._engine.max_length,
                most_calls=math.inf if self._engine.max_turns is None else self._engine.max_turns + 1,
            )
            self._episodes[running.key], self._sessions[running.key] = running, session
            self._active[running.key] = time.monotonic()
            given = {"prompt": prompt.text, "messages": messages, **prompt.columns, "base_url": self._engine.base_url}
            given["api_key"] = session.key = self._engine.sessions.add(session)
            self._environments.ask(running.key, "run", given, seed_of(self._engine.seed, prompt))

    def _take_answers(self, wait_seconds: float) -> None:
        self._queue.take_commands(wait_seconds)
        while (job := self._queue.start_next()) is not None:
            self._ready.append(job.request)
        for key, answer in self._environments.answers():
            self._ended[key] = answer, [*self._sessions[key].calls]
        if self._ended or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + WATCH_SECONDS
            self._end_lost()
            self._close_ended()

    def _end_lost(self) -> None:
        """End agents that hang, or whose episode is lost already."""
        now, waiting = time.monotonic(), {job.key for job in self._queue.open_jobs()}
        for key, session in self._sessions.items():
            if key in waiting and session.cut is None:
                self._active[key] = now
            if now - self._active[key] > self._engine.timeout_seconds:
                session.failure = session.failure or (
                    f"the agent worked {self._engine.timeout_seconds:g} s without a call and was ended: raise "
                    "task.environment.timeout_seconds if it needs longer"
                )
            if session.failure and key not in self._ended:
                self._environments.end(key)
                self._ended[key] = Answer(), []

    def _close_ended(self) -> None:
        jobs = {job.key: job for job in self._queue.open_jobs()}
        for key in list(self._ended):
            if key in jobs:  # the agent left a call behind: its episode has the same key in the engine
                self._queue.end([jobs[key]])
            else:
                self._close_agent(self._episodes[key], self._sessions.pop(key), *self._ended.pop(key))

    def _close_agent(self, running: Running, session: AgentSession, answer: Answer, calls: list[Call]) -> None:
        """The agent has ended: its calls become one trajectory."""
        self._engine.sessions.end(session.key)
        del self._active[running.key]
        trajectories = join_calls(calls, {})
        failure = session.failure or answer.error
        if not failure and len(trajectories) != 1:
            failure = "calls of the agent ran side by side" if trajectories else "the agent made no call"
        reward = session.reward if answer.value is None else answer.value
        if failure:
            self._close(running, failure=failure)
            return
        (found,) = trajectories
        assert session.group.prompt is not None
        running.prompt = session.group.prompt
        running.tokens, running.chosen, running.spans = [found.token_ids], [found.loss_mask], [*found.version_spans]
        # 0 where the policy did not choose, as in episodes with environments.
        running.behaviour, running.policy = (
            [np.nan_to_num(own)] for own in (found.behaviour_log_probs, found.policy_log_probs)
        )
        running.finish = "length" if session.cut else found.finish
        first = 0 if calls[0].chat is None else len(calls[0].chat.messages)
        running.messages = [*calls[-1].messages[first:]] if calls[-1].chat else [call.message for call in calls]
        running.tool_calls = sum(len(message.get("tool_calls", ())) for message in running.messages)
        self._close(running, Finished({} if reward is None else {self._engine.reward: reward}, None))
