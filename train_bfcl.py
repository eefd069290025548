"""RC-GRPO on the Berkeley Function Calling Leaderboard (BFCL v4, multi-turn), on GPUs.

    python train_bfcl.py                         the paper's main arm: RCTP, then RC-GRPO, then evaluation
    python train_bfcl.py --init sft --rl grpo    another: --init {rctp,sft,none} --rl {rc-grpo,grpo,none}
    torchrun --nproc-per-node 8 train_bfcl.py    on eight GPUs
    python train_bfcl.py --plan                  its tasks, steps and bytes, without loading a model
    python train_bfcl.py --smoke                 every stage of an arm, tiny; needs no GPU

What --out holds is not made again: a run that was stopped goes on by the same command.
Read rcgrpo.py first: the method is there. Sections 1-5 are what this script does: settings, pipeline, data,
stages, evaluation. 6-12 are the benchmark. 13-17 serve many GPUs and long runs; a reader may skip them.
Needs the public package bfcl-eval: pip install --no-deps bfcl-eval==2026.3.23
"""

# ruff: noqa: E402 (each section carries its own imports)
from __future__ import annotations

import argparse
import json
import math
import random
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from rcgrpo import HIGH, LOW, Trajectory, from_all, total

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
        ("--plan", False, YES_OR_NO, "print tasks, steps and bytes, and exit"),
        ("--smoke", False, YES_OR_NO, "a tiny model, a made-up R; other flags count"),
        ("--reward-tokens", list(REWARD_TOKENS), list(REWARD_TOKENS), "what to evaluate under"),
    ],
    "arm": [
        ("--model", "Qwen/Qwen2.5-7B-Instruct", TEXT, "causal LM with a chat template: hub name or folder"),
        ("--init", "rctp", ["rctp", "sft", "none"], "stage 1: reward-conditioned, on experts alone, or none"),
        ("--rl", "rc-grpo", ["rc-grpo", "grpo", "none"], "stage 2: with drawn tokens, plain GRPO, or none"),
        ("--split", "grouped", ["grouped", "paper"], "training and test tasks: without leak, or the paper's"),
        ("--limit", 0, FROM_0, "keep X training and X test tasks, of the shortest tool lists; 0: all"),
        ("--seed", 0, FROM_0, "of everything random but the split"),
        ("--protocol", "combined", ["combined", "turns"], "of evaluation: as trained, or the leaderboard's"),
    ],
    "stage 1": [
        ("--stage1", None, TEXT, "start stage 2 from the stage-1 model in this folder; train none"),
        ("--failures", "rollout", ["rollout", "corrupt"], "the base model's, topped up by corrupted experts"),
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
        ("--hindsight", False, YES_OR_NO, "after each step learn what succeeded as high; not the paper's"),
    ],
    "both stages": [
        ("--max-grad-norm", 1.0, BOUND, "gradient clipping"),
        ("--max-tokens", 16384, COUNT, "length limit of a trajectory; longer: truncated, reward 0"),
        ("--max-new-tokens", 1024, COUNT, "length limit of one action; longer: truncated, reward 0"),
        ("--max-turns", 30, COUNT, "assistant turns per rollout; more: truncated, reward 0"),
    ],
    "memory and speed": [
        ("--tokens-per-pass", 24576, COUNT, "tokens of one forward and backward pass in training"),
        ("--rollout-tokens", 2**17, COUNT, "of the sampler's cache; continuous: three times"),
        ("--sampler", "auto", ["auto", "plain", "continuous"], "auto: continuous with flash attention"),
        ("--offload", False, YES_OR_NO, "weights, gradients, moments in the host's memory: slower"),
        ("--checkpoint-every", 10, COUNT, "steps between checkpoints"),
        ("--eval-every", 25, COUNT, "steps of stage 2 between evaluations on 40 fixed test tasks"),
    ],
}
MAY_CHANGE = ("this call", "memory and speed")  # a run folder belongs to one value of each of the others
SMOKE = ("--out runs/smoke --model tiny --limit 4 --epochs 1 --stage1-batch 4 --stage1-lr 1e-3 --steps 2 "
         "--batch 4 --group-size 3 --lr 1e-4 --max-tokens 8192 --max-new-tokens 24 --rollout-tokens 40000 "
         "--checkpoint-every 1")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage="train_bfcl.py [flags]   (--help lists them)", description=__doc__,
                                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    for block, flags in SETTINGS.items():
        group = parser.add_argument_group(
            f"{block} (may change when a run goes on)" if block in MAY_CHANGE else block)
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
    if "--smoke" in argv:
        argv = [*SMOKE.split(), *argv]  # where a flag is given twice, the last one counts
    s = parser.parse_args(argv)
    s.epochs = s.epochs or {"rctp": 5, "sft": 2, "none": 1}[s.init]
    s.batch = s.batch or {"rc-grpo": 256, "grpo": 64, "none": 1}[s.rl]
    if "" in [str(text).strip() for text in (s.out, s.model, s.stage1)]:
        parser.error("--out, --model and --stage1 must not be empty")
    if s.group_size < 2 and s.rl != "none":
        parser.error("--group-size needs at least 2: rollouts are compared")
    if s.stage1 and s.init == "none":
        parser.error("--stage1 with --init none: say how it was trained, rctp or sft")
    s.reward_tokens = list(dict.fromkeys(s.reward_tokens))
    s.rollout_limits = {"max_turns": s.max_turns, "max_tokens": s.max_tokens}
    s.step_limits = {"tokens_per_pass": s.tokens_per_pass, "max_grad_norm": s.max_grad_norm}
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
# Each of several processes runs all of this with its share of the work, mine(items); from_all(items) is what
# they all have, `say` prints on the first, RANK 0 (section 13). One process has all the work.
def pipeline(s, train_env):
    """data -> stage 1 -> stage 2 -> evaluation, but for what --out holds. train_env: the envs of stage 2."""
    train, test = choose_tasks(s)
    tokenizer = check_everything(s)  # before --out is claimed
    run = Run(s)
    with run.lock:  # taken already; let go at the end
        own_stage1 = s.init != "none" and not s.stage1
        start = run.folder / "stage1" if own_stage1 else Path(s.stage1 or s.model)  # of stage 2
        final = start if s.rl == "none" else run.folder / "model"

        if own_stage1 and not start.exists() and not final.exists():
            train_stage1(run, s, make_data(run, s, train, tokenizer), tokenizer)
        if s.rl != "none" and not final.exists():
            train_stage2(run, s, start, train, test, tokenizer, train_env)
        evaluate(run, s, final, train, test, tokenizer)


def choose_tasks(s) -> list[list[dict]]:  # [train, test]
    def length(task):
        return sum(len(tool.text) for tool in task_tools(task).values()), task["id"]

    halves = split_tasks(load_tasks(), s.split)
    return [sorted(half, key=length)[:s.limit] if s.limit else half for half in halves]


# ===== 3. Data for stage 1 ==================================================================================
from rcgrpo import label_by_reward, rollout, scripted_policy


def make_data(run: Run, s, train: list[dict], tokenizer) -> list[Trajectory]:
    """Expert trajectories of the training tasks and, for RCTP, as many failures. Kept in data.json."""
    if (file := run.folder / "data.json").exists():
        with one_line(f"{file} is damaged: delete it, and it is made again"):
            return [Trajectory(**fields) for fields in json.loads(file.read_text())]
    reward_token = HIGH if s.init == "rctp" else None
    experts = {task["id"]: play_script(task, expert_turns(task), reward_token, tokenizer)
               for task in tqdm(mine(train), "expert trajectories", disable=RANK > 0)}
    fitting = [task for task in mine(train) if len(experts[task["id"]].ids) <= s.max_tokens]
    data = [experts[task["id"]] for task in fitting]
    if bad := [t.group for t in data if t.reward != 1]:
        raise SystemExit(f"experts of {bad} do not score 1: is bfcl-eval {BFCL_VERSION} unchanged?")
    if s.init == "rctp":
        data += make_failures(s, fitting, tokenizer)
    data = sorted(from_all(data), key=lambda t: (t.group, t.reward_token or ""))
    if not data:
        raise SystemExit(f"no training task fits into --max-tokens {s.max_tokens}: raise it")
    good, bad = ([sum(t.mask) for t in data if t.reward == R] for R in (1, 0))  # action tokens of each
    say(f"data: {len(good)} expert and {len(bad)} failure trajectories, of {sum(good):,} and {sum(bad):,} "
        f"action tokens; left out, longer than --max-tokens: {len(train) - len(good)} tasks")
    write_whole(file, "[" + ",\n".join(json.dumps(vars(t)) for t in data) + "]\n")
    return data


def play_script(task: dict, texts: list[str], reward_token, tokenizer) -> Trajectory:
    env, policy = BFCLEnv(task), scripted_policy(texts, tokenizer)
    no_limits = {"max_tokens": 10**9, "max_turns": 10**9}  # those are for models: a script ends
    return rollout([env], [reward_token], policy, tokenizer, [task["id"]], **no_limits)[0]


def make_failures(s, tasks: list[dict], tokenizer) -> list[Trajectory]:
    """One failure, R = 0, for each task: a rollout of the base model, or else a corrupted expert."""
    sampled = sample_failures(s, tasks, tokenizer) if s.failures == "rollout" and tasks else []
    failed = {t.group for t in sampled}
    rest = [task for task in tasks if task["id"] not in failed]
    corrupted = [corrupt_expert(task, s, tokenizer)
                 for task in tqdm(rest, "corrupted experts", disable=RANK > 0)]
    n_sampled, n_corrupted = total(len(sampled)), total(len(corrupted))
    say(f"failures: {n_sampled} rollouts of the base model, {n_corrupted} corrupted experts")
    return sampled + corrupted


def sample_failures(s, tasks: list[dict], tokenizer) -> list[Trajectory]:
    """What the base model does wrong: rolled out without a reward token, which it never saw; eq. 1 labels.
    What ran into a limit is left out: long, and a lesson in not stopping."""
    draws = seeded(s.seed, "failures", RANK)
    policy = make_policy(s, load_frozen(s.model, tokenizer), tokenizer, s.failure_temperature, draws)
    envs, names = [BFCLEnv(task) for task in tasks], [task["id"] for task in tasks]
    played = rollout(envs, [None] * len(tasks), policy, tokenizer, names, **s.rollout_limits)
    labelled = [label_by_reward(t, tokenizer) for t in played if t.reward == 0 and not t.truncated]
    return [t for t in labelled if len(t.ids) <= s.max_tokens]


def corrupt_expert(task: dict, s, tokenizer) -> Trajectory:
    rng = random.Random(f"{s.seed} {task['id']}")
    for _ in range(100):
        t = play_script(task, corrupt_turns(task, rng), LOW, tokenizer)
        if t.reward == 0 and len(t.ids) <= s.max_tokens:
            return t
    raise SystemExit(f"100 corruptions of {task['id']} all scored 1, or exceed --max-tokens")


# ===== 4. The two stages ====================================================================================
from rcgrpo import hindsight_step, rcgrpo_step, rctp_step


def share(items: list, batch: int, step: int, seed: int, name: str) -> list:
    """This process's part of batch number `step`. Items are shuffled anew in each pass, whose last batch is
    filled up from its beginning: all batches, and so all parts, have one size."""
    passed, index = divmod(step, math.ceil(len(items) / batch))
    order = list(range(len(items)))
    random.Random(f"{seed} {name} {passed}").shuffle(order)
    return mine([items[order[(index * batch + i) % len(items)]] for i in range(batch)])


def train_stage1(run: Run, s, data: list[Trajectory], tokenizer):
    """RCTP, or SFT where no trajectory has a reward token: from --model to the folder "stage1"."""
    model = shard(load_model(s.model, tokenizer), s.offload)
    optimizer = torch.optim.AdamW(model.parameters(), s.stage1_lr, weight_decay=0)
    for step in run.steps("stage1", math.ceil(len(data) / s.stage1_batch) * s.epochs, model, optimizer):
        trajectories = share(data, s.stage1_batch, step, s.seed, "stage1")
        metrics = rctp_step(model, optimizer, trajectories, **s.step_limits)
        run.log("stage1", step, metrics)
    run.finish("stage1", refresh(load_frozen(s.model, tokenizer), model), tokenizer)  # a plain copy


def train_stage2(run: Run, s, start: Path, train: list[dict], test: list[dict], tokenizer, train_env):
    """RC-GRPO or GRPO: from the model in `start`, which is pi_ref, to the folder "model"."""
    model = shard(load_model(start, tokenizer), s.offload)
    ref_model = shard(load_frozen(start, tokenizer)) if s.beta else None
    actor = load_frozen(start, tokenizer)  # rollouts need all weights in one place
    optimizer = torch.optim.AdamW(model.parameters(), s.lr, weight_decay=0)
    # plain GRPO: high in all rollouts after RCTP, else no token
    p = s.p_high if s.rl == "rc-grpo" else 1.0 if s.init == "rctp" else None
    for step in run.steps("stage2", s.steps, model, optimizer):
        refresh(actor, model)
        watched = watch(s, actor, test, tokenizer) if step % s.eval_every == 0 else {}
        tasks = share(train, s.batch, step, s.seed, "stage2")
        key = s.seed, "stage2", step, RANK  # a run that goes on draws what it would have drawn
        policy = make_policy(s, actor, tokenizer, s.temperature, seeded(*key, "sample"))
        with rollout_bar("rollouts", len(tasks) * s.group_size) as progress:
            metrics, rollouts = rcgrpo_step(
                model, ref_model, optimizer, tasks, train_env, policy, tokenizer, s.group_size, p,
                s.stratified, seeded(*key, "reward tokens", device="cpu"),
                {**s.rollout_limits, "progress": progress}, beta=s.beta, clip=s.clip, ratio=s.ratio,
                updates=s.updates, **s.step_limits)
        if s.hindsight:
            found = hindsight_step(model, optimizer, rollouts, tokenizer, **s.step_limits)
            metrics |= {"hindsight_loss": found["loss"], "hindsight_count": found["count"],
                        "skipped": metrics["skipped"] + found["skipped"]}
        t = rollouts[0]
        sample = {"reward_token": t.reward_token, "reward": t.reward, "text": tokenizer.decode(t.ids)}
        run.log("stage2", step, {**metrics, **watched}, sample)
    run.finish("model", refresh(actor, model), tokenizer)


# ===== 5. Evaluation ========================================================================================
def evaluate(run: Run, s, folder: Path, train: list[dict], test: list[dict], tokenizer):
    """Greedy rollouts of all test tasks under the reward tokens that eval.json lacks; a table of all."""
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # training is over
    made = read_origin(s.model) if s.init == s.rl == "none" else {}  # a model trained by another run
    init, rl, results = made.get("--init", s.init), made.get("--rl", s.rl), {}
    if (file := run.folder / "eval.json").exists():
        with one_line(f"{file} is damaged: delete it, and it is made again"):
            results.update(json.loads(file.read_text())["results"])
    report = {"arm": f"{init} + {rl}", "reward_token": own_reward_token(init, rl), "split": s.split,
              "leaked": leaked(train, test), "protocol": s.protocol, "results": results}
    missing = [name for name in s.reward_tokens if name not in results]
    policy = make_policy(s, load_frozen(folder, tokenizer), tokenizer, 0) if missing else None
    for name in missing:
        with rollout_bar(f"evaluation, {name}", len(mine(test))) as progress:
            played = from_all(play_tasks(s, mine(test), policy, tokenizer, name, progress))
        before = json_lines(run.folder / "trajectories.jsonl", "reward_token")
        lines = [line for line in before if line["reward_token"] in results] + played
        write_whole(run.folder / "trajectories.jsonl", "".join(map(json_line, lines)))
        results[name] = tally(played)
        write_whole(file, json.dumps(report, indent=1) + "\n")
    say("\n" + table(report))


def play_tasks(s, tasks: list[dict], policy, tokenizer, name: str, progress=None) -> list[dict]:
    """What comes out under the reward token of this name, ready for JSON."""
    envs = [BFCLEnv(task) if s.protocol == "combined" else LeaderboardEnv(task) for task in tasks]
    tokens = [REWARD_TOKENS[name]] * len(tasks)
    limits = s.rollout_limits | ({"max_turns": 10**9} if s.protocol == "turns" else {})  # its env has its own
    played = rollout(envs, tokens, policy, tokenizer, progress=progress, **limits) if tasks else []
    lines = []
    for task, env, t in zip(tasks, envs, played, strict=True):
        reason = "ran into --max-tokens, --max-new-tokens or --max-turns" if t.truncated else env.reason
        lines.append({"id": task["id"], "reward_token": name, "reward": t.reward, "truncated": t.truncated,
                      "reason": reason, "calls": env.calls, "messages": env.log})
    return lines


def watch(s, model, test: list[dict], tokenizer) -> dict:
    """Success on some 40 test tasks, always the same ones, with its 95 % interval. Only to be watched: the
    best checkpoint by it would be selected on the test tasks."""
    some = test[:: max(1, len(test) // 40)][:40]
    policy, name = make_policy(s, model, tokenizer, 0), own_reward_token(s.init, s.rl)
    k = total(sum(line["reward"] == 1 for line in play_tasks(s, mine(some), policy, tokenizer, name)))
    low, high = wilson(k, len(some))
    return {"test_success": k / len(some), "test_tasks": len(some),
            "test_95_from": low, "test_95_to": high}


def own_reward_token(init: str, rl: str) -> str:
    """What an arm is used under: high if it was trained under reward tokens at all."""
    return "high" if init == "rctp" or rl == "rc-grpo" else "none"


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


def table(report: dict) -> str:
    """The paper's columns, k/n beside each percentage, as n is small; a star: the arm's own reward token."""
    def cell(c):
        return f"{100 * c['accuracy']:.2f} ({c['k']}/{c['n']})" if c else "-"

    own, rows = report["reward_token"], [["reward token", "overall", "95 % interval", *CATEGORIES]]
    for name, tallied in report["results"].items():
        low, high = tallied["overall"]["wilson95"]
        rows.append([f"{name} *" if name == own else name, cell(tallied["overall"]),
                     f"{100 * low:.1f} - {100 * high:.1f}", *(cell(tallied.get(c)) for c in CATEGORIES)])
    absent = "" if own in report["results"] else " (not evaluated: see --reward-tokens)"
    return "\n".join([
        f"{report['arm']}, protocol {report['protocol']}",
        *("".join(f"{text:16}" for text in row).rstrip() for row in rows),
        f"* the reward token that this arm is trained to be used under: {own}{absent}",
        f"split {report['split']}: {report['leaked']} test tasks with the gold calls of a training task"])


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
import os
import sys
import traceback
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")
COMPUTE_DTYPE = torch.bfloat16 if CUDA else torch.float32
say = tqdm.write if RANK == 0 else lambda text: None


@contextmanager
def process_group():
    """The processes that torchrun started, or this one alone, a group of one that takes the same path. If one
    of several fails it ends at once, and torchrun ends the others: tearing the group down would wait for
    them, and they may be waiting for this one."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if SIZE == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo", timeout=timedelta(hours=6), **alone)
    try:
        yield
        from_all([])  # until all are here
    except BaseException as error:
        if SIZE > 1:
            told = error if isinstance(error, SystemExit) else traceback.format_exc()
            print(told, file=sys.stderr, flush=True)
            os._exit(1)
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def one_line(problem: str):
    """Whatever goes wrong in here is told in one line: damaged files and foreign models fail in many ways."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if isinstance(error, CheckpointException):  # it holds those of all processes
            error, _ = next(iter(error.failures.values()))
        raise SystemExit(f"{problem} ({type(error).__name__}: {error})".split("\n")[0]) from None


def mine(items: list) -> list:
    return items[RANK::SIZE]


def seeded(*key, device=DEVICE) -> torch.Generator:
    """A generator for this purpose, step and rank alone."""
    digest = sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def shard(model, offload: bool = False):
    """FSDP2: every process holds 1/N of weights, gradients and moments; a GPU computes in bf16, its layers
    again in the backward pass. Gradients are summed, not averaged: rcgrpo divides by the count of the whole
    batch.  offload: what is held stays in the host's memory; layers visit the GPU to compute."""
    mesh = dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(COMPUTE_DTYPE, torch.float32)
    policy = CPUOffloadPolicy(pin_memory=CUDA) if offload else OffloadPolicy()
    if offload and CUDA:  # AdamW is the host's work then, and torchrun leaves each process one thread
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if CUDA:
        model.activation_checkpointing_enable()
    for module in [*model.get_decoder().layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=policy)
        if mesh.size() > 1:  # alone it would only cost a copy
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


@torch.no_grad()
def refresh(plain, model):
    """Bring a plain copy up to date; parameters and buffers come in the same order, tied ones once."""
    targets, sources = [*plain.parameters(), *plain.buffers()], [*model.parameters(), *model.buffers()]
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.to(DEVICE).full_tensor() if isinstance(source, DTensor) else source)
    return plain


# ===== 14. Models ===========================================================================================
import gc
import logging

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from rcgrpo import add_reward_tokens, chat_format, context_length, model_policy


def load_model(path, tokenizer):
    """Whole, on the CPU, with the reward tokens; in fp32, as at lr 1e-6 a bf16 weight would not move."""
    gc.collect()  # what an earlier stage leaves is part of reference cycles
    torch.cuda.empty_cache()
    with one_line(f"cannot load a model from {path}"):
        model, report = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, output_loading_info=True)
        if report["missing_keys"]:
            raise ValueError(f"no weights for {', '.join(sorted(report['missing_keys'])[:3])}")
    add_reward_tokens(tokenizer, model)
    return model


def load_frozen(path, tokenizer):
    """Whole, on the device, in the type that it computes in; buffers keep theirs."""
    model = load_model(path, tokenizer).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(COMPUTE_DTYPE)
    return model.to(DEVICE)


def make_policy(s, model, tokenizer, temperature: float, generator=None):
    """rcgrpo's policy or continuous batching, which is faster with flash attention and slower without. Its
    cache is not padded; three times as large, it holds a step of the paper's on eight GPUs."""
    if not is_continuous(s):
        return model_policy(model, tokenizer, temperature, s.max_new_tokens, generator, s.rollout_tokens)
    stop_ids, seed = chat_format(tokenizer).stop_ids, generator.initial_seed() if generator else 0
    cache_tokens = max(3 * s.rollout_tokens, s.max_tokens + s.max_new_tokens)
    return ContinuousPolicy(model, stop_ids, temperature, s.max_new_tokens, seed, cache_tokens, s.max_tokens)


def is_continuous(s) -> bool:
    return s.sampler == "continuous" or s.sampler == "auto" and has_flash()


def has_flash() -> bool:
    return any(there_is(kernels_fallback_ok=True) for there_is in (is_flash_attn_2_available,
                                                                   is_flash_attn_3_available))


class ContinuousPolicy:
    """Draws from what `rcgrpo.model_policy` draws from; when an action ends, a waiting prompt takes its
    place. Keys and values of full pages are kept, and found by later turns and by the group's other rollouts.

    model: a plain one in evaluation mode.  seed: fixes the draws of the first call, of the second, ...
    cache_tokens: whose keys and values are held; max_tokens, of the longest row, must fit.
    `close`, which `rollout` calls, frees everything: it must come before the weights change."""

    PAGE = 256  # tokens; what flash attention reads in place

    def __init__(self, model, stop_ids, temperature, max_new_tokens, seed, cache_tokens, max_tokens):
        # All that shapes the draws; the model's own generation config is not read. top_k 0, top_p 1: no cut.
        draw = {"temperature": float(temperature), "top_k": 0, "top_p": 1.0} if temperature else {}
        self.generation = transformers.GenerationConfig(
            do_sample=temperature != 0, **draw, max_new_tokens=max_new_tokens, eos_token_id=sorted(stop_ids))
        self.model, self.temperature, self.cache_tokens = model, temperature, cache_tokens
        self.max_tokens = min(max_tokens, context_length(model.config))
        self.seeds, self.manager = torch.Generator().manual_seed(seed), None
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # errors are raised below

    def __call__(self, prompts):
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
        config = transformers.ContinuousBatchingConfig(
            page_size=self.PAGE,
            num_blocks=math.ceil(self.cache_tokens / self.PAGE),  # the default is 90 % of the free memory
            max_batch_tokens=min(max(sum(map(len, prompts)), self.PAGE), 2048),  # a mask: this x cache
            use_cuda_graph=(False, True) if has_flash() else None,  # prompts come in too many shapes
            disable_nccl_graph_mixing=False,  # for tensor parallelism; it would set an environment variable
            seed=0,  # else it draws one
        )
        hints = WorkloadHints(self.max_tokens, self.generation.max_new_tokens, len(prompts))
        manager = self.model.init_continuous_batching(self.generation, config, hints)
        manager.start()
        return manager

    def close(self):
        """Stop its thread and free its cache. The next call starts anew."""
        manager, self.manager = self.manager, None
        if manager:
            manager.stop(hard_stop=True)


def check_everything(s):
    """Refuse, in one line, what would fail later. Returns the tokenizer, with the reward tokens."""
    for flag, batch, arm in (("--stage1-batch", s.stage1_batch, s.init), ("--batch", s.batch, s.rl)):
        if arm != "none" and batch % SIZE:
            raise SystemExit(f"{flag} {batch} cannot be shared evenly by {SIZE} processes")
    check_origin(s)
    source = s.stage1 or s.model
    with one_line(f"{source} cannot be used: it must be a model on the hub or a folder with one"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        add_reward_tokens(tokenizer)
        chat_format(tokenizer).prompt([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
        chat_format(tokenizer).suffix([{"role": "tool", "content": "c"}])
        config = outline(source, tokenizer).config
    if s.max_tokens > (most := context_length(config)):
        raise SystemExit(f"{source} cannot read --max-tokens {s.max_tokens}: give {most} or less")
    if CUDA and not is_continuous(s):
        say("the plain sampler is several times slower than the continuous one: pip install kernels")
    if s.stage1 and s.init == "rctp" and not getattr(config, "reward_token_ids", None):
        raise SystemExit(f"--stage1 {source} never saw reward tokens, and --init rctp needs a model that did")
    return tokenizer


def outline(source: str, tokenizer):
    """The model's shapes without their contents, with rows for the reward tokens."""
    config = AutoConfig.from_pretrained(source)
    if config.get_text_config() is not config:
        raise ValueError("it is more than a language model: take one of text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    model.get_decoder().layers, model.get_output_embeddings().weight  # which are needed
    return model


def read_origin(source) -> dict:
    """Settings of the run of this script that made the model in this folder; {} if it is from elsewhere."""
    file = Path(source) / "rcgrpo.json"
    with one_line(f"{file} is damaged: train the model again"):
        return dict(json.loads(file.read_text())) if file.is_file() else {}


def check_origin(s):
    """A model that a run of this script made must be what the settings say that it is."""
    source = s.stage1 or s.model
    asked = {"--split": s.split}  # on another split it may have seen the test tasks
    if s.stage1:
        asked |= {"--init": s.init, "--rl": "none", "--model": s.model}
    made = {**asked, **read_origin(source)}  # what is not recorded counts as asked
    if wrong := [f"{flag} {made[flag]}, not {value}" for flag, value in asked.items() if made[flag] != value]:
        raise SystemExit(f"{source} was made with {'; '.join(wrong)}: take another model, or these flags")


# ===== 15. The run folder ===================================================================================
import fcntl
import shutil

import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

LOGS = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
SHOWN = "loss reward reward_high reward_low sigma zero_std entropy kl grad_norm truncated test_success"


class Run:
    """What is in --out: config.json, data.json, LOGS, checkpoints/, stage1/, model/, eval.json,
    trajectories.jsonl; and tensorboard/, if that is installed. A folder belongs to one set of settings, and
    to one run at a time, which has locked it: however a process ends, the kernel then unlocks it."""

    def __init__(self, s):
        self.folder, self.checkpoint_every, self.board = Path(s.out), s.checkpoint_every, None
        bound = [flag for block in SETTINGS if block not in MAY_CHANGE for flag, *_ in SETTINGS[block]]
        self.settings = {flag: getattr(s, flag[2:].replace("-", "_")) for flag in bound}
        with one_line(f"--out {self.folder} cannot be used; perhaps another process is at work there"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "a")
            if RANK == 0:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file = self.folder / "config.json"
        with one_line(f"{file} is damaged: choose another --out"):
            before = dict(json.loads(file.read_text())) if file.exists() else self.settings
        if changed := [f"{flag} was {before.get(flag)!r}, now {value!r}"
                       for flag, value in self.settings.items() if before.get(flag) != value]:
            raise SystemExit(f"{self.folder} holds a run with other settings: {'; '.join(changed)}. "
                             "Choose another --out, or repeat the settings of that run.")
        parts = [*self.folder.glob(".*.part"), *self.folder.glob("checkpoints/.*.part")]
        for part in parts if RANK == 0 else ():  # a run was killed then
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        write_whole(file, json.dumps(self.settings, indent=1) + "\n")

    def steps(self, stage: str, steps: int, model, optimizer):
        """Go back to the last checkpoint; then the steps that are left, with checkpoints in between."""
        done = self.load_checkpoint(stage, model, optimizer)
        for name in LOGS:  # the steps after the checkpoint are made again: their lines go,
            lines = json_lines(self.folder / name, "stage", "step")
            kept = [line for line in lines if (line["stage"], line["step"]) < (stage, done)]  # as names
            write_whole(self.folder / name, "".join(map(json_line, kept)))
        if RANK == 0:
            with suppress(ImportError):  # and their points
                from torch.utils.tensorboard import SummaryWriter
                folder = self.folder / "tensorboard" / stage
                self.board = SummaryWriter(str(folder), purge_step=done, flush_secs=1)
        self.bar = tqdm(range(done, steps), stage, initial=done, total=steps, disable=RANK > 0)
        for step in self.bar:
            yield step
            if (step + 1) % self.checkpoint_every == 0 and step + 1 < steps:
                self.save_checkpoint(f"{stage}-{step + 1:06d}", model, optimizer)

    def log(self, stage: str, step: int, metrics: dict, sample=None):
        """One line in metrics.jsonl, the same whenever the run is repeated (clocks: in timings.jsonl), and a
        rollout to be read in samples.jsonl. Three steps in a row without a finite gradient end the run."""
        if RANK > 0:
            return
        shown = [f"{name} {metrics[name]:.3g}" for name in SHOWN.split() if metrics.get(name) is not None]
        say(f"{stage} {step + 1}/{self.bar.total}  {'  '.join(shown)}")
        clock = {name: value for name, value in metrics.items() if name.endswith("_seconds")}
        numbers = {name: value for name, value in metrics.items() if name not in clock}
        for name, values in zip(LOGS, (numbers, clock, sample), strict=True):
            with open(self.folder / name, "a") as lines:
                lines.write(json_line({"stage": stage, "step": step, **values}) if values else "")
        for name, value in metrics.items() if self.board else ():
            if value is not None:
                self.board.add_scalar(name, value, step)
        last = json_lines(self.folder / "metrics.jsonl", "skipped")[-3:] if metrics["skipped"] else []
        if sum(line["skipped"] > 0 for line in last) == 3:
            raise SystemExit("stopped: three steps in a row had a gradient that is not finite")

    def save_checkpoint(self, name: str, model, optimizer):
        """Every process writes its shards. Then the checkpoint before it goes."""
        state = dict(enumerate(get_state_dict(model, optimizer)))
        before = list(self.folder.glob("checkpoints/stage*"))
        write_whole(self.folder / "checkpoints" / name, lambda part: checkpoint.save(
            state, checkpoint_id=part), by_all=True)
        for old in before if RANK == 0 else ():
            shutil.rmtree(old)

    def load_checkpoint(self, stage: str, model, optimizer) -> int:
        """Go on from the last checkpoint, whatever number of processes wrote it. The number of steps done."""
        if not (folders := sorted(self.folder.glob(f"checkpoints/{stage}-*"))):
            return 0
        state = dict(enumerate(get_state_dict(model, optimizer)))  # new moments, where to load the old ones
        with one_line(f"{folders[-1]} cannot be read: delete it, and {stage} begins anew"):
            checkpoint.load(state, checkpoint_id=folders[-1])
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
        return int(folders[-1].name.rpartition("-")[2])

    def finish(self, folder: str, plain, tokenizer):
        """Save a stage's model with the settings that made it. Results of another one go."""
        made = {**self.settings, "--rl": "none"} if folder == "stage1" else self.settings

        def write(part: Path):
            plain.save_pretrained(part)
            tokenizer.save_pretrained(part)
            (part / "rcgrpo.json").write_text(json.dumps(made, indent=1) + "\n")

        if RANK == 0:
            (self.folder / "eval.json").unlink(missing_ok=True)
        write_whole(self.folder / folder, write)


def write_whole(path: Path, content, by_all: bool = False):
    """A file or folder, whole or absent. content: the text, or what the first process (or all) call to make
    it at a path beside this one, which then gets its name. All call this, and wait until it is there."""
    part = path.with_name(f".{path.name}.part")
    with one_line(f"could not write {path}: if the disk is full, make room; the same command goes on"):
        if RANK == 0 or by_all:
            part.write_text(content) if isinstance(content, str) else content(part)
    from_all([])
    if RANK == 0:
        part.replace(path)
    from_all([])


def json_line(values: dict) -> str:
    """One line of JSON, which knows no NaN: null instead."""
    finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def json_lines(path: Path, *names) -> list[dict]:
    """The objects in a file, one in each line, with these names. A last line without its end, as a kill
    leaves it, does not count."""
    values = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        with one_line(f"{path}, line {number}, is damaged: delete it"):
            values.append(json.loads(line))
            [values[-1][name] for name in names]
    return values


@contextmanager
def rollout_bar(name: str, count: int):
    """A bar with the time left; gives the `progress` for `rollout` that moves it."""
    with tqdm(desc=name, total=count, unit="rollout", leave=False, disable=RANK > 0) as bar:
        yield lambda still_open: bar.update(count - still_open - bar.n)


# ===== 16. The plan =========================================================================================
def print_plan(s, train: list[dict], test: list[dict], tokenizer):
    """Print what the run will do, and what it will hold."""
    reward_token = HIGH if s.init == "rctp" else None
    lengths = [len(play_script(task, expert_turns(task), reward_token, tokenizer).ids)
               for task in tqdm(train, "experts", leave=False)]
    fitting = sum(n <= s.max_tokens for n in lengths)
    rows = fitting * 2 if s.init == "rctp" else fitting
    steps = math.ceil(rows / s.stage1_batch) * s.epochs
    stage1 = f"{steps} steps of {s.stage1_batch} of {rows} trajectories"
    stage2 = f"{s.steps} steps of {s.batch} tasks of {s.group_size} rollouts"
    print(f"{s.init} + {s.rl} on {s.model}; processes: {SIZE}\n"
          f"tasks: {len(train)} for training, {len(test)} for the test, split {s.split}; "
          f"{leaked(train, test)} of the test tasks have a training task with the same gold calls\n"
          f"experts: {min(lengths)} to {max(lengths)} tokens, {sum(lengths) // len(lengths)} on average; "
          f"{len(train) - fitting} have more than --max-tokens {s.max_tokens}\n"
          f"stage 1: {'none' if s.init == 'none' or s.stage1 else stage1}\n"
          f"stage 2: {'none' if s.rl == 'none' else stage2}")
    for name, n_bytes in bytes_held(s, outline(s.stage1 or s.model, tokenizer)).items():
        print(f"{n_bytes / 2**30:10.2f} GiB {name}")
    print("With what updates and rollouts need: see \"BFCL on GPUs\" in the README.")


def bytes_held(s, model) -> dict[str, int]:
    """Bytes by name, of the first of the processes."""
    whole = sum(p.numel() for p in model.parameters())
    named = sum(x.numel() for x in model.state_dict().values())  # tied weights have two names
    own = sum(math.ceil(len(p) / SIZE) * p[0].numel() for p in model.parameters())  # as FSDP2 cuts them
    config, place = model.config, "in the host's memory" if s.offload else "on each GPU"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 2  # keys, values, bf16
    tokens, sampler = (3, "continuous") if is_continuous(s) else (1, "plain")
    return {f"{place}: fp32 weights": 4 * own,
            f"{place}: their gradients": 4 * own,
            f"{place}: AdamW's moments": 8 * own,
            "on each GPU: the model that rolls out, bf16": 2 * whole,
            "on each GPU: pi_ref, bf16": 2 * own if s.beta and s.rl != "none" else 0,
            f"on each GPU: the cache of the {sampler} sampler, at most": tokens * s.rollout_tokens * token,
            "in the host's memory while loading, all processes: fp32 weights": 4 * whole * SIZE,
            "on the disk: two checkpoints and two models": 2 * (4 * named + 8 * whole) + 2 * 2 * whole}


# ===== 17. A tiny run, and the command line =================================================================
import tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


class ParityEnv(BFCLEnv):
    """For stage 2 of the smoke run: a model that knows nothing earns 0 everywhere, and nothing would move. So
    R is the parity of the characters that it said. Everything else is the benchmark."""

    def reward(self) -> float:
        said = "".join(message["content"] for message in self.log if message["role"] == "assistant")
        return float(sum(map(ord, said)) % 2)


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
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}")
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
    s = parse_arguments(sys.argv[1:] if argv is None else list(map(str, argv)))
    with one_line("the benchmark is not there"):
        bfcl_data()
    with process_group():
        if s.model == "tiny":
            s.model = f"{s.out}/tiny"
            if not Path(s.model).exists():
                write_whole(Path(s.model), make_tiny_model)
        try:
            if not s.plan:
                pipeline(s, ParityEnv if s.smoke else BFCLEnv)
            elif RANK == 0:
                print_plan(s, *choose_tasks(s), check_everything(s))
        except Exception as error:  # rollouts report what went wrong in a policy as an error of their own
            if re.search("out of memory|MemoryError", repr(error)):
                print("Out of memory: lower --tokens-per-pass or --rollout-tokens, or --offload",
                      file=sys.stderr)
            raise


if __name__ == "__main__":
    # Some of the benchmark's errors print a set, in hash order: the same run must say the same twice. Less
    # memory is lost between the GPU's blocks, and to rounding of the host's (--offload).
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1",
                   **os.environ, "PYTHONHASHSEED": "0"}
    if environment != os.environ:
        os.execve(sys.executable, [sys.executable, "-u", *sys.argv], environment)
    main()
