#!/usr/bin/env bash
# A Ray cluster of several machines by hand. On every machine: the same Python environment with 'tba-rl[ray]', the model and
# the data under the same paths, and the output folder on a disk that all of them see.
#
#   on the first machine     bash by_hand.sh head
#   on each other one        bash by_hand.sh join 10.0.0.1
#   on the first machine     RAY_AUTH_MODE=token tba train CONFIG.yaml runtime.kind=ray runtime.address=auto search.num_searchers=4
#   afterwards, everywhere   ray stop
#
# Whoever reaches Ray's ports can run code: they are open to who has the token only. The token is in ~/.ray/auth_token of the
# first machine; copy that file to the others (scp), and keep the ports behind a firewall, for the traffic is not encrypted.
set -euo pipefail

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
port=6379

case "${1:-}" in
  head)
    ray get-auth-token --generate > /dev/null
    ray start --head --port="$port" --include-dashboard=false
    ;;
  join)
    address="${2:?the address of the first machine}"
    ray start --address="$address:$port"
    ;;
  *)
    echo "usage: by_hand.sh head | join ADDRESS" >&2
    exit 2
    ;;
esac
