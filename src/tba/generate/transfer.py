"""Small tables between host and device, without waiting for what the device has been told to do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class OnItsWay:
    """Tables on their way to the host: as they are when the device comes to it."""

    def __init__(self, *tables: Tensor) -> None:
        """On a CPU they are taken as they are: who gives a view gives a copy of it."""
        self._tables = [table.to("cpu", non_blocking=True) for table in tables]
        self._arrived: torch.cuda.Event | None = None
        if tables and tables[0].is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tables[0].device))

    def wait(self) -> list[np.ndarray]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [table.numpy() for table in self._tables]
