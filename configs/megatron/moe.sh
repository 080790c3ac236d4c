#!/usr/bin/env bash
# Four experts on two ranks each, RANKS (8): dense work is compared among 8, experts among 4.
set -euo pipefail
export RANKS="${RANKS:-8}"
exec "$(dirname "$0")/small.sh" --num-experts 4 --expert-model-parallel-size 2 \
  --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear \
  --use-distributed-optimizer "$@"
