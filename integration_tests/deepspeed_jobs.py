"""Small real DeepSpeed jobs for tests: one body, layouts as data, configurations from configs/."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject import layers as autotp_layers
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from scout_deepspeed.masters import owned_masters
from torch import nn

from integration_tests import deepspeed_models as models
from integration_tests import deepspeed_script
from integration_tests.deepspeed_cases import CONFIGS, SCOUT, Layout, Options, Result
from scout_core.decision.incident import Incident
from scout_core.errors import ScoutError
from scout_core.lab.faults import Corruption, FaultAt, flip_bit
from scout_core.lab.injection import Target, inject
from scout_core.lab.model import GPT, Block, GPTConfig, Text, loss_of
from scout_core.report.events import RunDir

CONTEXT = 16


def config_of(layout: Layout, scout: dict[str, Any] | None, run_dir: str = "") -> dict[str, Any]:
    """Load the configuration; the block of the file is replaced, or removed for None."""
    config: dict[str, Any] = json.loads((CONFIGS / layout.config).read_text())
    config |= copy.deepcopy(layout.overrides)
    block = config.pop("scout")
    if scout is not None:
        config["scout"] = {**block, **scout, **({"run_dir": run_dir} if run_dir else {})}
    return config


def build(layout: Layout, config: dict[str, Any], options: Options) -> Any:
    """Build model and engine; a collective call."""
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(options.seed)
    gpt = GPTConfig(layers=4, width=options.width, heads=4, context=CONTEXT, dropout=0.1)
    mpu = None
    if layout.kind == "pipeline":
        model: nn.Module = models.pipeline(gpt, 2, layout.ranks // 2)
    elif layout.kind == "moe":
        model = models.moe_gpt(gpt, 2)
    elif layout.kind == "ulysses":
        mpu = parallel_state_sp
        mpu.initialize_sequence_parallel(2)
        model = models.ulysses_gpt(gpt, mpu.get_sequence_parallel_group())
    elif layout.kind == "ulysses_mesh":
        mesh = dist.init_device_mesh(
            "cpu", (layout.ranks // 2, 2), mesh_dim_names=("data_parallel", "sequence_parallel")
        )
        model = models.ulysses_gpt(gpt, mesh["sequence_parallel"].get_group())
    else:
        model = GPT(gpt)
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if layout.kind == "moe":
        groups = {"params": parameters, "name": "parameters"}
        parameters = split_params_into_different_moe_groups_for_optimizer(groups)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def batches(layout: Layout, engine: Any, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield micro-batches; ranks that share a batch get the same, or their part of it."""
    text = Text(CONTEXT)
    rank = dist.get_rank()
    part, parts, replica = 0, 1, rank
    if layout.kind.startswith("ulysses"):
        part, parts, replica = rank % 2, 2, rank // 2
    elif layout.kind == "pipeline":
        replica = engine.grid.get_data_parallel_rank()
    elif "tensor_parallel" in engine._config._param_dict:
        replica = rank // 2
    step = 0
    while True:
        inputs, targets = text.batch(seed, replica, step, 2)
        yield inputs.chunk(parts, 1)[part].contiguous(), targets.chunk(parts, 1)[part].contiguous()
        step += 1


def step_once(layout: Layout, engine: Any, data: Iterator[Any]) -> list[float]:
    """Train one optimizer step and return the losses."""
    if layout.kind == "pipeline":
        return [float(engine.train_batch(data))]
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine, *next(data))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train(rank: int, layout: Layout, options: Options) -> Result:
    """Train; the faults are injected on their ranks at the start of their steps."""
    engine = build(layout, config_of(layout, options.scout, options.run_dir), options)
    torch.manual_seed(1000 + rank)
    session = getattr(engine, "scout", None)
    data = batches(layout, engine, options.seed)
    losses = []
    for step in range(options.steps):
        for fault in options.faults:
            if fault.rank == rank and fault.step == step:
                apply(fault, engine, options.inside)
        losses += step_once(layout, engine, data)
        if session and any(i.kind is options.until for i in session.incidents()):
            break  # on all ranks: each learns all incidents
    found = (
        {
            "checks": session.check_count,
            "steps": session.step_count,
            "not_covered": session.coverage().not_covered,
            "recipes": session.coverage().recipes,
        }
        if session
        else {}
    )
    incidents = session.incidents() if session else []
    engine.destroy()
    return Result(losses, digest(held(engine)), digest(masters(engine)), incidents, **found)


def apply(fault: FaultAt, engine: Any, inside: str) -> None:
    """Inject one fault on this rank.

    Args:
        fault: of the kinds of `lab.faults`; or "shard": a bit of this rank's part of a parameter
            flips; "master": a bit of a master weight flips; or "partial": what this rank adds to
            row-parallel sums is wrong.
        inside: see `Options`.
    """
    layers = [module for module in engine.module.modules() if isinstance(module, Block)]
    if fault.kind == "shard":
        victim = max(layers[fault.layer].parameters(), key=lambda p: p.ds_tensor.numel())
        shard = victim.ds_tensor.data.view(-1)
        index = fault.seed % shard.numel()
        flip_bit(shard[index : index + 1], fault.magnitude)
        return
    if fault.kind == "master":
        masters_here = owned_masters(engine.optimizer)
        victim = masters_here[fault.seed % len(masters_here)].data
        flip_bit(victim[fault.seed % victim.numel() :][:1], fault.magnitude)
        return
    if fault.kind == "partial":
        _corrupt_partial_sums(fault)
        return
    parts = [layer.get_submodule(inside) for layer in layers]
    inject(fault, Target(parts, engine.basic_optimizer))


def _corrupt_partial_sums(fault: FaultAt) -> None:
    reduce = autotp_layers.RowParallel.apply
    corrupt = Corruption(fault)

    class Faulty:
        @staticmethod
        def apply(group: Any, partial: torch.Tensor, *rest: Any) -> torch.Tensor:
            wrong = partial.clone()
            corrupt(wrong)
            total: torch.Tensor = reduce(group, wrong, *rest)
            return total

    autotp_layers.RowParallel = Faulty


def train_until_a_report(rank: int, layout: Layout, options: Options) -> None:
    """Train a job that will stop; every rank ends as soon as an incident has been written."""
    threading.Thread(target=_end_on_report, args=(options.run_dir,), daemon=True).start()
    with contextlib.suppress(RuntimeError):  # a peer has ended before
        train(rank, layout, options)
    threading.Event().wait()


def _end_on_report(run_dir: str) -> None:
    while not RunDir(run_dir).incidents():
        time.sleep(0.1)
    os._exit(0)


def held(engine: Any) -> list[torch.Tensor]:
    """Parameters as this rank holds them."""
    return [getattr(p, "ds_tensor", p).data for p in engine.module.parameters()]


def masters(engine: Any) -> list[torch.Tensor]:
    """What the optimizer updates, and its state, on this rank."""
    optimizer = engine.basic_optimizer
    tensors = []
    for parameter, state in optimizer.state.items():
        tensors.append(parameter.data)
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors


def digest(tensors: list[torch.Tensor]) -> str:
    """Hash of the bytes of all tensors."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def refusals(rank: int, blocks: list[Any]) -> list[str]:
    """What `deepspeed.initialize` says to each block, and to an engine that cannot train."""
    layout = Layout("zero1.json", 1)
    plain = config_of(layout, None)
    said = [
        _refusal(functools.partial(build, layout, plain | {"scout": block}, Options()))
        for block in blocks
    ]
    config = {"train_micro_batch_size_per_gpu": 2, "scout": {**SCOUT, "enabled": True}}
    engine = functools.partial(deepspeed.initialize, model=GPT(GPTConfig()), config=config)
    return [*said, _refusal(engine)]


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except ScoutError as error:
        return str(error)
    return "no error"


def skip_steps(
    rank: int, layout: Layout, options: Options
) -> tuple[int, int, int, list[str], list[Incident]]:
    """Train with two steps whose gradients are infinite; DeepSpeed skips their updates."""
    engine = build(layout, config_of(layout, options.scout, options.run_dir), options)
    data = batches(layout, engine, options.seed)
    for step in range(options.steps):
        for fault in options.faults:
            if fault.rank == rank and fault.step == step:
                apply(fault, engine, options.inside)
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine, *next(data)) * (torch.inf if step in (1, 2) else 1.0))
            engine.step()
    session = engine.scout
    gaps, found = list(session.coverage().not_covered), session.incidents()
    return engine.skipped_steps, session.step_count, session.check_count, gaps, found


def close_early(rank: int, layout: Layout, options: Options) -> tuple[int, list[str]]:
    """Close the session after two steps of four; name the methods that stay wrapped."""
    engine = build(layout, config_of(layout, options.scout, options.run_dir), options)
    data = batches(layout, engine, options.seed)
    for step in range(4):
        if step == 2:
            engine.scout.close()
        step_once(layout, engine, data)
    wrapped = [name for name in ("step", "train_batch") if name in vars(engine)]
    return engine.scout.step_count, wrapped


def save_under_the_gate(rank: int, layout: Layout, options: Options) -> dict[str, Any]:
    """Save until a checkpoint is proven, then break a rank and try to save again."""
    engine = build(layout, config_of(layout, options.scout, options.run_dir), options)
    folder = pathlib.Path(options.run_dir) / "checkpoints"
    data = batches(layout, engine, options.seed)
    seen: dict[str, Any] = {"latest": [], "held": {}}
    for step in range(1, 3 * engine.scout.coverage().cycle_steps):
        step_once(layout, engine, data)
        seen["latest"].append(_read(folder / "latest"))
        if seen["latest"][-1] is not None:
            break
        assert engine.save_checkpoint(str(folder))
        seen["held"][f"global_step{step}"] = digest(held(engine)) + digest(masters(engine))
    for fault in options.faults:
        if fault.rank == rank:
            apply(fault, engine, options.inside)
    while not engine.scout.incidents() and engine.global_steps < 60:
        step_once(layout, engine, data)
    seen["incidents"] = engine.scout.incidents()
    seen["saved"] = engine.save_checkpoint(str(folder))
    engine.destroy()
    seen["at_end"] = _read(folder / "latest")
    return seen


def load_by_the_gate(
    rank: int, layout: Layout, options: Options, failure: str
) -> tuple[str, str, int, int, bool]:
    """Start again: name and digest of what is loaded, the steps counted, and whether it trains."""
    os.environ["SCOUT_FAILURE"] = failure
    engine = build(layout, config_of(layout, options.scout, options.run_dir), options)
    folder = pathlib.Path(options.run_dir) / "checkpoints"
    try:
        path, _ = engine.load_checkpoint(str(folder))
    except ScoutError as error:
        return str(error), "", 0, 0, False
    loaded = digest(held(engine)) + digest(masters(engine))
    steps = engine.scout.step_count
    data = batches(layout, engine, options.seed)
    for _ in range(2):
        step_once(layout, engine, data)
    clean = not engine.scout.incidents()
    return pathlib.Path(path).parent.name, loaded, steps, engine.scout.step_count, clean


def save_and_end(rank: int, layout: Layout, options: Options) -> tuple[str | None, str | None, str]:
    """Save once, long before a proof, and end as planned.

    Returns:
        What `latest` names before and after the end, and what loading a universal checkpoint says.
    """
    engine = build(layout, config_of(layout, options.scout, options.run_dir), options)
    folder = pathlib.Path(options.run_dir) / "checkpoints"
    step_once(layout, engine, batches(layout, engine, options.seed))
    engine.save_checkpoint(str(folder))
    before, said = _read(folder / "latest"), ""
    engine._config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(folder))
    except ValueError as error:
        said = str(error)
    engine.destroy()
    return before, _read(folder / "latest"), said


def run_script(rank: int, config: str, losses: str) -> None:
    """Run the user's script on this rank."""
    deepspeed_script.main(config, losses)


def _read(path: pathlib.Path) -> str | None:
    return path.read_text() if path.exists() else None
