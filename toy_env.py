"""A toy tool environment that shows the variance collapse, and RC-GRPO undoing it, in about 90 seconds on a laptop.

    python toy_env.py                  one seed of the 2x2 {SFT, RCTP} x {GRPO, RC-GRPO}
    python toy_env.py --seeds 3        three seeds, mean and spread
    python toy_env.py --help           what there is to play with

The agent works in a house. It is asked for one or two steps ("step 1 bring cup attic step 2 open cellar"), says one
tool call a turn and reads the answer: `find cup` -> `kitchen small`, `carry cup kitchen attic` -> `ok`, ..., `done`.
Where an item is, and whether it is large and needs `cart` instead of `carry`, has to be looked up.

In the demonstrations every item to be carried is small; in the tasks of reinforcement learning and of the test one is
large in half of the cases. So the fine-tuned agent is confidently right on one half and confidently wrong on the other:
groups of all ones and groups of all zeros, sigma_g = 0, nothing to learn from. RCTP also sees failures, one kind of which
takes the cart for everything: wrong there, right for what is large. Everything is trained by rcgrpo.py.
"""

import argparse
import copy
import json
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rcgrpo import (
    HIGH, LOW, add_reward_tokens, chat_format, rcgrpo_step, rctp_step, rollout, sample, scripted_policy,
)

# ======================================================================================================================
# The house: tasks, the env, the expert and the blunderer
# ======================================================================================================================

ROOMS = "kitchen attic cellar garden hall study".split()
ITEMS = "cup book lamp clock vase radio chair pan bag globe".split()
TOOL = {"bring": "carry", "fix": "repair", "open": "unlock", "light": "switch"}  # request -> tool
HABITS = {"carts everything": {"carry": "cart"}, "swaps unlock and switch": {"unlock": "switch", "switch": "unlock"},
          "wrong argument": {}, "stops early": {}}
MAX_TURNS = 8


def make_task(rng, n_steps, large=False):
    """A random task, e.g. {"where": {"cup": "hall", ...}, "large": ["pan", ...], "steps": [("open", "cellar"), ("bring",
    "cup", "attic")]}: where each item is, which are large, what is asked for. `large`: one item to bring is large."""
    kinds = rng.choice(list(TOOL), n_steps).tolist()
    if large:
        kinds[rng.integers(n_steps)] = "bring"
    items, rooms = rng.permutation(ITEMS).tolist(), rng.permutation(ROOMS).tolist()  # no item or room twice in a task
    arguments = lambda kind, item, room: (item, room) if kind == "bring" else (item,) if kind == "fix" else (room,)
    steps = [(kind, *arguments(kind, item, room)) for kind, item, room in zip(kinds, items, rooms)]
    brought = [step[1] for step in steps if step[0] == "bring"]
    return {
        "where": {item: str(rng.choice(rooms[n_steps:])) for item in ITEMS},  # nothing is already where it shall go
        "large": [item for item in ITEMS if rng.random() < 0.5 and item not in brought] + brought[: int(large)],
        "steps": steps,
    }


class House:
    """The env, as rcgrpo.rollout wants it. reward() is 1 if the house ends up exactly as asked for, else 0."""

    def __init__(self, task):
        self.task = task

    def reset(self):
        self.where, self.done, self.observation = dict(self.task["where"]), set(), None
        request = " ".join(f"step {n} {' '.join(step)}" for n, step in enumerate(self.task["steps"], 1))
        return [{"role": "user", "content": request}]

    def step(self, text):
        call = text.split()
        if call == ["done"]:
            return None
        self.observation = self.answer(call)
        return [{"role": "tool", "content": self.observation}]

    def answer(self, call):
        """Execute one call. The observation is what was found, "ok", "fail" (right form, impossible), or "error"."""
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
    """An expert with one bad habit: takes one tool for another, gets every other argument wrong, or stops too early."""
    habit = rng.choice(list(HABITS))
    for call in expert(house):
        tool, *arguments = call.split()
        tool = HABITS[habit].get(tool, tool)
        if arguments and rng.random() < 0.5:
            if habit == "wrong argument":
                slot = rng.integers(len(arguments))
                arguments[slot] = rng.choice(ROOMS if arguments[slot] in ROOMS else ITEMS)
            if habit == "stops early":
                tool, arguments = "done", []
        yield " ".join([tool, *arguments])


def demonstrate(tasks, tokenizer, rng, failures):
    """Expert trajectories of all tasks, marked high, and as many failures, marked low; or only experts, unmarked.

    Both are played for real by rcgrpo.rollout. A failure is kept only if its reward is 0.
    """
    def play(task, script, goal):
        house = House(task)
        return rollout([house], [goal], scripted_policy(script(house), tokenizer), tokenizer, max_turns=MAX_TURNS)[0]

    trajectories = []
    for task in tasks:
        trajectories.append(play(task, expert, HIGH if failures else None))
        assert trajectories[-1].reward == 1
        while failures and len(trajectories) % 2:
            failure = play(task, partial(blunderer, rng=rng), LOW)
            if failure.reward == 0:
                trajectories.append(failure)
    return trajectories


# ======================================================================================================================
# A word-level tokenizer and a tiny transformer
# ======================================================================================================================

CONTROL = ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer():
    words = [*ROOMS, *ITEMS, *TOOL, *TOOL.values(), *"find cart done step 1 2 ok fail error small large".split(),
             *"[ Reward Goal : ]".split()]
    vocabulary = {word: i for i, word in enumerate(["<unk>", *CONTROL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>", pad_token="<unk>",
                                   extra_special_tokens=CONTROL[:3])
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer, seed):
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
                         initializer_range=0.1)
    model = Qwen2ForCausalLM(config)
    add_reward_tokens(tokenizer, model)
    return model


# ======================================================================================================================
# The experiment: two fine-tuned models, four arms of reinforcement learning, nothing tuned per arm
# ======================================================================================================================

ARMS = ["sft+grpo", "sft+rc-grpo", "rctp+grpo", "rctp+rc-grpo"]
DEMONSTRATIONS, TEST_TASKS, TASKS_PER_STEP, BATCH, STAGE1_LR = 600, 200, 8, 32, 3e-3


def model_policy(model, tokenizer, temperature, generator=None):
    stop_ids = chat_format(tokenizer).stop_ids
    return partial(sample, model, temperature=temperature, max_new_tokens=8, stop_ids=stop_ids, generator=generator)


def success(model, tasks, tokenizer, init):
    """Share of tasks solved by greedy decoding, under the high mark if the model knows marks."""
    goals = [HIGH if init == "rctp" else None] * len(tasks)
    policy = model_policy(model, tokenizer, temperature=0)
    return np.mean([t.reward for t in rollout(map(House, tasks), goals, policy, tokenizer, max_turns=MAX_TURNS)])


def fine_tune(model, trajectories, steps, seed, name, log):
    """Stage 1. SFT and RCTP differ in their data and in nothing else."""
    rng, optimizer = np.random.default_rng(seed), torch.optim.AdamW(model.parameters(), STAGE1_LR, weight_decay=0)
    for step in (bar := tqdm(range(steps), desc=f"seed {seed} {name:12}", leave=False)):
        batch = [trajectories[i] for i in rng.integers(len(trajectories), size=BATCH)]
        metrics = rctp_step(model, optimizer, batch, rows_per_pass=BATCH)
        log(seed=seed, arm=name, stage=1, step=step, **metrics)
        bar.set_postfix_str(f"loss {metrics['loss']:.3f}")
    return model


def reinforce(model, arm, tokenizer, args, seed, log):
    """Stage 2. Plain GRPO draws no marks; on a model that knows them it always asks for the high one."""
    init, algorithm = arm.split("+")
    p = args.p_high if algorithm == "rc-grpo" else 1.0 if init == "rctp" else None
    ref_model, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    policy = model_policy(model, tokenizer, temperature=1.0, generator=generator)
    history = []
    for step in (bar := tqdm(range(args.steps), desc=f"seed {seed} {arm:12}", leave=False)):
        tasks = [make_task(rng, 2, large=bool(n % 2)) for n in range(TASKS_PER_STEP)]
        metrics, _ = rcgrpo_step(
            model, ref_model, optimizer, tasks, House, policy, tokenizer, G=args.group_size, p=p, stratified=args.stratified,
            generator=generator, limits={"max_turns": MAX_TURNS}, beta=args.beta, ratio=args.ratio,
            groups_per_pass=TASKS_PER_STEP,
        )
        history.append(metrics)
        log(seed=seed, arm=arm, stage=2, step=step, **metrics)
        bar.set_postfix_str(f"reward {metrics['reward']:.2f} sigma_g {metrics['sigma']:.3f}")
    return history


def run_seed(seed, args, log):
    """Both stages of every arm for one seed. Returns {arm: (success before, success after, metrics of each step)}."""
    rng, tokenizer = np.random.default_rng(seed), make_tokenizer()
    base = make_model(tokenizer, seed)
    demonstrations = [make_task(rng, n_steps=int(rng.integers(1, 3))) for _ in range(DEMONSTRATIONS)]
    test = [make_task(rng, n_steps=2, large=bool(n % 2)) for n in range(TEST_TASKS)]
    results = {}
    for init in ("sft", "rctp"):
        data = demonstrate(demonstrations, tokenizer, rng, failures=init == "rctp")
        tuned = fine_tune(copy.deepcopy(base), data, args.stage1_steps, seed, init, log)
        before = success(tuned, test, tokenizer, init)
        for arm in (arm for arm in ARMS if arm.startswith(init)):
            model = copy.deepcopy(tuned)
            history = reinforce(model, arm, tokenizer, args, seed, log)
            after = success(model, test, tokenizer, init)
            results[arm] = (before, after, history)
            print(f"seed {seed}  {arm:12}  success {before:.3f} -> {after:.3f}", flush=True)
    return results


# ======================================================================================================================
# The report
# ======================================================================================================================


def summarise(runs):
    """{arm: {name: one number per seed}}; "first" and "last" are means over the first and the last tenth of the steps."""
    def mean(history, key, part):
        tenth = max(1, len(history) // 10)
        values = [m[key] for m in (history[:tenth] if part == "first" else history[-tenth:]) if m[key] is not None]
        return float(np.mean(values)) if values else None

    columns = {"sigma_first": ("sigma", "first"), "sigma_last": ("sigma", "last"),
               "zero_std_first": ("zero_std", "first"), "zero_std_last": ("zero_std", "last"),
               "reward_high_minus_low_first": ("reward_high_minus_low", "first"),
               "reward_high_minus_low_last": ("reward_high_minus_low", "last"),
               "sigma2_first": ("sigma2", "first"), "floor_first": ("sigma2_floor", "first")}
    return {
        arm: {"success_before": [float(run[arm][0]) for run in runs], "success_after": [float(run[arm][1]) for run in runs],
              **{name: [mean(run[arm][2], *column) for run in runs] for name, column in columns.items()}}
        for arm in ARMS
    }


def cell(values):
    """Mean, and +- standard deviation where there are several seeds; a dash where the arm has no such number."""
    values = [v for v in values if v is not None]
    spread = f"±{np.std(values):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values) + 0.0:.2f}{spread}".replace("-0.00", "0.00") if values else "-"


def print_table(arms):
    columns = [("success", "success_before", "success_after"), ("sigma_g", "sigma_first", "sigma_last"),
               ("zero-variance groups", "zero_std_first", "zero_std_last"),
               ("mu_high - mu_low", "reward_high_minus_low_first", "reward_high_minus_low_last"),
               ("E[sigma_g^2] (floor)", "sigma2_first", "floor_first")]
    rows = [["arm", *(name for name, _, _ in columns)]]
    for arm, numbers in arms.items():
        pairs = [(cell(numbers[a]), cell(numbers[b])) for _, a, b in columns]
        rows.append([arm, *("-" if a == "-" else f"{a} -> {b}" for a, b in pairs[:-1]), "{} ({})".format(*pairs[-1])])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def sparkline(values, top, width=40):
    means = [np.mean(part) for part in np.array_split(np.array(values), min(width, len(values)))]
    return "".join(" ▁▂▃▄▅▆▇█"[min(8, round(8 * m / top))] for m in means)


def curve(runs, arm, key):
    """(seeds, steps)"""
    return np.array([[m[key] for m in run[arm][2]] for run in runs])


def plot(runs, path):
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for axis, key, title in zip(axes, ("sigma", "reward"), ("mean sigma_g of a group", "mean reward of the rollouts")):
        for arm in ARMS:
            smooth = np.array([np.convolve(c, np.ones(5) / 5, "valid") if len(c) >= 5 else c for c in curve(runs, arm, key)])
            (line,) = axis.plot(smooth.mean(0), label=arm.upper().replace("+", " + "))
            axis.fill_between(range(smooth.shape[1]), smooth.min(0), smooth.max(0), alpha=0.15, color=line.get_color())
        axis.set(title=title, xlabel="step of reinforcement learning", ylim=(0, None))
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(runs, arms):
    print("\nStart -> end of reinforcement learning (success: held-out tasks; the rest: first and last tenth of the steps)\n")
    print_table(arms)
    for key, title, top in (("sigma", "sigma_g", 0.5), ("reward", "mean reward of the rollouts", 1.0)):
        print(f"\n{title} over the steps (full block = {top})")
        for arm in ARMS:
            print(f"  {arm:12} |{sparkline(curve(runs, arm, key).mean(0), top)}|")
    sft, rctp, rc = arms["sft+grpo"], arms["rctp+grpo"], arms["rctp+rc-grpo"]
    share = lambda arm: f"{np.mean(arm['zero_std_first']):.0%}"
    print(f"\nAfter SFT, {share(sft)} of GRPO's groups had sigma_g = 0, and success went from {cell(sft['success_before'])} to "
          f"{cell(sft['success_after'])}: see `group_advantages`, where such a group's advantages are all 0.\n"
          f"After RCTP, with a mark drawn for every rollout, {share(rc)} had, and success went from {cell(rc['success_before'])} "
          f"to {cell(rc['success_after'])} (with the high mark always: {share(rctp)}, and to {cell(rctp['success_after'])}): see "
          "`sample_reward_tokens` and `collect_groups`, where the marks are drawn.\n"
          "The reward does not look at the mark, so the low mode is trained to succeed as well: mu_high - mu_low went from "
          f"{cell(rc['reward_high_minus_low_first'])} to {cell(rc['reward_high_minus_low_last'])}, and the floor of Prop. 4.3 "
          "with it: see `group_metrics`.")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, default=80, help="steps of reinforcement learning")
    parser.add_argument("--stage1-steps", type=int, default=400, help="steps of SFT and of RCTP")
    parser.add_argument("--group-size", type=int, default=8, help="G, rollouts per task")
    parser.add_argument("--p-high", type=float, default=0.5, help="p, probability of the high mark in RC-GRPO")
    parser.add_argument("--stratified", action="store_true", help="exactly round(pG) high marks in every group")
    parser.add_argument("--ratio", choices=["token", "trajectory"], default="token", help="one rho per token or per trajectory")
    parser.add_argument("--beta", type=float, default=0.02, help="weight of the KL to the stage-1 model")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of reinforcement learning")
    parser.add_argument("--out", type=Path, default=Path("runs/toy"), help="folder for metrics.jsonl, summary.json, toy.png")
    args = parser.parse_args()
    if min(args.seeds, args.steps, args.stage1_steps, args.group_size) < 1 or not 0 <= args.p_high <= 1:
        parser.error("--seeds, --steps, --stage1-steps and --group-size must be at least 1, --p-high between 0 and 1")
    return args


def main():
    args = parse_arguments()
    torch.set_num_threads(1)  # a model this small is fastest on one core
    args.out.mkdir(parents=True, exist_ok=True)
    started, seeds = time.time(), list(range(args.seed, args.seed + args.seeds))
    with open(args.out / "metrics.jsonl", "w") as metrics_file:
        log = lambda **line: metrics_file.write(json.dumps(line) + "\n")
        runs = [run_seed(seed, args, log) for seed in seeds]
    arms, seconds = summarise(runs), round(time.time() - started, 1)
    (args.out / "summary.json").write_text(json.dumps({"seconds": seconds, "seeds": seeds, "arms": arms}, indent=1) + "\n")
    plot(runs, args.out / "toy.png")
    report(runs, arms)
    print(f"\n{seconds:.0f} s. Written to {args.out}: {', '.join(sorted(os.listdir(args.out)))}")


if __name__ == "__main__":
    main()
