"""objective.name -> objective. A new objective is one file, one line here and one test."""

from __future__ import annotations

from tba.objectives.base import Objective
from tba.objectives.dpo import OnlineDPO
from tba.objectives.grpo import GRPO, DrGRPO
from tba.objectives.policy_gradient import RLOO, ProximalRLOO, Reinforce
from tba.objectives.ppo import PPO
from tba.objectives.tba_prime import TBAPrime
from tba.objectives.trajectory_balance import Kimi, LearnedLogZ, TrajectoryBalance
from tba.objectives.vineppo import VinePPO

OBJECTIVES: dict[str, type[Objective]] = {
    "tb": TrajectoryBalance,
    "tb_learned_z": LearnedLogZ,
    "tba_prime": TBAPrime,
    "kimi": Kimi,
    "reinforce": Reinforce,
    "rloo": RLOO,
    "proximal_rloo": ProximalRLOO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "ppo": PPO,
    "vineppo": VinePPO,
    "online_dpo": OnlineDPO,
}
