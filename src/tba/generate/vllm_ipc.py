"""vLLM's own ipc backend with a beginning and an end that cost less: where kernels use weights as they are loaded, values go
straight into the tensors in use, instead of through layers that are made anew. Registered with vLLM's factory.

An import error here means that the installed vLLM cannot import its backend: `vllm_weights` then takes the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferInitInfo

from tba.generate.vllm_weights import Transfer, goes_in_place


class IpcTransfer(IPCWeightTransferEngine):
    """vLLM's side of the transfer: by handles, as vLLM's own, or tensors of this process where there are none."""

    _in_place = False

    def init_transfer_engine(self, init_info: IPCWeightTransferInitInfo) -> None:
        super().init_transfer_engine(init_info)
        self._in_place = goes_in_place(self.model, self.device)

    def start_weight_update(self) -> None:
        if not self._in_place:
            super().start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "tensors" not in update_info:
            super().update_weights(update_info)
            return
        self.model.load_weights(iter(update_info["tensors"].items()))
        torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        if not self._in_place:
            super().finish_weight_update()


WeightTransferEngineFactory.register_engine(Transfer.ipc.value, IpcTransfer)
