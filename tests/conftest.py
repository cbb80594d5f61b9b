"""One thread per test process: two cores are shared, and results must not depend on how many there are."""

import torch

torch.set_num_threads(1)
