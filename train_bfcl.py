"""RC-GRPO on the Berkeley Function Calling Leaderboard (BFCL v4, multi-turn), on GPUs.

    python train_bfcl.py                         the paper's main arm: RCTP, then RC-GRPO, then evaluation
    python train_bfcl.py --init sft --rl grpo    another: --init {rctp,sft,none} --rl {rc-grpo,grpo,none}
    torchrun --nproc-per-node 8 train_bfcl.py    on eight GPUs
    python train_bfcl.py --plan                  what it would do and need, without loading a model
    python train_bfcl.py --smoke                 every stage of every arm, tiny; needs no GPU

Read rcgrpo.py first: the method is there. Sections 1-5 are what this script does: settings, pipeline, data,
stages, evaluation. 6-12 are the benchmark. 13-17 serve many GPUs and long runs; a reader may skip them.
Needs the public package bfcl-eval: pip install --no-deps bfcl-eval==2026.3.23
"""

# ruff: noqa: E402 (the benchmark and what serves long runs carry their own imports)
from __future__ import annotations

import argparse
import json
import math
import random
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from rcgrpo import HIGH, LOW, Trajectory, label_by_reward, rcgrpo_step, rctp_step, rollout, scripted_policy

# ===== 1. Settings ==========================================================================================
COUNT, FROM_0 = (int, 1, 10**9), (int, 0, 10**9)  # (kind, lowest, highest)
RATE, SHARE, WEIGHT = (float, 1e-12, 1), (float, 0, 1), (float, 0, 1e6)
TEMPERATURE, BOUND = (float, 0.01, 100), (float, 1e-6, 1e6)
TEXT, YES_OR_NO = "text", None
REWARD_TOKENS = {"high": HIGH, "low": LOW, "none": None}

# block: (flag, default, values, meaning)
SETTINGS = {
    "this call": [
        ("--out", "runs/bfcl", TEXT, "folder of the run"),
        ("--stage", "all", ["all", "data", "stage1", "stage2", "eval"],
         "run one stage alone; what earlier ones left in --out is picked up"),
        ("--resume", False, YES_OR_NO, "go on from the last checkpoint in --out"),
        ("--plan", False, YES_OR_NO, "print tasks, tokens, steps, memory and hours, and exit"),
        ("--smoke", False, YES_OR_NO, "every stage of every arm on a tiny random model; needs no GPU"),
        ("--goals", list(REWARD_TOKENS), list(REWARD_TOKENS), "reward tokens to evaluate under"),
    ],
    "arm": [
        ("--model", "Qwen/Qwen2.5-7B-Instruct", TEXT, "causal LM with a chat template: hub name or folder"),
        ("--init", "rctp", ["rctp", "sft", "none"], "stage 1: reward-conditioned, on experts alone, or none"),
        ("--rl", "rc-grpo", ["rc-grpo", "grpo", "none"],
         "stage 2: a reward token drawn for each rollout, plain GRPO, or none"),
        ("--split", "grouped", ["grouped", "paper"], "training and test tasks: without leak, or the paper's"),
        ("--protocol", "combined", ["combined", "turns"], "the paper's one prompt, the leaderboard's turns"),
        ("--limit", 0, FROM_0, "keep X training and X test tasks, of the shortest tool lists; 0: all"),
        ("--seed", 0, FROM_0, "of everything random but the split"),
    ],
    "stage 1": [
        ("--stage1", None, TEXT, "start stage 2 from the stage-1 model in this folder; train none"),
        ("--failures", "rollout", ["rollout", "corrupt"],
         "failures for RCTP: of the base model, topped up by corrupted experts; or only those"),
        ("--failure-temperature", 0.7, TEMPERATURE, "of the base model's rollouts that become failures"),
        ("--stage1-lr", 1e-5, RATE, "learning rate of stage 1"),
        ("--stage1-batch", 16, COUNT, "trajectories per step of stage 1"),
        ("--epochs", None, COUNT, "passes over the data; default: the paper's, 5 for rctp, 2 for sft"),
    ],
    "stage 2": [
        ("--lr", 1e-6, RATE, "learning rate of stage 2"),
        ("--batch", None, COUNT, "tasks (of G rollouts) a step; default: the paper's, 256 rc-grpo, 64 grpo"),
        ("--steps", 400, COUNT, "batches of tasks in all"),
        ("--updates", 1, COUNT, "optimizer steps on each batch"),
        ("--group-size", 5, COUNT, "G, rollouts per task"),
        ("--p-high", 0.5, SHARE, "p, probability of the high reward token"),
        ("--stratified", False, YES_OR_NO, "equally many high reward tokens in each group (3 of 5)"),
        ("--temperature", 1.0, TEMPERATURE, "of the rollouts"),
        ("--beta", 0.1, WEIGHT, "weight of the KL to the stage-1 model; 0: no such model is kept"),
        ("--clip", 0.2, BOUND, "clip range of the ratio; does something only with --updates above 1"),
        ("--ratio", "token", ["token", "trajectory"], "one rho per token or per trajectory"),
    ],
    "both stages": [
        ("--max-grad-norm", 1.0, BOUND, "gradient clipping"),
        ("--max-tokens", 16384, COUNT, "length limit of a trajectory; longer: truncated, reward 0"),
        ("--max-new-tokens", 1024, COUNT, "length limit of one action; longer: truncated, reward 0"),
        ("--max-turns", 30, COUNT, "assistant turns per rollout; more: truncated, reward 0"),
    ],
    "memory and speed": [
        ("--tokens-per-pass", 24576, COUNT, "tokens of one forward and backward pass in training"),
        ("--rollout-tokens", 2**17, COUNT,
         "tokens, padding included, in the sampler's cache; continuous batching: three times as many"),
        ("--sampler", "auto", ["auto", "plain", "continuous"],
         "plain loop or transformers' continuous batching; auto: the latter on a GPU with flash attention"),
        ("--offload", False, YES_OR_NO, "weights, gradients, moments in the host's memory: slower"),
        ("--checkpoint-every", 10, COUNT, "steps between checkpoints"),
        ("--eval-every", 25, COUNT, "steps of stage 2 between evaluations on 40 fixed test tasks"),
        ("--gpu", "h100", ["a100", "h100", "h200", "4090"], "for --plan, without a GPU it knows"),
    ],
}
BINDING = ("arm", "stage 1", "stage 2", "both stages")  # a run folder belongs to one value of each of these


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage="train_bfcl.py [flags]   (--help lists them)", description=__doc__,
                                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    for block, flags in SETTINGS.items():
        group = parser.add_argument_group(block + " (may change when a run goes on)" * (block not in BINDING))
        for flag, default, values, meaning in flags:
            shown = meaning if default is None else f"{meaning} (default: {default})"
            if values is YES_OR_NO:
                group.add_argument(flag, action="store_true", help=meaning)
            elif isinstance(values, list):
                several = "+" if isinstance(default, list) else None
                group.add_argument(flag, default=default, choices=values, nargs=several, help=shown)
            else:
                read = str if values is TEXT else number(*values)
                group.add_argument(flag, default=default, type=read, metavar="X", help=shown)
    s = parser.parse_args(argv)
    s.epochs = s.epochs or {"rctp": 5, "sft": 2, "none": 1}[s.init]
    s.batch = s.batch or {"rc-grpo": 256, "grpo": 64, "none": 1}[s.rl]
    s.goals = list(dict.fromkeys(s.goals))
    idle = f"--stage {s.stage} has nothing to do in the arm --init {s.init} --rl {s.rl} --stage1 {s.stage1}"
    for refused, reason in (
        ("" in [str(text).strip() for text in (s.out, s.model, s.stage1)],
         "--out, --model and --stage1 must not be empty"),
        (s.group_size < 2 and s.rl != "none", "--group-size needs at least 2: rollouts are compared"),
        (s.stage1 and s.init == "none", "--stage1 with --init none: say how it was trained, rctp or sft"),
        (s.stage in ("data", "stage1") and (s.init == "none" or s.stage1), idle),
        (s.stage == "stage2" and s.rl == "none", idle),
        (s.smoke and (s.plan or s.resume or s.stage1 or s.stage != "all"),
         "--smoke runs every stage of its arms: leave out --plan, --resume, --stage and --stage1"),
    ):
        if refused:
            parser.error(reason)
    return s


def number(kind, low, high):
    """What argparse calls to read a flag: text -> a number from low to high. nan and inf are none."""
    def read(text):
        with suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        name = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"must be a {name} from {low:g} to {high:g}, not {text!r}")
    return read


# ===== 2. The pipeline ======================================================================================
# Further down: run.steps are the steps left to do, run.log writes metrics.jsonl, run.finish saves the model;
# processes.mine(items) is this process's share of them, processes.gather(items) everybody's.
def pipeline(s, processes: Processes, train_env=None):
    """data -> stage 1 -> stage 2 -> evaluation, leaving out what --out holds already.

    s: the settings.  train_env: in place of BFCLEnv in stage 2."""
    train, test = choose_tasks(s.split, s.limit)
    tokenizer = check_everything(s, processes.size)  # before --out is claimed
    if processes.rank == 0 and not s.smoke:
        plan(s, tokenizer, train, test, processes.size, processes.cuda, memory_there(processes))

    with Run(s.out, binding_settings(s), processes, s.resume, s.checkpoint_every) as run:
        stage1 = Path(s.stage1) if s.stage1 else run.folder / "stage1"
        start = Path(s.model) if s.init == "none" else stage1
        final = start if s.rl == "none" else run.folder / "model"
        limits = {"max_turns": s.max_turns, "max_tokens": s.max_tokens}
        both_stages = {"tokens_per_pass": s.tokens_per_pass, "max_grad_norm": s.max_grad_norm}
        policy_of = partial(make_policy, tokenizer=tokenizer, sampler=s.sampler, max_tokens=s.max_tokens,
                            max_new_tokens=s.max_new_tokens, cache_tokens=s.rollout_tokens)

        def load(path):
            return load_model(str(path), tokenizer, processes, checkpointing=processes.cuda)

        def load_to_sample(path):
            return processes.copy_alone(partial(load, path)) if processes.sharded else load(path)

        def base_policy():
            generator = seeded(processes, s.seed, "failures", processes.rank)
            model = load_to_sample(s.model)
            return policy_of(model, generator=generator, temperature=s.failure_temperature)

        # data, stage 1
        trained_here = s.init != "none" and not s.stage1 and (s.rl == "none" or not final.exists())
        if s.stage in ("all", "data", "stage1") and trained_here and not stage1.exists():
            data = make_data(run, train, tokenizer, s.protocol, limits, s.seed, conditioned=s.init == "rctp",
                             base_policy=base_policy if s.failures == "rollout" else None)
            if s.stage == "data":
                return
            train_stage1(run, data, load(s.model), tokenizer, s.epochs, s.stage1_batch, s.stage1_lr, s.seed,
                         **both_stages)
        if trained_here:
            there_is(stage1, "stage1")
        # stage 2
        if s.stage in ("all", "stage2") and s.rl != "none" and not final.exists():
            make_env = partial(train_env or BFCLEnv, protocol=s.protocol)
            p = p_of_stage2(s.init, s.rl, s.p_high)
            reward_token = REWARD_TOKENS[own_reward_token(s.init, s.rl)]

            def watch(model):
                return evaluate_some(processes, some_of(test), partial(BFCLEnv, protocol=s.protocol),
                                     policy_of(model, temperature=0), tokenizer, reward_token, limits)

            sampling_policy_of = partial(policy_of, temperature=s.temperature)
            train_stage2(run, train, load(start), tokenizer, make_env, sampling_policy_of, s.steps, s.batch,
                         s.lr, s.seed, limits, G=s.group_size, p=p, stratified=s.stratified, beta=s.beta,
                         clip=s.clip, ratio=s.ratio, updates=s.updates, watch=watch, eval_every=s.eval_every,
                         **both_stages)
        # evaluation
        if s.stage in ("all", "eval"):
            if s.rl != "none":
                there_is(final, "stage2")
            evaluate(run, test, load_to_sample(final), tokenizer, partial(policy_of, temperature=0), limits,
                     s.goals, s.split, s.protocol, *trained_arm(s))


def choose_tasks(split: str, limit: int) -> tuple[list[dict], list[dict]]:
    def length(task):
        return sum(len(tool.text) for tool in task_tools(task).values()), task["id"]

    train, test = split_tasks(load_tasks(), split)
    if limit:
        train, test = sorted(train, key=length)[:limit], sorted(test, key=length)[:limit]
    return train, test


def p_of_stage2(init: str, rl: str, p: float) -> float | None:
    """P(high). Plain GRPO has one reward token for all its rollouts: high after RCTP, else none."""
    if rl == "rc-grpo":
        return p
    return 1.0 if init == "rctp" else None


# ===== 3. Data for stage 1 ==================================================================================
def make_data(run: Run, train: list[dict], tokenizer, protocol: str, limits: dict, seed: int,
              conditioned: bool, base_policy) -> list[Trajectory]:
    """Expert trajectories of the training tasks and, for RCTP (conditioned), as many failures.

    Kept in data.jsonl, and read from there the next time. base_policy: () -> the base model as a policy; its
    rollouts become failures. None: all are corrupted experts."""
    file, processes = run.folder / "data.jsonl", run.processes

    def expert(task):
        reward_token = HIGH if conditioned else None
        return play_script(task, protocol, expert_turns(task, protocol), reward_token, tokenizer, limits)

    if file.exists():
        return read_data(file, train, conditioned, len(tokenizer), expert)
    mine = processes.mine(train)
    experts = [expert(task) for task in tqdm(mine, "expert trajectories", disable=processes.rank > 0)]
    data = [t for t in experts if not t.truncated]
    too_long = sum(processes.gather([len(experts) - len(data)]))
    if bad := [t.group for t in data if t.reward != 1]:
        raise SystemExit(f"experts of {bad} do not score 1: is bfcl-eval {BFCL_VERSION} unchanged?")
    if conditioned:
        fitting = {t.group for t in data}
        tasks = [task for task in mine if task["id"] in fitting]
        data += make_failures(run, tasks, tokenizer, protocol, limits, seed, base_policy)
    data = sorted(processes.gather(data), key=lambda t: (t.group, t.reward_token or ""))
    if not data:
        raise SystemExit(f"not one of the {len(train)} training tasks fits into --max-tokens "
                         f"{limits['max_tokens']}: raise it")
    good, tokens = sum(t.reward == 1 for t in data), sum(len(t.ids) for t in data)
    run.say(f"data: {good} expert and {len(data) - good} failure trajectories, {tokens:,} tokens; left out, "
            f"longer than --max-tokens: {too_long} tasks")
    if processes.rank == 0:
        write_text(file, "".join(json.dumps(vars(t)) + "\n" for t in data))
    processes.gather([])  # a barrier
    return data


def play_script(task: dict, protocol: str, texts: list[str], reward_token, tokenizer, limits) -> Trajectory:
    env, policy = BFCLEnv(task, protocol), scripted_policy(texts, tokenizer)
    limits = {**limits, "max_turns": 10**6}  # that limit is for models: a script ends by itself
    return rollout([env], [reward_token], policy, tokenizer, [task["id"]], **limits)[0]


def make_failures(run: Run, tasks: list[dict], tokenizer, protocol: str, limits: dict, seed: int,
                  base_policy) -> list[Trajectory]:
    """One failure, R = 0, for each task: a rollout of the base model, or else a corrupted expert."""
    failures, gather = {}, run.processes.gather
    if base_policy is not None:
        policy, envs = base_policy(), [BFCLEnv(task, protocol) for task in tasks]
        # The base model never saw a reward token: it rolls out without one, and eq. 1 labels the rollout.
        played = rollout(envs, [None] * len(tasks), policy, tokenizer, [task["id"] for task in tasks],
                         **limits) if tasks else []
        for env, t in zip(envs, played, strict=True):
            if t.reward == 0 and any(t.mask):
                labelled = label_by_reward(t, env.log[:2], tokenizer)  # its two opening messages
                if len(labelled.ids) <= limits["max_tokens"]:
                    failures[t.group] = labelled
    from_model = len(failures)
    rest = [task for task in tasks if task["id"] not in failures]
    for task in tqdm(rest, "corrupted experts", disable=run.processes.rank > 0):
        rng, turns = random.Random(f"{seed} {task['id']}"), expert_turns(task, protocol)
        for _ in range(100):
            t = play_script(task, protocol, corrupt_turns(task, turns, rng), LOW, tokenizer, limits)
            if t.reward == 0 and any(t.mask):
                failures[task["id"]] = t
                break
        else:
            raise SystemExit(f"100 corruptions of {task['id']} all scored 1")
    run.say(f"failures: {sum(gather([from_model]))} rollouts of the base model, "
            f"{sum(gather([len(rest)]))} corrupted experts")
    return list(failures.values())


# ===== 4. The two stages ====================================================================================
def batch_indices(n: int, batch: int, step: int, seed: int, name: str) -> list[int]:
    """The indices of batch number `step` when n items are shuffled anew in each pass. The last is filled up
    from the beginning of the pass: all batches, and so all processes' shares of them, have one size."""
    passed, number = divmod(step, math.ceil(n / batch))
    order = list(range(n))
    random.Random(f"{seed} {name} {passed}").shuffle(order)
    return [order[(number * batch + i) % n] for i in range(batch)]


def train_stage1(run: Run, data: list[Trajectory], model, tokenizer, epochs: int, batch: int, lr: float,
                 seed: int, **step_settings):
    """RCTP, or SFT where no trajectory has a reward token. step_settings: keywords of `rctp_step`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0)
    steps = math.ceil(len(data) / batch) * epochs
    for step in run.steps("stage1", steps, model, optimizer):
        rows = run.processes.mine(batch_indices(len(data), batch, step, seed, "stage1"))
        trajectories = [data[row] for row in rows]
        metrics = rctp_step(model, optimizer, trajectories, gather=run.processes.gather, **step_settings)
        run.log("stage1", step, metrics, trajectories)
        run.bar.set_postfix_str(f"loss {metrics['loss']:.4f}")
    run.finish("stage1", model, tokenizer)


def train_stage2(run: Run, train: list[dict], model, tokenizer, make_env, policy_of, steps: int, batch: int,
                 lr: float, seed: int, limits: dict, beta: float, G: int, watch, eval_every: int,
                 **step_settings):
    """RC-GRPO or GRPO. policy_of: (model, generator=...) -> a policy. step_settings: those of `rcgrpo_step`.

    watch: (model) -> metrics of test tasks, asked for before every eval_every-th step."""
    processes = run.processes
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0)
    ref_model = processes.reference(model) if beta else None  # the stage-1 model: no checkpoint is loaded yet
    actor = processes.whole_copy(model) if processes.sharded else model  # rollouts need whole weights
    for step in run.steps("stage2", steps, model, optimizer):
        if actor is not model:
            processes.refresh(actor, model)
        key = seed, "stage2", step, processes.rank
        tasks = [train[i] for i in processes.mine(batch_indices(len(train), batch, step, seed, "stage2"))]
        reward_token_seed = seeded(processes, *key, "reward tokens").initial_seed()
        watched = watch(actor) if step % eval_every == 0 else {}
        with rollout_bar("rollouts", len(tasks) * G, processes) as progress:
            metrics, trajectories = rcgrpo_step(
                model, ref_model, optimizer, tasks, make_env,
                policy_of(actor, generator=seeded(processes, *key, "sample")), tokenizer, G=G, beta=beta,
                generator=torch.Generator().manual_seed(reward_token_seed),
                limits={**limits, "progress": progress}, gather=processes.gather, mine=processes.mine,
                **step_settings,
            )
        run.say(summary_line(step, steps, {**metrics, **watched}))
        samples = [{"reward_token": t.reward_token, "reward": t.reward, "text": tokenizer.decode(t.ids)}
                   for t in trajectories[:1]]
        run.log("stage2", step, {**metrics, **watched}, trajectories, *samples)
    run.finish("stage2", model, tokenizer)


# ===== 5. Evaluation ========================================================================================
def trained_arm(s) -> tuple[str, str]:
    """(init, rl) of the model: of this run, or if nothing is trained here of the one that made --model."""
    made = read_origin(s.model) if s.init == s.rl == "none" else None
    return (made["init"], made["rl"]) if made else (s.init, s.rl)


def own_reward_token(init: str, rl: str) -> str:
    """What an arm is used under: high if it was trained under reward tokens at all."""
    return "high" if init == "rctp" or rl == "rc-grpo" else "none"


def evaluate(run: Run, test: list[dict], model, tokenizer, policy_of, limits: dict, goals: list[str],
             split: str, protocol: str, init: str, rl: str) -> dict:
    """Greedy rollouts of all test tasks under each reward token: eval.json, trajectories.jsonl, a table.

    policy_of: (model) -> a greedy policy.  init, rl: the arm that made the model."""
    lines = []
    for goal in goals:
        tasks = run.processes.mine(test)
        envs = [BFCLEnv(task, protocol) for task in tasks]
        with rollout_bar(f"evaluation, {goal}", len(tasks), run.processes) as progress:
            reward_tokens = [REWARD_TOKENS[goal]] * len(tasks)
            played = rollout(envs, reward_tokens, policy_of(model), tokenizer, **limits,
                             progress=progress) if tasks else []
        for task, env, t in zip(tasks, envs, played, strict=True):
            reason = "ran into --max-tokens, --max-new-tokens or --max-turns" if t.truncated else env.reason
            lines.append({"id": task["id"], "goal": goal, "reward": t.reward, "truncated": t.truncated,
                          "reason": reason, "calls": env.calls, "messages": env.log})
    lines = run.processes.gather(lines)
    results = {goal: tally([line for line in lines if line["goal"] == goal]) for goal in goals}
    arm, own = f"{init} + {rl}", own_reward_token(init, rl)
    if run.processes.rank == 0:
        report = {"arm": arm, "reward_token": own, "split": split, "protocol": protocol, "goals": results}
        write_text(run.folder / "trajectories.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_text(run.folder / "eval.json", json.dumps(report, indent=1) + "\n")
    run.say("\n" + table(arm, results, own))
    return results


# ===== 6. The benchmark: tasks and splits ===================================================================
import ast
import decimal
import functools
import inspect
import pickle
import re
import threading
from collections import namedtuple
from importlib import import_module, metadata, resources

BFCL_VERSION = "2026.3.23"
CATEGORIES = ("base", "long_context", "miss_func", "miss_param")


def bfcl_data():
    """The benchmark's data folder; RuntimeError, saying what to install, if bfcl-eval is not as needed."""
    installed = [package.version for package in metadata.distributions(name="bfcl-eval")]
    if installed != [BFCL_VERSION]:
        raise RuntimeError(f"BFCL needs bfcl-eval {BFCL_VERSION}, installed: {installed or 'none'}. Its own "
                           f"packages are not needed: pip install --no-deps bfcl-eval=={BFCL_VERSION}")
    return resources.files("bfcl_eval") / "data"


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load_tasks() -> list[dict]:
    """The 800 multi-turn tasks by category and number: the benchmark's entries untouched, and "ground_truth":
    the gold calls as Python call strings, turn by turn."""
    data = bfcl_data()
    tasks = []
    for category in CATEGORIES:
        file = f"BFCL_v4_multi_turn_{category}.json"
        entries = sorted(read_lines(data / file), key=task_number)
        answers = sorted(read_lines(data / "possible_answer" / file), key=task_number)
        tasks += [{**entry, **answer} for entry, answer in zip(entries, answers, strict=True)]
    return tasks


def task_number(task: dict) -> int:
    """multi_turn_miss_func_17 -> 17: the four categories are variations of the same 200 stories."""
    return int(task["id"].rsplit("_", 1)[1])


def gold_list(task: dict) -> tuple:
    """All gold calls in order, without turns: often an empty turn is all that a category changes."""
    return tuple(call for turn in task["ground_truth"] for call in turn)


def split_tasks(tasks: list[dict], kind: str) -> tuple[list[dict], list[dict]]:
    """(train, test), a tenth in test, always the same one.

    "grouped": tasks that share a number or a gold list stay on one side; training sees nothing of test.
    "paper": the paper's, a seeded shuffle of single tasks; `leaked` counts what training sees of test."""
    size = round(len(tasks) / 10)
    if kind == "paper":
        shuffled = list(tasks)
        random.Random(42).shuffle(shuffled)
        return shuffled[size:], shuffled[:size]
    if kind != "grouped":
        raise ValueError(f"the split is 'grouped' or 'paper', not {kind!r}")
    groups = group_tasks(tasks)
    random.Random(0).shuffle(groups)
    held_out = set()
    for group in groups:  # all four categories of its numbers: the balance comes by itself
        if len(held_out) + len(group) <= size:
            held_out |= group
    return [t for t in tasks if t["id"] not in held_out], [t for t in tasks if t["id"] in held_out]


def group_tasks(tasks: list[dict]) -> list[frozenset]:
    """Sets of ids of the tasks that share a number or a gold list, directly or through other tasks."""
    groups = {}  # number or gold list -> its group
    for task in tasks:
        keys = task_number(task), gold_list(task)
        group = frozenset([task["id"]]).union(*(groups.get(key, ()) for key in keys))
        joined = [key for key, other in groups.items() if other < group]
        groups.update(dict.fromkeys([*joined, *keys], group))
    return list(dict.fromkeys(groups.values()))


def leaked(train: list[dict], test: list[dict]) -> int:
    """How many test tasks have a training task with the identical list of gold calls."""
    seen = {gold_list(task) for task in train}
    return sum(gold_list(task) in seen for task in test)


# ===== 7. The benchmark: tools and the prompt that shows them ===============================================
SYSTEM_PROMPT = ("You complete the user's requests by calling tools. Look things up instead of guessing, "
                 "and use only the tools that are listed.")
CLOSING = "\n\nComplete all steps with the tools, in this order, and call done() at the end."
DONE = json.dumps({"type": "function", "function": {
    "name": "done", "description": "Say that all steps are complete; this ends the conversation.",
    "parameters": {"type": "object", "properties": {}, "required": []}}})
# api: the class that has the method.  text: what the model reads, a line of JSON.  signature: without self
Tool = namedtuple("Tool", "name api text signature")


def api_class(name: str) -> type:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
    return getattr(import_module(CLASS_FILE_PATH_MAPPING[name]), name)


@functools.lru_cache(maxsize=None)  # eight classes
def class_tools(api: str) -> dict[str, Tool]:
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING as FILES
    instance, tools = api_class(api)(), {}
    for doc in read_lines(bfcl_data() / "multi_turn_func_doc" / FILES[api]):
        shown = {key: doc[key] for key in ("name", "description", "parameters")}
        text = json.dumps({"type": "function", "function": shown}, ensure_ascii=False)
        text = text.replace('"type": "dict"', '"type": "object"')  # JSON schema's words; in descriptions
        text = text.replace('"type": "float"', '"type": "number"')  # quotes are escaped: they stay
        signature = inspect.signature(getattr(instance, doc["name"]))
        tools[doc["name"]] = Tool(doc["name"], api, text, signature)
    return tools


def task_tools(task: dict) -> dict[str, Tool]:
    """Name -> tool: all documented methods of the task's classes but those that it excludes."""
    excluded = task.get("excluded_function", [])
    return {name: tool for api in task["involved_classes"] for name, tool in class_tools(api).items()
            if name not in excluded}


def system_text(tools: list[str]) -> str:
    """Our system prompt, then the tools in Hermes form: exactly what Qwen2.5's template writes for `tools=`.
    Written out here, a template that ignores `tools` (Llama-3.1's does) shows its model the same."""
    return (f"{SYSTEM_PROMPT}\n\n"
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"{tools_text(tools)}\n\n"
            "For each function call, return a json object with function name and arguments "
            "within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')


def tools_text(tools: list[str]) -> str:
    return "\n".join(["<tools>", *tools, "</tools>"])


# ===== 8. The benchmark: parsing what the model says ========================================================
MAX_DEPTH = 32  # nesting of a call's JSON; gold calls need 3
TAG = re.compile(r"<tool_call>[ \t\r\n]*|</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)
BLOCK_END = re.compile(r"[ \t\r\n]*(</tool_call>|\Z)")
BAD_BLOCK_END = re.compile(r"</tool_call>|(?=</think>)|\Z")


def parse_tool_calls(text: str) -> list:
    """One item per <tool_call> block, in order: (name, arguments) or, for a malformed block, an error text.

    '<tool_call>{"name": "ls"}</tool_call> and <tool_call>{oops</tool_call>' -> [("ls", {}), "Error: ..."]

    A block holds exactly one JSON object with a string "name" and ends where that object ends: a tag inside
    one of its strings is text. Nothing is repaired, no type is changed. A malformed block reaches to the next
    closing tag. A last block counts without one, if nothing follows: a stop string may have eaten it.

    What is said in a thought does not run. It reaches from <think> to </think>, or to the message's end; a
    </think> without <think> ends a thought that the prompt opened: all that was said before."""
    items, position = [], 0
    while tag := TAG.search(text, position):
        position = tag.end()
        if tag[0] == "</think>":
            items = []
        elif tag[0].startswith("<tool_call>"):
            try:
                call, position = parse_block(text, position)
                items.append(call)
            except (ValueError, RecursionError) as error:
                items.append(f"Error: this tool call could not be read and was not run: {error}")
                position = BAD_BLOCK_END.search(text, position).end()
    return items


def parse_block(text: str, start: int) -> tuple[tuple[str, dict], int]:
    """((name, arguments), where the block ends); Value- or RecursionError if it is malformed."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    call, length = decoder.raw_decode(text[start:])
    closing = BLOCK_END.match(text, start + length)
    if not closing:
        raise ValueError("only </tool_call> may follow the JSON object")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('a block must hold one JSON object with a string "name"')
    if "arguments" in call and "parameters" in call:
        raise ValueError('give "arguments" or "parameters", not both')
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None or arguments == "":  # three ways to say "none": missing, null, ""
        arguments = {}
    elif isinstance(arguments, str):  # the object as a string, as the OpenAI interface has it
        arguments = decoder.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments must be one JSON object")
    json.dumps([call, arguments], allow_nan=False, ensure_ascii=False).encode()  # no 1e999, whole characters
    if depth(arguments) > MAX_DEPTH:
        raise ValueError(f"the arguments are nested deeper than {MAX_DEPTH} levels")
    return (call["name"], arguments), closing.end()


def unique_keys(pairs: list[tuple]) -> dict:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object has the same key twice")
    return dict(pairs)


def depth(value) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


# ===== 9. The benchmark: running a call =====================================================================
MAX_NUMBER, MAX_PRECISION = 1e300, 1000  # for what MathAPI computes exactly or to any precision
MAX_PATHS, MAX_PATH = 1000, 255  # paths in a file tree, characters of the longest; the tasks have 126 and 64
ONE_CALL = threading.Lock()  # some data of the APIs, and mpmath's precision, belong to the whole process


def execute(instances: dict, tool: Tool, arguments: dict) -> str:
    """Run one call. The observation is the text that the benchmark's executor gives: a string as it is, a
    dict as JSON, the rest (None, lists, dicts with Decimal, mpf or complex) as Python's str, an exception as
    an error line. Type- or ValueError: it was not run, as it does not fit the method or could be endless.

    The method gets copies, also of its defaults: post_tweet stores its default list, mention() extends what
    is stored, and so a tweet would reach the next rollout."""
    import mpmath
    bound = tool.signature.bind(**arguments)
    bound.apply_defaults()
    check_bounds(instances[tool.api], tool.name, bound.arguments)
    arguments = pickle.loads(pickle.dumps(bound.arguments))
    with ONE_CALL, decimal.localcontext(), mpmath.workprec(mpmath.mp.prec):
        try:
            result = getattr(instances[tool.api], tool.name)(**arguments)
            if isinstance(result, dict):
                with suppress(TypeError, ValueError):
                    return json.dumps(result)
            return str(result)
        except Exception as error:
            return f"Error during execution: {error}"


def check_bounds(instance, name: str, arguments: dict):
    """ValueError for a call that could be endless: 10 ** 10 ** 8, or a walk through a file tree whose folders
    share what they hold. All other methods are done at once, whatever they get, in whatever state."""
    if name in ("power", "logarithm", "square_root", "round_number"):
        for key, value in arguments.items():
            most = MAX_PRECISION if key in ("exponent", "precision", "decimal_places") else MAX_NUMBER
            if value is not None and not (isinstance(value, (int, float)) and abs(value) <= most):
                raise ValueError(f"{key} must be a number from {-most:g} to {most:g}")
    elif name in ("find", "du"):
        check_tree(instance._navigate_to_directory(str(arguments.get("path", "."))))


def check_tree(folder):
    """A copied folder shares its subfolders, so few calls make endlessly many paths: the count has to end."""
    paths, items = 0, [(folder, 0)]
    while items:
        item, length = items.pop()
        contents = getattr(item, "contents", {})  # a file has none, nor has what is said of a wrong path
        paths += len(contents)
        if paths > MAX_PATHS or length > MAX_PATH:
            raise ValueError(f"more than {MAX_PATHS} paths, or one of more than {MAX_PATH} characters")
        items += [(inner, length + 1 + len(name)) for name, inner in contents.items()]


# ===== 10. The benchmark: gold ==============================================================================
def gold_call(call: str, tools: dict[str, Tool]) -> tuple[str, dict]:
    """"sort('a.txt')" -> ("sort", {"file_name": "a.txt"}): literals only, positional values get names."""
    node = ast.parse(call.strip(), mode="eval").body
    parameters = tools[node.func.id].signature.parameters
    arguments = dict(zip(parameters, map(ast.literal_eval, node.args), strict=False))
    arguments |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return node.func.id, arguments


def gold_turns(task: dict) -> list[list[tuple[str, dict]]]:
    tools = task_tools(task)
    return [[gold_call(call, tools) for call in turn] for turn in task["ground_truth"]]


GoldTurn = namedtuple("GoldTurn", "calls observations state")  # state after it: all API instances, pickled


@functools.lru_cache(maxsize=64)  # tasks by content; the rollouts of one task come together
def scenario(task_json: str) -> tuple[bytes, list[GoldTurn]]:
    """(initial state, gold replay). States are pickles: every rollout unpickles a world of its own, with its
    random generators, and nothing in it is shared (the long_context loader hands out module-level cards)."""
    task = json.loads(task_json)
    tools = task_tools(task)
    instances = {api: api_class(api)() for api in task["involved_classes"]}
    for api, instance in instances.items():
        if hasattr(instance, "_load_scenario"):
            config = task["initial_config"].get(api, {})
            instance._load_scenario(config, long_context="long_context" in task["id"])
    initial = pickle.dumps(instances)
    instances = pickle.loads(initial)
    replay = []
    for calls in gold_turns(task):
        observations = [execute(instances, tools[name], arguments) for name, arguments in calls]
        replay.append(GoldTurn(calls, observations, pickle.dumps(instances)))
    return initial, replay


def same_value(a, b) -> bool:
    """Numbers by value, so 2 equals 2.0; a bool equals only a bool; lists and dicts item by item."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return a == b


# ===== 11. The benchmark: environment =======================================================================
MAX_STEPS = 20  # messages with calls per user turn, as in the benchmark; BFCLEnv pools those of all turns
MAX_CALLS = 1000  # that run in an episode; gold has at most 35
OBSERVATION_LIMIT = 6000  # characters of an observation that the model sees, in data and rollouts alike
CUT_MARK = "\n[... the rest of this result was cut]"


class BFCLEnv:
    """One task as an environment for `rollout`, as the paper has it: all user turns in one message, all tools
    from the start, done() to finish; a message without any tool call ends the episode too. Reward: eq. 5.

    `tools` are those that are shown, others cannot be called; `calls` is what ran; `reason` says why the
    reward is what it is; `log` is the whole conversation, ready for JSON."""

    def __init__(self, task: dict):
        self.task = task
        self._tools = task_tools(task)
        self._initial, self._gold = scenario(json.dumps(task))
        self._begin()

    def _begin(self):
        self.calls, self.log = [], []
        self.reason = "the episode did not end"
        self._instances = self._reward = None
        self._steps = 0
        self._shown = [*(tool.text for tool in self._tools.values()), DONE]

    @property
    def tools(self) -> list[dict]:
        return [json.loads(text) for text in self._shown]

    def reset(self) -> list[dict]:
        """A fresh world and empty records; gives the system message and the first user message."""
        self._begin()
        self._instances = pickle.loads(self._initial)
        self.log = [{"role": "system", "content": system_text(self._shown)}, self._request()]
        return list(self.log)

    def _request(self) -> dict:
        requests = [turn[0]["content"] for turn in self.task["question"] if turn]  # miss_func: an empty turn
        steps = [f"Step {number}: {request}" for number, request in enumerate(requests, 1)]
        return {"role": "user", "content": "\n".join(steps) + CLOSING}

    def step(self, text: str) -> list[dict] | None:
        """Run the calls of one assistant message (its text without the end token). Gives one tool message per
        block, and what the user says next; None when the episode is over."""
        if self._instances is None or self._reward is not None:
            raise RuntimeError("no episode is running: call reset() first")
        blocks = parse_tool_calls(text)
        self.log.append({"role": "assistant", "content": text, "calls": blocks})
        messages = self._play(blocks)
        self.log += messages
        return messages if self._reward is None else None

    def _play(self, blocks: list) -> list[dict]:
        """Run what comes before done(), and see whether the episode is over."""
        names = [None if isinstance(block, str) else block[0] for block in blocks] + ["done"]
        messages = [self._answer(block) for block in blocks[:names.index("done")]]
        self._steps += 1
        if len(messages) < len(blocks) or not blocks:  # done() was called, or nothing
            self.reason = "ok"  # if both factors find it so
            self._reward = float(self.R_state() * self.R_action())  # eq. 5
        elif self._steps == MAX_STEPS * len(self._gold):
            self._reward, self.reason = 0.0, "step limit reached"
        return messages

    def _answer(self, block: tuple | str) -> dict:
        """The tool message for a block."""
        text = block if isinstance(block, str) else self._call(*block)
        if len(text) > OBSERVATION_LIMIT:
            text = text[:OBSERVATION_LIMIT - len(CUT_MARK)] + CUT_MARK
        return {"role": "tool", "content": text}

    def _call(self, name: str, arguments: dict) -> str:
        """Only listed names run, looked up, never evaluated."""
        if name not in self._tools:
            return f"Error during execution: there is no tool named {name!r}"
        if len(self.calls) == MAX_CALLS:
            return f"Error during execution: {MAX_CALLS} calls have been run, no more are"
        try:
            observation = execute(self._instances, self._tools[name], arguments)
        except (TypeError, ValueError) as error:
            return f"Error during execution: {name}: {error}"
        self.calls.append((name, arguments))
        return observation

    def reward(self) -> float:
        """1.0 or 0.0; an episode that was broken off is worth 0.0."""
        return self._reward or 0.0

    def R_state(self) -> bool:
        """The final state is that of the gold replay: what the benchmark compares, all public attributes."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import state_checker
        verdict = state_checker(self._instances, pickle.loads(self._gold[-1].state))
        if not verdict["valid"]:
            self.reason = f"final state: {verdict['error_message']}"
        return verdict["valid"]

    def R_action(self) -> bool:
        """Every gold call was made, in any order: same name, gold's arguments equal, others may be there."""
        for name, gold in [call for turn in self._gold for call in turn.calls]:
            made = [arguments for called, arguments in self.calls if called == name]
            if not any(same_value({key: a[key] for key in a.keys() & gold.keys()}, gold) for a in made):
                self.reason = f"gold call not made: {name}({json.dumps(gold, ensure_ascii=False)})"
                return False
        return True

    def close(self):
        """Forget the simulated world; reward, reason, calls and log stay."""
        self._instances = None


class LeaderboardEnv(BFCLEnv):
    """One task in the leaderboard's protocol, for evaluation: turn by turn, miss_func's late tools announced
    in theirs; a message without a readable call ends the turn, a turn that failed the episode. Reward: what
    the benchmark's checker says."""

    def _begin(self):
        super()._begin()
        self._hidden = set().union(*self.task.get("missed_function", {}).values())
        self._shown = [tool.text for name, tool in self._tools.items() if name not in self._hidden]
        self._turn = 0
        self._observations = []  # whole, as the benchmark's checker wants them

    def _request(self) -> dict:
        """The user message of the turn, or the docs of its late tools and the benchmark's sentence."""
        from bfcl_eval.constants import default_prompts
        late = self.task.get("missed_function", {}).get(str(self._turn))
        if late is None:
            return dict(self.task["question"][self._turn][0])
        docs = [self._tools[name].text for name in late]
        self._hidden -= set(late)
        self._shown += docs
        template = default_prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
        return {"role": "user", "content": template.format(functions=tools_text(docs))}

    def _play(self, blocks: list) -> list[dict]:
        """Run the calls; where the turn is over, the user's next message follows."""
        messages = [self._answer(block) for block in blocks]
        called = any(not isinstance(block, str) for block in blocks)
        self._steps += called
        if called and self._steps <= MAX_STEPS:
            return messages
        last = self._turn == len(self._gold) - 1
        failure = self._turn_failure()
        if called and not last:  # as in the leaderboard step 21 is still run, then the entry is given up
            failure = failure or f"step limit reached in turn {self._turn}"
        if failure or last:
            self._reward, self.reason = (0.0, failure) if failure else (1.0, "ok")
            return messages
        self._turn, self._steps = self._turn + 1, 0
        return [*messages, self._request()]

    def _call(self, name: str, arguments: dict) -> str:
        """As there, a gold call of the turn runs before its tool is announced: miss_func_49 needs `tail`."""
        needed = {gold for gold, _ in self._gold[self._turn].calls}
        if name in self._hidden - needed:
            return f"Error during execution: there is no tool named {name!r}"
        observation = super()._call(name, arguments)
        self._observations.append(observation)
        return observation

    def _turn_failure(self) -> str | None:
        """The benchmark's multi_turn_checker for one turn, on our instances. If there are gold calls, some
        call was made, the state is the gold one, and all observations so far include the gold ones."""
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


# ===== 12. The benchmark: experts and failures ==============================================================
def calls_text(calls: list[tuple[str, dict]]) -> str:
    """Hermes blocks, in the layout that the system prompt shows."""
    texts = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def expert_turns(task: dict, protocol: str = "combined", plan: list | None = None) -> list[str]:
    """What an expert says, so that playing it scores 1: one message per turn with its gold calls (or a plan's
    calls), then done() in "combined"; in "turns" a sentence ends each turn."""
    messages = []
    for calls in gold_turns(task) if plan is None else plan:
        if calls:
            messages.append(calls_text(calls))
        if protocol == "turns":
            messages.append("This is done." if calls else "For this I need another tool or more details.")
    if protocol == "combined":
        messages.append(calls_text([("done", {})]))
    return messages


CORRUPTIONS = ("wrong tool", "missing step", "early done", "wrong argument", "missing argument")


def corrupt_turns(task: dict, rng: random.Random, protocol: str = "combined") -> list[str]:
    """An expert's messages with one mistake, in the same format, so that the reward token does not merely
    tell formats apart. Not every mistake is a failure (some look-ups are needless): run it and check R = 0.

    wrong tool: the one whose parameters are most alike. missing step: one call left out. early done: this
    call and all later ones left out. wrong argument: another value, a text from elsewhere in the plan."""
    plan = gold_turns(task)
    turn, i = rng.choice([(turn, i) for turn, calls in enumerate(plan) for i in range(len(calls))])
    name, arguments = plan[turn][i]
    kind = rng.choice(CORRUPTIONS if arguments else CORRUPTIONS[:3])
    if kind == "wrong tool":
        plan[turn][i] = sibling_tool(task, name, arguments, rng), arguments
    elif kind == "missing step":
        del plan[turn][i]
    elif kind == "early done":
        plan[turn:] = [plan[turn][:i]] + [[]] * (len(plan) - turn - 1)
    else:
        key = rng.choice(list(arguments))
        wrong = {other: value for other, value in arguments.items() if other != key}
        if kind == "wrong argument":
            elsewhere = [value for calls in plan for _, others in calls for value in others.values()]
            wrong[key] = wrong_value(arguments[key], elsewhere, rng)
        plan[turn][i] = name, wrong
    return expert_turns(task, protocol, plan)


def sibling_tool(task: dict, name: str, arguments: dict, rng: random.Random) -> str:
    shared = {other: len(arguments.keys() & tool.signature.parameters.keys())
              for other, tool in task_tools(task).items() if other != name}
    most = max(shared.values())
    return rng.choice([other for other, count in shared.items() if count == most])


def wrong_value(value, elsewhere: list, rng: random.Random):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + rng.choice((-1, 1, 10))
    if isinstance(value, list) and value:
        return value[:-1]
    if not isinstance(value, str):
        return None
    texts = {other for other in elsewhere if isinstance(other, str)} - {value}
    return rng.choice(sorted(texts)) if texts else value + "_2"


# ===== 13. Many processes ===================================================================================
import copy
import fcntl
import gc
import hashlib
import itertools
import logging
import os
import shutil
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta

import tokenizers
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from rcgrpo import add_reward_tokens, chat_format, context_length, model_policy, weights_version


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

    def end(self, error: BaseException | None = None):
        """End one of several processes, when all have finished or this one failed, without Python's teardown:
        it waits for the others (NCCL), which may wait for this one, or now and then aborts (gloo). torchrun
        ends those that wait."""
        if self.size > 1:
            if error is None:
                try:
                    self.gather([])
                except RuntimeError as gone:  # another one failed
                    error = gone
            if error and not isinstance(error, SystemExit):
                traceback.print_exception(error)
            elif error and isinstance(error.code, str):
                print(error, file=sys.stderr)
            WORKER.close()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if error else 0)
        if error:
            raise error

    def shard(self, model):
        """FSDP2: every process holds 1/N of weights, gradients and moments; a GPU computes in bf16. Gradients
        are summed, not averaged: rcgrpo divides each term by the count of the whole batch."""
        if not self.sharded:
            return model
        mixed = MixedPrecisionPolicy(self.compute_dtype(), torch.float32)
        trained = any(p.requires_grad for p in model.parameters())
        offload = CPUOffloadPolicy(pin_memory=self.cuda) if self.offload and trained else OffloadPolicy()
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

    def copy_alone(self, load):
        """A plain copy of what load() gives; of its shards nothing is left."""
        copied = self.whole_copy(load())
        free_memory(self.cuda)
        return copied

    def compute_dtype(self):
        return torch.bfloat16 if self.cuda else torch.float32

    def reference(self, model):
        """pi_ref: a frozen copy, sharded where there are others to share it with."""
        copied = self.whole_copy(model) if self.sharded else copy.deepcopy(model).requires_grad_(False)
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


def free_memory(cuda: bool):
    gc.collect()  # a sharded model that nobody needs any more is part of reference cycles
    if cuda:
        torch.cuda.empty_cache()


# ===== 14. Models ===========================================================================================
def load_tokenizer(path: str):
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a damaged file fails in many ways
        raise SystemExit(f"cannot load a tokenizer from {path!r}, which must be a model on the hub "
                         f"or a folder with config.json, weights, tokenizer: {first_line(error)}") from None


def load_model(path: str, tokenizer, processes: Processes, checkpointing: bool):
    """fp32 master weights (at lr 1e-6 a bf16 weight would not move), then reward tokens, then shards."""
    free_memory(processes.cuda)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # a damaged file fails in many ways
        raise SystemExit(f"cannot load a model from {path!r}: {first_line(error)}") from None
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise SystemExit(f"cannot load a model from {path!r}: no weights for {missing}")
    add_reward_tokens(tokenizer, model)
    if checkpointing:
        model.activation_checkpointing_enable()
    return processes.shard(model)


def save_model(model, tokenizer, folder: Path, processes: Processes, origin: dict):
    """A Hugging Face checkpoint, complete or absent: written beside its name and renamed."""
    dtype = processes.compute_dtype()
    state = {name: tensor.to(dtype) for name, tensor in processes.full_state(model).items()}

    def write(part: Path):
        model.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        config = json.loads((part / "config.json").read_text())  # names the type of the master weights
        config["dtype"] = str(dtype).removeprefix("torch.")
        write_text(part / "config.json", json.dumps(config, indent=2) + "\n")
        write_text(part / "rcgrpo.json", json.dumps(origin, indent=2) + "\n")

    write_folder(folder, write if processes.rank == 0 else lambda part: None, processes)


def make_policy(model, tokenizer, temperature, sampler, max_new_tokens, cache_tokens, max_tokens,
                generator=None):
    """The policy of rollouts: rcgrpo's own, or continuous batching, which is faster with flash attention and
    slower without: "auto" looks for that. Its cache is shared and not padded; three times as large, it holds
    a step of the paper's on eight GPUs."""
    if sampler == "plain" or sampler == "auto" and not has_flash(model.device.type == "cuda"):
        return model_policy(model, tokenizer, temperature, max_new_tokens, generator, cache_tokens)
    stop_ids, seed = chat_format(tokenizer).stop_ids, generator.initial_seed() if generator else 0
    return ContinuousPolicy(model, stop_ids, temperature, max_new_tokens, seed, 3 * cache_tokens, max_tokens)


def has_flash(gpu: bool) -> bool:
    available = is_flash_attn_2_available, is_flash_attn_3_available
    return gpu and any(there_is_one(kernels_fallback_ok=True) for there_is_one in available)


class ContinuousPolicy:
    """Draws from what `rcgrpo.model_policy` draws from; when an action ends, a waiting prompt takes its
    place.

    Keys and values of full pages are kept and found again: in the next turn, by the group's other rollouts.
    model: a plain copy, not sharded.  max_tokens: the longest row there will be.
    seed: fixes the draws of the first call, of the second, ...
    cache_tokens: most tokens whose keys and values are held; a row of max_tokens always has room.
    N lists of ids -> N lists of ids. Raises RuntimeError if any of the N failed. `close` frees everything.
    """

    PAGE = 256  # tokens; what flash attention reads in place

    def __init__(self, model, stop_ids, temperature, max_new_tokens, seed, cache_tokens=2**19,
                 max_tokens=2**14):
        # All that shapes the draws; the model's own generation config is not read. top_k 0, top_p 1: no cut.
        draw = {"temperature": float(temperature), "top_k": 0, "top_p": 1.0} if temperature else {}
        self.generation = GenerationConfig(do_sample=temperature != 0, **draw, max_new_tokens=max_new_tokens,
                                           eos_token_id=sorted(stop_ids))
        self.model, self.temperature = model, temperature
        self.max_tokens = min(max_tokens, context_length(model.config))
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
        longest_row = math.ceil((self.max_tokens + longest_action) / self.PAGE)
        config = ContinuousBatchingConfig(
            page_size=self.PAGE,
            # room for this turn and later ones, up to the limit; the default is 90 % of the free memory
            num_blocks=max(longest_row, math.ceil(min(4 * pages, self.cache_tokens / self.PAGE))),
            max_batch_tokens=min(max(sum(lengths), self.PAGE), 2048),  # without flash: a mask of this x cache
            disable_nccl_graph_mixing=False,  # for tensor parallelism; it would set an environment variable
            seed=0,  # else it draws one
        )
        if has_flash(self.model.device.type == "cuda"):
            config.use_cuda_graph = False, True  # in decoding alone: batches of prompts have too many shapes
        hints = WorkloadHints(self.max_tokens, longest_action, len(prompts))
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


def evaluate_some(processes, tasks, make_env, policy, tokenizer, reward_token, limits) -> dict:
    """Success on a few test tasks along the way, with its 95 % interval. Only to be watched: the best
    checkpoint by it would be selected on the test tasks."""
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
    """What is in --out: config.json, LOGS, checkpoints/, stage1/, model/, eval.json, trajectories.jsonl.

    A folder belongs to one run at a time, and to one set of settings. Leave it by `close` or `with`."""

    def __init__(self, folder, settings: dict, processes: Processes, resume: bool = False,
                 checkpoint_every: int = 10):
        self.folder, self.settings, self.processes = Path(folder), settings, processes
        self.wanted, self.checkpoint_every = resume, checkpoint_every
        self.checkpoints = self.folder / "checkpoints"
        self.skips = 0  # steps skipped in a row
        self.lock = self.board = self.bar = None
        refusal = ""
        if processes.rank == 0:
            try:
                self._claim()
            except SystemExit as error:
                refusal = str(error)
        if refusal := "".join(processes.gather([refusal])):
            self.close()
            raise SystemExit(refusal if processes.rank == 0 else 1)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        for held in (self.lock, self.board):
            if held:
                held.close()

    def _claim(self):
        """Lock the folder, check what is in it, and tidy up after a run that was killed."""
        self.lock = lock_folder(self.folder)
        file = self.folder / "config.json"
        if file.exists():
            before = read_object(file, f"move {self.folder} away, or choose another --out")
            changed = [f"--{name.replace('_', '-')} was {before.get(name)!r}, now {value!r}"
                       for name, value in self.settings.items() if before.get(name) != value]
            if changed:
                raise SystemExit(f"{self.folder} holds a run with other settings: {'; '.join(changed)}. "
                                 "Choose another --out, or repeat the settings of that run.")
        for name in LOGS:
            self._steps_in(name)
        for part in [*self.folder.glob(".*.part"), *self.checkpoints.glob(".*.part")]:
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        for stage, name in STAGE_FOLDER.items():
            if (self.folder / name).exists():
                self._remove_checkpoints(stage)
        write_text(file, json.dumps(self.settings, indent=1) + "\n")

    def _steps_in(self, name: str) -> list[dict]:
        """The lines of a metrics file, without a last one that is cut. A foreign line ends the run."""
        places = [(-1, -1)]

        def problem(line):
            stage, step = line["stage"], line["step"]
            if stage not in STAGES or type(step) is not int:
                return "not a line of metrics"
            places.append((STAGES.index(stage), step))
            if places[-1] <= places[-2]:
                return "a step that was there before"

        return read_json_lines(self.folder / name, problem, "remove the line", drop_cut=True)

    def steps(self, stage: str, steps: int, model, optimizer):
        """The steps that are left to do, with a progress bar; checkpoints in between."""
        done = self.resume(stage, model, optimizer, self.wanted)
        self._forget_after(stage, done)
        self.bar = tqdm(range(done, steps), stage, initial=done, total=steps, disable=self.processes.rank > 0)
        for step in self.bar:
            yield step
            if (step + 1) % self.checkpoint_every == 0 and step + 1 < steps:
                self.save(stage, step + 1, model, optimizer)

    def log(self, stage: str, step: int, metrics: dict, trajectories: list[Trajectory], sample=None):
        """One line in metrics.jsonl, the same whenever the run is repeated (clocks: in timings.jsonl), and a
        rollout to be read in samples.jsonl.

        A gradient that is not finite was skipped; three in a row end the run, and the batch is kept."""
        if self.processes.rank == 0:
            clock = {name: value for name, value in metrics.items() if name.endswith("_seconds")}
            numbers = {name: value for name, value in metrics.items() if name not in clock}
            for file, values in zip(LOGS, (numbers, clock, sample), strict=True):
                with open(self.folder / file, "a") as lines:
                    lines.write(json_line({"stage": stage, "step": step, **values}) if values else "")
            self._show(stage, step, metrics)
        self.skips = self.skips + 1 if metrics["skipped"] else 0
        if self.skips:
            self.say(f"{stage} step {step}: the gradient was not finite ({metrics['grad_norm']}): skipped")
        if self.skips == 3:
            file = self.folder / f"non-finite-{stage}-{step}-rank{self.processes.rank}.jsonl"
            write_text(file, "".join(json_line(line) for line in [metrics, *map(vars, trajectories)]))
            raise SystemExit("stopped: three steps in a row had a gradient that is not finite; the batch "
                             f"is in {file}")

    def _forget_after(self, stage: str, done: int):
        """Drop the lines written after the last checkpoint; count the steps skipped just before it."""
        self.skips = 0
        if self.processes.rank == 0:
            for name in LOGS:
                lines = [line for line in self._steps_in(name)  # stage 1 made anew: stage 2 begins anew too
                         if (STAGES.index(line["stage"]), line["step"]) < (STAGES.index(stage), done)]
                write_text(self.folder / name, "".join(map(json_line, lines)))
            self._open_board()
            for line in self._steps_in("metrics.jsonl"):
                self.skips = self.skips + 1 if line["stage"] == stage and line.get("skipped") else 0
        (self.skips,) = self.processes.gather([self.skips] if self.processes.rank == 0 else [])

    def _open_board(self):
        """TensorBoard shows what metrics.jsonl holds. Its folder is made anew: no point is there twice."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        if self.board:
            self.board.close()
        shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        self.board = SummaryWriter(str(self.folder / "tensorboard"))
        for name in LOGS[:2]:
            for line in self._steps_in(name):
                self._show(line.pop("stage"), line.pop("step"), line)

    def _show(self, stage: str, step: int, metrics: dict):
        for name, value in metrics.items() if self.board else ():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self.board.add_scalar(f"{stage}/{name}", value, step)

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
            raise SystemExit(f"{self.folder} holds an unfinished {stage} ({folders[0].name}): add --resume "
                             "to go on with it, or choose another --out.")
        for folder in folders:
            state = training_state(model, optimizer)
            load = partial(checkpoint.load, state, checkpoint_id=folder, **self.processes.together())
            _, error = self.processes.attempt(load)
            if not error:
                set_state_dict(model, optimizer, model_state_dict=state["model"],
                               optim_state_dict=state["optimizer"])
                return int(folder.name.rsplit("-", 1)[1])
            self.say(f"{folder} cannot be read ({error.splitlines()[0]}); trying the one before it")
        if folders:
            raise SystemExit(f"no checkpoint in {self.checkpoints} can be read: start anew in another --out")
        return 0

    def finish(self, stage: str, model, tokenizer):
        """The stage's model with a record of how it was made, then no more need for its checkpoints."""
        origin = {name: self.settings[name] for name in ORIGIN}
        if stage == "stage1":
            origin["rl"] = "none"
        save_model(model, tokenizer, self.folder / STAGE_FOLDER[stage], self.processes, origin)
        if self.processes.rank == 0:
            self._remove_checkpoints(stage)

    def _remove_checkpoints(self, stage: str):
        for old in self.checkpoints.glob(f"{stage}-*"):
            shutil.rmtree(old)

    def say(self, text: str):
        if self.processes.rank == 0:
            tqdm.write(text)


def training_state(model, optimizer) -> dict:
    """All that training changes, by name; a new optimizer gets places for its moments."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


# torch.distributed.checkpoint warns a process that is alone
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

STAGES, LOGS = ["stage1", "stage2"], ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
STAGE_FOLDER = {"stage1": "stage1", "stage2": "model"}
ORIGIN = ("init", "rl", "split", "protocol", "model", "limit", "seed")  # in rcgrpo.json beside a model


def binding_settings(s) -> dict:
    names = [flag[2:].replace("-", "_") for block in BINDING for flag, *_ in SETTINGS[block]]
    return {name: getattr(s, name) for name in names}


def lock_folder(folder: Path):
    """Make the folder and lock it for this process. However the process ends, the kernel then unlocks it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except OSError as error:
        busy = "another process is at work there: wait for its end, or choose another"
        reason = busy if isinstance(error, BlockingIOError) else f"{type(error).__name__}: {error}"
        raise SystemExit(f"--out {folder} cannot be used: {reason}") from None


def there_is(folder: Path, stage: str):
    if not folder.exists():
        raise SystemExit(f"there is no {stage} model in {folder}: run --stage {stage} first")


# ----- files that are read back

def read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def write_text(path: Path, text: str):
    """Complete or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def json_line(values: dict) -> str:
    """One line of JSON, which knows no NaN: null instead."""
    finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_object(path: Path, remedy: str) -> dict:
    """The JSON object in a file. SystemExit if there is none."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{path} is damaged ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise SystemExit(f"{path} is damaged (it must hold an object): {remedy}")
    return value


def read_json_lines(path: Path, problem, remedy: str, drop_cut: bool = False) -> list:
    """The objects of a file, one in each line. SystemExit where one cannot be read, or has a problem(value).

    drop_cut: a last line without its end was being written when a run was killed; it does not count."""
    *lines, last = read_text(path).split("\n")
    if last and not drop_cut:
        lines.append(last)
    values = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            wrong = problem(value)
        except KeyError as error:
            wrong = f"there is no {error}"
        except (TypeError, ValueError, RecursionError) as error:
            wrong = str(error)
        if wrong:
            raise SystemExit(f"{path}, line {number}: {wrong}; {remedy}")
        values.append(value)
    return values


def read_data(path: Path, train: list[dict], conditioned: bool, vocabulary: int, expert) -> list[Trajectory]:
    """The trajectories in data.jsonl, none missing: a task without any must be too long for its expert."""
    pairs = {(HIGH, 1.0), (LOW, 0.0)} if conditioned else {(None, 1.0)}
    missing = {(task["id"], *pair) for task in train for pair in pairs}
    remedy = "delete the file, and the data are made again"

    def problem(line):
        t = Trajectory(**line)
        if not len(t.ids) == len(t.mask) or not set(t.mask) == {0, 1} or t.mask[0]:
            return "ids and mask do not fit"
        if not all(type(token) is int and 0 <= token < vocabulary for token in t.ids):
            return "ids that the tokenizer does not have"
        trajectory = t.group, t.reward_token, t.reward
        if trajectory not in missing:
            return f"no trajectory of this run, or one twice: {trajectory}"
        missing.remove(trajectory)

    data = [Trajectory(**line) for line in read_json_lines(path, problem, remedy)]
    for task in train:
        if any((task["id"], *pair) in missing for pair in pairs) and not expert(task).truncated:
            raise SystemExit(f"{path} is cut after line {len(data)}: {task['id']} is missing; {remedy}")
    return data


# ----- what is printed

def summary_line(step: int, steps: int, m: dict) -> str:
    def show(name):
        return "-" if m[name] is None else f"{m[name]:.3f}"

    return (f"step {step + 1}/{steps}  reward {show('reward')} (high {show('reward_high')} low "
            f"{show('reward_low')})  sigma_g {show('sigma')}  zero {m['zero_std']:.0%}  "
            f"entropy {show('entropy')}  KL {show('kl')}  grad {show('grad_norm')}  "
            f"truncated {m['truncated']:.0%}  {m['rollout_seconds']:.0f} + {m['update_seconds']:.0f} s"
            + (f"  test {m['test_success']:.0%} before it" if "test_success" in m else ""))


def tally(lines: list[dict]) -> dict:
    """{category or "overall": {"k", "n", "accuracy", "wilson95"}}"""
    tallied = {}
    for name in ("overall", *CATEGORIES):
        rewards = [line["reward"] for line in lines if name == "overall" or f"turn_{name}_" in line["id"]]
        if rewards:
            k, n = sum(reward == 1 for reward in rewards), len(rewards)
            tallied[name] = {"k": k, "n": n, "accuracy": k / n, "wilson95": wilson(k, n)}
    return tallied


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval for k successes of n."""
    centre, spread = k + z * z / 2, z * math.sqrt(k * (n - k) / n + z * z / 4)
    return (centre - spread) / (n + z * z), (centre + spread) / (n + z * z)


def table(arm: str, results: dict, own: str) -> str:
    """The paper's columns, k/n beside each percentage, as n is small; a star: the arm's own reward token."""
    def cell(c):
        return f"{100 * c['accuracy']:.2f} ({c['k']}/{c['n']})" if c else "-"

    rows = [["arm", "reward token", "overall", "95 % interval", *CATEGORIES]]
    for goal, tallied in results.items():
        low, high = tallied["overall"]["wilson95"]
        interval = f"{100 * low:.1f} - {100 * high:.1f}"
        rows.append([arm, goal + " *" * (goal == own), cell(tallied["overall"]), interval,
                     *(cell(tallied.get(category)) for category in CATEGORIES)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    absent = "" if own in results else "; not among --goals"
    return "\n".join([*lines, f"* the reward token that this arm is trained to be used under: {own}{absent}"])


# ----- what is checked before --out is claimed

def check_everything(s, processes: int):
    """Refuse, in one line, what would fail later. Returns the tokenizer, with the reward tokens."""
    for flag, batch, arm in (("--stage1-batch", s.stage1_batch, s.init), ("--batch", s.batch, s.rl)):
        if arm != "none" and batch % processes:
            raise SystemExit(f"{flag} {batch} cannot be shared evenly by {processes} processes")
    check_origin(s)
    source = s.stage1 or s.model
    tokenizer = load_tokenizer(source)
    try:
        chat_format(tokenizer)
        add_reward_tokens(tokenizer)
        chat = chat_format(tokenizer)  # once more: now it has to find the reward tokens
        chat.prompt([{"role": "system", "content": "as in the benchmark"}, {"role": "user", "content": "hi"}])
    except Exception as error:  # whatever a foreign tokenizer and its template may raise
        raise SystemExit(f"the tokenizer of {source} cannot be used: {first_line(error)}") from None
    check_model(source, len(tokenizer), s.max_tokens, reward_tokens=bool(s.stage1 and s.init == "rctp"))
    return tokenizer


def check_model(source: str, vocabulary: int, max_tokens: int, reward_tokens: bool):
    """reward_tokens: the model must have been trained under them."""
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:
        raise SystemExit(f"cannot load a model from {source!r}: {first_line(error)}") from None
    if config.get_text_config() is not config:
        raise SystemExit(f"{source} ({config.model_type}) is more than a language model: take one of text")
    numbers = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if lacking := [name for name in numbers if not isinstance(getattr(config, name, None), int)]:
        raise SystemExit(f"{source} ({config.model_type}) cannot be used here: no {', '.join(lacking)}")
    if max_tokens > context_length(config):
        raise SystemExit(f"{source} cannot read --max-tokens {max_tokens}: give --max-tokens "
                         f"{context_length(config)} or less")
    if reward_tokens and not getattr(config, "reward_token_ids", None):
        raise SystemExit(f"--stage1 {source} never saw reward tokens, and --init rctp needs a model that did")
    try:
        with torch.device("meta"):  # shapes only
            model = AutoModelForCausalLM.from_config(config)
            if vocabulary > model.get_input_embeddings().weight.shape[0]:
                model.resize_token_embeddings(vocabulary, pad_to_multiple_of=64, mean_resizing=False)
            model.get_decoder().layers, model.get_output_embeddings().weight
    except Exception as error:
        raise SystemExit(f"{source} ({config.model_type}) cannot be used here: {first_line(error)}") from None


def read_origin(source: str) -> dict | None:
    """How a run of this script made the model in this folder; None if it is from elsewhere."""
    file = Path(source) / "rcgrpo.json"
    if not file.is_file():
        return None
    origin = read_object(file, "train it again, or delete this file if you know where the model is from")
    if not set(ORIGIN) <= origin.keys():
        raise SystemExit(f"{file} is damaged (it must hold {', '.join(ORIGIN)}): train the model again")
    return origin


def check_origin(s):
    """A model that a run of this script made must be what the settings say that it is."""
    source = s.stage1 or s.model
    if origin := read_origin(source):
        asked = {"split": s.split}  # on another split it may have seen the test tasks
        if s.stage1:
            asked |= {"init": s.init, "rl": "none", "model": s.model}
        wrong = [f"--{name} {origin[name]}, not {value}" for name, value in asked.items()
                 if origin[name] != value]
        if wrong:
            raise SystemExit(f"{source} was made with {'; '.join(wrong)}: take another model, or these flags")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


# ===== 16. The plan =========================================================================================
# What the run needs, before anybody pays for it. A test holds the formulas of memory against tracked figures;
# those of time are a model, with the shares of a data sheet's numbers that such programs usually reach.
# name: (bf16 FLOP/s, bytes/s of its memory)
GPUS = {"a100": (312e12, 2e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "4090": (165e12, 1e12)}
READING, UPDATING = 0.45, 0.4  # shares of the peak FLOP/s
LAUNCH, GRAPH = 0.001, 0.002  # seconds: a layer of a plain step of sampling; a step of continuous batching
LOOPING, ENDLESS = 0.03, 0.005  # shares of rollouts that go on to --max-turns, of actions to --max-new-tokens
HOST = 25e9  # bytes/s between host and device


def plan(s, tokenizer, train, test, processes: int, gpu: bool, available: float | None):
    """Print what the run will do and needs. With `available` bytes per process: exit if they are too few."""
    try:
        config = AutoConfig.from_pretrained(s.stage1 or s.model).get_text_config()
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot load the configuration of {s.stage1 or s.model!r}: {error}") from None
    n_params = count_parameters(config)
    experts = [expert_play(task, s, tokenizer) for task in tqdm(train, desc="measuring", leave=False)]
    if torch.cuda.is_available():  # the hours are for the GPU that is there, if we know it
        there = torch.cuda.get_device_name().lower()
        s.gpu = next((name for name in GPUS if name in there), s.gpu)
    print(describe(s, train, test, [len(t.ids) for t in experts], processes, n_params, gpu))

    def need(n):
        return sum(size for _, size, _ in memory(s, config, n_params, n, gpu)) / 2**30

    parts, total = memory(s, config, n_params, processes, gpu), need(processes)
    sizes = [2**i for i in range(10)]
    largest, _, remedy = max(parts, key=lambda part: part[1])
    host, disk = host_and_disk(s, n_params, processes)
    free = f", {available / 2**30:.1f} are free" if available else ""
    print(f"memory     GiB per {'GPU; CUDA and NCCL take 1 to 2 more' if gpu else 'process'}")
    for name, size, _ in parts:
        print(f"           {size / 2**30:8.1f}  {name}")
    print(f"           {total:8.1f}  in all{free}; the largest part is {largest}: {remedy}")
    print("           by number of GPUs: " + ", ".join(f"{n}: {need(n):.0f}" for n in sizes[:6]))
    print(f"           of the machine's own {host / 2**30:.0f}, of the disk {disk / 2**30:.0f}")
    if gpu:
        print(hours(s, experts, config, n_params, processes))
    if available and total * 2**30 > available:
        enough = next((n for n in sizes if need(n) * 2**30 <= available), None)
        others = "No number of processes is enough." if enough is None else (
            f"With {enough} such processes it fits: torchrun --nproc-per-node {enough} train_bfcl.py ...")
        raise SystemExit(f"{s.model} does not fit: {total:.0f} GiB needed{free}. "
                         f"The largest part is {largest}: {remedy}. {others}")


def describe(s, train, test, lengths: list[int], processes: int, n_params: int, gpu: bool) -> str:
    """What the run will do. lengths: tokens of the expert trajectories of the training tasks."""
    too_long = sum(n > s.max_tokens for n in lengths)
    rows = (len(lengths) - too_long) * (2 if s.init == "rctp" else 1)
    steps = math.ceil(rows / s.stage1_batch) * s.epochs
    stage1 = (f"{steps} steps: {rows} trajectories, {s.epochs} epochs, batch {s.stage1_batch}, "
              f"lr {s.stage1_lr}")
    stage2 = (f"{s.steps} steps of {s.batch} tasks x G = {s.group_size} rollouts, lr {s.lr}, "
              f"beta {s.beta}")
    lines = [
        f"arm        {s.init} + {s.rl} on {s.model}, {n_params / 1e9:.2f} G parameters, {processes} "
        f"{'GPU' if gpu else 'CPU process'}(s)",
        f"tasks      {len(train)} training, {len(test)} test, split {s.split}: {leaked(train, test)} test "
        "tasks have a training task with the same gold calls",
        f"protocol   {s.protocol}",
        f"tokens     experts {min(lengths)} to {max(lengths)}, mean {sum(lengths) // len(lengths)}; "
        f"{too_long} longer than --max-tokens {s.max_tokens}{' are left out' * (s.init != 'none')}",
        f"stage 1    {stage1 if s.init != 'none' and not s.stage1 else 'none'}",
        f"stage 2    {stage2 if s.rl != 'none' else 'none'}",
        f"evaluation {len(test)} tasks under {', '.join(s.goals)}",
    ]
    if s.init == "rctp" and s.epochs == 5 or s.rl != "none" and s.batch in (64, 256):
        lines.append("note       the paper gives RCTP 5 epochs and SFT 2, RC-GRPO batch 256 and GRPO 64; for "
                     "a fair comparison of arms set --epochs and --batch alike")
    return "\n".join(lines)


def memory(s, config, n_params: int, processes: int, gpu: bool) -> list[tuple[str, float, str]]:
    """(part, bytes per process, what lowers it). Rollouts and updates take turns: the larger one counts."""
    compute, alone = (2 if gpu else 4), not gpu and processes == 1
    fp32 = 0 if s.offload else 4 * n_params / processes
    rollouts = rollout_memory(s, config, compute, gpu)
    tokens = max(s.tokens_per_pass, s.max_tokens)  # a row is not split
    update = fp32 + max(fp32, update_memory(tokens, config, n_params, compute))  # AdamW copies a moment
    parts = [("fp32 weights and AdamW's moments", 3 * fp32, "more GPUs, or --offload")]
    if s.rl != "none":
        parts.append(("the copy that rolls out", 0 if alone else compute * n_params, "a smaller --model"))
    if s.rl != "none" and s.beta:
        parts.append(("pi_ref", compute * n_params / processes, "more GPUs, or --beta 0"))
    if s.rl != "none" and rollouts > update:
        return [*parts, ("a rollout's keys and values", rollouts, "lower --rollout-tokens")]
    remedy = "lower --tokens-per-pass" if tokens == s.tokens_per_pass else "lower --max-tokens"
    return [*parts, ("an update, with its gradients", update, remedy)]


def update_memory(tokens: int, config, n_params: int, compute: int) -> float:
    """A pass over so many tokens, at its peak: the backward pass of an MLP or of the last logits. Beside them
    live a hidden state per layer, weights and gradients outside the layers, gathered, and those of some."""
    width, layers = config.hidden_size, config.num_hidden_layers
    inner, vocabulary = getattr(config, "intermediate_size", None) or 4 * width, config.vocab_size
    mlp = tokens * ((layers + 15) * width + 6 * inner) * compute
    logits = tokens * layers * width * compute + 4 * 1024 * vocabulary * 4
    root = vocabulary * width * compute
    tied = getattr(config, "tie_word_embeddings", False)
    layer = max(0, n_params - vocabulary * width * (1 if tied else 2)) / layers
    return max(mlp, logits) + 3 * root + 4 * layer * compute


def rollout_memory(s, config, compute: int, gpu: bool) -> float:
    """The cache, and a layer's part of reading with its mask, or what continuous batching works with."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    cache = s.rollout_tokens * bytes_in_cache(config, compute)
    if is_continuous(s, gpu):
        return (3 * cache + 1.5 * 2**30) / 0.8  # the library leaves a fifth of the free memory alone
    return cache + 2**14 * ((3 * inner + 4 * width) * compute + s.max_tokens * (1 + compute))


def bytes_in_cache(config, compute: int) -> int:
    """Keys and values of a token."""
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * width * compute


def is_continuous(s, gpu: bool) -> bool:
    return s.sampler == "continuous" or s.sampler == "auto" and has_flash(gpu)


def host_and_disk(s, n_params: int, processes: int) -> tuple[float, float]:
    """Bytes of the machine's memory, with all processes on it, and of the disk (3 checkpoints, 2 models)."""
    loading, saving = 4 * n_params * processes, 6 * n_params
    return max(loading, saving + (16 * n_params if s.offload else 0)), 3 * 12 * n_params + 2 * 2 * n_params


def hours(s, experts: list[Trajectory], config, n_params: int, processes: int) -> str:
    """The model's time on --gpu, and what it assumes."""
    stage1, *step = seconds(s, experts, config, n_params, processes)
    sampler = "continuous batching" if is_continuous(s, True) else (
        "the plain sampler (with flash attention, or --sampler continuous here, the other)")
    lines = []
    if s.init != "none" and not s.stage1:
        lines.append(f"stage 1 {stage1 / 3600:.1f} h")
    if s.rl != "none":
        lines.append(f"stage 2 {s.steps * sum(step) / 3600:.0f} h, a step {sum(step):.0f} s "
                     f"({step[0]:.0f} reading, {step[1]:.0f} sampling, {step[2]:.0f} update)")
    return (f"time       on {processes} {s.gpu}, modelled, not measured: {'; '.join(lines)}\n"
            f"           {sampler}; {READING:.0%} of peak FLOP/s for reading, {UPDATING:.0%} for updates;\n"
            f"           rollouts like the experts', but {LOOPING:.0%} of them loop to --max-turns and\n"
            f"           {ENDLESS:.1%} of actions run to --max-new-tokens")


def seconds(s, experts: list[Trajectory], config, n_params: int, processes: int) -> tuple:
    """Of stage 1, and of reading, sampling and updating in a step of stage 2."""
    flops, bandwidth = GPUS[s.gpu]
    continuous = is_continuous(s, True)
    said = [sum(b > a for a, b in itertools.pairwise([0, *t.mask])) for t in experts]  # actions of each
    prompt = sum(t.mask.index(1) for t in experts) / len(experts)
    action = sum(sum(t.mask) for t in experts) / sum(said)
    answer = (sum(len(t.ids) for t in experts) - prompt * len(experts)) / sum(said) - action
    groups = s.batch / processes
    rollouts = groups * s.group_size

    read = sampling = turns = 0
    for turn in range(s.max_turns):
        talking = rollouts * (LOOPING + (1 - LOOPING) * sum(n > turn for n in said) / len(said))
        length = min(s.max_tokens, prompt + turn * (action + answer))
        parts = 1 if continuous else math.ceil(talking * (length + s.max_new_tokens) / s.rollout_tokens)
        if parts > 1:  # its cache does not hold them all: everything is read again
            read += talking * length
        elif turn == 0:  # a group's prompt is read once, or under each reward token
            read += groups * prompt * (1 if continuous else 2)
        else:  # what is new, and what is left of the last page
            read += talking * (answer + 128 * continuous)
        endless = 1 - (1 - ENDLESS) ** (talking / max(1, parts))  # all wait for the longest action
        steps = endless * s.max_new_tokens + (1 - endless) * min(s.max_new_tokens, 2 * action)
        overhead = GRAPH if continuous else LAUNCH * config.num_hidden_layers
        sampling += min(parts, talking) * steps * (2 * n_params / bandwidth + overhead)
        turns += talking
    tokens = groups * prompt + turns * (action + answer)
    update = tokens * 2 * n_params * 5 / (UPDATING * flops)  # forward, once more, backward (as two), pi_ref

    kept = [len(t.ids) for t in experts if len(t.ids) <= s.max_tokens]
    stage1_tokens = sum(kept) * (2 if s.init == "rctp" else 1) * s.epochs / processes
    stage1 = stage1_tokens * 2 * n_params * 4 / (UPDATING * flops)
    if s.offload:  # each pass moves the weights there twice and the gradients back; AdamW runs on the host
        a_pass, a_step = 12 * n_params / processes / HOST, 28 * n_params / processes / (2 * HOST)
        update += tokens / s.tokens_per_pass * a_pass + a_step
        a_batch = s.stage1_batch / processes * sum(kept) / max(1, len(kept))
        stage1 += stage1_tokens * (a_pass / s.tokens_per_pass + a_step / max(1, a_batch))
    return stage1, read * 2 * n_params / (READING * flops), sampling, update


def count_parameters(config) -> int:
    with torch.device("meta"):  # shapes only
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def expert_play(task: dict, s, tokenizer) -> Trajectory:
    turns, reward_token = expert_turns(task, s.protocol), HIGH if s.init == "rctp" else None
    return play_script(task, s.protocol, turns, reward_token, tokenizer, {"max_tokens": 10**9})


def memory_there(processes: Processes) -> int:
    """Bytes that are free, per process."""
    if processes.cuda:
        return torch.cuda.mem_get_info(processes.device)[0]
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # without what only caches files
    there = re.search(r"MemAvailable: *(\d+) kB", read_text(Path("/proc/meminfo")))
    return (1024 * int(there[1]) if there else pages) // processes.size


# ===== 17. A tiny run of everything =========================================================================
SMOKE = ("--out runs/smoke --limit 4 --epochs 1 --steps 2 --group-size 3 "
         "--max-new-tokens 24 --max-tokens 8192 --checkpoint-every 1 --stage1-lr 1e-3 --lr 1e-4").split()
SMOKE_TEMPLATE = ("{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
                  "{% endfor %}"
                  "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}")


class ParityEnv(BFCLEnv):
    """For stage 2 of the smoke run: a model that knows nothing earns 0 everywhere, and nothing would move. So
    R is the parity of the characters that it said. Everything else is the benchmark."""

    def reward(self) -> float:
        said = "".join(message["content"] for message in self.log if message["role"] == "assistant")
        return float(sum(map(ord, said)) % 2)


def smoke(argv: list[str], processes: Processes):
    """Every stage of every arm, with real tasks and observations; only the model is tiny and knows nothing.

    argv: flags; what they say goes before what a smoke run has in their place."""
    shared = ["--stage1-batch", str(4 * processes.size), "--batch", str(2 * processes.size)]
    s = parse_arguments([*SMOKE, *argv])
    out = Path(s.out)
    argv = [*shared, *(flag for flag in argv if flag != "--smoke")]
    given = {flag.partition("=")[0] for flag in argv}
    inits = [s.init] if "--init" in given else ["rctp", "sft", "none"]
    rls = [s.rl] if "--rl" in given else ["rc-grpo", "grpo", "none"]
    if processes.rank == 0:
        lock = lock_folder(out)
    model = s.model
    if "--model" not in given:
        model = out / "base"
        write_folder(model, lambda part: make_tiny_model(part) if processes.rank == 0 else None, processes)
    for init, rl in itertools.product(inits, rls):
        folder = out / f"{init}+{rl}"
        if processes.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"\n=== {init} + {rl} ===", flush=True)
        flags = [*SMOKE, *argv, "--model", str(model), "--init", init, "--rl", rl, "--out", str(folder)]
        if init != "none" and rl != rls[0]:
            flags += ["--stage1", str(out / f"{init}+{rls[0]}" / "stage1")]
        arm = parse_arguments(flags)
        arm.smoke = True  # no plan
        pipeline(arm, processes, train_env=ParityEnv)
    if processes.rank == 0:
        lock.close()
        print(f"\nEvery stage of {len(inits) * len(rls)} arms ran; the runs are in {out}. In stage 2 R was "
              "not the benchmark's but the parity of what was said: weights that know nothing move. The "
              "tables are the benchmark's: 0 % is right.")


def make_tiny_model(folder: Path):
    """A random Qwen2 and a byte-level BPE tokenizer trained on the benchmark's own text."""
    texts = [system_text([tool.text for tool in task_tools(task).values()]) for task in load_tasks()[::40]]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=bpe.pre_tokenizer.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", extra_special_tokens=["<|start|>"])
    tokenizer.chat_template = SMOKE_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2**14,
        tie_word_embeddings=True))
    with torch.no_grad():  # it ends many of its messages: one that is cut off earns 0, whatever it says
        model.get_input_embeddings().weight[tokenizer.eos_token_id] *= 60
    model.save_pretrained(folder)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(map(str, argv))
    s = parse_arguments(argv)
    if s.plan:
        tokenizer = check_everything(s, processes=1)
        train, test = choose_tasks(s.split, s.limit)
        if int(os.environ.get("RANK", 0)) == 0:  # torchrun's flags say for how many GPUs
            plan(s, tokenizer, train, test, int(os.environ.get("WORLD_SIZE", 1)), gpu=True, available=None)
        return
    processes, error = Processes(s.offload), None
    try:
        if s.smoke:
            smoke(argv, processes)
        else:
            pipeline(s, processes)
    except KeyboardInterrupt:
        whole = f"; {s.out} is whole, and the same command with --resume goes on"
        error = SystemExit("\nstopped" + whole * (not s.smoke))
    except BaseException as failure:
        error = failure
        if any(isinstance(e, (torch.OutOfMemoryError, MemoryError)) for e in (error, error.__cause__)):
            print("Out of memory: in an update lower --tokens-per-pass, in rollouts --rollout-tokens, or "
                  "take --offload or more GPUs; all of them may change with --resume", file=sys.stderr)
    processes.end(error)


# Some of the benchmark's errors print a set, in hash order: the same run must say the same twice. Less memory
# is lost between the GPU's blocks, and to rounding of the host's (--offload).
ENVIRONMENT = {"PYTHONHASHSEED": "0",
               "PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"}

if __name__ == "__main__":
    environment = {**ENVIRONMENT, **os.environ, "PYTHONHASHSEED": "0"}
    if environment != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    try:
        main()
    except RuntimeError as error:
        if "bfcl-eval" not in str(error):
            raise
        raise SystemExit(str(error)) from None
