"""A byte-level tokenizer and a small text data set, so that torchtitan runs without a network."""

from __future__ import annotations

import json
import pathlib
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_WORDS = ("rank", "step", "peer", "shard", "replica", "token", "layer", "stage", "vote", "fault")


def make_assets(folder: pathlib.Path, seed: int = 0) -> list[str]:
    """Write both below `folder` and return the torchtitan options that use them."""
    tokenizer, data = folder / "tokenizer", folder / "c4_test"
    tokenizer.mkdir(parents=True)
    data.mkdir()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*special, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    made.save(str(tokenizer / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1]}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(names))
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(_WORDS, k=40)) for _ in range(400)]
    (data / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ["--model.hf_assets_path", str(tokenizer), "--training.dataset_path", str(data)]
