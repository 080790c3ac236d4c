"""A small GPT on megatron.training, with data of its own; it knows nothing of SCOUT.

Runs with megatron-core 0.17 and later, whose wheels hold megatron.training; see small.sh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from torch import nn


class Sums(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each token is the sum of the two before it, modulo the vocabulary."""

    def __init__(self, size: int, length: int, vocabulary: int) -> None:
        self._size, self._length, self._vocabulary = size, length, vocabulary

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = torch.Generator().manual_seed(index)
        row = torch.randint(0, self._vocabulary, (2,), generator=first).tolist()
        while len(row) <= self._length:
            row.append((row[-1] + row[-2]) % self._vocabulary)
        tokens = torch.tensor(row)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def data_sets(sizes: list[int | None]) -> tuple[Sums, ...]:
    """Training, validation and test data."""
    args = get_args()
    return tuple(Sums(size or 1, args.seq_length, args.vocab_size) for size in sizes)


data_sets.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its own


def model(
    config: Any = None, vp_stage: int | None = None, pg_collection: Any = None, **place: Any
) -> GPTModel:
    """One pipeline stage; `place` says whether it is the first or the last."""
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        **place,
    )


def forward_step(batches: Iterator[dict[str, torch.Tensor]], stage: nn.Module) -> Any:
    """Output of one micro-batch, and the function that makes a loss of it."""
    batch = next(batches)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    )
    tokens, labels = (batch[name].to(device) for name in ("tokens", "labels"))
    length = tokens.shape[1]
    positions = torch.arange(length, device=device).expand_as(tokens)
    later = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    return stage(tokens, positions, later, labels=labels), loss_of


def loss_of(per_token: torch.Tensor) -> Any:
    """Sum of the losses, number of tokens, and both for the log."""
    total = per_token.float().sum()
    count = torch.tensor(per_token.numel(), dtype=torch.int, device=per_token.device)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def main(extra_args_provider: Any = None) -> None:
    """Call `pretrain` as the installed version wants it."""
    parsing = {
        "extra_args_provider": extra_args_provider,
        "args_defaults": {"tokenizer_type": "NullTokenizer"},
    }
    names = {"model_type": ModelType.encoder_or_decoder, "forward_step_func": forward_step}
    try:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args
    except ImportError:  # before 0.18 `pretrain` parses the arguments
        pretrain(data_sets, model, **names, **parsing)
    else:
        args = parse_and_validate_args(**parsing)
        config = pretrain_cfg_container_from_args(args)
        pretrain(config, data_sets, model_provider=model, **names)


if __name__ == "__main__":
    main()
