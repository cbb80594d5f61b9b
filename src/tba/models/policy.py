"""A language model as the trainer uses it: packed tokens in, log-probs of the response tokens out.

Beside the model stand small learned heads on its hidden states: the critic of PPO, and the log Z of learned trajectory
balance. They live with the trainer, in fp32, and never travel to searchers.

The weights may be spread over the ranks of a process group, by PyTorch's FSDP2: each rank keeps its rows of every parameter
(of 10 rows and 4 ranks the rows 0 to 2, 3 to 5, 6 to 8 and 9). Every layer is a group of parameters that is gathered when it
computes and let go afterwards; what lies around the layers (embeddings, last norm, head) is one more group.

Axes: T packed tokens, M tokens whose probability is wanted, P prompts, H and D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from tba.models.load import ADAPTER, has_adapter
from tba.models.log_probs import chosen_log_probs
from tba.models.packed_attention import NAME as PACKED
from tba.models.packed_attention import PackedLayout
from tba.models.packed_check import own_logits, switch_to_packed
from tba.models.packing import PackedTokens, split_by_length
from tba.models.text_part import stated_context, switch_length, trunk_of
from tba.models.weights import CANARY_TOKENS, canary_tokens
from tba.types import Forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("tba.models")

SMALLEST_SQUARE = 1e-12
"""Number added to the mean square of a hidden state before it is divided by: only a state of zeros notices."""


class PolicyModel:
    """Computes log_pi of packed responses, with gradients where they are enabled. A model for which packed attention does
    not give what plain passes give (packed_check.py) is computed one sequence at a time, with a warning."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        critic: Critic | None = None,
        log_z: LogZ | None = None,
        max_length: int | None = None,
    ) -> None:
        """`max_length` is the longest sequence of the run in tokens; None = the model's context."""
        self.model = model
        max_length = max_length or stated_context(model.config)
        self._compute: Callable[[PackedTokens, float], tuple[Tensor, Tensor, Tensor | None]] = self._outputs
        switch = switch_length(model.config)
        self.switch = None if switch is None or (max_length or switch + 1) <= switch else switch
        """Length in tokens beyond which a sequence has other rotary angles; None = none of the run has."""
        self.packed = True  # the trial below computes as if it were so
        # A second user of one model finds it switched over already.
        if model.config._attn_implementation != PACKED:
            problem = switch_to_packed(model, self._outputs, max_length=max_length)
            self.packed = problem is None
            if problem is not None:
                logger.warning(
                    "training one sequence at a time, which is slow: packed attention does not work here (%s).", problem
                )
        self.critic, self.log_z = critic, log_z
        if self.heads and not self.packed:
            raise ValueError(
                "objectives with a critic or a learned log Z need hidden states of packed responses, which this model does "
                "not give (see the warning above): use tb, rloo, grpo or another objective without them."
            )
        if self.heads and self.switch is not None:
            raise ValueError(
                f"objectives with a critic or a learned log Z need the hidden states of a prompt once, and this model has "
                f"others where prompt and response are longer than {self.switch} tokens: keep them below that "
                "(task.max_prompt_tokens, generate.max_new_tokens), or use tb, rloo, grpo or another objective without them."
            )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, packed: PackedTokens, *, temperature: float) -> Forward:
        """Log-probs (log_pi) and entropy of all response tokens, in the order the responses were given to `pack`."""
        # M distinct response tokens; `expand` gives N, all that were packed, equal responses included.
        log_pi, entropy, hidden = self._compute(packed, temperature)
        outputs = {"log_pi_N": packed.expand(log_pi), "entropy_N": packed.expand(entropy)}
        if self.critic is not None and hidden is not None:
            outputs["values_N"] = packed.expand(self.critic(hidden[0][packed.predict_M]))
        if self.log_z is not None and hidden is not None:
            outputs["log_z_P"] = self.log_z(hidden[0], packed.prompt_spans)
        return Forward(**outputs)

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread the model's parameters over the ranks of a mesh, in place: from here on all of them run `forward` at once.
        The heads stay whole on every rank."""
        from torch.distributed.fsdp import fully_shard

        trunk = trunk_of(self.model)
        layers = getattr(trunk, "layers", None) or getattr(trunk, "h", None)
        if layers is None:
            raise ValueError(
                f"train.ranks: {type(self.model).__name__} has no list of layers to shard (`layers` or `h`). Train it with "
                "train.ranks=1."
            )
        # Layers first: parameters that are left belong to the group of the outermost module.
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        # What lies around the layers stays whole from the forward pass to the backward pass: the head is used in both.
        whole = ShardedForward(self.model, self._outputs)
        sharded = fully_shard(whole, mesh=mesh, reshard_after_forward=False)

        def run(packed: PackedTokens, temperature: float) -> tuple[Tensor, Tensor, Tensor | None]:
            outputs = whole(packed, temperature)
            if not torch.is_grad_enabled():
                sharded.reshard()  # no backward pass will: the next forward pass would go on with these weights
            return outputs

        self._compute = run

    def _outputs(self, packed: PackedTokens, temperature: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-prob and entropy of each distinct response token, and the hidden states [1, T, H] if there are any."""
        if not self.packed:
            # The model's own logits, whatever it does to them.
            logits_MV = torch.cat([own_logits(self.model, row[None], size)[0].float() for row, size in packed.rows()])
            log_probs_MV = torch.log_softmax(logits_MV / temperature, dim=-1)
            entropy_M = -(log_probs_MV.detach().exp() * log_probs_MV.detach()).sum(dim=-1)
            return log_probs_MV.gather(1, packed.targets_M[:, None])[:, 0], entropy_M, None
        if self.switch is not None and packed.layout.longest > self.switch:
            # Short and long sequences have different rotary angles, and one packed row has one set of them.
            parts = split_by_length(packed, self.switch)
            if len(parts) > 1:
                log_pis, entropies, _ = zip(*(self._outputs(part, temperature) for part, _ in parts))
                # index_M tells where each token of a part stood in the whole: sorting by it puts them back.
                order = torch.argsort(torch.cat([index_M for _, index_M in parts]))
                return torch.cat(log_pis)[order], torch.cat(entropies)[order], None
        # Trunk and head apart: logits of all T tokens would be T x V numbers, and only M are wanted.
        head = self.model.get_output_embeddings()
        hidden = trunk_of(self.model)(
            input_ids=packed.input_ids_T[None],
            position_ids=packed.positions_T[None],
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state
        hidden_MD, head_VD = _with_adapter(head, hidden[0, packed.predict_M])
        config: Any = self.model.config.get_text_config()
        # Cohere's factor of the logits, and Granite's divisor. It is one over a temperature: the two are one division.
        factor, divisor = (float(getattr(config, n, None) or 1.0) for n in ("logit_scale", "logits_scaling"))
        log_pi, entropy = chosen_log_probs(
            hidden_MD,
            head_VD,
            packed.targets_M,
            temperature=temperature / (factor / divisor),
            bias_V=getattr(head, "bias", None),
            softcap=getattr(config, "final_logit_softcapping", None),
        )
        return log_pi, entropy, hidden

    @property
    def heads(self) -> list[nn.Module]:
        return [head for head in (self.critic, self.log_z) if head is not None]

    @torch.no_grad()
    def canary(self, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Log-probs of the canary tokens under the given weights, as published."""
        # The searcher's half is in searcher/process.py: the same tokens, scored by its engine.
        tokens = canary_tokens(self.vocabulary, CANARY_TOKENS)
        return self.log_probs_under(tensors, tokens[:1], tokens[1:], temperature=1.0)

    @torch.no_grad()
    def log_probs_under(
        self, tensors: Mapping[str, Tensor], prompt_ids: np.ndarray, response_ids: np.ndarray, *, temperature: float
    ) -> np.ndarray:
        """float64 [T]: log-probs of one response under the given weights, as published, instead of the model's own."""
        tokens = torch.from_numpy(np.concatenate([prompt_ids, response_ids])).long().to(self.device)
        options: dict[str, Any] = {"use_cache": False}
        if self.packed:
            # The model attends by layouts from now on: one root is a plain sequence.
            options["packed_layout"] = PackedLayout(root_lengths=[len(tokens) - 1], device=self.device)
        published = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        # The model's own parameters stay as they are: the trainer may be a step beyond what it published.
        output = functional_call(self.model, published, (tokens[None, :-1],), options)
        log_probs = torch.log_softmax(output.logits[0, len(prompt_ids) - 1 :].float() / temperature, dim=-1)
        return log_probs.gather(1, tokens[len(prompt_ids) :, None])[:, 0].double().cpu().numpy()

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)


class Critic(nn.Module):
    """Value of the state before each response token: a linear head on the policy's hidden states, 0 at the start. The value
    loss trains the policy's trunk too."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_MH: Tensor) -> Tensor:
        return self.head(hidden_MH.float())[:, 0]


class LogZ(nn.Module):
    """Learned log Z of a prompt: a start value plus a linear head on the mean of its last hidden states.

        log Z = start + bias + sum_i weight_i h_i / H,   h the mean hidden state scaled to a root mean square of 1

    sum_i |h_i| <= H whatever the width H, so an update that moves every parameter by at most a moves log Z by at most 2 a
    nats: a by the bias, which all prompts share, and a by the weights. Adam's first step has a = its learning rate, and no
    later step more than 3.2 times that (betas .9 and .999).

    Deviation: the hidden states are detached, so that learning log Z does not move the policy.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        self.start: Tensor
        self.register_buffer("start", torch.tensor(0.0))
        self.start_at(0.0)
        self.started = False

    def start_at(self, log_z: float) -> None:
        """Give every prompt this log Z, near the truth: at beta .005 log Z is in the hundreds, and the head would take as
        many optimizer steps to get there. What was learned before is forgotten."""
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.start.fill_(log_z)
        self.started = True

    def forward(self, hidden_TH: Tensor, prompt_spans: tuple[tuple[int, int], ...]) -> Tensor:
        # Over the prompt's tokens only: log Z may not see a response.
        means_PH = torch.stack([hidden_TH[start : start + length].mean(dim=0) for start, length in prompt_spans])
        width = means_PH.shape[1]
        scaled_PH = nn.functional.rms_norm(means_PH.detach().float(), (width,), eps=SMALLEST_SQUARE)
        return self.start + self.head(scaled_PH / width)[:, 0]


def make_critic(model: PreTrainedModel) -> Critic:
    return Critic(model.get_output_embeddings().weight.shape[1]).to(next(model.parameters()).device)


def make_log_z(model: PreTrainedModel) -> LogZ:
    return LogZ(model.get_output_embeddings().weight.shape[1]).to(next(model.parameters()).device)


def _with_adapter(head: Any, hidden_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and the head's matrix, with the adapter of a head that has one in further columns:
    W h + s B (A h) = [W B] [h, s A h]. W + s B A in bf16 would round small updates away."""
    if not has_adapter(head) or head.disable_adapters:
        return hidden_MD, head.weight
    low_rank, up = head.lora_A[ADAPTER], head.lora_B[ADAPTER].weight.to(head.weight.dtype)
    added = head.scaling[ADAPTER] * low_rank(hidden_MD.to(low_rank.weight.dtype))
    return torch.cat([hidden_MD, added.to(hidden_MD.dtype)], dim=1), torch.cat([head.weight, up], dim=1)


# --- weights spread over ranks ---------------------------------------------------------------------------------------


class ShardedForward(nn.Module):
    """The forward pass of a policy as one module: FSDP2 gathers what lies around the layers while it runs."""

    def __init__(self, model: PreTrainedModel, compute: Callable[..., tuple[Tensor | None, ...]]) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        # FSDP2 hooks into the tensors that a module returns, which it cannot do for views.
        outputs = self._compute(*arguments, **options)
        return tuple(part.clone() if part is not None and part._is_view() else part for part in outputs)


class Ranks:
    """This process among the ranks of a trainer. `Ranks()` is a trainer of one process, for which all of this is nothing."""

    rank = 0
    size = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def concatenated(self, values: Sequence[Any]) -> list[Any]:
        """The values of all ranks, plain data, one rank after the other."""
        return list(values)


ALONE = Ranks()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or a gradient, sharing its memory. A tensor that is not sharded is whole."""
    sharded: Any = tensor.detach()
    return sharded.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Their module takes long to import, and a trainer of one rank never meets one."""
    return hasattr(tensor, "to_local")


def whole_tensor(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of the whole of `tensor`, or of this rank's rows of it, in host memory. `like` is the parameter it belongs to:
    where that is sharded, all ranks call this at once."""
    sharded: Any = like
    if is_sharded(like) and not is_sharded(tensor):
        from torch.distributed.tensor import DTensor

        # A moment is kept as plain rows: it gets the layout of its parameter, to be gathered like it.
        rows, layout = tensor.to(sharded.device), (sharded.device_mesh, sharded.placements)  # moments may be offloaded
        tensor = DTensor.from_local(rows, *layout, shape=sharded.shape, stride=sharded.stride())
    # A collective for sharded tensors: a rank that does not call it leaves the others waiting.
    whole: Any = tensor.detach()
    return (whole.full_tensor() if is_sharded(whole) else whole).to("cpu", copy=True)


def own_rows(whole: Tensor | None, like: Tensor) -> Tensor:
    """This rank's rows, in fp32, of a tensor that rank 0 has, spread as the parameter `like` is. All ranks call it."""
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    # Ranks other than 0 give memory of the right shape: distribute_tensor sends them rank 0's rows.
    empty = torch.empty(sharded.shape, dtype=torch.float32, device=sharded.device)
    given = empty if whole is None else empty.copy_(whole)
    return distribute_tensor(given, sharded.device_mesh, sharded.placements).to_local()
