#!/usr/bin/env bash
# A small GPT with SCOUT on: each of RANKS (4) GPUs holds a whole replica, and all are compared.
# Arguments are passed on: with 8 ranks, `--tensor-model-parallel-size 2` compares two groups of 4.
set -euo pipefail
cd "$(dirname "$0")"
exec torchrun --standalone --nproc-per-node "${RANKS:-4}" -m scout_megatron pretrain_small.py \
  --num-layers 4 --hidden-size 64 --num-attention-heads 4 --transformer-impl local \
  --seq-length 32 --max-position-embeddings 32 --vocab-size 127 --tokenizer-type NullTokenizer \
  --micro-batch-size 2 --global-batch-size 16 --train-iters 20 --split 100,0,0 --num-workers 0 \
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --lr-decay-iters 1000 \
  --eval-interval 1000 --eval-iters 0 --log-interval 1 --ckpt-format torch_dist \
  --attention-backend unfused --scout --scout-interval-steps 2 "$@"
