"""A toy tool environment that shows the variance collapse, and RC-GRPO undoing it, in a minute and a half.

    python toy_env.py               one seed of {SFT, RCTP} x {GRPO, RC-GRPO}, and of RC-GRPO with hindsight
    python toy_env.py --seeds 20    twenty seeds, compared by exact tests; --help: what there is to play with

The agent works in a house. It is asked for one or two steps ("step 1 bring cup attic step 2 open cellar"),
says one tool call a turn and reads the answer: `find cup` -> `kitchen small`, `carry cup kitchen attic` ->
`ok`, ..., `done`. Where an item is, and whether it is large and needs `cart`, not `carry`, must be looked up.

In the demonstrations every item to be carried is small; in half of the tasks of reinforcement learning and
of the test one is large. So the fine-tuned agent is confidently right on one half and just as confidently
wrong on the other: groups of all ones and of all zeros, sigma_g = 0, nothing to learn from. RCTP also sees
failures, one kind of which takes the cart for everything: wrong there, right for what is large. Everything is
trained by rcgrpo.py. Sections 4 and 5, the report and the command line, may be skipped.
"""

import argparse
import copy
import json
import math
import multiprocessing
import pickle
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm

import rcgrpo
from rcgrpo import HIGH, LOW

SETTINGS = {  # name: (default, lowest, highest, meaning)
    "seed": (0, 0, 2**31, "first seed"),
    "seeds": (1, 1, 10**6, "how many seeds"),
    "jobs": (2, 1, 1000, "processes at a time; the results are those of one"),
    "demonstrations": (600, 1, 10**6, "tasks that stage 1 sees solved (and, in RCTP, failed)"),
    "stage1-steps": (400, 1, 10**6, "steps of SFT and of RCTP"),
    "stage1-lr": (3e-3, 1e-9, 1.0, "learning rate of SFT and of RCTP"),
    "batch": (32, 1, 10**6, "trajectories per step of SFT and of RCTP"),
    "steps": (80, 1, 10**6, "steps of reinforcement learning"),
    "lr": (5e-4, 1e-9, 1.0, "learning rate of reinforcement learning"),
    "tasks-per-step": (8, 1, 10**6, "tasks per step of reinforcement learning"),
    "group-size": (8, 2, 10**6, "G, rollouts per task"),
    "p-high": (0.5, 0.0, 1.0, "p, probability of the high reward token in RC-GRPO"),
    "temperature": (0.5, 0.01, 100.0, "of the rollouts of reinforcement learning; the test is greedy"),
    "beta": (0.02, 0.0, 1000.0, "weight of the KL to the stage-1 model"),
    "test-tasks": (200, 2, 10**6, "held-out tasks"),
    "max-new-tokens": (8, 1, 10**6, "tokens per call, at most"),
    "tokens-per-pass": (24576, 1, 10**9, "tokens per pass, at most: bounds the memory"),
}
ARMS = {  # arm: the reward token that it is evaluated under
    "sft+grpo": None, "sft+rc-grpo": HIGH, "rctp+grpo": HIGH, "rctp+rc-grpo": HIGH,
    "rctp+rc-grpo+hindsight": HIGH,  # not the paper's: a `hindsight_step` after each step
    "rctp+grpo+hindsight": HIGH,  # its control, on request
}
NAME = {HIGH: "high", LOW: "low", None: "none"}
MAX_TURNS, EVALUATE_EVERY = 8, 10
torch.set_num_threads(1)  # the model is tiny

# ===== 1. The house: tasks, the env, the expert and the blunderer ===========================================

ROOMS = "kitchen attic cellar garden hall study".split()
ITEMS = "cup book lamp clock vase radio chair pan bag globe".split()
TOOL = {"bring": "carry", "fix": "repair", "open": "unlock", "light": "switch"}  # request -> tool
HABITS = {"carts everything": {"carry": "cart"}, "wrong argument": {}, "stops early": {},
          "swaps unlock and switch": {"unlock": "switch", "switch": "unlock"}}


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

    def __init__(self, task):
        self.task = task

    def reset(self):
        self.where, self.done, self.observation = dict(self.task["where"]), set(), None
        return [{"role": "user", "content": request(self.task)}]

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


def demonstrate(tasks, tokenizer, rng, failures):
    """Expert trajectories of all tasks under the high reward token and as many failures under the low one; or
    experts alone, under none. All are played by rcgrpo.rollout; a failure is kept only if its reward is 0."""
    def play(task, script, reward_token):
        house = House(task)
        policy = rcgrpo.scripted_policy(script(house), tokenizer)
        return rcgrpo.rollout([house], [reward_token], policy, tokenizer, max_turns=MAX_TURNS)[0]

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


# ===== 2. The agent: a tiny transformer over words =========================================================

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
    rcgrpo.add_reward_tokens(tokenizer, model)
    return model


# ===== 3. The experiment: two fine-tuned models, arms of reinforcement learning, nothing tuned per arm ======


def draw_tasks(args, seed):
    """(tasks of the demonstrations, tasks of the test, the random numbers that follow)"""
    rng = np.random.default_rng(seed)
    demonstrated = [make_task(rng, n_steps=int(rng.integers(1, 3))) for _ in range(args.demonstrations)]
    return demonstrated, [make_task(rng, 2, large=bool(n % 2)) for n in range(args.test_tasks)], rng


def fine_tune(args, seed, init):
    """Stage 1. SFT and RCTP differ in their data and in nothing else. Returns (model, tokenizer), pickled."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    tasks, _, rng = draw_tasks(args, seed)
    trajectories = demonstrate(tasks, tokenizer, rng, failures=init == "rctp")
    optimizer = torch.optim.AdamW(model.parameters(), args.stage1_lr, weight_decay=0)
    rng = np.random.default_rng(seed)
    file = open(args.out / "metrics.jsonl", "a", buffering=1)  # line by line
    for step in tqdm(range(args.stage1_steps), f"seed {seed} {init}", position=init == "rctp", leave=False):
        batch = [trajectories[i] for i in rng.integers(len(trajectories), size=args.batch)]
        metrics = rcgrpo.rctp_step(model, optimizer, batch, args.tokens_per_pass)
        print(json.dumps({"seed": seed, "arm": init, "stage": 1, "step": step, **metrics}), file=file)
    return pickle.dumps((model, tokenizer))


def sampling(args, seed, arm, model, tokenizer):
    """How an arm samples: its policy, and how many rollouts under which reward tokens."""
    draws = torch.Generator(model.device).manual_seed(2 * seed)
    policy = rcgrpo.model_policy(model, tokenizer, args.temperature, args.max_new_tokens, generator=draws)
    p = args.p_high if "rc-grpo" in arm else 1.0 if arm.startswith("rctp") else None  # drawn, high, no token
    generator = torch.Generator().manual_seed(2 * seed + 1)
    return policy, {"G": args.group_size, "p": p, "stratified": args.stratified, "generator": generator,
                    "limits": {"max_turns": MAX_TURNS}}


def success(args, model, tokenizer, tasks, reward_token):
    """Share of tasks solved by greedy decoding under this reward token."""
    policy = rcgrpo.model_policy(model, tokenizer, temperature=0, max_new_tokens=args.max_new_tokens)
    reward_tokens = [reward_token] * len(tasks)
    rollouts = rcgrpo.rollout(map(House, tasks), reward_tokens, policy, tokenizer, max_turns=MAX_TURNS)
    return float(np.mean([t.reward for t in rollouts]))


def reinforce(args, seed, arm, tuned):
    """Stage 2, on what `fine_tune` returned. Line n of its metrics is about the policy after n updates."""
    model, tokenizer = pickle.loads(tuned)
    ref_model = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0)
    policy, groups = sampling(args, seed, arm, model, tokenizer)
    test = draw_tasks(args, seed)[1]
    rng = np.random.default_rng([seed, 1])  # those of draw_tasks would give the tasks of the test again
    file, lines = open(args.out / "metrics.jsonl", "a", buffering=1), []
    for step in tqdm(range(args.steps + 1), f"seed {seed} {arm}", position=[*ARMS].index(arm), leave=False):
        metrics = {"seed": seed, "arm": arm, "stage": 2, "step": step}
        if step % EVALUATE_EVERY == 0 or step == args.steps:
            metrics["success"] = success(args, model, tokenizer, test, ARMS[arm])
        if step < args.steps:
            tasks = [make_task(rng, 2, large=bool(n % 2)) for n in range(args.tasks_per_step)]
            stepped, rollouts = rcgrpo.rcgrpo_step(
                model, ref_model, optimizer, tasks, House, policy, tokenizer, **groups, beta=args.beta,
                ratio=args.ratio, tokens_per_pass=args.tokens_per_pass)
            metrics |= stepped
            if arm.endswith("+hindsight"):
                learned = rcgrpo.hindsight_step(model, optimizer, rollouts, tokenizer, args.tokens_per_pass)
                metrics |= {"hindsight_loss": learned["loss"], "hindsight_count": learned["count"]}
        lines.append(metrics)
        print(json.dumps(metrics), file=file)
    return lines


# ===== 4. The report ========================================================================================


def show_group(args, arm, tuned):
    """A group before reinforcement learning: of the first test task that has a large item to bring, whatever
    comes out; and how many of twenty such groups are flat."""
    model, tokenizer = pickle.loads(tuned)
    tasks = list(filter(large_item, draw_tasks(args, args.seed)[1]))[:20]
    policy, groups = sampling(args, args.seed, arm, model, tokenizer)
    rollouts = rcgrpo.collect_groups(tasks, House, policy, tokenizer, **groups)
    rewards = np.array([t.reward for t in rollouts]).reshape(len(tasks), args.group_size)
    R, flat = rewards[0], sum(rewards.std(1) == 0)
    print(f'\n{arm.upper()}, "{request(tasks[0])}" ({large_item(tasks[0])} is large): mu_g = {R.mean():.2f}, '
          f"sigma_g = {R.std():.2f}\n  (sigma_g = 0 in {flat} of {len(tasks)} groups of such tasks)")
    for t, A in zip(rollouts, rcgrpo.group_advantages(R, [0] * len(R)).tolist(), strict=False):
        calls = tokenizer.decode(t.action_ids).replace(" <|end|>", " |").strip(" |")
        print(f"  {NAME[t.reward_token]:4}  R = {t.reward:.0f}  A = {A:5.2f}  {calls}", flush=True)


def summarise(runs):
    """{arm: {name: a number per seed}}; first, last: means of a tenth of the steps; solved: ends above .9."""
    def number(lines, key, part):
        values = [line[key] for line in lines if line.get(key) is not None]
        n = max(1, len(values) // 10)
        parts = {"before": values[:1], "after": values[-1:], "solved": [v > 0.9 for v in values[-1:]],
                 "mean": values, "first": values[:n], "last": values[-n:]}
        return float(np.mean(parts[part])) if values else None

    names = ["success_before", "success_after", "success_mean", "success_solved"]
    for key in ("sigma", "zero_std", "reward_high_minus_low", "sigma2", "sigma2_floor"):
        names += [f"{key}_first", f"{key}_last"]
    return {arm: {name: [number(lines, *name.rsplit("_", 1)) for lines in seeds] for name in names}
            for arm, seeds in runs.items()}


def report(runs, arms):
    """The table, the curves, and what they say."""
    print("\nsuccess: held-out tasks, greedy, this token, before -> after; the rest: first -> last tenth\n")
    row = "{:24}{:7}{:14}{:6}{:10}{:14}{:14}{}".format
    print(row("arm", "token", "success", "mean", "above .9", "sigma_g", "sigma_g = 0", "mu_high - mu_low"))
    for arm, numbers in arms.items():
        means = {name: "-" if None in n else f"{np.mean(n):.2f}" for name, n in numbers.items()}
        ends = [f"{means[f'{key}_first']} -> {means[f'{key}_last']}".replace("- -> -", "-")
                for key in ("sigma", "zero_std", "reward_high_minus_low")]
        print(row(arm, NAME[ARMS[arm]], f"{means['success_before']} -> {means['success_after']}",
                  means["success_mean"], f"{sum(numbers['success_solved']):.0f} of {len(runs[arm])}", *ends))
    for key, title, top in (("sigma", "sigma_g", 0.5), ("success", "held-out success", 1)):
        print(f"\n{title} over the steps, median of the seeds (full block = {top})")
        for arm, seeds in runs.items():
            median = np.median([[line[key] for line in lines if key in line] for lines in seeds], 0)
            parts = np.array_split(median, min(40, len(median)))
            blocks = "".join(" ▁▂▃▄▅▆▇█"[round(8 * part.mean() / top)] for part in parts)
            print(f"  {arm:24}|{blocks}|")
    print("", *closing_sentences(arms), "", sep="\n")


def closing_sentences(arms):
    """What the numbers say, and no more. A difference of less than .05 counts as none."""
    for arm, numbers in arms.items():
        before, after, flat = (numbers[key] for key in ("success_before", "success_after", "zero_std_first"))
        gain = np.mean(after) - np.mean(before)
        verb = "rose" if gain >= 0.05 else "fell" if gain <= -0.05 else "hardly moved"
        yield f"{arm.upper()}: {np.mean(flat):.0%} of its first groups had sigma_g = 0, and success {verb}."
        stuck = sum(f < 0.5 and abs(b - a) < 0.05 for f, a, b in zip(flat, before, after, strict=True))
        if stuck:
            yield (f"  In {stuck} of {len(flat)} seeds most of these had variance and success hardly moved: "
                   "variance is necessary, not sufficient.")
    pairs = [("rctp+rc-grpo", "rctp+grpo"), ("rctp+rc-grpo+hindsight", "rctp+rc-grpo"),
             ("rctp+rc-grpo+hindsight", "rctp+grpo+hindsight")]
    yield from (compare(arms, *pair) for pair in pairs if arms.keys() >= set(pair))


def compare(arms, new, old):
    """Two arms by two exact tests: means over the steps, paired by seed; how many seeds end above .9."""
    def verdict(difference, ways, k):  # outcome k came about, outcome i does so in ways[i] ways
        p = sum(way for way in ways if way <= ways[k]) / sum(ways)  # two-sided: all that are no more likely
        ahead = f"{(new if difference > 0 else old).upper()} is ahead"
        return f"p = {p:.2g}: {ahead if p < 0.05 else 'the two cannot be told apart'}"

    x, y = (np.round(arms[arm]["success_mean"], 9) for arm in (new, old))
    higher, lower, n = int(sum(x > y)), int(sum(x < y)), len(x)
    a, b = (int(sum(arms[arm]["success_solved"])) for arm in (new, old))
    sign = verdict(higher - lower, [math.comb(higher + lower, k) for k in range(higher + lower + 1)], higher)
    fisher = verdict(a - b, [math.comb(n, k) * math.comb(n, a + b - k) for k in range(a + b + 1)], a)
    return (f"{new.upper()} against {old.upper()}: success over the steps {x.mean():.2f} and {y.mean():.2f}, "
            f"higher in {higher} of {n} seeds, lower in {lower} (sign test, {sign}); {a} and {b} seeds end "
            f"above .9 (Fisher's exact test, {fisher}).")


def plot(folders, path):
    """Left: flat groups against temperature, a point for each run. Right: success over the steps of the first
    run, median and quartiles of its seeds."""
    from matplotlib.figure import Figure  # the only thing that needs it
    runs = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    lines = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm, color in zip(runs[0]["arms"], ["gray", "C1", "C2", "C0", "C0"], strict=False):  # the first five
        style = {"color": color, "linestyle": "--" if "hindsight" in arm else "-", "label": arm.upper()}
        flat = [(run["settings"]["temperature"], np.mean(run["arms"][arm]["zero_std_first"]))
                for run in runs if arm in run["arms"]]
        if "hindsight" not in arm:
            left.plot(*zip(*sorted(flat), strict=True), marker="o", **style)
        mine = [line for line in lines if line["arm"] == arm and "success" in line]
        steps = sorted({line["step"] for line in mine})
        seeds = [[line["success"] for line in mine if line["step"] == step] for step in steps]
        low, median, high = np.quantile(seeds, (0.25, 0.5, 0.75), axis=1)
        right.plot(steps, median, **style)
        right.fill_between(steps, low, high, color=color, alpha=0.15)
    left.set(title="groups with sigma_g = 0 at first", xlabel="temperature of the rollouts", ylim=(0, 1.05))
    title = f"greedy success, held-out tasks (rollouts at {runs[0]['settings']['temperature']})"
    right.set(title=title, xlabel="step of reinforcement learning", ylim=(0, 1.05))
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=120)


# ===== 5. The command line ==================================================================================


def parse_arguments(argv=None):
    """(arguments, parser)"""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS)[:5], help="which arms (all but the last)")
    add("--stratified", action="store_true", help="the same number of high reward tokens in every group")
    add("--ratio", choices=["token", "trajectory"], default="token", help="one rho per token or trajectory")
    add("--out", type=Path, default=Path("runs/toy"), help="folder of metrics and summary")
    add("--plot", type=Path, nargs="+", metavar="DIR", help="only draw toy.png of these runs into --out")
    for name, (default, _, _, meaning) in SETTINGS.items():
        add(f"--{name}", type=type(default), default=default, metavar="N", help=f"{meaning} ({default})")
    args = parser.parse_args(argv)
    for name, (_, low, high, _) in SETTINGS.items():
        value = getattr(args, name.replace("-", "_"))
        if not low <= value <= high:  # nor is nan, nor inf
            parser.error(f"--{name} needs at least {low} and at most {high}, got {value}")
    args.arms = [arm for arm in ARMS if arm in args.arms]
    args.seeds = list(range(args.seed, args.seed + args.seeds))
    return args, parser


def run_arms(args):
    """Both stages of all seeds, in processes. Returns {arm: for each seed its lines of metrics}."""
    spawn = multiprocessing.get_context("spawn")
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes inherit it: ctrl-C is for this one
    pool = spawn.Pool(args.jobs, tqdm.set_lock, (spawn.RLock(),))
    signal.signal(signal.SIGINT, handler)
    with pool:  # when this ends, they end
        inits = dict.fromkeys(arm.split("+")[0] for arm in args.arms)
        parts = [(seed, init) for seed in args.seeds for init in inits]
        results = [pool.apply_async(fine_tune, (args, *part)) for part in parts]
        tuned = {part: result.get() for part, result in zip(parts, results, strict=True)}
        for arm in (arm for arm in ("sft+grpo", "rctp+rc-grpo") if arm in args.arms):
            show_group(args, arm, tuned[args.seed, arm.split("+")[0]])
        parts = [(seed, arm, tuned[seed, arm.split("+")[0]]) for seed in args.seeds for arm in args.arms]
        results = [pool.apply_async(reinforce, (args, *part)) for part in parts]
        lines = [result.get() for result in results]
    return {arm: lines[n :: len(args.arms)] for n, arm in enumerate(args.arms)}


def main(argv=None):
    started = time.time()
    args, parser = parse_arguments(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if args.plot:
            return plot(args.plot, args.out / "toy.png")
        for name in ("metrics.jsonl", "summary.json"):  # of an earlier run
            (args.out / name).unlink(missing_ok=True)
        runs = run_arms(args)
    except (OSError, ImportError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(f"stopped; what was measured is in {args.out}")
    arms, seconds = summarise(runs), round(time.time() - started, 1)
    summary = {"seconds": seconds, "seeds": args.seeds, "settings": vars(args), "arms": arms}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1, default=str) + "\n")
    report(runs, arms)
    print(f"{seconds:.0f} s. Written to {args.out}: metrics.jsonl, summary.json")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` does what ctrl-C does
    main()
