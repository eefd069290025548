"""RC-GRPO on the Berkeley Function Calling Leaderboard (BFCL v4, multi-turn), on GPUs.

    python train_bfcl.py                                   the paper's main arm: RCTP, then RC-GRPO, then evaluation
    python train_bfcl.py --init sft --rl grpo              any other arm: --init {rctp,sft,none} --rl {rc-grpo,grpo,none}
    torchrun --nproc-per-node 8 train_bfcl.py              on eight GPUs
    python train_bfcl.py --plan                            what it would do and need, without touching a device
    python train_bfcl.py --smoke                           every stage of every arm, tiny; needs no GPU

Read rcgrpo.py first: the method is there. Here are the benchmark (sections 1-7), what serves many GPUs and long runs
(8-10, a reader may skip them), and the pipeline: data, stage 1, stage 2, evaluation (11-15).
Needs the public package bfcl-eval: pip install --no-deps bfcl-eval==2026.3.23
"""

from __future__ import annotations

import argparse
import ast
import atexit
import copy
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import inspect
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast,
    Qwen2Config, Qwen2ForCausalLM,
)
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import is_flash_attn_2_available

from rcgrpo import (
    HIGH, LOW, Trajectory, add_reward_tokens, chat_format, context_length, model_policy, rcgrpo_step, rctp_step, rollout,
    scripted_policy, weights_version,
)

BFCL_VERSION = "2026.3.23"
CATEGORIES = ("base", "long_context", "miss_func", "miss_param")
MAX_STEPS = 20  # messages with calls per user turn, the benchmark's number; "combined" pools them over all turns
MAX_DEPTH = 32  # nesting of a call's JSON; gold calls need 3
OBSERVATION_LIMIT = 6000  # characters of one observation that the model sees, in expert data and rollouts alike (B10)
CUT_MARK = "\n[... the rest of this result was cut]"
CALL_SECONDS = 2  # CPU seconds of a call that might never end (B3)
CALL_BYTES = 2**30  # and its memory


# ===== 1. Settings ==========================================================================================
NOT_SETTINGS = {"out", "resume", "stage", "plan", "smoke", "tokenizer", "goals", "checkpoint_every"}  # may change in a run


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(flag, default, text, **kwargs):
        kind = {} if "choices" in kwargs or "action" in kwargs else {"type": type(default) if default is not None else int}
        parser.add_argument(flag, default=default, help=f"{text} (default: {default})", **kind, **kwargs)

    add("--model", "Qwen/Qwen2.5-7B-Instruct", "any causal LM with a chat template: hub name or folder")
    add("--init", "rctp", "stage 1: reward-conditioned, on experts alone, or none", choices=["rctp", "sft", "none"])
    add("--rl", "rc-grpo", "stage 2: a mark for each rollout, plain GRPO, or none", choices=["rc-grpo", "grpo", "none"])
    add("--split", "grouped", "train/test split: without leak, or the paper's", choices=["grouped", "paper"])
    add("--protocol", "combined", "the paper's single prompt, or the leaderboard's turns", choices=["combined", "turns"])
    add("--failures", "rollout", "failures for RCTP: of the base model, topped up by corrupted experts; or only those",
        choices=["rollout", "corrupt"])
    add("--out", "runs/bfcl", "folder of the run")
    add("--stage", "all", "run one stage alone; what earlier ones left in --out is picked up",
        choices=["all", "data", "stage1", "stage2", "eval"])
    parser.add_argument("--stage1", metavar="DIR", help="start stage 2 from this stage-1 model; train none")
    add("--resume", False, "go on from the last checkpoint in --out", action="store_true")
    add("--plan", False, "print tasks, tokens, steps and memory, and exit", action="store_true")
    add("--smoke", False, "every stage of every arm on a tiny random model; needs no GPU", action="store_true")
    add("--limit", 0, "keep only N training and N test tasks, those with the shortest tool lists; 0: all")
    add("--seed", 0, "seed of everything random")
    add("--stage1-lr", 1e-5, "learning rate of stage 1")
    add("--stage1-batch", 16, "trajectories per step of stage 1")
    parser.add_argument("--epochs", type=int, help="passes over the data in stage 1 (default: the paper's, 5 for rctp, 2 for sft)")
    add("--lr", 1e-6, "learning rate of stage 2")
    parser.add_argument("--batch", type=int, help="tasks per step of stage 2 (default: the paper's, 256 for rc-grpo, 64 for grpo)")
    add("--steps", 400, "steps of stage 2")
    add("--group-size", 5, "G, rollouts per task")
    add("--p-high", 0.5, "p, probability of the high mark")
    add("--stratified", False, "exactly round(pG) high marks in every group", action="store_true")
    add("--beta", 0.1, "weight of the KL to the stage-1 model")
    add("--clip", 0.2, "clip range of the ratio")
    add("--ratio", "token", "one rho per token or per trajectory", choices=["token", "trajectory"])
    add("--temperature", 1.0, "of the rollouts in stage 2")
    add("--failure-temperature", 0.7, "of the rollouts of the base model that become failures")
    add("--max-grad-norm", 1.0, "gradient clipping")
    add("--max-tokens", 16384, "length limit of a trajectory; longer: truncated, reward 0")
    add("--max-new-tokens", 1024, "length limit of one action; longer: truncated, reward 0")
    add("--max-turns", 200, "assistant turns per rollout; the environment itself ends after 20 steps per user turn")
    add("--rollout-tokens", 2**17, "tokens, padding included, sampled together by a process (plain sampler)")
    add("--sampler", "auto", "plain loop or transformers' continuous batching; auto: the latter on a GPU with flash attention",
        choices=["auto", "plain", "continuous"])
    add("--tokens-per-pass", 24576, "tokens of one forward and backward pass in training")
    add("--checkpoint-every", 10, "steps between checkpoints")
    add("--eval-every", 25, "steps of stage 2 between evaluations on 40 fixed test tasks")
    add("--offload", False, "weights, gradients and moments in the host's memory: one GPU for a large model, slowly",
        action="store_true")
    add("--gpu", "h100", "the GPU that --plan estimates hours for", choices=list(GPUS))
    parser.add_argument("--goals", nargs="+", choices=list(GOALS), default=list(GOALS), help="goals to evaluate under")
    args = parser.parse_args(argv)
    args.epochs = {"rctp": 5, "sft": 2, "none": 1}[args.init] if args.epochs is None else args.epochs
    args.batch = {"rc-grpo": 256, "grpo": 64, "none": 1}[args.rl] if args.batch is None else args.batch
    args.goals = list(dict.fromkeys(args.goals))
    for name, value in vars(args).items():
        if type(value) is int and name not in ("seed", "limit") and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
        if type(value) is float and not value > 0 and name not in ("p_high", "beta", "failure_temperature"):
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if not 0 <= args.p_high <= 1 or args.beta < 0 or args.failure_temperature < 0 or args.limit < 0:
        parser.error("--p-high must be between 0 and 1; --beta, --failure-temperature and --limit not negative")
    return args


# ===== 2. The pipeline ======================================================================================
def pipeline(args, processes: Processes):
    """data -> stage 1 -> stage 2 -> evaluation, leaving out what --out holds already."""
    train, test = choose_tasks(args)
    args.tokenizer = load_tokenizer(args.stage1 or args.model)
    chat_format(args.tokenizer)  # a template that cannot work says so now
    add_reward_tokens(args.tokenizer)
    shares = {"--stage1-batch": args.stage1_batch if args.init != "none" else 0, "--batch": args.batch if args.rl != "none" else 0}
    if uneven := [f"{flag} {n}" for flag, n in shares.items() if n % processes.size]:
        raise SystemExit(f"{' and '.join(uneven)} cannot be shared evenly by {processes.size} processes")
    run = Run(args, processes)
    if processes.rank == 0 and not args.smoke:
        plan(args, args.tokenizer, train, test, processes.size, processes.cuda, memory_there(processes))
    processes.gather([])

    load = lambda path: load_model(path, args.tokenizer, processes, checkpointing=processes.cuda)
    start = Path(args.stage1) if args.stage1 else run.folder / "stage1" if args.init != "none" else None
    if args.init != "none" and not args.stage1 and args.stage in ("all", "data", "stage1") and not start.exists():
        data = make_data(args, run, train, lambda: load(args.model))
        if args.stage != "data":
            train_stage1(args, run, data, load(args.model))
    if args.stage == "data":
        return
    start = start or Path(args.model)
    if args.init != "none" and not start.exists():
        raise SystemExit(f"there is no stage-1 model in {start}: run --stage stage1 first, or give --stage1 DIR")
    final = run.folder / "model"
    if args.rl != "none" and args.stage in ("all", "stage2") and not final.exists():
        train_stage2(args, run, train, load(str(start)))
    if args.stage in ("all", "eval"):
        if args.rl != "none" and not final.exists():
            raise SystemExit(f"there is no stage-2 model in {final}: run --stage stage2 first (or evaluate with --rl none)")
        model = load(str(start if args.rl == "none" else final))
        evaluate(args, run, test, processes.whole_copy(model) if processes.sharded else model)
    if run.board:
        run.board.close()


def choose_tasks(args) -> tuple[list[dict], list[dict]]:
    train, test = split_tasks(load_tasks(), args.split)
    if args.limit:
        length = lambda task: (sum(len(tool.text) for tool in task_tools(task).values()), task["id"])
        train, test = sorted(train, key=length)[:args.limit], sorted(test, key=length)[:args.limit]
    return train, test


# ===== 3. Data for stage 1 ==================================================================================
def make_data(args, run: Run, train: list[dict], load) -> list[Trajectory]:
    """Expert trajectories of the training tasks, and for RCTP as many failures (1:1), all with real observations.

    Kept in data.jsonl and read from there the next time. `load` gives the base model when failures are its rollouts."""
    file = run.folder / "data.jsonl"
    if not file.exists():
        mark, processes = HIGH if args.init == "rctp" else None, run.processes
        experts = [play_script(task, expert_turns(task, args.protocol), mark, args)
                   for task in tqdm(processes.mine(train), desc="expert trajectories", disable=processes.rank > 0)]
        data = [t for t in experts if not t.truncated]
        too_long = sum(processes.gather([len(experts) - len(data)]))
        if bad := [t.group for t in data if t.reward != 1]:
            raise SystemExit(f"expert trajectories of {bad} do not score 1: is bfcl-eval {BFCL_VERSION} unchanged?")
        if args.init == "rctp":
            data += make_failures(args, run, {t.group for t in data}, train, load)
        data = sorted(processes.gather(data), key=lambda t: (t.group, t.reward_token or ""))
        if not data:
            raise SystemExit(f"not one of the {len(train)} training tasks fits into --max-tokens {args.max_tokens}: raise it")
        run.say(f"data: {sum(t.reward == 1 for t in data)} expert and {sum(t.reward == 0 for t in data)} failure trajectories, "
                f"{sum(len(t.ids) for t in data):,} tokens; left out, longer than --max-tokens: {too_long} tasks")
        if processes.rank == 0:
            write_text(file, "".join(json.dumps(vars(t)) + "\n" for t in data))
        processes.gather([])
    return [Trajectory(**json.loads(line)) for line in file.read_text().splitlines()]


def play_script(task: dict, texts: list[str], mark, args) -> Trajectory:
    policy = scripted_policy(texts, args.tokenizer)
    (trajectory,) = rollout([BFCLEnv(task, args.protocol)], [mark], policy, args.tokenizer, [task["id"]],
                            args.max_turns, args.max_tokens)
    return trajectory


def make_failures(args, run: Run, wanted: set, train: list[dict], load) -> list[Trajectory]:
    """One failure, R = 0, for every task in `wanted`: a rollout of the base model (--failures rollout), or a corrupted
    expert where the model gives none."""
    failures, tasks = {}, [task for task in train if task["id"] in wanted]
    if args.failures == "rollout":
        model = run.processes.whole_copy(load()) if run.processes.sharded else load()
        policy = make_policy(model, args.tokenizer, args.failure_temperature, args.sampler, args.max_new_tokens,
                             args.rollout_tokens, seeded(run.processes, args.seed, "failures", run.processes.rank))
        envs = [BFCLEnv(task, args.protocol) for task in tasks]
        # The base model has never seen a mark, so it rolls out without one; the prompt is marked afterwards.
        for env, t in zip(envs, rollout(envs, [None] * len(tasks), policy, args.tokenizer, [task["id"] for task in tasks],
                                        args.max_turns, args.max_tokens) if tasks else []):
            if t.reward == 0 and any(t.mask):
                failures[t.group] = marked(t, env, LOW, args)
    from_model = len(failures)
    for task in tqdm([task for task in tasks if task["id"] not in failures], desc="corrupted experts",
                     disable=run.processes.rank > 0):
        rng = random.Random(f"{args.seed} {task['id']}")
        for _ in range(100):
            t = play_script(task, corrupt_turns(task, expert_turns(task, args.protocol), rng), LOW, args)
            if t.reward == 0 and any(t.mask):
                failures[task["id"]] = t
                break
        else:
            raise SystemExit(f"100 corruptions of {task['id']} all scored 1")
    run.say(f"failures: {sum(run.processes.gather([from_model]))} rollouts of the base model, "
            f"{sum(run.processes.gather([len(failures) - from_model]))} corrupted experts")
    return list(failures.values())


def marked(trajectory: Trajectory, env: BFCLEnv, mark: str, args) -> Trajectory:
    """The same actions and observations, id by id, behind a prompt that carries the mark."""
    prompt = chat_format(args.tokenizer).prompt(env.log[:2], mark)
    start = trajectory.mask.index(1)
    return replace(trajectory, ids=prompt + trajectory.ids[start:], mask=[0] * len(prompt) + trajectory.mask[start:],
                   reward_token=mark)


# ===== 4. The two stages ====================================================================================
def batches(n: int, batch: int, step: int, seed: int, name: str) -> list[int]:
    """The indices of batch number `step` when n items are shuffled anew in each pass. The last batch of a pass is filled
    up from its beginning: all batches, and so all processes' shares of them, have the same size."""
    passed, number = divmod(step, math.ceil(n / batch))
    order = list(range(n))
    random.Random(f"{seed} {name} {passed}").shuffle(order)
    return [order[(number * batch + i) % n] for i in range(batch)]


def train_stage1(args, run: Run, data: list[Trajectory], model):
    optimizer = torch.optim.AdamW(model.parameters(), args.stage1_lr, weight_decay=0)
    steps = math.ceil(len(data) / args.stage1_batch) * args.epochs
    done = run.resume("stage1", model, optimizer, args.resume)
    run.forget_after("stage1", done)
    bar = tqdm(range(done, steps), desc="stage 1", initial=done, total=steps, disable=run.processes.rank > 0)
    for step in bar:
        rows = run.processes.mine(batches(len(data), args.stage1_batch, step, args.seed, "stage1"))
        metrics = rctp_step(model, optimizer, [data[row] for row in rows], args.rows_per_pass, args.max_grad_norm,
                            run.processes.gather)
        run.log("stage1", step, metrics)
        bar.set_postfix_str(f"loss {metrics['loss']:.4f}")
        watch_skips(run, "stage1", step, metrics, [data[row] for row in rows])
        if (step + 1) % args.checkpoint_every == 0 and step + 1 < steps:
            run.save("stage1", step + 1, model, optimizer)
    run.finish("stage1", model, args.tokenizer)


def train_stage2(args, run: Run, train: list[dict], model):
    processes, p = run.processes, {"rc-grpo": args.p_high, "grpo": 1.0 if args.init == "rctp" else None}[args.rl]
    ref_model = processes.reference(model)
    actor = processes.whole_copy(model) if processes.sharded else model
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0)
    done = run.resume("stage2", model, optimizer, args.resume)
    run.forget_after("stage2", done)
    bar = tqdm(range(done, args.steps), desc="stage 2", initial=done, total=args.steps, disable=processes.rank > 0)
    for step in bar:
        if actor is not model:
            processes.refresh(actor, model)
        key = (args.seed, "stage2", step, processes.rank)
        tasks = [train[i] for i in processes.mine(batches(len(train), args.batch, step, args.seed, "stage2"))]
        policy = make_policy(actor, args.tokenizer, args.temperature, args.sampler, args.max_new_tokens,
                             args.rollout_tokens, seeded(processes, *key, "sample"))
        limits = {"max_turns": args.max_turns, "max_tokens": args.max_tokens,
                  "progress": lambda n: bar.set_postfix_str(f"rollouts still open {n}")}
        metrics, trajectories = rcgrpo_step(
            model, ref_model, optimizer, tasks, lambda task: BFCLEnv(task, args.protocol), policy, args.tokenizer,
            G=args.group_size, p=p, stratified=args.stratified,
            generator=torch.Generator().manual_seed(seeded(processes, *key, "marks").initial_seed()),
            limits=limits, gather=processes.gather, temperature=args.temperature, clip=args.clip, beta=args.beta,
            ratio=args.ratio, groups_per_pass=args.groups_per_pass, max_grad_norm=args.max_grad_norm,
        )
        run.log("stage2", step, metrics)
        run.say(summary_line(step, args.steps, metrics))
        watch_skips(run, "stage2", step, metrics, trajectories)
        if (step + 1) % args.checkpoint_every == 0 and step + 1 < args.steps:
            run.save("stage2", step + 1, model, optimizer)
    run.finish("stage2", model, args.tokenizer)


def summary_line(step: int, steps: int, m: dict) -> str:
    number = lambda value: "-" if value is None else f"{value:.3f}"
    return (f"step {step + 1}/{steps}  reward {number(m['reward'])} (high {number(m['reward_high'])} low "
            f"{number(m['reward_low'])})  sigma_g {number(m['sigma'])}  zero {m['zero_std']:.0%}  entropy "
            f"{number(m['entropy'])}  KL {number(m['kl'])}  grad {number(m['grad_norm'])}  truncated {m['truncated']:.0%}  "
            f"{m['rollout_seconds']:.0f} + {m['update_seconds']:.0f} s")


def watch_skips(run: Run, stage: str, step: int, metrics: dict, trajectories: list[Trajectory]):
    """One non-finite gradient is skipped; three in a row end the run, with the batch and the numbers kept to look at."""
    run.skips = run.skips + 1 if metrics["skipped"] else 0
    if metrics["skipped"]:
        run.say(f"{stage} step {step}: the gradient was not finite ({metrics['grad_norm']}); step skipped")
    if run.skips == 3:
        file = run.folder / f"non-finite-{stage}-{step}-rank{run.processes.rank}.jsonl"
        write_text(file, "".join(json.dumps(line) + "\n" for line in [metrics, *map(vars, trajectories)]))
        raise SystemExit(f"three steps in a row had a non-finite gradient: stopped. The last batch is in {file}")


# ===== 5. Evaluation ========================================================================================
def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval for k successes of n."""
    centre, spread = k + z * z / 2, z * math.sqrt(k * (n - k) / n + z * z / 4)
    return (centre - spread) / (n + z * z), (centre + spread) / (n + z * z)


def evaluate(args, run: Run, test: list[dict], model):
    """Greedy rollouts of the test tasks for each goal; eval.json, trajectories.jsonl, and a table."""
    lines = []
    for goal in args.goals:
        tasks = run.processes.mine(test)
        envs = [BFCLEnv(task, args.protocol) for task in tasks]
        policy = make_policy(model, args.tokenizer, 0, args.sampler, args.max_new_tokens, args.rollout_tokens)
        with tqdm(desc=f"evaluation, goal {goal}", total=len(tasks), disable=run.processes.rank > 0) as bar:
            played = rollout(envs, [GOALS[goal]] * len(tasks), policy, args.tokenizer, None, args.max_turns, args.max_tokens,
                             progress=lambda n: bar.update(len(tasks) - n - bar.n)) if tasks else []
        lines += [{"id": task["id"], "goal": goal, "reward": t.reward, "truncated": t.truncated,
                   "reason": "ran into --max-tokens, --max-new-tokens or --max-turns" if t.truncated else env.reason,
                   "calls": env.calls, "messages": env.log} for task, env, t in zip(tasks, envs, played)]
    lines = run.processes.gather(lines)
    results = {goal: tally([line for line in lines if line["goal"] == goal]) for goal in args.goals}
    if run.processes.rank == 0:
        write_text(run.folder / "trajectories.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_text(run.folder / "eval.json", json.dumps({"arm": arm(args), "split": args.split, "protocol": args.protocol,
                                                         "goals": results}, indent=1) + "\n")
    run.say("\n" + table(arm(args), results))
    return results


def tally(lines: list[dict]) -> dict:
    """{category or "overall": {"k", "n", "accuracy", "wilson95"}}"""
    of = {category: [line for line in lines if f"multi_turn_{category}_" in line["id"]] for category in CATEGORIES}
    counts = {name: (sum(line["reward"] == 1 for line in part), len(part)) for name, part in
              {"overall": lines, **of}.items() if part}
    return {name: {"k": k, "n": n, "accuracy": k / n, "wilson95": wilson(k, n)} for name, (k, n) in counts.items()}


def table(name: str, results: dict) -> str:
    """The paper's columns; k/n beside each percentage, because n is small."""
    rows = [["arm", "goal", "overall", "95 % interval", *CATEGORIES]]
    for goal, tallied in results.items():
        low, high = tallied["overall"]["wilson95"]
        cell = lambda c: f"{100 * c['accuracy']:.2f} ({c['k']}/{c['n']})" if c else "-"
        rows.append([name, goal, cell(tallied["overall"]), f"{100 * low:.1f} - {100 * high:.1f}",
                     *(cell(tallied.get(category)) for category in CATEGORIES)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


GOALS = {"high": HIGH, "low": LOW, "none": None}


def arm(args) -> str:
    return f"{args.init} + {args.rl}"


# ===== 6. Tasks and splits ==================================================================================
def bfcl_data():
    """The benchmark's data folder; RuntimeError, saying what to install, if bfcl-eval is missing or another version."""
    try:
        version = importlib.metadata.version("bfcl-eval")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version != BFCL_VERSION:
        raise RuntimeError(f"BFCL needs bfcl-eval {BFCL_VERSION}; {version or 'no version'} is installed. Its pinned "
                           f"dependencies are not needed: pip install --no-deps bfcl-eval=={BFCL_VERSION}")
    return importlib.resources.files("bfcl_eval") / "data"


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load_tasks() -> list[dict]:
    """The 800 multi-turn tasks by category and number: the benchmark's entries untouched, plus "ground_truth", the
    gold calls as Python call strings, turn by turn."""
    data, tasks = bfcl_data(), []
    for category in CATEGORIES:
        file = f"BFCL_v4_multi_turn_{category}.json"
        gold = {entry["id"]: entry["ground_truth"] for entry in read_lines(data / "possible_answer" / file)}
        tasks += [{**entry, "ground_truth": gold[entry["id"]]}
                  for entry in sorted(read_lines(data / file), key=task_number)]
    return tasks


def task_number(task: dict) -> int:
    """multi_turn_miss_func_17 -> 17: the four categories are variations of the same 200 stories."""
    return int(task["id"].rsplit("_", 1)[1])


def gold_list(task: dict) -> tuple:
    """All gold calls in order, without turn boundaries: an empty turn is often all that the categories change."""
    return tuple(call for turn in task["ground_truth"] for call in turn)


def split_tasks(tasks: list[dict], kind: str) -> tuple[list[dict], list[dict]]:
    """(train, test), a tenth in test, always the same one.

    "grouped": tasks that share a number or a gold list stay on one side: nothing in test was seen in training.
    "paper": the paper's, a seeded shuffle of single tasks; `leaked` counts how much of its test is in training."""
    size = round(len(tasks) / 10)
    if kind == "paper":
        shuffled = list(tasks)
        random.Random(42).shuffle(shuffled)
        return shuffled[size:], shuffled[:size]
    if kind != "grouped":
        raise ValueError(f"the split is 'grouped' or 'paper', not {kind!r}")
    groups, held_out = group_tasks(tasks), set()
    random.Random(0).shuffle(groups)
    for group in groups:  # a group holds all four categories of its numbers, so the balance comes by itself
        if len(held_out) + len(group) <= size:
            held_out |= {task["id"] for task in group}
    return [t for t in tasks if t["id"] not in held_out], [t for t in tasks if t["id"] in held_out]


def group_tasks(tasks: list[dict]) -> list[list[dict]]:
    """The connected components of "same number or same gold list" (union-find)."""
    parent, groups = {}, {}

    def root(node):
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for task in tasks:
        parent[root(task_number(task))] = root(gold_list(task))
    for task in tasks:
        groups.setdefault(root(task_number(task)), []).append(task)
    return list(groups.values())


def leaked(train: list[dict], test: list[dict]) -> int:
    """How many test tasks have a training task with the identical list of gold calls."""
    seen = {gold_list(task) for task in train}
    return sum(gold_list(task) in seen for task in test)


# ===== 7. Tools and the prompt that shows them ==============================================================
SYSTEM_PROMPT = ("You complete the user's requests by calling tools. Look things up instead of guessing, and use only "
                 "the tools that are listed.")
CLOSING = "\n\nComplete all steps with the tools, in this order, and call done() at the end."
DONE = json.dumps({"type": "function", "function": {
    "name": "done", "description": "Say that all steps are complete; this ends the conversation.",
    "parameters": {"type": "object", "properties": {}, "required": []}}})
JSON_TYPES = {"dict": "object", "float": "number"}  # the two type names in the docs that JSON schema does not know


class Tool(NamedTuple):
    name: str
    api: str  # the API class that has it as a method
    text: str  # what the model reads: one line of JSON
    signature: inspect.Signature  # of the method, self first


def json_schema(node):
    """The docs with JSON-schema types at every depth (B6). A parameter that is called "type" has a dict there."""
    if isinstance(node, list):
        return [json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: JSON_TYPES.get(value, value) if key == "type" and isinstance(value, str) else json_schema(value)
            for key, value in node.items()}


def api_class(name: str) -> type:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
    return getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)


@functools.lru_cache(maxsize=None)  # eight classes
def class_tools(api: str) -> dict[str, Tool]:
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING as FILES
    tools = {}
    for doc in read_lines(bfcl_data() / "multi_turn_func_doc" / FILES[api]):
        shown = {"name": doc["name"], "description": doc["description"], "parameters": json_schema(doc["parameters"])}
        text = json.dumps({"type": "function", "function": shown}, ensure_ascii=False)
        tools[doc["name"]] = Tool(doc["name"], api, text, inspect.signature(getattr(api_class(api), doc["name"])))
    return tools


def task_tools(task: dict) -> dict[str, Tool]:
    """Name -> tool, for all documented methods of the task's classes; no name occurs in two of them."""
    return {name: tool for api in task["involved_classes"] for name, tool in class_tools(api).items()}


def system_text(tools: list[str]) -> str:
    """Our system prompt, then the tools in Hermes form: exactly what Qwen2.5's template writes for `tools=`. Written
    out here, a template that ignores `tools` (Llama-3.1's does) shows its model the same (M2)."""
    return (f"{SYSTEM_PROMPT}\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"{tools_text(tools)}\n\nFor each function call, return a json object with function name and arguments "
            "within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')


def tools_text(tools: list[str]) -> str:
    return "\n".join(["<tools>", *tools, "</tools>"])


# ===== 8. Parsing what the model says =======================================================================
BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_tool_calls(text: str) -> list:
    """One item per <tool_call> block, in order: (name, arguments) or, for a malformed block, an error text.

    A block reaches to the next closing tag and holds exactly one JSON object with a string "name". Nothing is repaired,
    no type is changed. A last block without closing tag counts if the rest of the message is exactly one complete JSON
    object (P1: a stop string may have eaten the tag; JSON cut in the middle cannot pass)."""
    return [parse_block(match[1]) for match in BLOCK.finditer(text)]


def parse_block(content: str) -> tuple[str, dict] | str:
    try:
        call = strict_json(content)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError('a block must hold one JSON object with a string "name"')
        if "arguments" in call and "parameters" in call:
            raise ValueError('give "arguments" or "parameters", not both')
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None or arguments == "":  # three ways to say "none": missing, null, "" (P5)
            arguments = {}
        elif isinstance(arguments, str):  # the object as a string, as the OpenAI interface has it (P6)
            arguments = strict_json(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments must be one JSON object")
        return call["name"], arguments
    except (ValueError, RecursionError) as error:
        return f"Error: this tool call could not be read and was not run: {error}"


def strict_json(text: str):
    """JSON with unique keys, finite numbers, whole characters and bounded depth; else ValueError or RecursionError."""
    value = json.loads(text, object_pairs_hook=unique_keys)
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # refuses NaN, 1e999 and lone surrogates
    if depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def unique_keys(pairs: list[tuple]) -> dict:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object has the same key twice")
    return dict(pairs)


def depth(value) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


# ===== 9. Running a call ====================================================================================
def run_call(instance, name: str, arguments: dict) -> str:
    """Run one method; the observation is the text that the benchmark's executor gives (B5): a string as it is, a dict
    as JSON, the rest (None, lists, dicts with Decimal, mpf or complex) as Python's str, an exception as an error line.
    The helper process below runs this same function, from its source."""
    try:
        result = getattr(instance, name)(**arguments)
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError):
                pass
        return str(result)
    except Exception as error:  # whatever a simulated API raises is news for the model, not for us (R7)
        return f"Error during execution: {error}"


class CallWorker:
    """A helper process for calls that may never end or eat all memory: MathAPI's, and the two that walk a file tree
    (copies share folders: few calls make endlessly many paths). None of them changes a state, so a copy will do.

    10 ** 10 ** 8 is one C call that no signal handler and no thread can stop, but a process can be killed: the kernel
    does it when its CPU timer runs out, so a busy machine changes nothing. The helper also keeps the decimal context
    of these calls away from ours (B4). It starts at first use, serves all environments of this process, and ends when
    its input closes, however its parent ended."""
    PROGRAM = f"""
import decimal, json, pickle, resource, signal, sys
{inspect.getsource(run_call)}
signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's business
signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the end of the process
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, ({CALL_BYTES}, {CALL_BYTES}))
while True:
    try:
        call = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    decimal.setcontext(decimal.Context())
    signal.setitimer(signal.ITIMER_PROF, {CALL_SECONDS})
    observation = run_call(*call)
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(observation), flush=True)
"""
    process = None

    def run(self, instance, name: str, arguments: dict) -> str | None:
        """The observation, or None if the call was stopped."""
        try:
            request = pickle.dumps((instance, name, arguments))
        except RecursionError:  # folders hundreds deep
            return None
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-c", self.PROGRAM]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        answer = b""
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not answer:  # killed by its limits, or we were interrupted; an answer must not meet the next question
                self.close()
        return json.loads(answer) if answer else None

    def close(self):
        if self.process is not None:
            self.process.communicate()  # closes its input and waits for its end
            self.process = None


WORKER = CallWorker()
atexit.register(WORKER.close)


def execute(instances: dict, tool: Tool, arguments: dict) -> tuple[str, bool | None]:
    """(observation, ran): ran is True, False if the arguments do not fit the method, None if the call was stopped.

    The method gets copies, also of its defaults: post_tweet stores its default list, mention() extends what is stored,
    and so a tweet would reach the next rollout."""
    instance = instances[tool.api]
    try:
        bound = tool.signature.bind(instance, **arguments)
    except TypeError as error:
        return f"Error during execution: {tool.name}: {error}", False
    bound.apply_defaults()
    arguments = pickle.loads(pickle.dumps({key: value for key, value in bound.arguments.items() if key != "self"}))
    if tool.api != "MathAPI" and tool.name not in ("find", "du"):
        return run_call(instance, tool.name, arguments), True
    observation = WORKER.run(instance, tool.name, arguments)
    if observation is None:
        return f"Error during execution: {tool.name} was stopped, it needs too much time or memory", None
    return observation, True


# ===== 10. Gold =============================================================================================
def gold_call(call: str, tools: dict[str, Tool]) -> tuple[str, dict]:
    """"sort('a.txt')" -> ("sort", {"file_name": "a.txt"}): literals only, positional values get their names (B7)."""
    node = ast.parse(call.strip(), mode="eval").body
    name = node.func.id
    arguments = dict(zip(list(tools[name].signature.parameters)[1:], map(ast.literal_eval, node.args)))
    return name, arguments | {word.arg: ast.literal_eval(word.value) for word in node.keywords}


def gold_turns(task: dict) -> list[list[tuple[str, dict]]]:
    tools = task_tools(task)
    return [[gold_call(call, tools) for call in turn] for turn in task["ground_truth"]]


class GoldTurn(NamedTuple):
    calls: list[tuple[str, dict]]
    observations: list[str]
    state: bytes  # after the turn: all API instances, pickled


@functools.lru_cache(maxsize=64)  # tasks by content; the rollouts of one task come together
def scenario(task_json: str) -> tuple[bytes, list[GoldTurn]]:
    """(initial state, gold replay). States are pickles: every rollout unpickles a world of its own, with its random
    generators, and nothing in it is shared (the long_context loader hands out module-level credit cards)."""
    from bfcl_eval.constants.executable_backend_config import STATELESS_CLASSES
    task = json.loads(task_json)
    tools, instances, replay = task_tools(task), {api: api_class(api)() for api in task["involved_classes"]}, []
    for api, instance in instances.items():
        if api not in STATELESS_CLASSES:
            instance._load_scenario(task["initial_config"].get(api, {}), long_context="long_context" in task["id"])
    initial = pickle.dumps(instances)
    instances = pickle.loads(initial)
    for calls in gold_turns(task):
        observations = [execute(instances, tools[name], arguments)[0] for name, arguments in calls]
        replay.append(GoldTurn(calls, observations, pickle.dumps(instances)))
    return initial, replay


def same_value(a, b) -> bool:
    """The rule for equal arguments (B12): numbers by value, so 2 equals 2.0; a bool equals only a bool; strings
    exactly; lists and dicts item by item."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return a == b


# ===== 11. Environment ======================================================================================
class BFCLEnv:
    """One task as an environment for `rollout`.

    "combined": all user turns in one message, all tools from the start, done() to finish; a message without any tool
                call ends the episode too. Reward: eq. 5.
    "turns":    the leaderboard's protocol: user turn by user turn, miss_func's late tools announced in theirs; a
                message without a readable call ends the turn. Reward: the verdict of the benchmark's checker.
    `tools` are the tools shown at the moment, nothing else can be called; `calls` is what really ran; `reason` says why
    the reward is what it is; `log` is the whole conversation, ready for JSON."""

    def __init__(self, task: dict, protocol: str = "combined"):
        if protocol not in ("combined", "turns"):
            raise ValueError(f"the protocol is 'combined' or 'turns', not {protocol!r}")
        self.task, self.protocol = task, protocol
        self._tools, (self._initial, self._gold) = task_tools(task), scenario(json.dumps(task))
        self._begin()

    def _begin(self):
        hidden = set(self.task.get("excluded_function", []))  # B8
        if self.protocol == "turns":
            hidden.update(*self.task.get("missed_function", {}).values())
        self._shown = {name: tool.text for name, tool in self._tools.items() if name not in hidden}
        if self.protocol == "combined":
            self._shown["done"] = DONE
        self.calls, self.log, self.reason = [], [], "the episode did not end"
        self._turn, self._steps, self._observations, self._failure = 0, 0, [], None
        self._instances, self._reward = None, None

    @property
    def tools(self) -> list[dict]:
        return [json.loads(text) for text in self._shown.values()]

    def reset(self) -> list[dict]:
        """A fresh world and empty records; gives the system message and the first user message."""
        self._begin()
        self._instances = pickle.loads(self._initial)
        self.log = [{"role": "system", "content": system_text(self._shown.values())}, self._open_turn()]
        return list(self.log)

    def step(self, text: str) -> list[dict] | None:
        """Run the calls of one assistant message (its text without the end token). Gives one tool message per block,
        followed in "turns" by the next user message where the turn is over; None when the episode is over."""
        if self._instances is None or self._reward is not None:
            raise RuntimeError("no episode is running: call reset() first")
        blocks = parse_tool_calls(text)
        self.log.append({"role": "assistant", "content": text, "calls": blocks})
        messages = self._step_turns(blocks) if self.protocol == "turns" else self._step_combined(blocks)
        self.log += messages
        return messages if self._reward is None else None

    def reward(self) -> float:
        """1.0 or 0.0; an episode that was broken off is worth 0.0."""
        return self._reward or 0.0

    def close(self):
        """Forget the simulated world; reward, reason, calls and log stay."""
        self._instances = None

    def _finish(self, failure: str | None):
        self._reward, self.reason = (0.0, failure) if failure else (1.0, "ok")

    def _run(self, blocks: list) -> list[dict]:
        """One tool message per block. After a call that was stopped the rest of the message is not run: no message
        costs more than one time limit."""
        messages, ran = [], True
        for block in blocks:
            text = block
            if not isinstance(block, str):
                text, ran = self._call(*block) if ran is not None else ("Error: not run after a stopped call", None)
                self._observations.append(text)
            if len(text) > OBSERVATION_LIMIT:
                text = text[:OBSERVATION_LIMIT - len(CUT_MARK)] + CUT_MARK
            messages.append({"role": "tool", "content": text})
        return messages

    def _call(self, name: str, arguments: dict) -> tuple[str, bool | None]:
        """Only listed names run, looked up, never evaluated (B1). One exception: a gold call of the current turn runs
        even if unlisted, as in the leaderboard: miss_func_49's gold needs `tail` two turns before it is announced."""
        needed = {gold for gold, _ in self._gold[self._turn].calls} - set(self.task.get("excluded_function", []))
        if name not in self._shown and name not in needed:
            return f"Error during execution: there is no tool named {name!r}", False
        text, ran = execute(self._instances, self._tools[name], arguments)
        if ran:
            self.calls.append((name, arguments))
        return text, ran

    def _open_turn(self) -> dict:
        """The user message that opens the episode (combined) or the current turn; for a turn that brings late tools
        it is their docs and the benchmark's fixed sentence (B9)."""
        from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as LATE
        if self.protocol == "combined":
            requests = [turn[0]["content"] for turn in self.task["question"] if turn]  # miss_func has an empty turn
            steps = [f"Step {number}: {request}" for number, request in enumerate(requests, 1)]
            return {"role": "user", "content": "\n".join(steps) + CLOSING}
        late = self.task.get("missed_function", {}).get(str(self._turn))
        if late is None:
            return dict(self.task["question"][self._turn][0])
        self._shown.update({name: self._tools[name].text for name in late})
        return {"role": "user", "content": LATE.format(functions=tools_text([self._shown[name] for name in late]))}

    def _step_combined(self, blocks: list) -> list[dict]:
        names = [None if isinstance(block, str) else block[0] for block in blocks]
        done = names.index("done") if "done" in names else len(blocks)
        messages = self._run(blocks[:done])
        self._steps += 1
        if not blocks or done < len(blocks):
            self._finish(self._combined_failure())
        elif self._steps >= MAX_STEPS * len(self._gold):
            self._finish("step limit reached")
        return messages

    def _combined_failure(self) -> str | None:
        """What R_state or R_action of eq. 5 lacks, or None. The state is what the benchmark compares, the public
        attributes of the instances."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import state_checker
        verdict = state_checker(self._instances, pickle.loads(self._gold[-1].state))
        if not verdict["valid"]:
            return f"final state: {verdict['error_message']}"
        for name, gold in (call for turn in self._gold for call in turn.calls):
            made = [arguments for other, arguments in self.calls if other == name]
            if not any(all(key in arguments and same_value(arguments[key], value) for key, value in gold.items())
                       for arguments in made):
                return f"gold call not made: {name}({json.dumps(gold, ensure_ascii=False)})"
        return None

    def _step_turns(self, blocks: list) -> list[dict]:
        messages = self._run(blocks)
        called = any(not isinstance(block, str) for block in blocks)
        self._steps += called
        if called and self._steps <= MAX_STEPS:
            return messages
        self._failure = self._failure or self._turn_failure()
        self._turn += 1
        self._steps = 0
        if self._turn == len(self._gold):
            self._finish(self._failure)
        elif called:  # like the leaderboard: step 21 of a turn is still run, then the entry is given up
            self._finish(self._failure or f"step limit reached in turn {self._turn - 1}")
        else:
            messages.append(self._open_turn())
        return messages

    def _turn_failure(self) -> str | None:
        """The benchmark's multi_turn_checker for one turn, on our instances. If there are gold calls: some call was
        made, the state is the gold state, and all observations so far include the gold ones, whole, not as cut for the
        model. A turn without gold calls is not tested, but what it changed stays changed."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker
        gold = self._gold[self._turn]
        if not gold.calls:
            return None
        if not self._steps:
            return f"turn {self._turn}: no call"
        verdict = state_checker(self._instances, pickle.loads(gold.state))
        if verdict["valid"]:
            verdict = response_checker(self._observations, gold.observations, self._turn)
        return None if verdict["valid"] else f"turn {self._turn}: {verdict['error_message']}"


# ===== 12. Experts and failures =============================================================================
def calls_text(calls: list[tuple[str, dict]]) -> str:
    """Hermes blocks, in the layout that the system prompt shows."""
    objects = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def expert_turns(task: dict, protocol: str) -> list[str]:
    """What an expert says, so that playing it scores 1: one message per turn with its gold calls; then done() in
    "combined"; in "turns" a sentence after each of them, and a sentence alone in a turn without gold calls."""
    if protocol == "combined":
        return [calls_text(calls) for calls in gold_turns(task) if calls] + [calls_text([("done", {})])]
    messages = [[calls_text(calls), "This is done."] if calls else ["For this I need another tool or more details."]
                for calls in gold_turns(task)]
    return sum(messages, [])


CORRUPTIONS = ("wrong tool", "missing step", "early done", "wrong argument", "missing argument")


def corrupt_turns(task: dict, turns: list[str], rng: random.Random) -> list[str]:
    """An expert's messages with one mistake, in the same format, so that the reward token does not merely tell formats
    apart. Not every mistake is a failure (a look-up can be left out in vain): run it and check R = 0.

    wrong tool: the one whose parameters are most alike. missing step: one call left out. early done: this call and all
    later ones left out. wrong argument: another value, a text from elsewhere in the plan. missing argument."""
    plan = [parse_tool_calls(text) for text in turns]
    places = [(i, j) for i, calls in enumerate(plan) for j, (name, _) in enumerate(calls) if name != "done"]
    i, j = rng.choice(places)
    name, arguments = plan[i][j]
    kind = rng.choice(CORRUPTIONS if arguments else CORRUPTIONS[:3])
    changed = {place: [] for place in (places[places.index((i, j)):] if kind == "early done" else [(i, j)])}
    if kind == "wrong tool":
        changed[i, j] = [(sibling_tool(task, name, arguments, rng), arguments)]
    elif kind.endswith("argument"):
        wrong, key = dict(arguments), rng.choice(list(arguments))
        value = wrong.pop(key)
        if kind == "wrong argument":
            wrong[key] = wrong_value(value, [plan[a][b][1] for a, b in places], rng)
        changed[i, j] = [(name, wrong)]
    new_plan = [[new for b, call in enumerate(calls) for new in changed.get((a, b), [call])]
                for a, calls in enumerate(plan)]
    return [calls_text(new) if new else text  # a message that lost all its calls is not said at all
            for text, calls, new in zip(turns, plan, new_plan) if new or not calls]


def sibling_tool(task: dict, name: str, arguments: dict, rng: random.Random) -> str:
    shared = {other: len(arguments.keys() & tool.signature.parameters.keys())
              for other, tool in task_tools(task).items()
              if other != name and other not in task.get("excluded_function", [])}
    return rng.choice([other for other, count in shared.items() if count == max(shared.values())])


def wrong_value(value, plan_arguments: list[dict], rng: random.Random):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + rng.choice((-1, 1, 10))
    if isinstance(value, str):
        texts = {text for arguments in plan_arguments for text in arguments.values() if isinstance(text, str)} - {value}
        return rng.choice(sorted(texts)) if texts else value + "_2"
    return value[:-1] if value and isinstance(value, list) else None


# ===== 13. Many processes ===================================================================================
# Everything that serves more than one GPU. Run alone, on a CPU, all of it steps aside: gather is `list`, the
# model is not sharded, and rollouts use the model itself.
class Processes:
    """This process among those that torchrun started. Methods that communicate are called by all of them.

    offload: weights, gradients and moments stay in the host's memory; layers visit the device to compute."""

    def __init__(self, offload: bool = False):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.cuda, self.offload, self.device = torch.cuda.is_available(), offload, torch.device("cpu")
        self.sharded = self.cuda or self.size > 1 or offload
        if self.cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        patience = timedelta(hours=6)  # for the slowest rollout
        if self.sharded and not dist.is_initialized():
            alone = {} if self.size > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
            dist.init_process_group(backend, timeout=patience, **alone)
            if self.size == 1:  # with others, tearing down waits for them: for ever, if this process failed
                atexit.register(dist.destroy_process_group)
        if self.sharded:
            self.objects = dist.new_group(backend="gloo", timeout=patience)  # python objects need no GPU
            self.mesh = dist.init_device_mesh(self.device.type, (self.size,))

    def gather(self, items: list) -> list:
        """The concatenation of everybody's lists, in the order of the ranks, for everybody."""
        if self.size == 1:
            return list(items)
        lists = [None] * self.size
        dist.all_gather_object(lists, items, group=self.objects)
        return [item for one in lists for item in one]

    def mine(self, items: list) -> list:
        return items[self.rank::self.size]

    def attempt(self, action, kinds=(Exception, CheckpointException)):
        """(what action() returns, ""), or if it failed in any process (None, the first error)."""
        result, error = None, ""
        try:
            result = action()
        except kinds as failure:
            if isinstance(failure, CheckpointException):  # no Exception; it holds those of all processes
                failure, _ = next(iter(failure.failures.values()))
            error = f"{type(failure).__name__}: {failure}"
        errors = [e for e in self.gather([error]) if e]
        return (None, errors[0]) if errors else (result, "")

    def together(self) -> dict:
        """How torch.distributed.checkpoint is to talk to the others."""
        return {"no_dist": True} if self.size == 1 else {"process_group": self.objects}

    def leave(self):
        """End one of several processes when all have finished."""
        self.gather([])
        if self.size > 1:
            self._end(0)

    def fail(self, error: BaseException):
        """End one of several processes that failed. The others may wait for it: torchrun ends them."""
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            print(error, file=sys.stderr)
        else:
            traceback.print_exception(error)
        self._end(1)

    def _end(self, code: int):
        """Without Python's teardown, which waits for the others (NCCL) or now and then aborts (gloo)."""
        WORKER.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def shard(self, model):
        """FSDP2: every process holds 1/N of the fp32 weights, gradients and moments; a GPU computes in bf16.
        Gradients are summed, not averaged: rcgrpo divides each term by the count of the whole batch."""
        if not self.sharded:
            return model
        mixed = MixedPrecisionPolicy(self.compute_dtype(), torch.float32)
        offload = CPUOffloadPolicy(pin_memory=self.cuda) if self.offload else OffloadPolicy()
        for module in [*model.get_decoder().layers, model]:
            fully_shard(module, mesh=self.mesh, mp_policy=mixed, offload_policy=offload)
            if self.size > 1:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def whole_copy(self, model):
        """A plain, frozen copy in the compute type on the device, for rollouts."""
        config = copy.deepcopy(model.config)  # the copy has its own dtype and attention
        with self.device:
            plain = AutoModelForCausalLM.from_config(config, dtype=self.compute_dtype())
        for target, source in zip(plain.buffers(), model.buffers(), strict=True):
            target.data = target.data.to(source.dtype)  # a router's bias stays fp32
        return self.refresh(plain.eval().requires_grad_(False), model)

    def compute_dtype(self):
        return torch.bfloat16 if self.cuda else torch.float32

    def reference(self, model):
        """pi_ref: a frozen copy, sharded where there are others to share it with."""
        copied = self.whole_copy(model)
        return self.shard(copied) if self.size > 1 else copied

    @torch.no_grad()
    def refresh(self, plain, model):
        """Bring the copy up to date; parameters and buffers come in the same order, tied ones once."""
        targets, sources = [*plain.parameters(), *plain.buffers()], [*model.parameters(), *model.buffers()]
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.to(self.device).full_tensor() if isinstance(source, DTensor) else source)
        return plain

    def full_state(self, model) -> dict:
        """The state dict on rank 0's CPU, whole, without the second names of tied weights."""
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        every, once = (dict(model.named_parameters(remove_duplicate=unique)) for unique in (False, True))
        return {name: tensor for name, tensor in state.items() if name in once or name not in every}


# ===== 14. Models ===========================================================================================
def load_tokenizer(path: str):
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot load a tokenizer from {path!r}: {error}\nGive --model the name of a model "
                         "on the Hugging Face hub or a folder with config.json, weights, tokenizer.") from None


def load_model(path: str, tokenizer, processes: Processes, checkpointing: bool):
    """fp32 master weights (at lr 1e-6 a bf16 weight would not move), then reward tokens, then shards."""
    gc.collect()  # a sharded model of an earlier stage is part of reference cycles
    if processes.cuda:
        torch.cuda.empty_cache()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot load a model from {path!r}: {error}") from None
    add_reward_tokens(tokenizer, model)
    if checkpointing:
        model.activation_checkpointing_enable()
    return processes.shard(model)


def save_model(model, tokenizer, folder: Path, processes: Processes):
    """A Hugging Face checkpoint, complete or absent: written beside its name and renamed."""
    dtype = processes.compute_dtype()
    state = {name: tensor.to(dtype) for name, tensor in processes.full_state(model).items()}

    def write(part: Path):
        model.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        config = json.loads((part / "config.json").read_text())  # names the type of the master weights
        config["dtype"] = str(dtype).removeprefix("torch.")
        write_text(part / "config.json", json.dumps(config, indent=2) + "\n")

    write_folder(folder, write if processes.rank == 0 else lambda part: None, processes)


def make_policy(model, tokenizer, temperature, sampler, max_new_tokens, cache_tokens, generator=None):
    """The policy of rollouts: rcgrpo's own, or continuous batching, which is faster with flash attention and
    slower without: "auto" looks for that. Its cache is shared and not padded; three times as large, it holds
    a step of the paper's on eight GPUs."""
    flash = model.device.type == "cuda" and is_flash_attn_2_available()
    if sampler == "plain" or sampler == "auto" and not flash:
        return model_policy(model, tokenizer, temperature, max_new_tokens, generator, cache_tokens)
    stop_ids, seed = chat_format(tokenizer).stop_ids, generator.initial_seed() if generator else 0
    return ContinuousPolicy(model, stop_ids, temperature, max_new_tokens, seed, 3 * cache_tokens)


class ContinuousPolicy:
    """Draws from what `rcgrpo.model_policy` draws from; when an action ends, a waiting prompt takes its
    place.

    Keys and values of full pages are kept and found again: in the next turn, by the group's other rollouts.
    model: a plain copy, not sharded.  seed: fixes the draws of the first call, of the second, ...
    cache_tokens: most tokens whose keys and values are held.
    N lists of ids -> N lists of ids. Raises RuntimeError if any of the N failed. `close` frees everything.
    """

    PAGE = 256  # tokens; what flash attention reads in place

    def __init__(self, model, stop_ids, temperature, max_new_tokens, seed, cache_tokens=2**19):
        # All that shapes the draws; the model's own generation config is not read. top_k 0, top_p 1: no cut.
        draw = {"temperature": float(temperature), "top_k": 0, "top_p": 1.0} if temperature else {}
        self.generation = GenerationConfig(do_sample=temperature != 0, **draw, max_new_tokens=max_new_tokens,
                                           eos_token_id=sorted(stop_ids))
        self.model, self.temperature, self.max_tokens = model, temperature, context_length(model.config)
        self.cache_tokens, self.seeds, self.manager = cache_tokens, torch.Generator().manual_seed(seed), None
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # errors are raised below

    def __call__(self, prompts):
        if self.manager and self.weights != weights_version(self.model):
            self.close()  # what it keeps belongs to other weights
        outputs, cuda = {}, [self.model.device] if self.model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(cuda):
                manager = self.manager = self.manager or self._start(prompts)
                with manager.pause():  # added at once: timing must not decide which are drawn together
                    torch.manual_seed(torch.randint(2**62, (), generator=self.seeds).item())
                    requests = manager.add_requests(prompts)
                while len(outputs) < len(prompts):
                    if output := manager.get_result(timeout=1):
                        outputs[output.request_id] = output
                    elif not manager.is_running():
                        break
            errors = {output.error for output in outputs.values()} - {None}
            if errors or len(outputs) < len(prompts):
                cause = manager.background_thread_status.fatal_error
                raise RuntimeError(f"continuous batching failed: {'; '.join(errors) or cause}") from cause
        except BaseException:
            self.close()
            raise
        return [outputs[request].generated_tokens for request in requests]

    def _start(self, prompts):
        lengths, longest_action = [len(prompt) for prompt in prompts], self.generation.max_new_tokens
        pages = sum(math.ceil((length + longest_action) / self.PAGE) for length in lengths)
        config = ContinuousBatchingConfig(
            page_size=self.PAGE,
            # room for this turn and later ones, up to the limit; the default is 90 % of the free memory
            num_blocks=math.ceil(min(4 * pages, self.cache_tokens / self.PAGE)),
            max_batch_tokens=min(max(sum(lengths), self.PAGE), 2048),  # without flash: a mask of this x cache
            disable_nccl_graph_mixing=False,  # for tensor parallelism; it would set an environment variable
            seed=0,  # else it draws one
        )
        hints = WorkloadHints(max(lengths), longest_action, len(prompts))
        self.weights, self.training = weights_version(self.model), self.model.training
        manager = self.model.init_continuous_batching(self.generation, config, hints)
        manager.start()
        return manager

    def close(self):
        """Stop its thread and free its cache. The next call starts anew."""
        manager, self.manager = self.manager, None
        if manager:
            manager.stop(hard_stop=True)
            self.model.train(self.training)


def evaluate_some(processes: Processes, tasks, make_env, policy, tokenizer, reward_token, limits) -> dict:
    """Success on a few test tasks along the way, with its 95 % interval, for metrics.jsonl. Only to be
    watched: the best checkpoint by it would be selected on the test tasks."""
    mine = processes.mine(tasks)
    envs = [make_env(task) for task in mine]
    played = rollout(envs, [reward_token] * len(mine), policy, tokenizer, **limits) if mine else []
    k = sum(processes.gather([sum(t.reward == 1 for t in played)]))
    low, high = wilson(k, len(tasks))
    return {"test_success": k / len(tasks), "test_low": low, "test_high": high, "test_tasks": len(tasks)}


def some_of(tasks: list[dict], n: int = 40) -> list[dict]:
    """The same n tasks every time, from all categories."""
    return tasks[::max(1, len(tasks) // n)][:n]


@contextmanager
def rollout_bar(name: str, total: int, processes: Processes):
    """A bar with the time left; gives the `progress` for `rollout` that moves it."""
    with tqdm(desc=name, total=total, unit="rollout", leave=False, disable=processes.rank > 0) as bar:
        yield lambda still_open: bar.update(total - still_open - bar.n)


def seeded(processes: Processes, *key) -> torch.Generator:
    """A generator for this purpose, step and rank alone: a resumed run draws what it would have drawn."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(processes.device).manual_seed(int.from_bytes(digest[:7], "big"))


# ===== 15. The run folder: settings, metrics, checkpoints ===================================================
def write_folder(folder: Path, write, processes: Processes):
    """All processes call `write(temporary folder)`; if all succeed it gets its name, else nothing is left of
    it and the run ends with a message. Two processes never write the same file."""
    part = folder.with_name(f".{folder.name}.part")
    if processes.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    processes.gather([])
    kinds = OSError, RuntimeError, SafetensorError, CheckpointException
    _, error = processes.attempt(lambda: write(part), kinds)
    if processes.rank == 0:
        shutil.rmtree(part if error else folder, ignore_errors=True)
        if not error:
            part.rename(folder)
    processes.gather([])
    if error:
        raise SystemExit(f"could not write {folder}: {error}\nNothing half-written was left. Make room, then "
                         "run the same command with --resume: it goes on from the last checkpoint.")


class Run:
    """What is in --out: config.json, metrics.jsonl, timings.jsonl, checkpoints/, stage1/, model/, eval.json, ..."""

    def __init__(self, args, processes: Processes):
        self.folder, self.processes = Path(args.out), processes
        self.checkpoints = self.folder / "checkpoints"
        self.settings = {name: value for name, value in sorted(vars(args).items()) if name not in NOT_SETTINGS}
        self.skips = 0  # steps skipped in a row
        self._check_settings()
        self.board = self._tensorboard()

    def _check_settings(self):
        """A folder belongs to one set of settings."""
        file = self.folder / "config.json"
        if file.exists():
            before = json.loads(file.read_text())
            changed = [f"--{n.replace('_', '-')} was {before.get(n)!r}, now {v!r}" for n, v in self.settings.items()
                       if before.get(n) != v]
            if changed:
                raise SystemExit(f"{self.folder} holds a run with other settings: {'; '.join(changed)}.\nChoose another "
                                 "--out, or repeat the settings of that run.")
        self.processes.gather([])  # nobody writes before everybody has looked
        if self.processes.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(self.settings, indent=1) + "\n")

    def _tensorboard(self):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(self.folder / "tensorboard")) if self.processes.rank == 0 else None

    def log(self, stage: str, step: int, metrics: dict):
        """One line in metrics.jsonl, the same in every repetition of the run, and what a clock says in timings.jsonl."""
        if self.processes.rank:
            return
        clock = {name: value for name, value in metrics.items() if name.endswith("_seconds")}
        for file, values in (("metrics.jsonl", {n: v for n, v in metrics.items() if n not in clock}),
                             ("timings.jsonl", clock)):
            with open(self.folder / file, "a") as lines:
                lines.write(json.dumps({"stage": stage, "step": step, **values}) + "\n")
        for name, value in metrics.items() if self.board else ():
            if value is not None:
                self.board.add_scalar(f"{stage}/{name}", value, step)

    def forget_after(self, stage: str, step: int):
        """Drop the lines that a run wrote after its last checkpoint, and a last line cut in the middle."""
        if self.processes.rank:
            return
        for file in ("metrics.jsonl", "timings.jsonl"):
            kept = []
            for line in read_text(self.folder / file).splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if STAGES.index(entry["stage"]) < STAGES.index(stage) or entry["stage"] == stage and entry["step"] < step:
                    kept.append(line + "\n")
            write_text(self.folder / file, "".join(kept))

    def save(self, stage: str, step: int, model, optimizer):
        """Checkpoint "`step` steps are done". Every process writes its shards; older ones but the last go."""
        state = training_state(model, optimizer)

        def write(part):
            checkpoint.save(state, checkpoint_id=part, **self.processes.together())

        write_folder(self.checkpoints / f"{stage}-{step:06d}", write, self.processes)
        if self.processes.rank == 0:
            for old in sorted(self.checkpoints.glob(f"{stage}-*"))[:-2]:
                shutil.rmtree(old)

    def resume(self, stage: str, model, optimizer, wanted: bool) -> int:
        """Load the newest readable checkpoint of the stage, whatever number of processes wrote it. The number
        of steps done, 0 if there is none."""
        folders = sorted(self.checkpoints.glob(f"{stage}-*"), reverse=True)
        if folders and not wanted:
            raise SystemExit(f"{self.folder} holds an unfinished {stage} ({folders[0].name}): add --resume to "
                             "go on with it, or choose another --out.")
        for folder in folders:
            saved, error = self.processes.attempt(checkpoint.FileSystemReader(folder).read_metadata)
            if not error:
                load = functools.partial(checkpoint.load, checkpoint_id=folder, **self.processes.together())
                state = training_state(model, optimizer, saved.state_dict_metadata)
                _, error = self.processes.attempt(functools.partial(load, state))
            if not error:
                return int(folder.name.rsplit("-", 1)[1])
            self.say(f"{folder} cannot be read ({error.splitlines()[0]}); trying the one before it")
        if folders:
            raise SystemExit(f"no checkpoint in {self.checkpoints} can be read: start anew in another --out")
        return 0

    def finish(self, stage: str, model, tokenizer):
        """The stage's model, then no more need for its checkpoints."""
        save_model(model, tokenizer, self.folder / STAGE_FOLDER[stage], self.processes)
        if self.processes.rank == 0:
            for old in self.checkpoints.glob(f"{stage}-*"):
                shutil.rmtree(old)

    def say(self, text: str):
        if self.processes.rank == 0:
            tqdm.write(text)


@torch.no_grad()
def training_state(model, optimizer, saved: dict | None = None) -> dict:
    """All that training changes, by name: weights, and what the optimizer keeps for each of them.

    saved: the names in a checkpoint, with sizes; the optimizer gets places to load them into."""
    parameters, state = dict(model.named_parameters()), {}
    if saved is not None:
        optimizer.state.clear()
        for key, entry in saved.items():
            kind, *name, slot = key.split(".")
            if kind == "optimizer":
                parameter = parameters[".".join(name)]
                moment = entry.size == parameter.shape  # else a count of steps
                place = torch.zeros_like(parameter) if moment else torch.zeros(entry.size)
                optimizer.state[parameter][slot] = place
    for name, parameter in parameters.items():
        state[f"model.{name}"] = parameter
        for slot, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{slot}"] = value
    return state


# torch.distributed.checkpoint warns a process that is alone
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

STAGES = ["stage1", "stage2"]
STAGE_FOLDER = {"stage1": "stage1", "stage2": "model"}


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def write_text(path: Path, text: str):
    """Complete or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


# ===== 16. The plan =========================================================================================
# What the run needs, before anybody pays for it. A test holds the formulas of memory against tracked figures;
# those of time are a model, with the shares of a data sheet's numbers that such programs usually reach.
# name: (bf16 FLOP/s, bytes/s of its memory)
GPUS = {"a100": (312e12, 2e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "4090": (165e12, 1e12)}
READING, UPDATING = 0.45, 0.4  # shares of the peak FLOP/s
LAUNCH, GRAPH = 0.001, 0.002  # seconds: a layer of a plain step of sampling; a step of continuous batching
LOOPING, ENDLESS = 0.03, 0.005  # shares of rollouts that go on to --max-turns, of actions to --max-new-tokens
HOST = 25e9  # bytes/s between host and device


def plan(args, tokenizer, train, test, processes: int, gpu: bool, available: float | None):
    """Print what the run will do and needs. With `available` bytes per process: exit if they are too few."""
    try:
        config = AutoConfig.from_pretrained(args.stage1 or args.model).get_text_config()
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot load the configuration of {args.stage1 or args.model!r}: {error}") from None
    n_params = count_parameters(config)
    experts = [expert_play(task, args, tokenizer) for task in tqdm(train, desc="measuring", leave=False)]
    print(describe(args, train, test, [len(t.ids) for t in experts], processes, n_params, gpu))

    def need(n):
        return sum(size for _, size, _ in memory(args, config, n_params, n, gpu)) / 2**30

    parts, total = memory(args, config, n_params, processes, gpu), need(processes)
    sizes = [2**i for i in range(10)]
    largest, _, remedy = max(parts, key=lambda part: part[1])
    host, disk = host_and_disk(args, n_params, processes)
    free = f", {available / 2**30:.1f} are free" if available else ""
    print(f"memory     GiB per {'GPU; CUDA and NCCL take 1 to 2 more' if gpu else 'process'}")
    for name, size, _ in parts:
        print(f"           {size / 2**30:8.1f}  {name}")
    print(f"           {total:8.1f}  in all{free}; the largest part is {largest}: {remedy}")
    print("           by number of GPUs: " + ", ".join(f"{n}: {need(n):.0f}" for n in sizes[:6]))
    print(f"           of the machine's own {host / 2**30:.0f}, of the disk {disk / 2**30:.0f}")
    if gpu:
        print(hours(args, experts, config, n_params, processes))
    if available and total * 2**30 > available:
        enough = next((n for n in sizes if need(n) * 2**30 <= available), None)
        others = "No number of processes is enough." if enough is None else (
            f"With {enough} such processes it fits: torchrun --nproc-per-node {enough} train_bfcl.py ...")
        raise SystemExit(f"{args.model} does not fit: {total:.0f} GiB needed{free}. "
                         f"The largest part is {largest}: {remedy}. {others}")


def describe(args, train, test, lengths: list[int], processes: int, n_params: int, gpu: bool) -> str:
    """What the run will do. lengths: tokens of the expert trajectories of the training tasks."""
    too_long = sum(n > args.max_tokens for n in lengths)
    rows = (len(lengths) - too_long) * (2 if args.init == "rctp" else 1)
    steps = math.ceil(rows / args.stage1_batch) * args.epochs
    stage1 = stage2 = "none"
    if args.init != "none" and not args.stage1:
        stage1 = (f"{steps} steps: {rows} trajectories, {args.epochs} epochs, batch {args.stage1_batch}, "
                  f"lr {args.stage1_lr}")
    if args.rl != "none":
        stage2 = (f"{args.steps} steps of {args.batch} tasks x G = {args.group_size} rollouts, lr {args.lr}, "
                  f"beta {args.beta}")
    leak = "no test task's gold calls occur in training"
    if args.split != "grouped":
        leak = (f"{leaked(train, test)} of {len(test)} test tasks have a training task with the same gold "
                "calls: memorisation helps")
    lines = [
        f"arm        {args.init} + {args.rl} on {args.model}, {n_params / 1e9:.2f} G parameters, {processes} "
        f"{'GPU' if gpu else 'CPU process'}(s)",
        f"tasks      {len(train)} training, {len(test)} test, split {args.split}: {leak}",
        f"protocol   {args.protocol}",
        f"tokens     experts {min(lengths)} to {max(lengths)}, mean {sum(lengths) // len(lengths)}; "
        f"{too_long} longer than --max-tokens {args.max_tokens} are left out",
        f"stage 1    {stage1}",
        f"stage 2    {stage2}",
        f"evaluation {len(test)} tasks under {', '.join(args.goals)}",
    ]
    if args.init == "rctp" and args.epochs == 5 or args.rl != "none" and args.batch in (64, 256):
        lines.append("note       the paper gives RCTP 5 epochs and SFT 2, RC-GRPO batch 256 and GRPO 64; for "
                     "a fair comparison of arms set --epochs and --batch alike")
    return "\n".join(lines)


def memory(args, config, n_params: int, processes: int, gpu: bool) -> list[tuple[str, float, str]]:
    """(part, bytes per process, what lowers it). Rollouts and updates take turns: the larger one counts."""
    compute, alone = (2 if gpu else 4), not gpu and processes == 1
    fp32 = 0 if args.offload else 4 * n_params / processes
    rollouts = rollout_memory(args, config, compute, gpu)
    update = fp32 + update_memory(args, config, n_params, compute)
    parts = [("fp32 weights and AdamW's moments", 3 * fp32, "more GPUs, or --offload")]
    if args.rl != "none":
        parts.append(("the copy that rolls out", 0 if alone else compute * n_params, "a smaller --model"))
    if args.rl != "none" and args.beta:
        parts.append(("pi_ref", compute * n_params / processes, "more GPUs, or --beta 0"))
    if args.rl != "none" and rollouts > update:
        return [*parts, ("a rollout's keys and values", rollouts, "lower --rollout-tokens")]
    longer = args.max_tokens > args.tokens_per_pass  # a trajectory can be a pass of its own
    remedy = "lower --max-tokens" if longer else "lower --tokens-per-pass"
    return [*parts, ("an update, with its gradients", update, remedy)]


def update_memory(args, config, n_params: int, compute: int) -> float:
    """A pass over T tokens, at its peak: in the backward pass of an MLP, or of the last chunk of logits.
    Beside them live a hidden state per layer, weights and gradients outside the layers, gathered, and those
    of a few."""
    T = max(args.tokens_per_pass, args.max_tokens)
    width, layers = config.hidden_size, config.num_hidden_layers
    inner, vocabulary = getattr(config, "intermediate_size", None) or 4 * width, config.vocab_size
    mlp = T * ((layers + 15) * width + 6 * inner) * compute
    logits = T * layers * width * compute + 4 * 1024 * vocabulary * 4
    root = vocabulary * width * compute
    tied = getattr(config, "tie_word_embeddings", False)
    layer = max(0, n_params - vocabulary * width * (1 if tied else 2)) / layers
    return max(mlp, logits) + 3 * root + 4 * layer * compute


def rollout_memory(args, config, compute: int, gpu: bool) -> float:
    """The cache, and a layer's part of reading with its mask, or what continuous batching works with."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    cache = args.rollout_tokens * bytes_in_cache(config, compute)
    if is_continuous(args, gpu):
        return 3 * cache + 1.5 * 2**30
    return cache + 2**14 * ((3 * inner + 4 * width) * compute + args.max_tokens * (1 + compute))


def bytes_in_cache(config, compute: int) -> int:
    """Keys and values of a token."""
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * width * compute


def is_continuous(args, gpu: bool) -> bool:
    return args.sampler == "continuous" or args.sampler == "auto" and gpu and is_flash_attn_2_available()


def host_and_disk(args, n_params: int, processes: int) -> tuple[float, float]:
    """Bytes of the machine's memory, with all processes on it, and of the disk (3 checkpoints, 2 models)."""
    loading, saving = 4 * n_params * processes, 6 * n_params
    return max(loading, saving + (16 * n_params if args.offload else 0)), 3 * 12 * n_params + 2 * 2 * n_params


def hours(args, experts: list[Trajectory], config, n_params: int, processes: int) -> str:
    """The model's time on --gpu, and what it assumes."""
    stage1, *step = seconds(args, experts, config, n_params, processes)
    sampler = "continuous batching" if is_continuous(args, True) else "the plain sampler"
    lines = []
    if args.init != "none" and not args.stage1:
        lines.append(f"stage 1 {stage1 / 3600:.1f} h")
    if args.rl != "none":
        lines.append(f"stage 2 {args.steps * sum(step) / 3600:.0f} h, a step {sum(step):.0f} s "
                     f"({step[0]:.0f} reading, {step[1]:.0f} sampling, {step[2]:.0f} update)")
    return (f"time       on {processes} {args.gpu}, modelled, not measured: {'; '.join(lines)}\n"
            f"           {sampler}; {READING:.0%} of peak FLOP/s for reading, {UPDATING:.0%} for updates;\n"
            f"           rollouts like the experts', but {LOOPING:.0%} of them loop to --max-turns and\n"
            f"           {ENDLESS:.1%} of actions run to --max-new-tokens")


def seconds(args, experts: list[Trajectory], config, n_params: int, processes: int) -> tuple:
    """Of stage 1, and of reading, sampling and updating in a step of stage 2."""
    flops, bandwidth = GPUS[args.gpu]
    continuous = is_continuous(args, True)
    said = [sum(b > a for a, b in itertools.pairwise([0, *t.mask])) for t in experts]  # actions of each
    prompt = sum(t.mask.index(1) for t in experts) / len(experts)
    action = sum(sum(t.mask) for t in experts) / sum(said)
    answer = (sum(len(t.ids) for t in experts) - prompt * len(experts)) / sum(said) - action
    groups = args.batch / processes
    rollouts = groups * args.group_size

    read = sampling = turns = 0
    for turn in range(args.max_turns):
        talking = rollouts * (LOOPING + (1 - LOOPING) * sum(n > turn for n in said) / len(said))
        length = min(args.max_tokens, prompt + turn * (action + answer))
        parts = 1 if continuous else math.ceil(talking * (length + args.max_new_tokens) / args.rollout_tokens)
        if parts > 1:  # its cache does not hold them all: everything is read again
            read += talking * length
        elif turn == 0:  # a group's prompt is read once, or under each reward token
            read += groups * prompt * (1 if continuous else 2)
        else:  # what is new, and what is left of the last page
            read += talking * (answer + 128 * continuous)
        endless = 1 - (1 - ENDLESS) ** (talking / max(1, parts))  # all wait for the longest action
        steps = endless * args.max_new_tokens + (1 - endless) * min(args.max_new_tokens, 2 * action)
        overhead = GRAPH if continuous else LAUNCH * config.num_hidden_layers
        sampling += min(parts, talking) * steps * (2 * n_params / bandwidth + overhead)
        turns += talking
    tokens = groups * prompt + turns * (action + answer)
    update = tokens * 2 * n_params * 5 / (UPDATING * flops)  # forward, once more, backward (as two), pi_ref

    kept = [len(t.ids) for t in experts if len(t.ids) <= args.max_tokens]
    stage1_tokens = sum(kept) * (2 if args.init == "rctp" else 1) * args.epochs / processes
    stage1 = stage1_tokens * 2 * n_params * 4 / (UPDATING * flops)
    if args.offload:  # each pass moves the weights there twice and the gradients back; AdamW runs on the host
        a_pass, a_step = 12 * n_params / processes / HOST, 28 * n_params / processes / (2 * HOST)
        update += tokens / args.tokens_per_pass * a_pass + a_step
        a_batch = args.stage1_batch / processes * sum(kept) / max(1, len(kept))
        stage1 += stage1_tokens * (a_pass / args.tokens_per_pass + a_step / max(1, a_batch))
    return stage1, read * 2 * n_params / (READING * flops), sampling, update


def count_parameters(config) -> int:
    with torch.device("meta"):  # shapes only
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def expert_play(task: dict, args, tokenizer) -> Trajectory:
    env, policy = BFCLEnv(task, args.protocol), scripted_policy(expert_turns(task, args.protocol), tokenizer)
    (trajectory,) = rollout([env], [None], policy, tokenizer, max_turns=10**6, max_tokens=10**9)
    return trajectory


def memory_there(processes: Processes) -> int:
    """Bytes that are free, per process."""
    if processes.cuda:
        return torch.cuda.mem_get_info(processes.device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes.size


# ===== 17. A tiny run of everything =========================================================================
SMOKE = ("--limit 4 --epochs 1 --stage1-batch 4 --batch 2 --steps 2 --group-size 3 --max-new-tokens 24 --max-tokens 8192 "
         "--checkpoint-every 1 --stage1-lr 1e-3 --lr 1e-4").split()
SMOKE_TEMPLATE = ("{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
                  "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}")


def smoke(out: Path, processes: Processes):
    """Every stage of every arm, with real tasks, observations and rewards; only the model is tiny and knows nothing."""
    base = out / "base"
    write_folder(base, lambda part: make_tiny_model(part) if processes.rank == 0 else None, processes)
    for init, rl in itertools.product(["rctp", "sft", "none"], ["rc-grpo", "grpo", "none"]):
        folder = out / f"{init}+{rl}"
        shutil.rmtree(folder, ignore_errors=True)
        flags = ["--model", str(base), "--init", init, "--rl", rl, "--out", str(folder), "--smoke", *SMOKE]
        if init != "none" and rl != "rc-grpo":
            flags += ["--stage1", str(out / f"{init}+rc-grpo" / "stage1")]
        print(f"\n=== {init} + {rl} ===", flush=True)
        pipeline(parse_arguments(flags), processes)
    print(f"\nEvery stage of every arm ran. The runs are in {out}; with weights that know nothing, 0 % is the right score.")


def make_tiny_model(folder: Path):
    """A random Qwen2 and a byte-level BPE tokenizer trained on the benchmark's own text."""
    texts = [system_text([tool.text for tool in task_tools(task).values()]) for task in load_tasks()[::40]]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=bpe.pre_tokenizer.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", extra_special_tokens=["<|start|>"])
    tokenizer.chat_template = SMOKE_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16384, tie_word_embeddings=True)).save_pretrained(folder)


def main(argv=None):
    args = parse_arguments(argv)
    if args.plan:
        args.tokenizer = load_tokenizer(args.stage1 or args.model)
        train, test = choose_tasks(args)
        return plan(args, args.tokenizer, train, test, int(os.environ.get("WORLD_SIZE", 1)), gpu=True, available=None)
    processes = Processes(args.offload)
    try:
        if args.smoke:
            smoke(Path(args.out) if args.out != "runs/bfcl" else Path("runs/smoke"), processes)
        else:
            pipeline(args, processes)
        processes.leave()
    except BaseException as error:
        stopped = None
        if isinstance(error, KeyboardInterrupt):
            stopped = SystemExit(f"\nstopped; {args.out} is whole; the same command with --resume goes on")
        if processes.size > 1:
            processes.fail(stopped or error)
        if stopped:
            raise stopped from None
        raise


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Some of the benchmark's error texts print a set, in hash order: the same run must say the same twice.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    try:
        main()
    except RuntimeError as error:
        if "bfcl-eval" not in str(error):
            raise
        raise SystemExit(str(error)) from None
