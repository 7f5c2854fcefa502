#!/usr/bin/env python3
"""Train tinymoe, a mixture of experts of 43 M parameters in llama.cpp's qwen3moe layout, from scratch.

Reads the files that `prepare.py pack` wrote to --data and writes to --out:

    tinymoe-q8_0.gguf   the model, replaced at every checkpoint and at the end
    train.log           what was printed
    val.json            settings and all measured figures
    trace.npz           which experts the first 4 windows of each validation text use

Made for one GPU. To try it without one: --cpu --tiny --no-compile --batch 2 --ctx 64 --max-steps 5
"""

from __future__ import annotations

import argparse
import time

START = time.time()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", default="corpus", help="folder of train.bin and the like (default: corpus)")
    parser.add_argument("--out", default="out", help="folder to write to (default: out)")

    schedule = parser.add_argument_group("schedule, in seconds of wall time")
    schedule.add_argument("--train-s", type=float, default=480, help="training proper (default: 480)")
    schedule.add_argument(
        "--deadline",
        type=float,
        default=575,
        help="from the start of the process until all must be written; cuts --train-s (default: 575)",
    )
    schedule.add_argument(
        "--reserve", type=float, default=28, help="kept before --deadline for the evaluation (default: 28)"
    )
    schedule.add_argument("--ckpt-s", type=float, default=60, help="between checkpoints (default: 60)")
    schedule.add_argument("--max-steps", type=int, default=10**9, help="stop after so many steps")

    training = parser.add_argument_group("training")
    training.add_argument("--batch", type=int, default=96, help="sequences per step (default: 96)")
    training.add_argument("--ctx", type=int, default=1024, help="tokens per sequence (default: 1024)")
    training.add_argument(
        "--muon-lr", type=float, default=0.02, help="learning rate of attention and experts (default: 0.02)"
    )
    training.add_argument(
        "--adam-lr", type=float, default=3e-3, help="of the rest; the router gets half (default: 0.003)"
    )
    training.add_argument("--wd", type=float, default=0.1, help="weight decay of Muon (default: 0.1)")
    training.add_argument("--aux", type=float, default=0.004, help="balance loss per layer (default: 0.004)")
    training.add_argument("--seed", type=int, default=1234)

    trial = parser.add_argument_group("for trying it")
    trial.add_argument("--tiny", action="store_true", help="a model of 2 small layers")
    trial.add_argument("--cpu", action="store_true", help="without a GPU; evaluates 2 windows per domain")
    trial.add_argument("--no-compile", action="store_true", help="without torch.compile")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from trainer.config import TINY, ModelConfig
    from trainer.loop import run  # imports PyTorch: after the arguments are known to be good

    run(args, TINY if args.tiny else ModelConfig(), START)


if __name__ == "__main__":
    main()
