"""A language model as the trainer uses it: packed tokens in, log-probs of the response tokens out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from tba.models.canary import CANARY_TOKENS, canary_tokens
from tba.models.heads import Critic, LogZ
from tba.models.logprobs import chosen_log_probs
from tba.models.packed_attention import NAME as PACKED
from tba.models.packed_attention import PackedLayout, use_packed_attention
from tba.models.packing import PackedTokens, pack
from tba.types import Forward

logger = logging.getLogger("tba.models")


class PolicyModel:
    """Computes log_pi of packed responses, with gradients where they are enabled.

    Packed attention needs a model that goes through transformers' attention interface. That is checked once, against
    the model's own plain forward pass; a model that fails it is computed one sequence at a time, in words.
    """

    def __init__(self, model: PreTrainedModel, *, critic: Critic | None = None, log_z: LogZ | None = None) -> None:
        self.model = model
        self.critic = None
        self.log_z = None
        # A second user of one model finds it switched over already.
        self.packed = model.config._attn_implementation == PACKED or self._check_packed()
        if not self.packed and (critic is not None or log_z is not None):
            raise ValueError(
                "objectives with a critic or a learned log Z need hidden states of packed responses, which this model does "
                "not give (see the warning above): use tb, rloo, grpo or another objective without them."
            )
        if critic is not None and critic.trunk is not None:
            use_packed_attention(critic.trunk)
        self.critic = critic
        self.log_z = log_z

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, packed: PackedTokens, *, temperature: float) -> Forward:
        """log_pi and entropy of all response tokens, in the order the responses were given to `pack`."""
        if not self.packed:
            return self._forward_one_by_one(packed, temperature)
        head = self.model.get_output_embeddings()
        hidden_TH = self._hidden(self.model.base_model, packed)
        log_pi, entropy = chosen_log_probs(
            hidden_TH[packed.predict_M],
            head.weight,
            packed.targets_M,
            temperature=temperature,
            bias_V=getattr(head, "bias", None),
            softcap=getattr(self.model.config, "final_logit_softcapping", None),
        )
        return Forward(
            log_pi_N=packed.expand(log_pi),
            entropy_N=packed.expand(entropy),
            values_N=None if self.critic is None else packed.expand(self._values(self.critic, hidden_TH, packed)),
            log_z_P=None if self.log_z is None else self.log_z(hidden_TH, packed.prompt_spans),
        )

    def _values(self, critic: Critic, hidden_TH: Tensor, packed: PackedTokens) -> Tensor:
        if critic.trunk is not None:
            hidden_TH = self._hidden(critic.trunk, packed)
        return critic(hidden_TH[packed.predict_M])

    @property
    def heads(self) -> list[nn.Module]:
        """What is trained beside the model."""
        return [head for head in (self.critic, self.log_z) if head is not None]

    def _hidden(self, trunk: nn.Module, packed: PackedTokens) -> Tensor:
        output = trunk(
            input_ids=packed.input_ids_T[None],
            position_ids=packed.positions_T[None],
            use_cache=False,
            packed_layout=packed.layout,
        )
        return output.last_hidden_state[0]

    def _forward_one_by_one(self, packed: PackedTokens, temperature: float) -> Forward:
        """The model's own logits, whatever it does to them; needs a layout without shared prompts."""
        rows = packed.input_ids_T.split(list(packed.layout.root_lengths))
        logits_TV = torch.cat([self.model(row[None], use_cache=False).logits[0].float() for row in rows])
        log_probs_MV = torch.log_softmax(logits_TV[packed.predict_M] / temperature, dim=-1)
        entropy_M = -(log_probs_MV.detach().exp() * log_probs_MV.detach()).sum(dim=-1)
        return Forward(log_pi_N=log_probs_MV.gather(1, packed.targets_M[:, None])[:, 0], entropy_N=entropy_M)

    @torch.no_grad()
    def canary(self, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Log-probs of the canary tokens under the given weights, as published."""
        tokens = torch.from_numpy(canary_tokens(self.vocabulary, CANARY_TOKENS)).long().to(self.device)
        options: dict[str, Any] = {"use_cache": False}
        if self.packed:
            options["packed_layout"] = PackedLayout(root_lengths=[CANARY_TOKENS], device=self.device)
        published = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        output = functional_call(self.model, published, (tokens[None, :-1],), options)
        log_probs = torch.log_softmax(output.logits[0].float(), dim=-1)
        return log_probs.gather(1, tokens[1:, None])[:, 0].double().cpu().numpy()

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @torch.no_grad()
    def _check_packed(self) -> bool:
        """Compare both layouts with the plain forward pass on a few tokens; False = use the slow way."""
        tokens = torch.arange(12, device=self.device) * 7919 % self.vocabulary
        plain = torch.log_softmax(self.model(tokens[None]).logits[0].float(), dim=-1)
        want = torch.cat([plain[3:7].gather(1, tokens[4:8, None]), plain[3:11].gather(1, tokens[4:12, None])])[:, 0]
        before = self.model.config._attn_implementation
        try:
            use_packed_attention(self.model)
            self.packed = True
            gaps = [self._gap(tokens, want, share_prompts=share) for share in (False, True)]
        except (ValueError, TypeError, KeyError) as error:
            return self._refuse_packed(before, str(error))
        # In half precision the error grows with the size of the log-prob, and random tokens are unlikely ones.
        tolerance = 1e-3 if plain.dtype == self.model.dtype else 0.25 + 0.1 * float(want.abs().max())
        if max(gaps) > tolerance:
            return self._refuse_packed(before, f"log-probs differ by {max(gaps):.2g} from a plain forward pass")
        return True

    def _gap(self, tokens: Tensor, want: Tensor, *, share_prompts: bool) -> float:
        packed = pack([tokens[:4]], [[tokens[4:8], tokens[4:12]]], share_prompts=share_prompts, device=tokens.device)
        return float((self.forward(packed, temperature=1.0).log_pi_N - want).abs().max())

    def _refuse_packed(self, attention: str, reason: str) -> bool:
        logger.warning(
            "training one sequence at a time, which is slow: packed attention does not work here (%s).", reason
        )
        self.model.set_attn_implementation(attention)
        return False
