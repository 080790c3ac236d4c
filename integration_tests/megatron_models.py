"""A small GPT of megatron-core, on every layout; what the local layer spec refuses is made here."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional as F

from integration_tests.megatron_cases import Job, Layout

CONTEXT = 16
VOCABULARY = 256
DTYPES = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(job: Job) -> tuple[list[nn.Module], Any, TransformerConfig]:
    """Build model chunks, optimizer and configuration; a collective call."""
    layout = job.layout
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.chunks,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.instances,
    )
    torch.manual_seed(job.seed)
    model_parallel_cuda_manual_seed(job.seed + 1)
    config = config_of(layout, job.width)
    chunks = [_wrapped(config, layout, i) for i in range(layout.chunks or 1)]
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(_optimizer_config(layout, config), chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if layout.overlap:
        config.no_sync_func = chunks[0].no_sync
        config.param_sync_func = chunks[0].start_param_sync
    return chunks, optimizer, config


def config_of(layout: Layout, width: int) -> TransformerConfig:
    """Translate a layout into Megatron's configuration."""
    dtype = DTYPES[layout.half]
    experts = {
        "num_moe_experts": layout.experts,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_ffn_hidden_size": 2 * width,
        "add_bias_linear": False,
    }
    plain = {
        "num_layers": layout.layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "ffn_hidden_size": 2 * width,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.chunks,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": layout.half == "bf16",
        "fp16": layout.half == "fp16",
        "hidden_dropout": layout.dropout,
        "attention_dropout": 0.0 if layout.context > 1 else layout.dropout,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
    }
    return TransformerConfig(**{**plain, **(experts if layout.experts else {}), **layout.config})


def _optimizer_config(layout: Layout, config: TransformerConfig) -> OptimizerConfig:
    plain = {
        "optimizer": "adam",
        "lr": 1e-3,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "bf16": layout.half == "bf16",
        "fp16": layout.half == "fp16",
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "overlap_param_gather": layout.overlap,
    }
    return OptimizerConfig(**{**plain, **layout.optimizer})


def _wrapped(config: TransformerConfig, layout: Layout, index: int) -> Any:
    model: nn.Module = _gpt(config, layout, index)
    if layout.half:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap,
        grad_reduce_in_fp32=bool(layout.half),
        num_distributed_optimizer_instances=layout.instances,
        bucket_size=4000 if layout.overlap else None,
        check_for_nan_in_grad=False,
    )
    return DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0)


def _gpt(config: TransformerConfig, layout: Layout, index: int) -> GPTModel:
    stage = index if layout.chunks else None
    place = {"ignore_virtual": layout.chunks is None, "vp_stage": stage}
    layer: Any = get_gpt_layer_local_spec(num_experts=layout.experts or None)
    if layout.context > 1:
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    spec = layer
    if layout.sequence_parallel:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        number = get_num_layers_to_build(config, vp_stage=stage)
        spec = TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=Norm)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=CONTEXT,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=stage,
        position_embedding_type="rope" if layout.context > 1 else "learned_absolute",
        share_embeddings_and_output_weights=True,
    )


class Norm(nn.Module):
    """Layer norm whose gradients are summed over the sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class _Gather(torch.autograd.Function):
    """Stack the parts of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


class GatheringAttention(nn.Module):
    """Causal attention over a sequence that is split between context-parallel ranks.

    Each rank holds one piece from the front and its mirror image from the back.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
    ) -> torch.Tensor:
        """(length, batch, heads, width) of this rank -> (length, batch, heads * width)."""
        group = parallel_state.get_context_parallel_group()
        ranks, mine = dist.get_world_size(group), dist.get_rank(group)
        places = [places_of(ranks, rank) for rank in range(ranks)]
        keys = _Gather.apply(key, group).flatten(0, 1).permute(1, 2, 3, 0)
        values = _Gather.apply(value, group).flatten(0, 1).permute(1, 2, 0, 3)
        scores = query.permute(1, 2, 0, 3) @ keys / math.sqrt(query.shape[-1])
        later = torch.cat(places)[None, :] > places[mine][:, None]
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        return mixed.permute(2, 0, 1, 3).flatten(2)


def places_of(ranks: int, rank: int) -> torch.Tensor:
    """Positions of a rank's tokens in the whole sequence; all of them without other ranks."""
    if ranks == 1:
        return torch.arange(CONTEXT)
    half, mirror = CONTEXT // (2 * ranks), 2 * ranks - rank - 1
    first = torch.arange(rank * half, (rank + 1) * half)
    return torch.cat([first, torch.arange(mirror * half, (mirror + 1) * half)])
