"""The data types of the pipeline, in order: Prompt -> Request -> Completion -> Trajectory -> TrajectoryGroup -> Batch,
and Weights on the way back.

Every record is frozen and complete when made. Token data is NumPy (int32 ids, float32 log-probs) until the trainer turns
a Batch into tensors. Axis letters: P prompts, K responses per prompt, T tokens of one response, N tokens of all responses
of a batch laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Finish = Literal["stop", "length"]
"""Why a response ended: it produced a stop token, or it was cut off at its length limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """A problem to solve: Prompt(id="train-17", token_ids=np.array([1, 40, 7]), text="2+2=", columns={"answer": "4"})"""

    id: str
    """Unique in its split; part of the key of every random number drawn for it."""
    token_ids: np.ndarray
    """int32 [tokens], never empty; holds the BOS token already where the model wants one."""
    text: str | list[dict[str, str]]
    """As the data has it (plain text or chat messages): what reward functions are given."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, for the reward."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose tokens. Sampling(temperature=0.7, max_new_tokens=64) samples the tempered policy, as TB is defined."""

    max_new_tokens: int
    temperature: float = 1.0
    policy_temperature: float | None = None
    """Temperature of the policy that is trained; None = `temperature`. They differ only under exploration."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all tokens."""
    greedy: bool = False
    min_new_tokens: int = 0
    """Stop tokens are forbidden before this many tokens (the behaviour log-prob accounts for it)."""

    @property
    def training_temperature(self) -> float:
        return self.temperature if self.policy_temperature is None else self.policy_temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One rollout of a prompt: Request(prompt=prompt, first_sample=16) asks for sample indices 16, 17, ..."""

    prompt: Prompt
    first_sample: int = 0
    prefix_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 response tokens already chosen; generation continues after them, positions counted from the response's start."""
    sampling: Sampling | None = None
    """Overrides the call's sampling for this rollout (exploration)."""
    rollout: int = -1
    """Number of the rollout among all rollouts of the run; -1 = it is not one of them."""
    samples: int | None = None
    """Number of responses; None = the call's samples_per_prompt."""
    goes_on: bool = False
    """Whether another request will go on from its responses: an engine may keep their keys and values for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """The conversation of policy and environment behind one completion. Episode(prompt=prompt, chosen=[True, True, False,
    True], messages=[{"role": "assistant", ...}, {"role": "tool", ...}])"""

    prompt: Prompt
    """The prompt as the policy saw it: with the tools, and with what the environment said at its reset."""
    chosen: np.ndarray
    """bool [T]: True where the policy chose the token, False where an environment, a user or a template wrote it."""
    messages: Sequence[Mapping[str, Any]]
    """All messages after the prompt, in TRL's form."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards that the environment gave, by the name of its class."""
    environment: bytes | None = None
    """A pickled copy of the environment at the end, for rewards that ask for `environments`; None = there is none."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Calls that could not be read, or gave an error."""
    failure: str = ""
    """Why the episode has no reward: its environment hung, died or failed; empty = it has one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One response as an engine produced it. Completion(prompt_id="train-17", sample_index=3, token_ids=[9, 4, 2],
    behaviour_log_probs=[-.1, -.7, -.0], policy_log_probs=[-.1, -.7, -.0], version_spans=((0, 12),), finish="stop")"""

    prompt_id: str
    sample_index: int
    token_ids: np.ndarray
    """int32 [T], the stop token included; a prefix it was continued from is included too."""
    behaviour_log_probs: np.ndarray
    """float32 [T], as sampled: after temperature, truncation and forbidden tokens. NaN where unknown (prefix, import)."""
    policy_log_probs: np.ndarray
    """float32 [T], at the training temperature, without truncation. NaN where unknown."""
    version_spans: tuple[tuple[int, int], ...]
    """((first token, version), ...): which weights chose which tokens."""
    finish: Finish
    num_prefix_tokens: int = 0
    episode: Episode | None = None
    """How it came about over several turns; None = it is a single response."""

    @property
    def version(self) -> int:
        """The oldest version that chose one of its tokens: its lag is counted from there."""
        # The oldest bounds the lag of every token: weights may change in the middle of a response.
        return min(version for _, version in self.version_spans)

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T]: True where the policy chose the token."""
        return np.ones(len(self.token_ids), np.bool_) if self.episode is None else self.episode.chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """A scored response. Trajectory(completion=completion, rewards={"exact_match": 1.0}, log_ref=[-.2, -.6, -.1],
    reference_version=0, loss_mask=[True, True, True])"""

    completion: Completion
    rewards: Mapping[str, float]
    """Components by name, combined at training time. NaN = not applicable."""
    log_ref: np.ndarray
    """float32 [T], log-probs of the reference at the training temperature."""
    reference_version: int
    loss_mask: np.ndarray
    """bool [T]: True where the policy chose the token (not a tool's or a user's words)."""
    step_values: np.ndarray | None = None
    """float32 [T]: Monte-Carlo value of the prefix before each reasoning step, NaN at other tokens; None = not estimated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryGroup:
    """The responses of one rollout, sent and stored together. TrajectoryGroup(id="searcher-0.5f3a91c2/41", prompt=prompt,
    trajectories=(t0, t1, t2, t3), searcher=0)"""

    id: str
    """Unique in a run, in the form of `GroupId`: no group is stored twice."""
    prompt: Prompt
    trajectories: Sequence[Trajectory]
    """A tuple, or columns (runtime/columns.py). Empty when every reward failed: the rollout still counts as generated."""
    rollout: int = -1
    """Number of the rollout among all rollouts of the run; -1 = imported, no rollout."""
    num_lost: int = 0
    """Responses of the rollout that were lost to failing rewards."""
    why_lost: str = ""
    """Why the first of them was lost; empty = none was."""
    searcher: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.trajectories) + self.num_lost

    @property
    def version(self) -> int:
        """The oldest version behind any of its tokens; of a group that has trajectories."""
        # A group whose rewards all failed has no trajectory, and min of nothing raises.
        return min(trajectory.completion.version for trajectory in self.trajectories)


@dataclass(frozen=True, kw_only=True)
class GroupId:
    """The parts of a group's id: who made the group, in which incarnation, and which of its groups it is.
    GroupId(sender="searcher-0", incarnation="5f3a91c2", number=41) is written searcher-0.5f3a91c2/41."""

    sender: str
    """A searcher (searcher-0), or an import."""
    incarnation: str
    """Short id of one start of the sender: a searcher that was restarted numbers its groups from 0 again."""
    number: int
    """Number of the group within the incarnation; it rises in the order in which groups are sent."""

    @classmethod
    def parse(cls, text: str) -> GroupId:
        # From the right: the last slash and the last dot end the sender, whatever it holds.
        source, _, number = text.rpartition("/")
        sender, _, incarnation = source.rpartition(".")
        if not sender or not incarnation or not number.isdecimal():
            raise ValueError(f"group id {text!r} is not SENDER.INCARNATION/NUMBER, as in searcher-0.5f3a91c2/41.")
        return cls(sender=sender, incarnation=incarnation, number=int(number))

    def __str__(self) -> str:
        return f"{self.source}/{self.number}"

    @property
    def source(self) -> str:
        """Sender and incarnation: what numbers are counted within."""
        return f"{self.sender}.{self.incarnation}"


class HighWaterMarks:
    """The highest group number that has come from each source. The numbers of a source rise in the order of arrival, so that
    one at or below its mark came before: memory grows with restarts of senders, not with groups."""

    def __init__(self, marks: Mapping[str, int] | None = None) -> None:
        self._marks = dict(marks or {})

    def passed(self, group: GroupId) -> bool:
        """Whether this group, or a later one of its source, has come."""
        # Numbers begin at 0, so -1 stands for a source that has sent nothing.
        return group.number <= self._marks.get(group.source, -1)

    def raise_to(self, group: GroupId) -> None:
        self._marks[group.source] = group.number

    @property
    def by_source(self) -> dict[str, int]:
        """A copy: {"searcher-0.5f3a91c2": 41}."""
        return dict(self._marks)


@dataclass
class ResponseCounts:
    """Responses of a run so far, counted by the trainer alone: limits, metrics and the summary read them here."""

    generated: int = 0
    """Responses received from searchers, those lost to failing rewards included."""
    trained: int = 0
    """Responses with weight in the batches of all optimizer steps; one that is trained twice counts twice."""
    again: int = 0
    """Number of responses in second updates on earlier batches, which `trained` does not count."""

    @property
    def ratio(self) -> float:
        """How often each response was trained on average; replay.max_replay_ratio bounds it, second updates aside."""
        return (self.trained + self.again) / max(1, self.generated)


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """Normalisers of the whole step, in each of its micro-batches: Totals(prompts=16, responses=128, tokens=5120)"""

    prompts: int
    """With at least one response that has weight."""
    responses: int
    """Number of them that have weight."""
    tokens: int
    """Of these responses, those that the policy chose."""


NO_ROW = -1
"""In `Batch.rows_PK`: no response was sampled for this place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """P prompts x K responses sampled from replay. Responses are P-major: response r is prompt r // K, sample r % K.

    `rewards` maps a component's name to its [P, K] values; `reward_PK` and `weight_PK` are filled in by
    `tba.trainer.batch.combine` at training time, so that weights and schedules never freeze into stored data.
    """

    prompt_ids: tuple[str, ...]
    prompt_tokens: tuple[Tensor, ...]
    """P tensors, int64 [prompt tokens]."""
    token_ids_N: Tensor
    """int64, all responses laid end to end."""
    offsets: Tensor
    """int64 [P*K + 1] on the CPU: response r is token_ids_N[offsets[r]:offsets[r + 1]]."""
    loss_mask_N: Tensor
    log_ref_N: Tensor
    behaviour_N: Tensor
    """Behaviour log-probs; NaN where unknown."""
    policy_N: Tensor
    """Policy log-probs of the version that generated; NaN where unknown."""
    rewards: Mapping[str, Tensor]
    reward_PK: Tensor
    weight_PK: Tensor
    """1 = trains, 0 = dropped (by the truncation or equal-reward rule), or no response at all: see `sampled_PK`."""
    version_PK: Tensor
    """int64, the oldest version that chose a token of the response."""
    truncated_PK: Tensor
    """bool: cut off at the length limit."""
    rows_PK: Tensor
    """int64 rows of the replay buffer; NO_ROW where a prompt has fewer than K responses and its first one stands in."""
    totals: Totals
    step_values_N: Tensor | None = None
    """Monte-Carlo value of the prefix where a reasoning step begins, else NaN; None = not estimated."""
    old_values_N: Tensor | None = None
    """The critic's values when this batch was first trained on; None = this is the first time."""
    usual_drift: float = 0.0
    """Nats that one update moves log_pi of a response that it was not trained on."""

    @property
    def shape(self) -> tuple[int, int]:
        """(P, K)."""
        return self.reward_PK.shape[0], self.reward_PK.shape[1]

    @property
    def sampled_PK(self) -> Tensor:
        """bool: a response was sampled here; False where a prompt had fewer than K."""
        return self.rows_PK != NO_ROW

    @property
    def lengths(self) -> Tensor:
        """int64 [P*K] on the CPU."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def response_of_token(self) -> Tensor:
        """int64 [N]: which response each token belongs to."""
        device, lengths = self.token_ids_N.device, self.lengths
        responses = torch.arange(len(lengths), device=device)
        lengths = on_device(lengths, device)
        # With output_size given, repeat_interleave on a GPU need not ask the device how long its result is.
        return torch.repeat_interleave(responses, lengths, output_size=len(self.token_ids_N))

    def per_token(self, value_PK: Tensor) -> Tensor:
        """[N]: each token gets its response's value."""
        return value_PK.flatten()[self.response_of_token]

    @property
    def kept_N(self) -> Tensor:
        """bool [N]: tokens the policy chose, of responses that have weight."""
        return self.loss_mask_N & (self.per_token(self.weight_PK) > 0)

    def sum_per_response(self, values_N: Tensor) -> Tensor:
        """Sum a token quantity over each response's chosen tokens -> [P, K], in fp32 (fp64 stays fp64)."""
        # bfloat16 has 8 bits of mantissa: a sum of hundreds of log-probs in it would lose whole nats.
        values_N = values_N if values_N.dtype == torch.float64 else values_N.float()
        # Not a product with the mask: NaN times 0 is NaN, and unknown log-probs are NaN.
        masked_N = torch.where(self.loss_mask_N, values_N, torch.zeros_like(values_N))
        sums = torch.zeros(len(self.lengths), dtype=values_N.dtype, device=values_N.device)
        return sums.index_add(0, self.response_of_token, masked_N).view(self.shape)

    def take(self, prompts: Sequence[int]) -> Batch:
        """The given prompts with all their responses, in that order, with the totals of the full step."""
        K, index = self.shape[1], torch.as_tensor(prompts, dtype=torch.long)
        # Responses are P-major, so prompt p owns the K rows from p * K on.
        responses = (index[:, None] * K + torch.arange(K)).flatten()
        # Indices are made on the CPU, where offsets are: to make them on a GPU would wait for it.
        lengths, device = self.lengths[responses], self.reward_PK.device
        tokens, rows = on_device(self.tokens_of(responses), device), on_device(index, device)
        return replace(
            self,
            # `totals` is not replaced: gradients of micro-batches add up to that of the whole step.
            prompt_ids=tuple(self.prompt_ids[p] for p in prompts),
            prompt_tokens=tuple(self.prompt_tokens[p] for p in prompts),
            offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
            rewards={name: value[rows] for name, value in self.rewards.items()},
            **{name: value[tokens] for name, value in self._token_tensors()},
            **{name: getattr(self, name)[rows] for name in RESPONSE_FIELDS},
        )

    def tokens_of(self, responses: Tensor) -> Tensor:
        """int64 on the CPU: where the tokens of the given responses lie in N, response after response."""
        lengths = self.lengths[responses]
        # Place in N minus place in the result: adding arange gives each token its place in N.
        starts = self.offsets[:-1][responses] - (lengths.cumsum(0) - lengths)
        return torch.repeat_interleave(starts, lengths) + torch.arange(int(lengths.sum()))

    def to(self, device: torch.device) -> Batch:
        """Move what objectives compute on; offsets and prompts stay on the CPU."""
        # Offsets are read by Python to slice and split: on a GPU each read would wait for it.
        tensors = [*self._token_tensors(), *((name, getattr(self, name)) for name in RESPONSE_FIELDS)]
        moved: dict[str, Any] = {name: on_device(value, device) for name, value in tensors}
        rewards = {name: on_device(value, device) for name, value in self.rewards.items()}
        return replace(self, rewards=rewards, **moved)

    def _token_tensors(self) -> list[tuple[str, Any]]:
        """(field, tensor) of every per-token quantity there is."""
        found = [(name, getattr(self, name)) for name in (*TOKEN_FIELDS, "step_values_N", "old_values_N")]
        return [(name, value) for name, value in found if value is not None]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A copy from the host does not wait for earlier work of the device; a copy back does."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # Only a copy from pinned memory is asynchronous; from pageable memory CUDA waits in spite of the flag.
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy each source over its target, casting: on a GPU in a few kernels for all of them, where launching one for each of
    hundreds would take longer than copying."""
    alike: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        is_plain = target.shape == source.shape and target.is_contiguous() and source.is_contiguous()
        if is_plain and target.is_cuda and source.device == target.device:
            # PyTorch copies a list at once only where all of it has the same dtypes and layout.
            own_targets, own_sources = alike.setdefault((target.dtype, source.dtype, target.device), ([], []))
            own_targets.append(target)
            own_sources.append(source)
        else:
            target.copy_(source)
    # The rest (other layouts, other devices) was copied above one by one.
    for own_targets, own_sources in alike.values():
        torch._foreach_copy_(own_targets, own_sources)


TOKEN_FIELDS = ("token_ids_N", "loss_mask_N", "log_ref_N", "behaviour_N", "policy_N")
"""Token fields that every batch has."""
RESPONSE_FIELDS = ("reward_PK", "weight_PK", "version_PK", "truncated_PK", "rows_PK")


def total_reward(components: Sequence[float | np.ndarray | None], weights: Sequence[float]) -> np.ndarray:
    """The weighted sum of reward components, elementwise; not-applicable values (NaN or None) are left out.
    total_reward([1.0, None], [0.5, 2.0]) == 0.5"""
    # A value that is left out counts 0 in the sum: weights of the others are not raised in its place.
    values = [np.nan_to_num(np.nan if value is None else value, nan=0.0) for value in components]
    return np.asarray(sum(weight * value for value, weight in zip(values, weights, strict=True)))


def combined_reward(components: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """`total_reward` of one response: combined_reward({"right": 1.0, "short": None}, {"right": 0.5, "short": 2.0}) == 0.5"""
    # By the components' own order: those of a response may be fewer than the weights.
    return float(total_reward(list(components.values()), [weights[name] for name in components]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """The model's outputs for a batch, the input of every objective: Forward(log_pi_N=tensor([-.1, -.7, -.0]))"""

    log_pi_N: Tensor
    """[N] log-probs of the response tokens under the current policy at the training temperature."""
    entropy_N: Tensor | None = None
    """[N] entropy of the policy at each token, without gradient."""
    values_N: Tensor | None = None
    """[N] the critic's value of the state before each token; None = there is no critic."""
    log_z_P: Tensor | None = None
    """[P] learned log Z of each prompt; None = there is no such head."""

    def nothing(self) -> Forward:
        """The same outputs of no token and no prompt: gradients go through all of the model, and are zero."""
        # A slice of length 0 keeps the graph, so that every FSDP rank takes part in the backward pass.
        parts = {known.name: getattr(self, known.name) for known in fields(self)}
        return replace(self, **{name: part[:0] for name, part in parts.items() if part is not None})


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """The result of an objective: `value` is back-propagated, `metrics` are numbers for the log."""

    value: Tensor
    metrics: Mapping[str, float | Tensor]
    """Tensors of one number where they are computed on a device: reading one there would stop the host until the device has
    caught up, so all are read together at the end of the step. NaN = no value (a mean over nothing), left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Named tensors of one version, as published: Weights(version=12, tensors={"lm_head.weight": ...}, checksum=8349202)"""

    version: int
    """Number of optimizer steps behind them."""
    tensors: Mapping[str, Tensor]
    checksum: int | None = None
    """Of the tensors as published; None = they never left their process."""
