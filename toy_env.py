"""A toy tool environment that shows the variance collapse, and RC-GRPO undoing it, in one to two minutes.

    python toy_env.py                        one seed of the 2x2 {SFT, RCTP} x {GRPO, RC-GRPO}
    python toy_env.py --seeds 20             twenty seeds; with --resume, go on where that was stopped
    python toy_env.py --model DIR_OR_NAME    the same house with a pretrained chat model
    python toy_env.py --help                 what there is to play with

The agent works in a house. It is asked for one or two steps ("step 1 bring cup attic step 2 open cellar"),
says one tool call a turn and reads the answer: `find cup` -> `kitchen small`, `carry cup kitchen attic` ->
`ok`, ..., `done`. Where an item is, and whether it is large and needs `cart` instead of `carry`, has to be
looked up.

In the demonstrations every item to be carried is small; in half of the tasks of reinforcement learning and
of the test one is large. So the fine-tuned agent is confidently right on one half and just as confidently
wrong on the other: groups of all ones and of all zeros, sigma_g = 0, nothing to learn from. RCTP also sees
failures, one kind of which takes the cart for everything: wrong there, right for what is large. Everything is
trained by rcgrpo.py. Sections 1-3 are the house, the agent, the experiment, 4 is the report; 5 and 6,
processes and command line, may be skipped.
"""

import argparse
import copy
import fcntl
import json
import math
import multiprocessing
import multiprocessing.connection
import operator
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm

from rcgrpo import (
    HIGH,
    LOW,
    add_reward_tokens,
    chat_format,
    collect_groups,
    group_advantages,
    hindsight_step,
    model_policy,
    rcgrpo_step,
    rctp_step,
    rollout,
    scripted_policy,
)

SETTINGS = {  # name: (default for the tiny transformer, for a pretrained model, lowest, highest, meaning)
    "demonstrations": (600, 200, 1, 10**6, "tasks that stage 1 sees solved (and, in RCTP, failed)"),
    "stage1-steps": (400, 60, 1, 10**6, "steps of SFT and of RCTP"),
    "stage1-lr": (3e-3, 1e-4, 0.0, 1.0, "learning rate of SFT and of RCTP"),
    "batch": (32, 8, 1, 10**6, "trajectories per step of SFT and of RCTP"),
    "steps": (80, 40, 1, 10**6, "steps of reinforcement learning"),
    "lr": (5e-4, 1e-5, 0.0, 1.0, "learning rate of reinforcement learning"),
    "tasks-per-step": (8, 4, 1, 10**6, "tasks per step of reinforcement learning"),
    "group-size": (8, 8, 2, 10**6, "G, rollouts per task"),
    "p-high": (0.5, 0.5, 0.0, 1.0, "p, probability of the high reward token in RC-GRPO"),
    "temperature": (0.5, 1.0, 0.01, 100.0, "of the rollouts"),
    "beta": (0.02, 0.02, 0.0, 1000.0, "weight of the KL to the stage-1 model"),
    "test-tasks": (200, 40, 2, 10**6, "held-out tasks"),
    "max-new-tokens": (8, 24, 1, 10**6, "tokens per call, at most"),
    "tokens-per-pass": (24576, 4096, 1, 10**9, "tokens per pass, at most: bounds the memory"),
    "jobs": (2, 1, 1, 1000, "processes at a time; the results are those of one"),
}
ARMS = {  # arm: the reward token that it is evaluated under
    "sft+grpo": None, "sft+rc-grpo": HIGH, "rctp+grpo": HIGH, "rctp+rc-grpo": HIGH,
    "rctp+rc-grpo+hindsight": HIGH, "rctp+grpo+hindsight": HIGH,
}
NAME = {HIGH: "high", LOW: "low", None: "none"}
MAX_TURNS, EVALUATE_EVERY = 8, 10

# ===== 1. The house: tasks, the env, the expert and the blunderer ===========================================

ROOMS = "kitchen attic cellar garden hall study".split()
ITEMS = "cup book lamp clock vase radio chair pan bag globe".split()
TOOL = {"bring": "carry", "fix": "repair", "open": "unlock", "light": "switch"}  # request -> tool
HABITS = {"carts everything": {"carry": "cart"}, "wrong argument": {}, "stops early": {},
          "swaps unlock and switch": {"unlock": "switch", "switch": "unlock"}}
MANUAL = f"""You work in a house. Rooms: {" ".join(ROOMS)}. Items: {" ".join(ITEMS)}.
Do the steps that you are asked for. Say one call and nothing else, then read its answer. The calls:
find ITEM - tells the room it is in, and whether it is small or large
carry ITEM FROM TO - bring a small item from one room to another
cart ITEM FROM TO - bring a large item
repair ITEM ROOM - fix an item in the room it is in
unlock ROOM - open a room
switch ROOM - light a room
done - when all steps are done"""


def make_task(rng, n_steps, large=False):
    """A random task: where items are, which are large, what to do. `large`: one item to bring is large.

    {"where": {"cup": "hall", ...}, "large": ["pan", ...], "steps": [("open", "hall"), ("fix", "cup")]}
    """
    kinds = rng.choice(list(TOOL), n_steps).tolist()
    if large:
        kinds[rng.integers(n_steps)] = "bring"
    items, rooms = rng.permutation(ITEMS).tolist(), rng.permutation(ROOMS).tolist()  # none twice in a task
    steps = []
    for kind, item, room in zip(kinds, items, rooms, strict=False):
        steps.append({"bring": (kind, item, room), "fix": (kind, item)}.get(kind, (kind, room)))
    brought = [step[1] for step in steps if step[0] == "bring"]
    where = {item: str(rng.choice(rooms[n_steps:])) for item in ITEMS}  # nothing is already where it shall go
    others = [item for item in ITEMS if rng.random() < 0.5 and item not in brought]
    return {"where": where, "large": others + brought[: int(large)], "steps": steps}


def request(task):
    return " ".join(f"step {n} {' '.join(step)}" for n, step in enumerate(task["steps"], 1))


def large_item(task):
    """The item to bring that is large, None if there is none."""
    brought = [step[1] for step in task["steps"] if step[0] == "bring"]
    return next((item for item in brought if item in task["large"]), None)


class House:
    """The env, as rcgrpo.rollout wants it. reward() is 1 if the house ends up exactly as asked, else 0."""

    def __init__(self, task, manual=None):
        self.task, self.manual = task, manual

    def reset(self):
        self.where, self.done, self.observation = dict(self.task["where"]), set(), None
        system = [{"role": "system", "content": self.manual}] if self.manual else []
        return [*system, {"role": "user", "content": request(self.task)}]

    def step(self, text):
        call = text.split()
        if call == ["done"]:
            return None
        self.observation = self.answer(call)
        return [{"role": "tool", "content": self.observation}]

    def answer(self, call):
        """Execute a call. Returns what was found, "ok", "fail" (right form, but impossible) or "error"."""
        match call:
            case ["find", item] if item in ITEMS:
                return f"{self.where[item]} {'large' if item in self.task['large'] else 'small'}"
            case ["carry" | "cart" as tool, item, source, target] if item in ITEMS and target in ROOMS:
                if self.where[item] != source or (tool == "cart") != (item in self.task["large"]):
                    return "fail"
                self.where[item] = target
            case ["repair", item, room] if item in ITEMS:
                if self.where[item] != room:
                    return "fail"
                self.done.add(("fix", item))
            case ["unlock" | "switch" as tool, room] if room in ROOMS:
                self.done.add(("open" if tool == "unlock" else "light", room))
            case _:
                return "error"
        return "ok"

    def reward(self):
        moves = {step[1]: step[2] for step in self.task["steps"] if step[0] == "bring"}
        others = {step for step in self.task["steps"] if step[0] != "bring"}
        return float(self.where == self.task["where"] | moves and self.done == others)


def expert(house):
    """What an expert says, call by call, reading the house's answers on the way."""
    for kind, *arguments in house.task["steps"]:
        tool = TOOL[kind]
        if kind in ("bring", "fix"):
            yield f"find {arguments[0]}"
            room, size = house.observation.split()
            arguments.insert(1, room)
            tool = "cart" if kind == "bring" and size == "large" else tool
        yield " ".join([tool, *arguments])
    yield "done"


def blunderer(house, rng):
    """An expert with a bad habit: takes one tool for another, gets arguments wrong, or stops too early."""
    habit = rng.choice(list(HABITS))
    for call in expert(house):
        tool, *arguments = call.split()
        tool = HABITS[habit].get(tool, tool)
        if arguments and rng.random() < 0.5:
            if habit == "wrong argument":
                slot = rng.integers(len(arguments))
                arguments[slot] = rng.choice(ROOMS if arguments[slot] in ROOMS else ITEMS)
            if habit == "stops early":
                yield "done"
                return
        yield " ".join([tool, *arguments])


def demonstrate(tasks, tokenizer, rng, failures, make_env=House):
    """Expert trajectories of all tasks under the high reward token and as many failures under the low one; or
    experts alone, under none. All are played by rcgrpo.rollout; a failure is kept only if its reward is 0."""
    def play(task, script, reward_token):
        house = make_env(task)
        policy = scripted_policy(script(house), tokenizer)
        return rollout([house], [reward_token], policy, tokenizer, max_turns=MAX_TURNS)[0]

    trajectories = []
    for task in tasks:
        trajectories.append(play(task, expert, HIGH if failures else None))
        assert trajectories[-1].reward == 1
        while failures:  # until one fails: a bad habit may do no harm
            failure = play(task, partial(blunderer, rng=rng), LOW)
            if failure.reward == 0:
                trajectories.append(failure)
                break
    return trajectories


# ===== 2. The agent: a tiny transformer over words, or a pretrained model with its own tokenizer ============

CONTROL = ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer():
    others = "find cart done step 1 2 ok fail error small large [ Reward Goal : ]"
    words = [*ROOMS, *ITEMS, *TOOL, *TOOL.values(), *others.split()]
    vocabulary = {word: i for i, word in enumerate(["<unk>", *CONTROL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    cuts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>", pad_token="<unk>",
        extra_special_tokens=CONTROL[:3])
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer, seed):
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.1))
    add_reward_tokens(tokenizer, model)
    return model


def load(args, seed, weights=None):
    """(model, tokenizer, make_env): as stage 1 takes them, or with the weights in a folder."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    pretrained = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    if args.model is None:
        tokenizer = make_tokenizer()
        model = make_model(tokenizer, seed)
        return pretrained(weights) if weights else model, tokenizer, House
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    # a template that cannot be used is refused here
    chat_format(tokenizer).prompt([{"role": "system", "content": MANUAL}, {"role": "user", "content": "hi"}])
    model = pretrained(weights or args.model)
    add_reward_tokens(tokenizer, model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer, partial(House, manual=MANUAL)


# ===== 3. The experiment: two fine-tuned models, four arms of reinforcement learning, nothing tuned per arm =


def draw_tasks(args, seed):
    """(tasks of the demonstrations, tasks of the test, the random numbers that follow)"""
    rng = np.random.default_rng(seed)
    demonstrated = [make_task(rng, n_steps=int(rng.integers(1, 3))) for _ in range(args.demonstrations)]
    return demonstrated, [make_task(rng, 2, large=bool(n % 2)) for n in range(args.test_tasks)], rng


def fine_tune(args, seed, init, log):
    """Stage 1. SFT and RCTP differ in their data and in nothing else. Returns (model, tokenizer)."""
    model, tokenizer, make_env = load(args, seed)
    tasks, _, rng = draw_tasks(args, seed)
    trajectories = demonstrate(tasks, tokenizer, rng, failures=init == "rctp", make_env=make_env)
    if args.model:  # one group: the manual, with which all begin, is computed once in a pass
        trajectories = [replace(t, group="all") for t in trajectories]
    optimizer = torch.optim.AdamW(model.parameters(), args.stage1_lr, weight_decay=0)
    rng = np.random.default_rng(seed)
    for step in range(args.stage1_steps):
        batch = [trajectories[i] for i in rng.integers(len(trajectories), size=args.batch)]
        log(stage=1, step=step, **rctp_step(model, optimizer, batch, args.tokens_per_pass))
    return model, tokenizer


def sampling(args, seed, arm, model, tokenizer):
    """How an arm samples: its policy, and how many rollouts under which reward tokens."""
    draws = torch.Generator(model.device).manual_seed(2 * seed)
    policy = model_policy(model, tokenizer, args.temperature, args.max_new_tokens, generator=draws)
    p = {"sft+grpo": None, "rctp+grpo": 1.0, "rctp+grpo+hindsight": 1.0}.get(arm, args.p_high)  # None: no token, 1: always the high one
    generator = torch.Generator().manual_seed(2 * seed + 1)
    return policy, {"G": args.group_size, "p": p, "stratified": args.stratified, "generator": generator}


def success(args, model, tokenizer, make_env, tasks, reward_token):
    """Share of tasks solved by greedy decoding under this reward token."""
    policy = model_policy(model, tokenizer, temperature=0, max_new_tokens=args.max_new_tokens)
    reward_tokens = [reward_token] * len(tasks)
    rollouts = rollout(map(make_env, tasks), reward_tokens, policy, tokenizer, max_turns=MAX_TURNS)
    return float(np.mean([t.reward for t in rollouts]))


def reinforce(args, seed, arm, log):
    """Stage 2. Line n of its metrics is about the policy after n updates. Returns (model, tokenizer)."""
    model, tokenizer, make_env = load(args, seed, part(args, seed, arm.split("+")[0]))
    ref_model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0)
    policy, groups = sampling(args, seed, arm, model, tokenizer)
    evaluate = partial(success, args, model, tokenizer, make_env, draw_tasks(args, seed)[1])
    rng = np.random.default_rng([seed, 1])  # those of draw_tasks would give the tasks of the test again
    for step in range(args.steps + 1):
        metrics = {}
        if step % EVALUATE_EVERY == 0 or step == args.steps:
            metrics["success"] = evaluate(ARMS[arm])
        if arm == "sft+rc-grpo" and step in (0, args.steps):  # is success without one kept?
            metrics["success_without_token"] = evaluate(None)
        if step < args.steps:
            tasks = [make_task(rng, 2, large=bool(n % 2)) for n in range(args.tasks_per_step)]
            stepped, rollouts = rcgrpo_step(
                model, ref_model, optimizer, tasks, make_env, policy, tokenizer, **groups,
                limits={"max_turns": MAX_TURNS}, beta=args.beta, ratio=args.ratio,
                tokens_per_pass=args.tokens_per_pass)
            metrics |= stepped
            if arm.endswith("+hindsight"):
                learned = hindsight_step(model, optimizer, rollouts, tokenizer, args.tokens_per_pass)
                metrics |= {"hindsight_loss": learned["loss"], "hindsight_count": learned["count"]}
        log(stage=2, step=step, **metrics)
    return model, tokenizer


# ===== 4. The report ========================================================================================


def show_group(args, seed, arm):
    """One group of an arm as reinforcement learning will see it: temperature 1, the arm's own reward tokens.
    The task is the first of the test that has a large item to bring, whatever comes out; more are counted."""
    tasks = list(filter(large_item, draw_tasks(args, seed)[1]))[:20]
    model, tokenizer, make_env = load(args, seed, part(args, seed, arm.split("+")[0]))
    policy, groups = sampling(args, seed, arm, model, tokenizer)
    rollouts = collect_groups(tasks, make_env, policy, tokenizer, **groups, limits={"max_turns": MAX_TURNS})
    rewards = np.array([t.reward for t in rollouts]).reshape(len(tasks), args.group_size)
    flat, (mu, sigma) = np.sum(rewards.std(1) == 0), (rewards[0].mean(), rewards[0].std())
    print(f'{arm.upper()}, "{request(tasks[0])}" (the {large_item(tasks[0])} is large): mu_g = {mu:.2f}, '
          f"sigma_g = {sigma:.2f}\n  (sigma_g = 0 in {flat} of {len(tasks)} groups of such tasks)")
    advantages = group_advantages(rewards[0], [0] * args.group_size).tolist()
    for trajectory, advantage in zip(rollouts, advantages, strict=False):  # the first group
        token, calls = NAME[trajectory.reward_token], " | ".join(said(trajectory, tokenizer))
        print(f"  {token:4}  R = {trajectory.reward:.0f}  A = {advantage:5.2f}  {calls}")
    print(flush=True)


def said(trajectory, tokenizer):
    """The calls of a trajectory, as texts of one line."""
    runs = groupby(zip(trajectory.ids, trajectory.mask, strict=True), key=lambda pair: pair[1])
    actions = [[token for token, _ in run] for sampled, run in runs if sampled]
    return [" ".join(chat_format(tokenizer).text(action).split())[:60] for action in actions]


def curves(runs, arm, key):
    """(seeds, steps that have such a number)"""
    return np.array([[line[key] for line in run[arm] if key in line] for run in runs])


def summarise(runs):
    """{arm: {name: one number per seed}}; "first" and "last" are means of a tenth of the steps."""
    def tenth(lines, key, end):
        values = [line[key] for line in lines if key in line]
        n = max(1, len(values) // 10)
        values = [value for value in (values[:n] if end == "first" else values[-n:]) if value is not None]
        return float(np.mean(values)) if values else None

    keys = {"sigma": "sigma", "zero_std": "zero_std", "reward_high_minus_low": "reward_high_minus_low",
            "sigma2": "sigma2", "floor": "sigma2_floor"}
    arms = {}
    for arm in runs[0]:
        arms[arm] = numbers = {}
        for key in ("success", "success_without_token"):
            if (curve := curves(runs, arm, key)).size:
                numbers |= {f"{key}_before": curve[:, 0].tolist(), f"{key}_after": curve[:, -1].tolist()}
        for name, key in keys.items():
            for end in ("first", "last"):
                numbers[f"{name}_{end}"] = [tenth(run[arm], key, end) for run in runs]
    return arms


def cell(values):
    """Mean, and +- standard deviation where there are several seeds; a dash where there is no such number."""
    values = [v for v in values if v is not None]
    spread = f"±{np.std(values):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values) + 0.0:.2f}{spread}".replace("-0.00", "0.00") if values else "-"


def print_table(arms):
    rows = [["arm", "reward token", "held-out success", "sigma_g", "sigma_g = 0", "mu_high - mu_low",
             "E[sigma_g^2] (floor)"]]
    for arm, numbers in arms.items():
        value = {name: cell(values) for name, values in numbers.items()}
        change = {name: f"{value[f'{name}_first']} -> {value[f'{name}_last']}".replace("- -> -", "-")
                  for name in ("sigma", "zero_std", "reward_high_minus_low")}
        success = f"{value['success_before']} -> {value['success_after']}"
        rows.append([arm, NAME[ARMS[arm]], success, *change.values(),
                     f"{value['sigma2_first']} ({value['floor_first']})"])
        if "success_without_token_before" in value:
            success = f"{value['success_without_token_before']} -> {value['success_without_token_after']}"
            rows.append(["  the same", "none", success])
    widths = [max(len(row[n]) for row in rows if n < len(row)) for n in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip())


def compare_seeds(arms):
    """What single seeds say: how many end above .9, and two exact tests of RCTP+GRPO against RCTP+RC-GRPO."""
    after = {arm: numbers["success_after"] for arm, numbers in arms.items()}
    above = {arm: sum(value > 0.9 for value in values) for arm, values in after.items()}
    seeds = len(next(iter(after.values())))
    counts = ", ".join(f"{arm.upper()} {n}" for arm, n in above.items())
    yield f"Of {seeds} seeds end above .9: {counts}."
    if {"rctp+grpo", "rctp+rc-grpo"} <= after.keys():
        a, b = after["rctp+grpo"], after["rctp+rc-grpo"]
        better, worse = (sum(map(order, a, b)) for order in (operator.lt, operator.gt))
        yield (f"RCTP+RC-GRPO ends above RCTP+GRPO in {better} seeds, below in {worse}: sign test "
               f"p = {sign_test(better, worse):.2g}; Fisher's exact test of the counts above .9: "
               f"p = {fisher_test(above['rctp+grpo'], above['rctp+rc-grpo'], seeds):.2g}.")


def sign_test(better, worse):
    """Two-sided p of so uneven a split, or a more uneven one, of better + worse fair coins."""
    n = better + worse
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)


def fisher_test(a, b, n):
    """Two-sided p of a of n against b of n: all splits of a + b that are no more likely than this one."""
    ways = [math.comb(n, k) * math.comb(n, a + b - k) for k in range(a + b + 1)]
    return sum(way for way in ways if way <= ways[a]) / sum(ways)


def sparkline(values, top, width=40):
    means = [np.mean(part) for part in np.array_split(np.array(values), min(width, len(values)))]
    return "".join(" ▁▂▃▄▅▆▇█"[min(8, round(8 * m / top))] for m in means)


def closing_sentences(arms, steps):
    """What the numbers say, and no more. A difference of less than .05 counts as none."""
    def compare(a, b, less, same, more):
        gap = np.mean(b) - np.mean(a)
        return more if gap >= 0.05 else less if gap <= -0.05 else same

    def story(arm):
        before, after = arms[arm]["success_before"], arms[arm]["success_after"]
        verb = compare(before, after, "fell", "hardly moved", "rose")
        untaught = " (stage 1 has taught next to nothing)" if np.mean(before) < 0.1 else ""
        stuck = np.mean(arms[arm]["zero_std_first"])
        return (f"{arm.upper()}: {stuck:.0%} of its first groups had sigma_g = 0, so no policy gradient; "
                f"in {steps} steps held-out success {verb}, {cell(before)} -> {cell(after)}{untaught}")

    if "sft+grpo" in arms:
        yield f"{story('sft+grpo')} (see `group_advantages`)."
    if "rctp+rc-grpo" not in arms:
        return
    rc, against = arms["rctp+rc-grpo"], ""
    if "rctp+grpo" in arms:
        after = arms["rctp+grpo"]["success_after"]
        order = compare(after, rc["success_after"], "below", "level with", "above")
        against = f", {order} RCTP+GRPO ({cell(after)})"
    yield f"{story('rctp+rc-grpo')}{against} (see `sample_reward_tokens`)."
    first, last = rc["reward_high_minus_low_first"], rc["reward_high_minus_low_last"]
    meaning = "no difference to speak of, which Prop. 4.3 needs"
    if None not in first + last and np.mean(first) >= 0.05:
        meaning = compare(first, last, "the gap narrowed, and the floor of Prop. 4.3 sank", "the gap stayed",
                          "the gap widened, and the floor of Prop. 4.3 rose")
    yield f"Its mu_high - mu_low, {cell(first)} -> {cell(last)}: {meaning} (see `group_metrics`)."


def report(runs, arms, steps):
    print("\nSuccess: held-out tasks, greedy, under the arm's own reward token, before -> after.\n"
          "The rest: first -> last tenth of the steps of reinforcement learning; the last column: first.\n")
    print_table(arms)
    for key, title, top in (("sigma", "sigma_g", 0.5), ("success", "held-out success", 1)):
        print(f"\n{title} over the steps, median of the seeds (full block = {top})")
        for arm in arms:
            median = np.median(curves(runs, arm, key), 0)
            print(f"  {arm:12} reward token {NAME[ARMS[arm]]} |{sparkline(median, top)}|")
    several = compare_seeds(arms) if len(runs) > 1 else []
    print("", *closing_sentences(arms, steps), *several, "", sep="\n")


def plot(runs, path):
    """sigma_g and held-out success, median and range of the seeds. Needs matplotlib."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print(f"No {path.name}: pip install matplotlib, then the same command with --resume draws it.")
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6))
    titles = {"sigma": "mean sigma_g of a group", "success": "success on held-out tasks"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for arm in runs[0]:
            x = [line["step"] for line in runs[0][arm] if key in line]
            y = curves(runs, arm, key)
            n = min(5, y.shape[1]) if key == "sigma" else 1  # sigma_g: means of five steps
            y = np.array([np.convolve(curve, np.ones(n) / n, "valid") for curve in y])
            x = x[n // 2 :][: y.shape[1]]
            label = f"{arm.upper()} (reward token at test: {NAME[ARMS[arm]]})"
            (line,) = axis.plot(x, np.median(y, 0), label=label)
            axis.fill_between(x, y.min(0), y.max(0), alpha=0.15, color=line.get_color())
        axis.set(title=title, xlabel="step of reinforcement learning", ylim=(0, None))
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ===== 5. Processes =========================================================================================
# A run is made of parts: stage 1 and the arms of every seed. They meet in --out and nowhere else.


def part(args, seed, name, suffix=""):
    """Where the model of a part is kept, or (".jsonl") its metrics, once it is finished."""
    return args.out / f"seed-{seed}" / f"{name}{suffix}"


def run_parts(args, parts, slot=0, lock=None):
    """Run parts one after another, except finished ones. lock: of the other processes, if there are any."""
    if lock:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that started this one
        threading.Thread(target=end_with_parent, daemon=True).start()
        tqdm.set_lock(lock)
    for seed, name in parts:
        finished, begun = part(args, seed, name, ".jsonl"), part(args, seed, name, ".jsonl.part")
        if not (finished.exists() and part(args, seed, name).exists()):
            begun.parent.mkdir(exist_ok=True)
            steps, run = (args.steps, reinforce) if name in ARMS else (args.stage1_steps, fine_tune)
            with (open(begun, "w", buffering=1) as file,
                  tqdm(total=steps, desc=f"seed {seed} {name:12}", position=slot, leave=False) as bar):
                model, tokenizer = run(args, seed, name, partial(log_line, file, bar, {}, seed, name))
            model.save_pretrained(part(args, seed, name))
            if args.model:  # the other is make_tokenizer()
                tokenizer.save_pretrained(part(args, seed, name))
            begun.replace(finished)
        if name in ARMS:
            curve = [line["success"] for line in read(args, seed, name) if "success" in line]
            tqdm.write(f"seed {seed}  {name:12}  held-out success, reward token {NAME[ARMS[name]]}: "
                       f"{curve[0]:.3f} -> {curve[-1]:.3f}")


def end_with_parent():
    """However the process that started this one ends: the lock on --out ends with it."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def log_line(file, bar, shown, seed, name, **metrics):
    """A line of metrics into the file, its most telling numbers beside the progress bar."""
    file.write(json.dumps({"seed": seed, "arm": name, **metrics}) + "\n")
    telling = ["reward", "sigma", "success"] if name in ARMS else ["loss"]
    shown |= {key: f"{metrics[key]:.3f}" for key in telling if key in metrics}
    bar.set_postfix(shown, refresh=False)
    bar.update(metrics["step"] < bar.total)


def run_in_processes(args, parts):
    """Deal parts to --jobs processes. When one fails, and at ctrl-C, all end."""
    if args.jobs == 1:
        return run_parts(args, parts)
    spawn = multiprocessing.get_context("spawn")
    lock, running = spawn.RLock(), []
    try:
        for slot in range(min(args.jobs, len(parts))):
            mine = parts[slot :: args.jobs]
            running.append(spawn.Process(target=run_parts, args=(args, mine, slot, lock), daemon=True))
            running[-1].start()
        while running:
            multiprocessing.connection.wait([process.sentinel for process in running])
            if any(process.exitcode for process in running):
                sys.exit("a process failed, see above; the same command with --resume goes on")
            running = [process for process in running if process.exitcode is None]
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
            process.join()


def read(args, seed, name):
    path = part(args, seed, name, ".jsonl")
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        sys.exit(f"{path} is damaged ({error}): delete it, and this command with --resume makes it again")


# ===== 6. The command line ==================================================================================


def within(kind, low, high):
    """The type of an argument: a finite number from low to high, whole if kind is int."""
    def number(text):
        value = kind(text)
        if not low <= value <= high:  # nor is nan, nor inf
            raise argparse.ArgumentTypeError(f"needs at least {low} and at most {high}, got {text}")
        return value
    return number


def parse_arguments(argv=None):
    """(arguments, parser)"""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--seed", type=within(int, 0, 2**31), default=0, help="first seed")
    add("--seeds", type=within(int, 1, 10**6), default=1, help="how many seeds")
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="which arms (all)")
    add("--model", help="a pretrained chat model, folder or name, in place of the tiny transformer")
    add("--stratified", action="store_true", help="equally many high reward tokens in each group")
    add("--ratio", choices=["token", "trajectory"], default="token", help="one rho per token or trajectory")
    add("--out", type=Path, default=Path("runs/toy"), help="folder of metrics, summary, picture and models")
    add("--resume", action="store_true", help="keep what is finished in --out and go on")
    for name, (tiny, pretrained, low, high, meaning) in SETTINGS.items():
        add(f"--{name}", type=within(type(tiny), low, high), metavar="N",
            help=f"{meaning} ({tiny}; with --model {pretrained})")
    args = parser.parse_args(argv)
    for name, (tiny, pretrained, *_) in SETTINGS.items():
        if getattr(args, name.replace("-", "_")) is None:
            setattr(args, name.replace("-", "_"), pretrained if args.model else tiny)
    args.arms = [arm for arm in ARMS if arm in args.arms]
    args.threads = max(1, torch.get_num_threads() // args.jobs) if args.model else 1  # the tiny one needs one
    return args, parser


def claim(args, parser):
    """Make --out ready; what cannot be trained, written to or resumed is refused in one line.

    Returns a lock on it, which ends with this process however that ends."""
    try:
        load(args, args.seed)
    except Exception as error:  # whatever files that are no model raise
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        parser.error(f"--model {args.model} cannot be used: {reason}")
    free = ("seed", "seeds", "jobs", "threads", "arms", "out", "resume", "tokens_per_pass")
    settings = {name: value for name, value in vars(args).items() if name not in free}
    settings, file = json.dumps(settings, indent=1), args.out / "settings.json"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        lock = open(args.out / ".lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if args.resume and file.exists():
            kept = file.read_text()
            if kept != settings:
                other = sorted(set(kept.splitlines()) - set(settings.splitlines()))
                parser.error(f"--resume: {file} has other settings than this command: {' '.join(other)}")
        results = [args.out / name for name in ("metrics.jsonl", "summary.json", "toy.png")]
        for old in [] if args.resume else [*args.out.glob("seed-*/*.jsonl"), *results]:
            old.unlink(missing_ok=True)
        file.write_text(settings)
    except BlockingIOError:
        parser.error(f"--out {args.out} is in use by another process: wait for its end, or choose another")
    except OSError as error:
        parser.error(f"--out {args.out} cannot be used: {error}")
    return lock


def main(argv=None):
    started = time.time()
    args, parser = parse_arguments(argv)
    lock = claim(args, parser)
    seeds = list(range(args.seed, args.seed + args.seeds))
    inits = dict.fromkeys(arm.split("+")[0] for arm in args.arms)
    try:
        run_in_processes(args, [(seed, init) for seed in seeds for init in inits])
        if shown := [arm for arm in ("sft+grpo", "rctp+rc-grpo") if arm in args.arms]:
            print("\nThe first test task with a large item: a group before reinforcement learning.\n")
        for arm in shown:
            show_group(args, args.seed, arm)
        run_in_processes(args, [(seed, arm) for seed in seeds for arm in args.arms])
    except KeyboardInterrupt:
        sys.exit("stopped; the same command with --resume goes on")
    with open(args.out / "metrics.jsonl", "w") as file:
        for seed in seeds:
            for name in [*inits, *args.arms]:
                file.write(part(args, seed, name, ".jsonl").read_text())
    runs = [{arm: read(args, seed, arm) for arm in args.arms} for seed in seeds]
    arms, seconds = summarise(runs), round(time.time() - started, 1)
    summary = {"seconds": seconds, "seeds": seeds, "arms": arms}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    report(runs, arms, args.steps)
    plot(runs, args.out / "toy.png")
    written = ", ".join(sorted(name for name in os.listdir(args.out) if not name.startswith(".")))
    print(f"{seconds:.0f} s. Written to {args.out}: {written}")
    lock.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` does what ctrl-C does
    main()
