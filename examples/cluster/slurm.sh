#!/usr/bin/env bash
# A run on several nodes of a SLURM cluster: sbatch examples/cluster/slurm.sh CONFIG.yaml [key=value ...]
# The environment with 'tba-rl[ray]' is active where sbatch is called, and the output folder is on a shared disk. A job that is
# requeued goes on from its last checkpoint.
#SBATCH --job-name=tba
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail

config="${1:?sbatch slurm.sh CONFIG.yaml [key=value ...]}"
shift

RAY_AUTH_TOKEN="$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address="$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')"
port=6379

srun --nodes=1 --ntasks=1 -w "${nodes[0]}" \
  ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --block &
sleep 15 # Ray has no way to wait for its head
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 -w "$node" ray start --address="$address:$port" --block &
done

name="slurm-$SLURM_JOB_ID"
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  resume=(--resume)
fi
# In the background, so that the signal before the end of the job's time reaches this shell, which passes it on.
tba train "$config" "name=$name" runtime.kind=ray "runtime.address=$address:$port" \
  "search.num_searchers=$((${#nodes[@]} - 1))" "${resume[@]}" "$@" &
training=$!
trap 'kill -TERM "$training"' TERM
wait "$training" || wait "$training"
