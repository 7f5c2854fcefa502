"""The training run: batches, schedule, optimisers, checkpoints, final evaluation.

The schedule runs over wall time, not over steps: a run takes --train-s seconds on any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ggufio

from .config import ModelConfig
from .evaluate import perplexities, routing_trace, validation_losses
from .model import Layer, Model, token_loss
from .muon import Muon
from .schedule import schedule

_ROUTER_LR_FACTOR = 0.5
_TRACE_WINDOWS = 4
_CHECKPOINT_WINDOWS = 24  # validation windows per domain while training
_GGUF_NAME = "tinymoe-q8_0.gguf"


class Log:
    """Prints lines with the seconds since `start` and writes them to a file as well."""

    def __init__(self, path: Path, start: float) -> None:
        self.start = start
        self.path = path
        path.write_text("", encoding="utf-8")

    def __call__(self, *parts: object) -> None:
        line = f"[{time.time() - self.start:6.1f}] " + " ".join(str(part) for part in parts)
        print(line, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class Windows:
    """Draws batches of windows from the training tokens; every pass has its own order and its own offset."""

    def __init__(self, tokens: Tensor, batch: int, ctx: int, seed: int) -> None:
        self.tokens = tokens
        self.batch = batch
        self.ctx = ctx
        self.epoch = 0
        self._rng = np.random.default_rng(seed)
        self._count = (len(tokens) - 1) // ctx - 1
        if self._count < batch:
            raise ValueError(f"{len(tokens)} tokens are too few for {batch} windows of {ctx}: lower --batch")
        self._position = self._count  # forces a new pass
        self._starts = tokens.new_empty(0)
        self._range = torch.arange(ctx + 1, device=tokens.device)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, both [batch, ctx]."""
        if self._position + self.batch > self._count:
            order = self._rng.permutation(self._count)
            offset = int(self._rng.integers(0, self.ctx))
            self._starts = torch.from_numpy(order * self.ctx + offset).to(self.tokens.device)
            self._position = 0
            self.epoch += 1
        starts = self._starts[self._position : self._position + self.batch]
        self._position += self.batch
        window = self.tokens[starts[:, None] + self._range].long()
        return window[:, :-1], window[:, 1:]


class Trainer:
    """A model with its optimisers: Muon for the matrices of attention and experts, AdamW for the rest."""

    def __init__(self, args: argparse.Namespace, config: ModelConfig, device: str) -> None:
        self.args = args
        self.config = config
        self.device = device
        self.model = Model(config).to(device)
        compiled = not args.no_compile
        matrices: list[tuple[Tensor, float]] = []
        tables: list[Tensor] = []
        routers: list[Tensor] = []
        norms: list[Tensor] = []
        for name, param in self.model.named_parameters():
            if name.endswith((".wq", ".wk", ".wv", ".wo")):
                matrices.append((param, max(1.0, param.shape[0] / param.shape[1]) ** 0.5))
            elif name.endswith(".wgu"):
                matrices.append((param, 1.0))
            elif name.endswith(".wd"):
                matrices.append((param, max(1.0, param.shape[-1] / param.shape[-2]) ** 0.5))
            elif name in ("embed", "head"):
                tables.append(param)
            elif name.endswith("router"):
                routers.append(param)
            else:
                norms.append(param)
        self.muon = Muon(matrices, args.muon_lr, args.wd, compiled)
        groups = [
            {"params": tables, "lr_factor": 1.0},
            {"params": routers, "lr_factor": _ROUTER_LR_FACTOR},
            {"params": norms, "lr_factor": 1.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=args.adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=device == "cuda"
        )
        # one compiled layer serves all layers; evaluation runs eagerly
        self._layer_forward = torch.compile(Layer.forward, dynamic=False) if compiled else Layer.forward
        self._loss = torch.compile(token_loss, dynamic=False) if compiled else token_loss

    def step(self, x: Tensor, y: Tensor, lr_factor: float, momentum: float) -> tuple[Tensor, Tensor, Tensor]:
        """Train on one batch. Returns the loss, the sum of the layers' balance losses, the experts' loads."""
        with torch.autocast(self.device, torch.bfloat16):
            hidden, balance, loads = self.model.hidden(x.contiguous(), self._layer_forward)
            loss = self._loss(hidden, self.model.head, y.contiguous())
        (loss + self.args.aux * balance).backward()
        self.muon.step(lr_factor, momentum)
        for group in self.adam.param_groups:
            group["lr"] = self.args.adam_lr * group["lr_factor"] * lr_factor
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach(), balance.detach(), loads.detach()

    def warm_up(self) -> tuple[float, float]:
        """Compile with two steps on noise at learning rate 0; returns loss and balance loss on it."""
        for _ in range(2):
            noise = torch.randint(0, self.config.vocab, (self.args.batch, self.args.ctx), device=self.device)
            loss, balance, _ = self.step(noise, noise, 0.0, 0.9)
        self.muon.reset()
        self.adam.state.clear()
        return loss.item(), balance.item() / self.config.n_layer

    def state(self) -> dict[str, np.ndarray]:
        """Return the parameters as float32 arrays, copied: training goes on while a checkpoint is written."""
        return {name: p.detach().float().cpu().numpy().copy() for name, p in self.model.named_parameters()}


class _Progress:
    """What a run has done so far, and the figures kept for val.json."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.losses: list[tuple[int, int, float]] = []
        self.checkpoints: list[tuple[int, int, dict[str, float]]] = []


def run(args: argparse.Namespace, config: ModelConfig, start: float) -> None:
    """Train, evaluate and write the model, train.log, val.json and trace.npz to --out.

    Parameters
    ----------
    args
        Of train.py.
    config
        Shape of the model.
    start
        time.time() at the start of the process; --deadline counts from it.
    """
    device = "cpu" if args.cpu else "cuda"
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = False  # matters for the float32 evaluation alone
    data, out = Path(args.data), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    log = Log(out / "train.log", start)
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    val = np.fromfile(data / "val.bin", np.uint16)

    trainer = Trainer(args, config, device)
    n_params = sum(param.numel() for param in trainer.model.parameters())
    machine = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    log(f"params {n_params / 1e6:.2f}M, torch {torch.__version__}, {machine}")
    loss, balance = trainer.warm_up()
    log(f"compiled; loss on noise {loss:.3f}, balance {balance:.3f} per layer")
    tokens = torch.from_numpy(np.fromfile(data / "train.bin", np.uint16).astype(np.int32)).to(device)
    log(f"train tokens {len(tokens) / 1e6:.2f}M")
    if device == "cuda":
        log(f"gpu memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")

    windows = Windows(tokens, args.batch, args.ctx, args.seed)
    progress = _train(trainer, windows, val, meta, log)
    rate = progress.tokens / progress.seconds
    log(
        f"trained {progress.steps} steps, {progress.tokens / 1e6:.1f}M tokens, {windows.epoch} epochs begun, "
        f"{progress.seconds:.1f}s, {rate / 1e3:.0f}k tok/s"
    )
    _export(out / _GGUF_NAME, trainer.state(), config, data, log)
    report = _evaluate(trainer.model, args, val, np.fromfile(data / "valtxt.bin", np.uint16), meta, log)
    report = {
        "cfg": dataclasses.asdict(config),
        "args": vars(args),
        "params": n_params,
        "steps": progress.steps,
        "tokens": progress.tokens,
        "epochs": windows.epoch,
        "train_s": progress.seconds,
        "tok_s": rate,
        **report,
        "evals": progress.checkpoints,
        "hist": progress.losses,
    }
    (out / "val.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    log("done")


def _train(trainer: Trainer, windows: Windows, val: np.ndarray, meta: dict[str, Any], log: Log) -> _Progress:
    args, config = trainer.args, trainer.config
    progress = _Progress()
    begin = time.time()
    end = min(begin + args.train_s, log.start + args.deadline - args.reserve)
    total = end - begin
    log(f"training for {total:.0f}s")
    last_checkpoint = begin
    export: threading.Thread | None = None
    previous = None
    while True:
        now = time.time()
        if now >= end or progress.steps >= args.max_steps:
            break
        lr_factor, momentum = schedule(now - begin, total)
        x, y = windows.next()
        loss, balance, loads = trainer.step(x, y, lr_factor, momentum)
        progress.steps += 1
        progress.tokens += x.numel()
        if trainer.device == "cuda":  # at most one step ahead of the GPU, so that the clock is right
            event = torch.cuda.Event()
            event.record()
            if previous is not None:
                previous.synchronize()
            previous = event
        if progress.steps % 100 == 0 or progress.steps in (1, 10, 30):
            share = loads.cpu().numpy() / config.top_k * config.n_expert  # 1 = the uniform share
            log(
                f"step {progress.steps} ep {windows.epoch} {progress.tokens / 1e6:.1f}M tok "
                f"p={(now - begin) / total:.3f} loss {loss.item():.4f} "
                f"balance {balance.item() / config.n_layer:.3f} "
                f"load min {share.min():.2f} max {share.max():.2f} f={lr_factor:.3f} "
                f"{progress.tokens / (time.time() - begin) / 1e3:.0f}k tok/s"
            )
            progress.losses.append((progress.steps, progress.tokens, loss.item()))
            if not math.isfinite(loss.item()):
                log("loss is not finite, stopping")
                break
        if now - last_checkpoint > args.ckpt_s and end - now > 25:
            last_checkpoint = now
            losses = validation_losses(
                trainer.model,
                val,
                meta["val_offsets"],
                args.ctx,
                autocast=trainer.device == "cuda",
                max_windows=_CHECKPOINT_WINDOWS,
            )
            log("val", _rounded(losses, 3), f"mean {_mean(losses):.4f}")
            progress.checkpoints.append((progress.steps, progress.tokens, losses))
            if export:
                export.join()
            export = threading.Thread(
                target=_export,
                args=(Path(args.out) / _GGUF_NAME, trainer.state(), config, Path(args.data), log),
            )
            export.start()
    progress.seconds = time.time() - begin
    if export:
        export.join()
    return progress


def _evaluate(
    model: Model,
    args: argparse.Namespace,
    val: np.ndarray,
    val_text: np.ndarray,
    meta: dict[str, Any],
    log: Log,
) -> dict[str, Any]:
    """Measure the trained model in float32, write the routing trace, return the figures for val.json."""
    max_windows = 2 if args.cpu else None
    losses = validation_losses(
        model,
        val,
        meta["val_offsets"],
        args.ctx,
        autocast=False,
        max_windows=max_windows,
    )
    log("final val fp32", _rounded(losses, 4), f"mean {_mean(losses):.4f}")
    offsets = meta["valtxt_offsets"]
    scores = perplexities(model, val_text, offsets, args.ctx, max_windows=max_windows)
    log("llama-perplexity protocol", {domain: round(score["ppl"], 3) for domain, score in scores.items()})
    trace = routing_trace(model, val_text, offsets, args.ctx, _TRACE_WINDOWS)
    np.savez_compressed(Path(args.out) / "trace.npz", **trace)
    token_bytes = {domain: meta["val"][domain]["bytes_per_token"] for domain in offsets}
    bits = {domain: losses[domain] / math.log(2) / token_bytes[domain] for domain in offsets}
    return {"val_nll": losses, "val_bits_per_byte": bits, "llama_ppl": scores}


def _export(path: Path, state: dict[str, np.ndarray], config: ModelConfig, data: Path, log: Log) -> None:
    begin = time.time()
    ggufio.write_gguf(path, state, config, data / "tokenizer.json")
    log(f"wrote {path.name}: {os.path.getsize(path)} bytes, {time.time() - begin:.1f}s")


def _mean(losses: dict[str, float]) -> float:
    return sum(losses.values()) / len(losses)


def _rounded(losses: dict[str, float], digits: int) -> dict[str, float]:
    return {domain: round(loss, digits) for domain, loss in losses.items()}
