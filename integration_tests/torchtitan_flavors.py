"""Tiny flavors of torchtitan's models; loaded by `--experimental.custom_import`.

The debug flavors have 6 layers and up to 30 M parameters: more than eight ranks on two cores need.
"""

from __future__ import annotations

from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.moe import MoEArgs

VOCABULARY = 264

llama3_args["tiny"] = TransformerModelArgs(
    dim=64, n_layers=4, n_heads=4, vocab_size=VOCABULARY, multiple_of=32, rope_theta=500000
)
deepseekv3_args["tiny"] = DeepSeekV3ModelArgs(
    vocab_size=VOCABULARY,
    dim=64,
    inter_dim=128,
    moe_inter_dim=64,
    n_layers=3,
    n_dense_layers=1,
    n_heads=4,
    moe_args=MoEArgs(
        num_experts=8,
        num_shared_experts=1,
        top_k=2,
        score_func="softmax",
        route_norm=False,
        score_before_experts=False,
    ),
    q_lora_rank=0,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    mscale=0.70,
)
