"""RC-GRPO in one file: Reward-Conditioned Group Relative Policy Optimization (arXiv 2602.03025).

An agent fine-tuned on expert demonstrations becomes so sure of itself that all G rollouts of a task earn the
same reward. Then sigma_g, the std of the rewards in a group, and every advantage are 0: GRPO learns nothing.
RC-GRPO puts a reward token into the prompt and lets it vary within the group:

  stage 1, RCTP     minimise -sum_t log pi(a_t | h_t, r) over good trajectories (r high) and bad ones (r low)
  freeze            pi_ref <- pi
  stage 2, RC-GRPO  repeat: for each task draw r_1..r_G, roll out a_t,j ~ pi(. | h_t,j, r_j), earn R_1..R_G,
                    A_j <- (R_j - mu_g) / (sigma_g + eps), one clipped policy-gradient step with KL to pi_ref

Afterwards the model is used under <|high_reward|>. The reward itself never looks at the token.

Symbols: tau a trajectory, h_t its history, a_t its t-th action (one assistant turn), r the reward token, R
the reward, A the advantage; G rollouts of a task are a group, mu_g and sigma_g mean and std of R in it;
mu_high, mu_low mean R by token; p = P(high). Three policies: pi_theta is trained, pi_old is the one that
sampled, pi_ref is frozen. Shapes: N trajectories (n in a pass), T action tokens (at most).

Where this file departs from the paper, or fills in what it leaves open:
  1. rho is one ratio per token, and the loss a mean over all action tokens, as in the authors' framework.
     GRPO itself divides each rollout by its own length, which makes a token of a long rollout count less.
     ratio="trajectory" is eq. 7 as printed, one product per rollout, which soon leaves the clip range.
  2. KL is estimated per token and averaged over tokens, under either ratio. The paper names no estimator.
  3. Reward tokens are drawn i.i.d. as in eq. 3; stratified=True puts equally many high ones into each group.
  4. Trajectories are token in, token out: what the model sampled is never decoded and encoded again.
  5. Log-probs are without dropout and router noise; a group's shared prompt is computed once, exactly.
  6. Sums are divided by the counts of the whole batch, so that cutting it into passes does not change the
     gradient; eq. 2 becomes a mean over tokens.
  7. eps of eq. 6 is 1e-6; a rollout that runs into a length limit has R = 0.

Part I, sections 1-9, is the method, complete, in the order of the paper's equations (`hindsight_step` alone
is not the paper's). Part II, appendices A-E, is what it stands on.
"""

# ruff: noqa: E402, B905 (each appendix carries its own imports)
import math
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import torch

# ========== Part I: the method ==============================================================================

# ===== 1. Reward tokens (eq. 1):   r = <|high_reward|> if R = 1,   <|low_reward|> if R = 0 ==================
# So the data of stage 1 is labelled. In stage 2 it is the other way round: r is drawn, then R is earned. (A
# third level is a third token here, in `label_by_reward`, `sample_reward_tokens` and appendix E.)

HIGH, LOW = "<|high_reward|>", "<|low_reward|>"


def inject_reward_token(messages, reward_token):
    """New messages, with "\\n\\n[Reward Goal: <reward token>]" at the end of the first user message.

    >>> inject_reward_token([{"role": "user", "content": "Hi"}], HIGH)
    [{'role': 'user', 'content': 'Hi\\n\\n[Reward Goal: <|high_reward|>]'}]
    """
    messages = [dict(message) for message in messages]
    for message in messages:
        if message["role"] == "user":
            message["content"] = message["content"] + f"\n\n[Reward Goal: {reward_token}]"
            return messages
    raise ValueError("there is no user message to put the reward token into; env.reset() must return one")


# ===== 2. Trajectories, token in / token out ================================================================
# A conversation is built by appending ids and nothing else:
#
#   ids    <|im_start|>user ... [Reward Goal: r]<|im_end|> <|im_start|>assistant | find cup<|im_end|> | \n ...
#   mask   0 0 0 ...                                                             | 1    1  1          | 0  ...
#          prompt (h_1, r)                                                       | sampled (a_1)      | forced
#
# All of it is h_2. The mask is written where the token is sampled, never reconstructed from the text.


@dataclass
class Trajectory:
    """One rollout. `ids` and `mask` have the same length; mask 1 = sampled by the policy, 0 = forced."""

    ids: list[int]
    mask: list[int]
    reward_token: str | None = None  # the r_j it was drawn under; None: no token at all (SFT, plain GRPO)
    group: object = None  # rollouts of one task share it; None: a group of its own
    reward: float = 0.0  # R in [0, 1]; 0 where truncated
    truncated: bool = False  # it ran into a token or turn limit
    opening: list | None = None  # the messages that env.reset() gave, of which the prompt was made

    @property
    def action_ids(self):
        return [token for token, sampled in zip(self.ids, self.mask) if sampled]


def rows_by_group(groups):
    """The rows of each group, in order of appearance. groups: hashable ids, or a tensor or array of them.

    >>> rows_by_group([7, 9, 7, None])
    {7: [0, 2], 9: [1], ('alone', 3): [3]}
    """
    rows = {}
    for row, group in enumerate(groups):
        if hasattr(group, "item"):  # a tensor is equal to nothing but itself: no two would share a group
            group = group.item()
        if isinstance(group, list):  # a tuple that went through JSON
            group = tuple(group)
        rows.setdefault(("alone", row) if group is None else group, []).append(row)
    return rows


def label_by_reward(trajectory, tokenizer, threshold=1.0):
    """Eq. 1 for a finished rollout (with this tokenizer's ids): HIGH if R >= threshold, else LOW.

    Returns a new trajectory: the same actions and observations, id by id, behind the prompt that was played,
    which now carries the token.
    """
    if 1 not in trajectory.mask or trajectory.opening is None:
        raise ValueError("to be labelled, a trajectory needs an action and its .opening, the messages played")
    r = HIGH if round(trajectory.reward, 9) >= threshold else LOW
    prompt = chat_format(tokenizer).prompt(trajectory.opening, r)
    start = trajectory.mask.index(1)
    mask = [0] * len(prompt) + trajectory.mask[start:]
    return replace(trajectory, ids=prompt + trajectory.ids[start:], mask=mask, reward_token=r)


# ===== 3. Stage 1, RCTP (eq. 2):   L = -E_{(tau, r) ~ D}  sum_t log pi(a_t | h_t, r) ========================
# The result is a reward-conditioned trajectory policy. SFT: the same loss on experts, without a reward token.
# With several processes each gives its own trajectories: `total` sums a number over all of them, `from_all`
# joins their lists (appendix D). Alone they are the number and the list.


def rctp_loss(logp, mask=None, n_tokens=None):
    """Mean negative log-likelihood of the action tokens (eq. 2, departure 6). The mask leaves out the rest.

    logp, mask (N, T); no mask: all True.  n_tokens: of the whole batch if this is a part; ValueError if 0.
    """
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    n_tokens = int(mask.sum()) if n_tokens is None else n_tokens
    if n_tokens == 0:
        raise ValueError("no action token in the batch: drop trajectories whose prompt fills the context")
    return -logp.masked_fill(~mask, 0).sum() / n_tokens


def rctp_step(model, optimizer, trajectories, tokens_per_pass=24576, max_grad_norm=1.0):
    """One optimizer step of stage 1 on labelled trajectories (for SFT: expert ones). Returns metrics.

    tokens_per_pass: most tokens in one forward and backward pass; this bounds the memory of the step.
    Gradients are to be SUMMED over processes (FSDP2 as train_bfcl.py sets it; DDP would average).
    """
    trajectories = list(trajectories)
    check_step(model, optimizer, tokens_per_pass, max_grad_norm)
    check_trajectories(model, trajectories, all_act=True)
    n_tokens = total(count_action_tokens(trajectories))
    loss_sum = 0.0
    model.zero_grad()  # what a step that failed may have left
    for rows in passes(model, trajectories, tokens_per_pass):
        part = [trajectories[row] for row in rows]
        logp = action_logprobs(model, part)  # (n, T)
        loss = rctp_loss(logp, action_mask(part, logp.device), n_tokens)
        loss.backward()
        loss_sum += loss.item()
    stepped = optimizer_step(model, optimizer, max_grad_norm)  # clip, step, clear
    return {"loss": total(loss_sum), "tokens": n_tokens, **stepped}


# ===== 4. Group sampling (eq. 3):   r_j ~ P_sample i.i.d.,   P(high) = p ====================================
# Why: Prop. 4.3, the floor. E[sigma_g^2] >= kappa (mu_high - mu_low)^2 with kappa = (G-1)/G p(1-p): while the
# two tokens make the policy succeed at different rates, groups have variance. (For a 0/1 reward it is exactly
# (G-1)/G m(1-m), m = p mu_high + (1-p) mu_low: the tokens help by moving m away from 0 and 1.)


def sample_reward_tokens(G, p, generator=None, stratified=False):
    """G reward tokens for one group. i.i.d.: at G = 5, p = .5, 6 % of groups hold only one of the two.

    stratified=True: pG high ones, a half rounded up (3 of 5 at p = .5), in random order. ValueError unless
    G >= 1 and 0 <= p <= 1.

    >>> sample_reward_tokens(2, p=1.0)
    ['<|high_reward|>', '<|high_reward|>']
    """
    if G < 1 or not 0 <= p <= 1:
        raise ValueError(f"need G >= 1 and 0 <= p <= 1, got G = {G}, p = {p}")
    if stratified:
        high = torch.randperm(G, generator=generator) < math.floor(p * G + 0.5)
    else:
        high = torch.rand(G, generator=generator) < p
    return [HIGH if is_high else LOW for is_high in high.tolist()]


# ===== 5. Rollouts (eqs. 4-5):   a_{t,j} ~ pi(. | h_{t,j}, r_j),   R_j the env's verdict ====================
# An env is any object with reset() -> messages, step(text) -> messages or None when over, reward() -> R in
# [0, 1], and close() if it likes. Eq. 5, R = R_state R_action, is one such reward: BFCLEnv in train_bfcl.py.
# A policy is any callable: N prompts -> N actions, all lists of ids. An action ends with one of
# chat_format(tokenizer).stop_ids and is drawn from softmax(logits / temperature) of the current weights. It
# may have .temperature (1 if absent), .max_tokens (the longest row it reads) and .close(), which means
# "forget what you have read" and is called after every rollout. A model and a script run through the same
# function: demonstrations have exactly the layout of rollouts.


def collect_groups(tasks, make_env, policy, tokenizer, G=5, p=0.5, stratified=False, generator=None,
                   limits=None):
    """Roll out G conversations per task, each under its own reward token (eqs. 3-4).

    make_env(task) -> a fresh env.  p: P(high); 1.0 is "always high", None "no token", as in plain GRPO.
    stratified: as in `sample_reward_tokens`.  generator: of the reward tokens, on the CPU.
    limits: keywords of `rollout`, e.g. {"max_turns": 8}.
    Returns len(tasks) * G trajectories. `group` is unique to task and call: results of calls may be joined.
    """
    call, reward_tokens, groups = uuid.uuid4().hex, [], []
    for index in range(len(tasks)):
        reward_tokens += [None] * G if p is None else sample_reward_tokens(G, p, generator, stratified)
        groups += [f"{call}-{index}"] * G
    envs = (make_env(task) for task in tasks for _ in range(G))
    return rollout(envs, reward_tokens, policy, tokenizer, groups, **(limits or {}))


def rollout(envs, reward_tokens, policy, tokenizer, groups=None, max_turns=20, max_tokens=32768, threads=1,
            progress=None):
    """Play every env to its end, all of them turn by turn together.

    envs: N envs.  reward_tokens: N, None for no token.  groups: N group ids (default: None each).
    max_turns: assistant turns per rollout.  max_tokens: longest trajectory (the model's context, if shorter).
    threads: the envs of a turn run one after another, or this many at once (for tools that make one wait).
    progress: called before each turn with the number of conversations still open, at the end with 0.
    Returns N trajectories. One that hits a limit, or whose action does not end, is `truncated` with reward 0;
    a cut action is not executed. RolloutError: an env or a policy broke its contract; all envs are closed.
    """
    chat = chat_format(tokenizer)
    max_tokens = min(max_tokens, getattr(policy, "max_tokens", max_tokens))
    with open_envs(envs, policy, max_turns, max_tokens, threads) as (envs, map_all):  # map, or one in threads
        reward_tokens, groups = one_per_env(envs, reward_tokens, groups)

        # Open every conversation: (h_1, r).
        begin = partial(begin_trajectory, chat, max_tokens)
        trajectories = list(map_all(begin, envs, reward_tokens, groups))

        # Turn by turn: an action a_t in every conversation that is open, then its env's observation.
        play = partial(play_turn, chat, max_tokens)
        playing = [row for row, t in enumerate(trajectories) if not t.truncated]
        turn = 0
        while playing and turn < max_turns:
            turn += 1
            if progress:
                progress(len(playing))
            talking = [trajectories[row] for row in playing]
            actions = ask_policy(policy, [t.ids for t in talking], turn)
            still_open = list(map_all(play, [envs[row] for row in playing], talking, actions))
            playing = [row for row, is_open in zip(playing, still_open) if is_open]
        for row in playing:  # still talking at the turn limit
            trajectories[row].truncated = True

        # The verdicts: R. A truncated rollout keeps 0.
        whole = [row for row, t in enumerate(trajectories) if not t.truncated]
        for row, R in zip(whole, map_all(CheckedEnv.reward, [envs[row] for row in whole])):
            trajectories[row].reward = R
        if progress:
            progress(0)
    warn_if_none_ended(trajectories, chat)
    return trajectories


def begin_trajectory(chat, max_tokens, env, reward_token, group):
    """A trajectory that holds the prompt and no action; truncated if there is no room for one."""
    opening = env.reset()
    prompt = chat.prompt(opening, reward_token)
    return Trajectory(prompt, [0] * len(prompt), reward_token, group, 0.0, len(prompt) >= max_tokens, opening)


def play_turn(chat, max_tokens, env, trajectory, action):
    """Append one action and the env's observation. True while the conversation is open."""
    ends = [place for place, token in enumerate(action, 1) if token in chat.stop_ids]
    action = action[: min([*ends[:1], max_tokens - len(trajectory.ids)])]  # what follows a stop id is padding
    trajectory.ids = trajectory.ids + action  # a new list: the policy may have kept the old one
    trajectory.mask = trajectory.mask + [1] * len(action)
    if action[-1] not in chat.stop_ids:  # cut off: not executed
        trajectory.truncated = True
        return False
    observation = env.step(chat.text(action))
    if observation is None:
        return False
    suffix = chat.suffix(observation, after=action[-1])
    if len(trajectory.ids) + len(suffix) >= max_tokens:  # it leaves no room to go on
        trajectory.truncated = True
        return False
    trajectory.ids = trajectory.ids + suffix
    trajectory.mask = trajectory.mask + [0] * len(suffix)
    return True


# ===== 6. Advantages (eq. 6):  A_j = (R_j - mu_g) / (sigma_g + eps),  sigma_g^2 = 1/G sum_j (R_j - mu_g)^2
# Prop. 4.2, the collapse: if KL(pi* || pi_ref) <= eps_sft at K turns (pi* a deterministic expert), all G
# rollouts are the expert's, so sigma_g and the policy gradient are 0, with probability >= 1 - G K eps_sft.


def group_advantages(rewards, groups, eps=1e-6):
    """Group-normalised advantages (eq. 6), (N,) float32.

    rewards: N numbers in [0, 1].  groups: N ids in any order, as in `rows_by_group`; sizes may differ. The
    reward token is no part of the id: a task's high and low rollouts are compared with each other, which is
    the point of the method. Where all rewards of a group are equal, also in one of size 1, A is exactly 0.

    >>> group_advantages([1, 0, 1, 1], ["a", "a", "b", "b"])
    tensor([ 1.0000, -1.0000,  0.0000,  0.0000])
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64).round(decimals=9)  # .1 + .2 is .3
    if len(rewards) != len(groups):
        raise ValueError(f"need one group id per reward: {len(rewards)} rewards, {len(groups)} ids")
    if not ((rewards >= 0) & (rewards <= 1)).all():
        raise ValueError(f"rewards must be finite and in [0, 1], got {rewards.tolist()}")
    advantages = torch.zeros_like(rewards)
    for rows in rows_by_group(groups).values():
        R = rewards[rows]
        if R.max() > R.min():
            mu, sigma = R.mean(), R.std(correction=0)  # population std: 1/G, not 1/(G-1)
            advantages[rows] = (R - mu) / (sigma + eps)
    return advantages.float()


# ===== 7. Clipped policy gradient with KL (eqs. 7-9) ========================================================
#   rho = pi_theta(a | h, r) / pi_old(a | h, r)                                                       (eq. 7)
#   L   = -mean[ min(rho A, clip(rho, 1 - c, 1 + c) A) ]                c = 0.2, the paper's eps      (eq. 8)
#         + beta mean[ KL(pi_theta || pi_ref) ]                                                       (eq. 9)
#
# All three are evaluated under the same r_j. Where A > 0, an action gains nothing more once rho is above 1+c,
# where A < 0 nothing more below 1-c: there its gradient is 0. A step the wrong way is never clipped. In the
# first update pi_theta is pi_old, so rho = 1, and with one update a batch (the paper) nothing clips at all. L
# is then -mean[A], near 0 and of either sign; it is its gradient, -mean[A grad log pi], that trains.


def clipped_policy_loss(logp, old_logp, ref_logp, advantages, mask=None, clip=0.2, beta=0.1, ratio="token",
                        n_tokens=None, n_trajectories=None):
    """The RC-GRPO loss (eqs. 7-9) and what it saw.

    logp, old_logp, ref_logp (None if beta = 0) (N, T); mask (N, T), default: all True; advantages (N,).
    clip: c.  beta: weight of the KL.
    ratio: "token": one rho a token, mean over tokens; "trajectory": eq. 7's product, mean over trajectories.
    n_tokens, n_trajectories: counts of the whole batch when this is a part of it (default: of this part).
    Returns (loss, metrics); given these counts, those of the parts of a batch add up to those of the batch.

    >>> clipped_policy_loss(torch.tensor([[1.5]]).log(), torch.zeros(1, 1), None, torch.ones(1), beta=0)[0]
    tensor(-1.2000)
    """
    if ratio not in ("token", "trajectory"):
        raise ValueError(f'ratio must be "token" or "trajectory", got {ratio!r}')
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    n_tokens = max(1, int(mask.sum()) if n_tokens is None else n_tokens)
    A = advantages.to(logp.device)[:, None]  # (N, 1)

    log_rho = bounded(logp - old_logp) * mask  # (N, T); at most 20, so that exp() is finite
    if ratio == "trajectory":
        log_rho = bounded(log_rho.sum(1, keepdim=True))  # (N, 1)
        weight = 1 / (len(logp) if n_trajectories is None else n_trajectories)
    else:
        weight = mask.to(logp.dtype) / n_tokens  # (N, T)
    rho = log_rho.exp()
    surrogate = torch.minimum(rho * A, rho.clamp(1 - clip, 1 + clip) * A)
    loss = -(surrogate * weight).sum()

    kl = torch.zeros((), device=logp.device)
    if beta:
        # Value: k3 = e^d - d - 1, never negative; its mean over a ~ pi_theta is KL(pi_theta || pi_ref).
        # Gradient: that of d^2/2, -d grad log pi_theta; its mean is grad KL(pi_theta || pi_ref).
        # (k3's own averages to grad KL(pi_ref || pi_theta).)  x + (y - x).detach(): y, with x's gradient.
        d = bounded(ref_logp - logp)
        k3, half_square = d.exp() - d - 1, d * d / 2
        kl = ((half_square + (k3 - half_square).detach()) * mask).sum() / n_tokens
        loss = loss + beta * kl

    with torch.no_grad():
        clipped = ((rho > 1 + clip) & (A > 0)) | ((rho < 1 - clip) & (A < 0))
        metrics = {"loss": loss.item(), "kl": kl.item(), "clip_fraction": (clipped * weight).sum().item()}
    return loss, metrics


# ===== 8. Stage 2, one step =================================================================================


def rcgrpo_step(model, ref_model, optimizer, tasks, make_env, policy, tokenizer, G=5, p=0.5, stratified=False,
                generator=None, limits=None, beta=0.1, **update_settings):
    """One step of stage 2: reward tokens, rollouts, advantages, update. Returns (metrics, own rollouts).

    tasks ... limits: as in `collect_groups`, of this process; the metrics are of all.
    beta, update_settings: keywords of `rcgrpo_update`; the temperature is the policy's own.
    """
    check_update(model, ref_model, optimizer, G, beta, **update_settings)  # before rollouts are paid for
    temperature, started = temperature_of(policy), time.perf_counter()
    rollouts = collect_groups(tasks, make_env, policy, tokenizer, G, p, stratified, generator, limits)
    sampled = time.perf_counter()
    everyone, dealt = deal_groups(rollouts)  # of all processes; those that this one learns from
    updated = rcgrpo_update(model, ref_model, optimizer, dealt, temperature, beta=beta, **update_settings)
    seconds = {"rollout_seconds": sampled - started, "update_seconds": time.perf_counter() - sampled}
    return {**group_metrics(everyone, p), **updated, **seconds}, rollouts


def rcgrpo_update(model, ref_model, optimizer, trajectories, temperature=1.0, clip=0.2, beta=0.1,
                  ratio="token", updates=1, tokens_per_pass=24576, max_grad_norm=1.0):
    """`updates` clipped optimizer steps on one batch (the paper: one). Returns the last one's metrics.

    ref_model: the frozen stage-1 model; None if beta = 0; for LoRA, the PEFT model's `disable_adapter`.
    trajectories: whole groups, this process's part of the batch.  temperature: of their sampling.
    clip, beta, ratio: as in `clipped_policy_loss`.  tokens_per_pass: as in `rctp_step`.
    """
    trajectories = list(trajectories)
    check_update(model, ref_model, optimizer, largest_group(trajectories), beta, clip, ratio, updates,
                 tokens_per_pass, max_grad_norm)
    check_trajectories(model, trajectories)
    advantages = group_advantages([t.reward for t in trajectories], [t.group for t in trajectories])  # (N,)
    n_tokens, n_trajectories = total(count_action_tokens(trajectories)), total(len(trajectories))
    parts = passes(model, trajectories, tokens_per_pass)
    old, ref, skipped = {}, {}, 0  # log-probs of each pass, kept from the first update for the others
    model.zero_grad()
    for update in range(updates):
        seen = Counter()
        for number, rows in enumerate(parts):
            part = [trajectories[row] for row in rows]
            logp, entropy = action_logprobs(model, part, temperature, entropy=True)  # (n, T)
            mask = action_mask(part, logp.device)
            if update == 0:
                old[number] = logp.detach()  # no update since sampling: pi_old is pi_theta
                ref[number] = reference_logprobs(model, ref_model, part, temperature) if beta else None
            loss, metrics = clipped_policy_loss(logp, old[number], ref[number], advantages[rows], mask, clip,
                                                beta, ratio, n_tokens, n_trajectories)
            loss.backward()
            mean_entropy = (entropy * mask).sum().item() / max(1, n_tokens)
            seen.update(metrics, entropy=mean_entropy)  # a Counter's update adds
        stepped = optimizer_step(model, optimizer, max_grad_norm)
        skipped += stepped["skipped"]
    return {**{name: total(value) for name, value in seen.items()}, **stepped, "skipped": skipped}


def hindsight_step(model, optimizer, rollouts, tokenizer, tokens_per_pass=24576, max_grad_norm=1.0):
    """Not the paper's: after a step of stage 2, learn what its rollouts found. Returns metrics.

    What earned R = 1, under either token, is labelled high (eq. 1) and learned by eq. 2; "count": how many
    (0: no step). Why: where each mode is deterministic, sigma_g is largest, yet grad log pi of an action of
    probability 1 is 0, so the high mode cannot leave its habit. (The field's name is hindsight relabelling:
    Andrychowicz et al. 2017; of instructions to language models, Zhang et al. 2023.)
    """
    found = [label_by_reward(t, tokenizer) for t in rollouts if round(t.reward, 9) == 1 and 1 in t.mask]
    count = total(len(found))
    if count == 0:
        return {"loss": None, "tokens": 0, "grad_norm": None, "skipped": 0, "count": 0}
    return {**rctp_step(model, optimizer, found, tokens_per_pass, max_grad_norm), "count": count}


# ===== 9. What to watch =====================================================================================
# Prop. 4.3 speaks of the start of stage 2: the reward ignores the token, so training lifts mu_low too, and
# the floor sinks. It bounds an expectation: the gap of one small batch, squared, overestimates the floor.


def group_metrics(trajectories, p=None):
    """Reward statistics of one batch of groups. None stands for "there was no such rollout".

    reward, reward_high, reward_low, reward_high_minus_low   mean R, mu_high, mu_low, mu_high - mu_low
    sigma, zero_std                  mean sigma_g; share of groups with sigma_g = 0
    sigma2, sigma2_floor             mean sigma_g^2; mean kappa (mu_high - mu_low)^2, p measured if not given
    advantage_std                    spread of A; 1 if every group has variance
    truncated, tokens                share of rollouts cut off; action tokens sampled
    A step adds loss, grad_norm (before clipping; None: not finite, so dropped and counted in skipped), kl and
    entropy (means over action tokens), clip_fraction (of ratios), rollout_seconds, update_seconds.
    """
    R, groups = [round(t.reward, 9) for t in trajectories], [t.group for t in trajectories]
    by_token = {token: [t.reward for t in trajectories if t.reward_token == token] for token in (HIGH, LOW)}
    p = len(by_token[HIGH]) / len(R) if p is None else p
    sigmas, kappas = [], []
    for rows in rows_by_group(groups).values():
        rewards, G = [R[row] for row in rows], len(rows)
        spread = torch.tensor(rewards, dtype=torch.float64).std(correction=0).item()
        sigmas.append(spread if len(set(rewards)) > 1 else 0.0)  # no rounding error counts as variance
        kappas.append((G - 1) / G * p * (1 - p))

    def mean(values):
        return sum(values) / len(values) if values else None

    mu_high, mu_low = mean(by_token[HIGH]), mean(by_token[LOW])
    gap = mu_high - mu_low if by_token[HIGH] and by_token[LOW] else None
    return {
        "reward": mean(R), "reward_high": mu_high, "reward_low": mu_low, "reward_high_minus_low": gap,
        "sigma": mean(sigmas), "zero_std": mean([s == 0 for s in sigmas]),
        "sigma2": mean([s * s for s in sigmas]),
        "sigma2_floor": 0.0 if gap is None else mean(kappas) * gap**2,
        "advantage_std": group_advantages(R, groups).std(correction=0).item(),
        "truncated": mean([t.truncated for t in trajectories]), "tokens": count_action_tokens(trajectories),
    }


# ========== Part II: what the method stands on ==============================================================

# ===== A. Log-probs =========================================================================================
# Promise: log pi of every action token, exact for every causal language model, without dropout. By definition
# that is one pass per trajectory. The fast way, in bounded memory, is one pass over whole groups, laid out as
#
#   ids        [ shared prefix  | continuation 1 | continuation 2 | ... ]
#   positions    0 ... P-1        P P+1 ...        P P+1 ...
#   attention    causal           prefix + itself  prefix + itself
#
# so that a prompt is computed once, up to the reward token where rollouts part, and every token sees what it
# would have seen alone. It is taken where a trial on made-up rows has shown that it gives the same numbers.

import inspect
import os
import re
import warnings
from contextlib import nullcontext
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_layers import GradientCheckpointingLayer


def action_logprobs(model, trajectories, temperature=1.0, entropy=False, rows_per_chunk=1024):
    """log pi of every token of the actions, given all before it, at the temperature it was sampled with.

    Returns logp (N, T): row j holds the log-probs of trajectory j's action tokens in order, then zeros.
    With entropy=True returns (logp, H), H (N, T) the entropy of the distribution at each, without gradient.
    rows_per_chunk: of a packed pass, logits exist for so many action tokens at a time. The model is left in
    evaluation mode.
    Raises ValueError for what cannot be scored: a row that begins with an action, is longer than the model's
    context, or holds an id that the model does not have.
    """
    if not temperature > 0:
        raise ValueError(f"log-probs need the temperature > 0 of the actions' sampling, got {temperature}")
    if any(t.mask[0] for t in trajectories):
        raise ValueError("a trajectory begins with an action: nothing conditions its first token")
    check_rows(model, [t.ids for t in trajectories])
    read = partial(read_logits, temperature=temperature, entropy=entropy)
    packed = packs(model, longest(trajectories))
    silence(model)
    if packed:
        logp, h = packed_logprobs(model, trajectories, read, rows_per_chunk)  # (M,), (M,)
    else:
        logp, h = plain_logprobs(model, trajectories, read)
    model.eval()
    mask = action_mask(trajectories, logp.device)  # (N, T)
    zeros = torch.zeros(mask.shape, device=logp.device)
    rows = zeros.masked_scatter(mask, logp)  # without an action, too, a backward pass reaches every weight
    return (rows, zeros.masked_scatter(mask, h)) if entropy else rows


def action_mask(trajectories, device="cpu"):
    """(N, T) bool: True where row j of `action_logprobs` holds one of trajectory j's action tokens.

    >>> action_mask([Trajectory([5, 6, 7], [0, 1, 1]), Trajectory([5, 6], [0, 1])]).tolist()
    [[True, True], [True, False]]
    """
    counts = [count_action_tokens([t]) for t in trajectories]
    columns = torch.arange(max(counts, default=0), device=device)
    return columns < torch.tensor(counts, dtype=torch.long, device=device)[:, None]


def count_action_tokens(trajectories):
    """Action tokens in all trajectories."""
    return sum(sum(t.mask) for t in trajectories)


def longest(trajectories):
    """Tokens of the longest trajectory; 0 if there is none."""
    return max((len(t.ids) for t in trajectories), default=0)


def read_logits(logits, targets, temperature, entropy):
    """log pi and entropy (M,) of targets (M,) under softmax(logits (M, V) / temperature), in fp32."""
    logits = logits.float() / temperature
    log_z = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None])[:, 0] - log_z
    if not entropy:
        return logp, logp
    with torch.no_grad():
        return logp, torch.special.entr((logits - log_z[:, None]).exp()).sum(-1)  # -p log p


def bounded(log_ratio):
    """Keep exp() finite: e^20 is far outside any clip range. -inf minus -inf counts as no difference."""
    return log_ratio.nan_to_num(0.0).clamp(-20, 20)


def plain_logprobs(model, trajectories, read):
    """The definition: one pass per trajectory, with the model's own attention."""
    logps, entropies = [], []
    for trajectory in trajectories or [Trajectory([0], [0])]:  # an empty pass is a pass
        ids = torch.tensor([trajectory.ids], device=model.device)
        places = [place - 1 for place, sampled in enumerate(trajectory.mask) if sampled] or [0]
        places = torch.tensor(places, device=model.device)  # (n,): where an action token is predicted
        if accepts(model, "logits_to_keep"):
            logits = model(ids, use_cache=False, logits_to_keep=places).logits[0]  # (n, V)
        else:
            logits = model(ids, use_cache=False).logits[0, places]
        logp, h = read(logits, torch.tensor(trajectory.action_ids or [0], device=logits.device))
        n = sum(trajectory.mask)  # a row without an action reads one dummy, which counts for nothing
        logps.append(logp[:n])
        entropies.append(h[:n])
    return torch.cat(logps), torch.cat(entropies)


def packed_logprobs(model, trajectories, read, rows_per_chunk):
    """The same in one pass. Logits are made chunk by chunk, also in the backward pass: no (M, V)."""
    ids, positions, layout, readout, targets = pack(trajectories or [Trajectory([0], [0])])
    head = model.get_output_embeddings()
    head.forward = lambda hidden: hidden
    try:
        hidden = model(
            torch.tensor([ids], device=model.device),
            position_ids=torch.tensor([positions], device=model.device),
            attention_mask=torch.ones(1, 1, 1, 1, device=model.device),  # 4-d: the library builds none
            layout=layout,
            use_cache=False,
            logits_to_keep=torch.tensor(readout or [0], device=model.device),
        ).logits[0]  # (M, width)
    finally:
        del head.forward
    targets = torch.tensor(targets or [0], device=hidden.device)

    def read_chunk(hidden, targets):
        return read(head(hidden), targets)

    logps, entropies = [], []
    for chunk in zip(hidden.split(rows_per_chunk), targets.split(rows_per_chunk)):
        logp, h = checkpoint(read_chunk, *chunk, use_reentrant=False)
        logps.append(logp)
        entropies.append(h)
    return torch.cat(logps), torch.cat(entropies)


def accepts(model, keyword):
    """Whether the model's forward takes this keyword."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper, as PEFT's, takes anything
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return keyword in forward_keywords(type(model))


@lru_cache
def forward_keywords(kind):
    return set(inspect.signature(kind.forward).parameters)


def pack(trajectories):
    """Lay trajectories out as drawn above.

    Returns ids and positions (L,); layout: for each group [prefix length, continuation lengths ...]; readout
    (M,): the place that predicts each action token; targets (M,): that token; all in the rows' order.
    """
    ids, positions, layout, readout = [], [], [], {}
    for rows in rows_by_group([t.group for t in trajectories]).values():
        base, prefix = len(ids), len(os.path.commonprefix([trajectories[row].ids for row in rows]))
        ids += trajectories[rows[0]].ids[:prefix]
        positions += range(prefix)
        layout.append([prefix])
        for row in rows:
            trajectory, start = trajectories[row], len(ids)
            ids += trajectory.ids[prefix:]
            positions += range(prefix, len(trajectory.ids))
            layout[-1].append(len(trajectory.ids) - prefix)
            readout[row] = [base + place - 1 if place <= prefix else start + place - 1 - prefix
                            for place, sampled in enumerate(trajectory.mask) if sampled]
    readout = [place for row in range(len(trajectories)) for place in readout[row]]
    targets = [token for trajectory in trajectories for token in trajectory.action_ids]
    return ids, positions, layout, readout, targets


def group_attention(plain, module, query, key, value, attention_mask, layout=None, scaling=None, **kwargs):
    """Attention over the layout of `pack`; without one, the library's own, which is `plain`.

    query (1, heads, L, D), key and value (1, kv heads, L, D) -> (1, L, heads, D), None. Sliding windows are
    left out: `packs` sees to it that no row is longer than the window.
    """
    if layout is None:
        return plain(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    extras = ("softcap", "s_aux", "sinks", "position_bias", "indices")
    extras = [name for name in extras if kwargs.get(name) is not None]
    if extras or attention_mask.numel() > 1:
        raise ValueError(f"its attention has {', '.join(extras) or 'a mask'} of its own")
    group_attention.calls += 1
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary makes them fp32
    key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    out, sizes = [], [sum(lengths) for lengths in layout]
    for lengths, *group in zip(layout, *(x.split(sizes, 2) for x in (query, key, value))):
        parts = list(zip(*(x.split(lengths, 2) for x in group)))  # (q, k, v) of prefix and continuations
        for number, (q, k, v) in enumerate(parts):
            if number > 0:  # a continuation attends to the prefix and, causally, to itself
                k, v = torch.cat([parts[0][1], k], 2), torch.cat([parts[0][2], v], 2)
            if q.shape[2]:
                causal = causal_lower_right(q.shape[2], k.shape[2])  # flash attention: no mask in memory
                out.append(F.scaled_dot_product_attention(q, k, v, causal, scale=scaling))
    return torch.cat(out, 2).transpose(1, 2), None


for _name in ("sdpa", "flash_attention_2", "flash_attention_3"):  # for the whole process
    AttentionInterface.register(_name, partial(group_attention, AttentionInterface()[_name]))


# ----- A, continued: what a model takes, and in what passes

_TRIALS = WeakKeyDictionary()  # model -> {(what, attention): why not, or None}


def packs(model, longest_row):
    """Whether groups of rows up to this length may be packed. The first time for a model it makes a trial."""
    return not trial(model, "packed", packing_trial) and longest_row <= attention_window(model.config)


def trial(model, what, compare):
    """Why the model cannot be run in this way, or None. Found once, told once, the same on every process.

    compare(model, ids) -> (our log-probs, those of the definition) on made-up ids.
    """
    trials, key = _TRIALS.setdefault(model, {}), (what, model.config._attn_implementation)
    if key not in trials:
        model.eval()
        known = model.get_input_embeddings().weight.shape[0]
        ids = [token % known for token in range(3, 80, 5)]  # 16 of them
        with torch.no_grad():
            pair = torch.tensor([ids[:9], ids[:8] + ids[9:10]], device=model.device)
            before, other = (model(row[None], use_cache=False).logits[0, :8] for row in pair)
            # computed in 16 bits, also from fp32 weights: under autocast, sharded, and if cast back to fp32
            coarse = any((before == before.to(kind)).all() for kind in (torch.bfloat16, torch.float16))
            check_numbers(before)
            if (before - other).abs().max() > (0.3 if coarse else 1e-3):
                raise ValueError(f"{type(model).__name__} is no causal language model: its logits look ahead")
            try:
                ours, plain = compare(model, ids)
                by = (ours - plain).abs()
                # bf16 alone makes single log-probs of a real model differ by .4, but .02 to .1 on average
                same = by.mean() < 0.2 if coarse else by.max() < 1e-3
                trials[key] = None if same else f"its log-probs would differ by {by.max():.2g}"
            except torch.OutOfMemoryError:  # says nothing about the model
                raise
            except Exception as error:  # whatever a model says to a layout or a cache that it does not know
                trials[key] = str(error).partition("\n")[0] or type(error).__name__
                if hasattr(model, "reset_iter_state"):  # FSDP2 would take the next pass for the rest of this
                    model.reset_iter_state()
        if trials[key]:
            warnings.warn(f"{type(model).__name__} cannot be {what}, so its rows are computed one by one, "
                          f"right but slower: {trials[key]}", stacklevel=4)
    return trials[key]


def check_numbers(logits):
    if logits.isnan().any():
        raise ValueError("the model's logits are not numbers (nan): its weights have diverged")


def packing_trial(model, ids):
    check_places(model)
    config = model.config.get_text_config()
    if any("soft" in name and "cap" in name and value for name, value in vars(config).items()):
        raise ValueError("its attention or its logits have a soft-cap")  # too gentle for bf16 to show it
    rows = [Trajectory(ids[:6] + ids[n : n + k], [0] * 5 + [1] * (k + 1), group=n % 2)
            for n, k in ((7, 5), (2, 3), (5, 8), (9, 1))]
    read = partial(read_logits, temperature=1.0, entropy=False)
    group_attention.calls, layers = 0, config.num_hidden_layers
    packed, _ = packed_logprobs(model, rows, read, rows_per_chunk=5)
    if group_attention.calls != layers:
        kind = model.config._attn_implementation
        raise ValueError(f"{group_attention.calls} of its {layers} layers attend by our form of {kind!r}")
    return packed, plain_logprobs(model, rows, read)[0]


def check_places(model):
    """ValueError for Llama-4's attention: it scales queries by their place in the pass, not their position,
    and only beyond 8,192 places, which no trial reaches."""
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        raise ValueError("its attention depends on places in the pass (attn_temperature_tuning)")


def attention_window(config):
    """The shortest sliding window, chunk or choice of tokens of any layer; infinite where there is none."""
    config = config.get_text_config()
    if set(getattr(config, "layer_types", None) or [None]) == {"full_attention"}:
        return math.inf
    names = ("sliding_window", "sliding_window_size", "window_size", "attention_window", "local_attention",
             "attention_window_size", "attention_chunk_size", "index_topk", "indexer_budget")
    sizes = [getattr(config, name, None) for name in names]
    return min([size for size in sizes if isinstance(size, int) and size > 0], default=math.inf)


def context_length(config):
    """Tokens that a row may have: the model's positions, or fewer where its rope changes with the length.

    Rope of type "dynamic" or "longrope" rescales every position of a batch once its longest row passes a
    limit: tokens sampled before could not be scored after it.
    """
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *rope.values()]:  # one for all layers, or one for each type of layer
        kind = str(parameters.get("rope_type")) if isinstance(parameters, dict) else ""
        if re.search("dynamic|longrope", kind):
            limits.append(parameters.get("original_max_position_embeddings"))
    return min([limit for limit in limits if isinstance(limit, int) and limit > 0], default=math.inf)


def check_rows(model, rows):
    """ValueError for rows of ids that the model cannot read: too long, or with ids that have no embedding."""
    longest_row, context = max(map(len, rows), default=0), context_length(model.config)
    if longest_row > context:
        raise ValueError(f"a row of {longest_row} tokens, and the model reads {context} (its positions, or "
                         "the length at which its rope changes): lower max_tokens")
    largest = max((max(ids) for ids in rows if ids), default=0)
    if largest >= (known := model.get_input_embeddings().weight.shape[0]):
        raise ValueError(f"token id {largest}, and the model has {known} embeddings: tokens were added to "
                         "the tokenizer alone; call add_reward_tokens(tokenizer, model)")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("adapters with virtual tokens (prompt or prefix tuning) cannot be used: take LoRA")


def passes(model, trajectories, tokens_per_pass):
    """The rows of each forward pass (micro-batch): at most tokens_per_pass, a shared prefix counted once.

    Cut greedily, group by group: a group that fits stays together, another is split. A longer row is a pass
    of its own, and so is every row of a model that is not packed. All processes make the same number of
    passes, the last ones empty where there is less to do.
    """
    packed = packs(model, max(from_all([longest(trajectories)])))  # the same answer on every process
    cut, room = [], 0  # room: tokens that still fit into the last pass
    for rows in rows_by_group([t.group for t in trajectories]).values():
        prefix = len(os.path.commonprefix([trajectories[row].ids for row in rows]))
        own = [len(trajectories[row].ids) - prefix for row in rows]  # tokens beyond the prefix
        if prefix + sum(own) > room:
            room = 0
        for tokens, row in zip(own, rows):
            new = not packed or room < tokens + (prefix if row == rows[0] else 0)
            if new:
                cut.append([])
                room = tokens_per_pass
            cut[-1].append(row)
            room -= tokens + (prefix if new or row == rows[0] else 0)
    return cut + [[]] * (max(from_all([len(cut)])) - len(cut))


def reference_logprobs(model, ref_model, trajectories, temperature):
    """`action_logprobs` of the frozen model, without gradient."""
    adapter_off = nullcontext()
    if not hasattr(ref_model, "config"):  # a PEFT model's disable_adapter
        ref_model, adapter_off = model, ref_model()
    with torch.no_grad(), adapter_off:
        logp = action_logprobs(ref_model, trajectories, temperature)
    if hasattr(ref_model, "reshard"):  # sharded: no backward pass will free its gathered weights
        ref_model.reshard()
    return logp


def silence(model):
    """Evaluation mode: no dropout, no router noise. Gradient checkpointing, which the library has in training
    mode only, stays on: its layers, and nothing in them, are told that they train, until they really run."""
    model.eval()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.training, run = torch.is_grad_enabled(), layer._gradient_checkpointing_func
            if getattr(run, "func", None) is not _run_silently:
                layer._gradient_checkpointing_func = partial(_run_silently, run)


def _run_silently(run, forward, *args):
    def silent(*args):
        layer = forward.args[0]
        training, layer.training = layer.training, False
        try:
            return forward(*args)
        finally:
            layer.training = training

    return run(silent, *args)


# ===== B. Envs and policies =================================================================================
# Promise: whatever an env or a policy does wrong is an error that names it, and every env is closed. A model
# is sampled from exactly softmax(logits / temperature), and what was said is read once while its cache fits.

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from operator import index

from transformers import DynamicCache


class RolloutError(RuntimeError, TypeError, ValueError):
    """What an env or a policy did wrong; it names the env's row, the turn and the method."""


class CheckedEnv:
    """An env whose answers are checked. Whatever goes wrong is a RolloutError."""

    def __init__(self, env, row):
        self.env, self.row, self.turn = env, row, 0

    def reset(self):
        return copy.deepcopy(self._messages("reset"))  # kept as the opening: the env may change its own

    def step(self, text):
        self.turn += 1
        messages = self._messages("step", text)
        if any(message["role"] == "assistant" for message in messages or ()):
            raise self._error("step", "returned an assistant message: it must return only what is new, and "
                              "the env does not speak for the assistant")
        return messages

    def reward(self):
        answer = self._call("reward")
        with suppress(Exception):  # a numeric string is no number
            R = round(float(answer + 0), 9)  # six sixths are 1
            if 0 <= R <= 1:
                return abs(R)  # no -0
        raise self._error("reward", f"returned {answer!r}: rewards must be finite numbers in [0, 1]")

    def close(self):
        if hasattr(self.env, "close"):
            self._call("close")

    def _messages(self, method, *arguments):
        answer = self._call(method, *arguments)
        if answer is None and method == "step":  # the conversation is over
            return None
        messages = answer if isinstance(answer, list) and answer else [None]
        if all(isinstance(message, dict) and isinstance(message.get("role"), str)
               and isinstance(message.get("content"), str) for message in messages):
            return messages
        raise self._error(method, "must return a non-empty list of {'role': str, 'content': str}, got "
                          f"{answer!r}")

    def _call(self, method, *arguments):
        try:
            return getattr(self.env, method)(*arguments)
        except Exception as error:
            raise self._error(method, f"raised {type(error).__name__}: {error}") from error

    def _error(self, method, what):
        kind = type(self.env).__name__
        return RolloutError(f"env {self.row} ({kind}), turn {self.turn}: env.{method}() {what}")


@contextmanager
def open_envs(envs, policy, max_turns, max_tokens, threads):
    """The envs, checked, and a map over them. At the end every env is closed, and the policy forgets."""
    limits = {"max_turns": max_turns, "max_tokens": max_tokens, "threads": threads}
    if not all(isinstance(limit, int) and limit >= 1 for limit in limits.values()):
        raise ValueError(f"limits of a rollout are whole numbers from 1 on, got {limits}")
    with ExitStack() as closing:
        closing.push(partial(forget, policy))
        opened = []
        try:
            for env in envs:
                opened.append(CheckedEnv(env, len(opened)))
                closing.callback(opened[-1].close)
        except Exception as error:
            raise RolloutError(f"env {len(opened)} was not made: {type(error).__name__}: {error}") from error
        if len({id(checked.env) for checked in opened}) < len(opened):
            raise ValueError("one env object is given for several rollouts: make a fresh env for each")
        if threads > 1:
            yield opened, closing.enter_context(ThreadPoolExecutor(threads)).map
        else:
            yield opened, map


def forget(policy, error, *_):
    """Call policy.close(), if there is one. An error that is on its way goes before one of close()."""
    if hasattr(policy, "close"):
        with suppress(Exception) if error else nullcontext():
            policy.close()


def one_per_env(envs, reward_tokens, groups):
    """Reward tokens and group ids as lists, one for each env."""
    reward_tokens, groups = list(reward_tokens), [None] * len(envs) if groups is None else list(groups)
    if not envs or not len(envs) == len(reward_tokens) == len(groups):
        raise ValueError(f"need as many reward tokens and groups as envs, at least one: {len(envs)} envs, "
                         f"{len(reward_tokens)} reward tokens, {len(groups)} groups")
    return reward_tokens, groups


def ask_policy(policy, prompts, turn):
    """The policy's actions, as lists of int."""
    try:
        sampled = policy(prompts)
    except Exception as error:
        raise RolloutError(f"turn {turn}: the policy raised {type(error).__name__}: {error}") from error
    with suppress(TypeError):  # text in place of ids, or no lists at all
        actions = [[index(token) for token in ids] for ids in sampled]
        if len(actions) == len(prompts) and all(actions):
            return actions
    raise RolloutError(f"turn {turn}: the policy must return one non-empty list of ids for each of its "
                       f"{len(prompts)} prompts, got {sampled!r}"[:400])


def warn_if_none_ended(trajectories, chat):
    """Where no action at all has an end, the policy leaves it out, or its limit is too low."""
    said = [token for t in trajectories for token in t.action_ids]
    if said and not chat.stop_ids.intersection(said):
        warnings.warn(f"no action ended with a stop id ({sorted(chat.stop_ids)}), so all rollouts are cut off: "
                      "a policy must return the stop id too; or raise max_new_tokens", stacklevel=3)


def scripted_policy(texts, tokenizer):
    """A policy for one conversation that says `texts` in order. A generator may look at its env first.

    ValueError if the conversation goes on when all is said, or is over, by its end or a limit, before.
    """
    texts, chat = iter(texts), chat_format(tokenizer)

    def policy(prompts):
        if len(prompts) != 1:
            raise ValueError(f"a script speaks in one conversation, not in {len(prompts)}: roll out one env")
        if (text := next(texts, None)) is None:
            raise ValueError("the script is over but the conversation is not: let its last line end it")
        return [chat.action(text)]

    def close():
        if next(texts, None) is not None:
            raise ValueError("the conversation was over before the script: let the line that ends it be the "
                             "last, and max_turns and max_tokens have room for all")

    policy.close = close
    return policy


def sample(model, prompts, temperature, max_new_tokens, stop_ids, generator=None):
    """Draw one action per prompt from exactly softmax(logits / temperature); greedy at temperature 0.

    prompts: N lists of ids.  stop_ids: an action ends with the first of these, kept, or after max_new_tokens.
    Returns N lists of ids. No top-k, no penalties, nothing that a generation config could slip in: the
    log-probs of appendix A are those of the distribution sampled here.
    """
    return ModelPolicy(model, stop_ids, temperature, max_new_tokens, generator)(prompts)


def model_policy(model, tokenizer, temperature=1.0, max_new_tokens=512, generator=None, cache_tokens=2**17):
    """A policy that samples the model as `sample` does, and reads only what is new in a conversation.

    generator: of the draws, on the model's device.  cache_tokens: most tokens, padding included, whose keys
    and values are held at a time; a call that needs more samples in parts, and the next turn reads again.
    `rcgrpo_step` scores at its `temperature`. What it has read is forgotten when the weights change.
    """
    stop_ids = chat_format(tokenizer).stop_ids
    return ModelPolicy(model, stop_ids, temperature, max_new_tokens, generator, cache_tokens)


class ModelPolicy:
    """What `model_policy` returns. It keeps the ids that it has read in each conversation, cached."""

    READ_AT_ONCE = 2**14  # tokens, padding included, of one forward pass

    def __init__(self, model, stop_ids, temperature, max_new_tokens, generator=None, cache_tokens=2**17):
        if not (0 <= temperature < math.inf and max_new_tokens >= 1 and cache_tokens >= 1):
            raise ValueError(f"need 0 <= temperature < inf, max_new_tokens and cache_tokens >= 1, got "
                             f"{temperature}, {max_new_tokens}, {cache_tokens}")
        self.model, self.stop_ids, self.generator = model, set(stop_ids), generator
        self.temperature, self.max_new_tokens, self.cache_tokens = temperature, max_new_tokens, cache_tokens
        self.max_tokens = context_length(model.config)  # `rollout` ends what is longer
        self._begin(0)

    @torch.no_grad()
    def __call__(self, prompts):
        """N lists of ids -> N lists of sampled ids."""
        prompts = [list(prompt) for prompt in prompts]
        if not all(prompts) or max(map(len, prompts)) >= self.max_tokens:
            lengths = [len(prompt) for prompt in prompts]
            raise ValueError(f"prompts must have from 1 to {self.max_tokens - 1} tokens, got {lengths}")
        check_rows(self.model, prompts)
        training, alone = self.model.training, not pads(self.model)
        self.model.eval()  # no dropout, no router noise
        parts = [[row] for row in range(len(prompts))] if alone else self._parts(prompts)
        sampled = {}
        try:
            for rows in parts:
                sample_part = self._sample_alone if alone else self._sample_together
                sampled.update(zip(rows, sample_part([prompts[row] for row in rows])))
        except BaseException:
            self._begin(0)  # what was being read is half there
            raise
        finally:
            self.model.train(training)
        return [sampled[row] for row in range(len(prompts))]

    def close(self):
        """Forget what was read, and free its memory. The next call reads anew."""
        self._begin(0)

    def _parts(self, prompts):
        """Rows that are sampled together: all, if their keys and values fit."""

        def tokens(rows):
            return len(rows) * (max(len(prompts[row]) for row in rows) + self.max_new_tokens)

        every = list(range(len(prompts)))
        if tokens(every) <= self.cache_tokens:
            return [every]
        parts = [[]]
        for row in sorted(every, key=lambda row: len(prompts[row])):  # all of a part are padded to its last
            if parts[-1] and tokens([*parts[-1], row]) > self.cache_tokens:
                parts.append([])
            parts[-1].append(row)
        return parts

    def _sample_together(self, prompts):
        rows = self._recall(prompts)
        if rows is None:
            different = list(dict.fromkeys(map(tuple, prompts)))
            self._begin(len(different))
            if len(different) < len(prompts):  # the rollouts of a task under one reward token: read it once
                self._feed([list(prompt[:-1]) for prompt in different])
            rows = [different.index(tuple(prompt)) for prompt in prompts]
        self._select(rows)
        logits = self._feed([prompt[len(read) :] for prompt, read in zip(prompts, self.read)])  # (N, V)
        return self._draw(prompts, logits, self._feed)

    def _sample_alone(self, prompts):
        """One row, for models that padding disturbs: with the library's cache for it, or with none."""
        cached, read = not trial(self.model, "read in pieces", caching_trial), []
        cache = DynamicCache(config=self.model.config) if cached else None

        def feed(new):
            read.extend(new[0])
            if not cached:
                return next_logits(self.model, [read])
            positions = torch.arange(len(read) - len(new[0]), len(read), device=self.model.device)
            return next_logits(self.model, new, cache, position_ids=positions[None])

        return self._draw(prompts, feed(prompts), feed)

    def _begin(self, rows):
        """Forget everything. An empty cache for this many rows."""
        self.read = [[] for _ in range(rows)]
        self.real = torch.zeros(rows, 0, dtype=torch.bool, device=self.model.device)  # slots, not padding
        self.cache = DynamicCache()  # without a config all layers keep all slots
        self.weights = weights_version(self.model)

    def _recall(self, prompts):
        """The row of the cache that each prompt goes on from; None if one has none. Some may have ended."""
        longest_row = max(map(len, prompts)) + self.max_new_tokens
        if self.weights != weights_version(self.model) or longest_row > attention_window(self.model.config):
            return None  # a window counts slots, and a cache that is gone on with has gaps
        rows, left = [], iter(range(len(self.read)))
        for prompt in prompts:
            for row in left:
                if self.read[row] == prompt[: len(self.read[row])] and len(self.read[row]) < len(prompt):
                    rows.append(row)
                    break
        return rows if len(rows) == len(prompts) else None

    def _select(self, rows):
        """Keep these rows of the cache, some perhaps twice, and of their slots the real ones, at the end."""
        real = self.real[rows]  # (N, slots)
        padding = real.shape[1] - int(real.sum(1).max())
        order = real.byte().argsort(dim=1, stable=True)[:, padding:]
        for layer in self.cache.layers:
            if layer.is_initialized:  # (N, heads, slots, D) -> (N, heads, n, D)
                layer.keys, layer.values = (
                    x[rows].gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
                    for x in (layer.keys, layer.values))
        self.real = real.gather(1, order)
        self.read = [self.read[row] for row in rows]

    def _feed(self, new):
        """Read the next ids of each row (none, for some). Returns the logits (N, V) that follow them."""
        width, past, logits, device = max(map(len, new)), self.real.shape[1], None, self.real.device
        padding = [width - len(ids) for ids in new]  # on the left: the last column is real
        block = torch.tensor([[0] * n + ids for n, ids in zip(padding, new)], dtype=torch.long, device=device)
        real = torch.arange(width, device=device) >= torch.tensor(padding, device=device)[:, None]
        self.real = torch.cat([self.real, real], 1)
        self.read = [read + ids for read, ids in zip(self.read, new)]
        positions = (self.real.cumsum(1) - 1).clamp_min(0)[:, past:]
        step = max(1, self.READ_AT_ONCE // len(new))
        for start in range(0, width, step):
            end = min(width, start + step)
            mask = self.real[:, : past + end].long()
            logits = next_logits(self.model, block[:, start:end], self.cache, mask, positions[:, start:end])
        return logits

    def _draw(self, prompts, logits, feed):
        """Sample token by token. Rows that are over stay in the draw: others do not depend on them."""
        actions, talking = [[] for _ in prompts], set(range(len(prompts)))
        room = [min(self.max_new_tokens, self.max_tokens - len(prompt)) for prompt in prompts]
        while True:
            check_numbers(logits)
            if self.temperature == 0:
                drawn = logits.argmax(-1)
            else:
                probabilities = (logits / self.temperature).softmax(-1)
                drawn = torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]
            said = [[token] if row in talking else [] for row, token in enumerate(drawn.tolist())]
            for row in list(talking):
                actions[row] += said[row]
                if said[row][0] in self.stop_ids or len(actions[row]) == room[row]:
                    talking.discard(row)
            if not talking:
                return actions
            logits = feed(said)


def next_logits(model, ids, cache=None, attention_mask=None, position_ids=None):
    """Logits (N, V), fp32, after the last of ids (N, L), which go on from what the cache holds."""
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
    given["logits_to_keep"] = 1
    given = {name: value for name, value in given.items() if value is not None and accepts(model, name)}
    ids = torch.as_tensor(ids, device=model.device)
    return model(ids, use_cache=cache is not None, **given).logits[:, -1].float()


def weights_version(model):
    """Changes when any weight or adapter does; what is written through .data shows in the sum alone."""
    adapters = [(list(m.active_adapters), m.disable_adapters) for m in model.modules()
                if isinstance(getattr(m, "active_adapters", None), list)]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]  # if sharded, ours
    return adapters, [(p.data_ptr(), p._version, p.sum(dtype=torch.float32).item()) for p in local]


def pads(model):
    """Whether rows of different lengths may share a cache."""
    return not trial(model, "padded", padding_trial)


def padding_trial(model, ids):
    """Rows of different lengths in one cache, gone on with in another order, against plain passes."""
    check_places(model)
    policy = ModelPolicy(model, (), 0, 1)
    policy._begin(2)
    policy._feed([ids[:9], ids[3:7]])
    policy._select([1, 0, 0])
    ours = policy._feed([ids[:1], ids[1:4], ids[5:7]])
    plain = torch.cat([next_logits(model, [row]) for row in policy.read])
    return ours.log_softmax(-1)[:, ids], plain.log_softmax(-1)[:, ids]


def caching_trial(model, ids):
    """One row read in pieces, with the library's own cache, against a plain pass."""
    cache = DynamicCache(config=model.config)
    for start, end in ((0, 9), (9, 10), (10, 11)):
        positions = torch.arange(start, end, device=model.device)[None]
        ours = next_logits(model, [ids[start:end]], cache, position_ids=positions)
    return ours.log_softmax(-1)[:, ids], next_logits(model, [ids[:11]]).log_softmax(-1)[:, ids]


# ===== C. Chat templates ====================================================================================
# Promise: a conversation appended piece by piece has the ids of the whole, rendered once; control tokens come
# from the frame, never from what a user or a tool says; all else is refused.

import json

from transformers.utils import get_json_schema

JOINT = "\u2060"  # the word joiner, invisible: a control token with a joint in it is ordinary text
SAID = "\ue000"  # stands for what the assistant says in a dummy chat
DUMMY = [{"role": "user", "content": "u"}, {"role": "assistant", "content": SAID}]


def chat_format(tokenizer, **template):
    """The tokenizer's ChatFormat, which can stand wherever this file takes a tokenizer. Built once, and again
    when tokens, template or end token have changed. template: its keywords, e.g. enable_thinking=False."""
    if isinstance(tokenizer, ChatFormat):  # its tokenizer may have changed since
        tokenizer, template = tokenizer.tokenizer, {**tokenizer.template, **template}
    state = [getattr(tokenizer, name, None) for name in ("chat_template", "eos_token_id")]
    template = json.dumps(template, default=get_json_schema)  # tools may be functions
    return _chat_format(tokenizer, f"{len(tokenizer)} {state}", template)


@lru_cache(maxsize=8)
def _chat_format(tokenizer, state, template):
    return ChatFormat(tokenizer, **json.loads(template))


class ChatFormat:
    """A chat template, cut into pieces. What it renders, the tokenizer itself encodes.

    Control tokens are the special ones and added tags like <tool_call> or [INST]. Template, system prompt and
    inject_reward_token write them; in what a user or a tool says they get a joint. A template without tool
    messages is given user messages instead. If its header opens a thought (<think>), a script closes it.
    """

    def __init__(self, tokenizer, **template):
        if not (getattr(tokenizer, "chat_template", None) and getattr(tokenizer, "is_fast", False)):
            raise ValueError("no chat template: set chat_template of a fast tokenizer (see AutoTokenizer)")
        self.tokenizer, self.template, self.tools_as_user = tokenizer, template, False
        self.unknown = tokenizer.unk_token_id
        added = [(i, t) for i, t in tokenizer.added_tokens_decoder.items() if i != self.unknown]
        self.special = {i: t.content for i, t in added if t.special}
        self.control = self.special | {i: t.content for i, t in added if t.content.startswith(("<", "["))}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the vocabulary lacks")  # words of our own examples
            try:
                self._try_out()
            except ValueError as problem:
                self.tools_as_user = True
                self._try_out()
                warnings.warn(f"tool results are shown as user messages: {problem}", stacklevel=4)
        self._encode = lru_cache(256)(self._encode)  # groups have few prompts, envs repeat themselves

    def prompt(self, messages, reward_token=None):
        """Ids of the opening messages, with `reward_token` if given, up to where the assistant speaks."""
        if reward_token and reward_token not in self.control.values():
            raise ValueError(f"no token {reward_token!r} yet: call add_reward_tokens(tokenizer, model)")
        return list(self._encode(json.dumps(messages), True, reward_token))

    def suffix(self, messages, after=None):
        """Ids that follow an action whose last id is `after`: `messages` in their frame, the next header."""
        ids = self._encode(json.dumps(messages))  # the turn's end comes first: most actions bring it along
        return ids[1:] if after in (None, ids[0]) else list(ids)

    def action(self, text):
        """Ids that a script "samples" to say `text`. Special tokens spelt in it stay ordinary text."""
        said = self._ids(text.encode("utf-8", "replace").decode(), split_special_tokens=True)
        if self.unsaid.keys() & set(said):
            raise ValueError(f"a script cannot say {text!r}: this tokenizer reads control tokens in it")
        return [*self._ids(self.close_thought), *said, self.end_of_turn]

    def text(self, action_ids):
        """What an env is given to read: the sampled text, with its header's <think>, without end token."""
        ids = action_ids[:-1] if action_ids and action_ids[-1] in self.stop_ids else action_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        closed = text.startswith(self.close_thought)  # also where there is none to close
        return text.removeprefix(self.close_thought) if closed else "<think>" + text

    def _read_frame(self):
        """Find the assistant's end tokens, and what closes a thought, in dummy chats."""
        header, ended = self._render(DUMMY[:1]), self._after_answer([{"role": "user", "content": "v"}])
        before, _, ended_last = self._render(DUMMY, generate=False).partition(SAID)
        self.end_of_turn, last_end = ([*self._ids(text), None][0] for text in (ended, ended_last))
        if self.end_of_turn not in self.control:
            raise ValueError(f"a chat template must end a turn with an added token, not with {ended[:20]!r}")
        ends = self.control.keys() & {self.end_of_turn, last_end}
        self.stop_ids = (ends | {self.tokenizer.eos_token_id}) - {None}
        self.unsaid = self.special | {i: self.control[i] for i in ends}
        closing = before.partition(header)[2].lstrip() or "</think>\n\n"
        self.close_thought = closing if header.rstrip().endswith("<think>") else ""

    def _try_out(self):
        """ValueError unless a conversation of all kinds of messages has one set of ids, whole or appended."""
        self._read_frame()
        roles = ("user", "assistant", "tool", "tool", "assistant", "user")
        messages = [{"role": role, "content": f"say {n}"} for n, role in enumerate(roles)]
        reward_token = HIGH if HIGH in self.control.values() else None
        whole, appended = (self._render(part, reward_token) for part in (messages, messages[:1]))
        ids = self.prompt(messages[:1], reward_token)
        for said, answer in (("say 1", messages[2:4]), ("say 4", messages[5:])):
            appended += self.close_thought + said + self._after_answer(answer)
            ids += self.action(said) + self.suffix(answer)
        thought = r"<think>\s*</think>\s*"  # templates drop it from earlier turns, ours stays
        same = re.sub(thought, "", appended) == re.sub(thought, "", whole)
        native = self.tokenizer(appended if same else whole, add_special_tokens=False).input_ids
        if ids != native:
            there = self.tokenizer.decode(native[len(os.path.commonprefix([ids, native])) :][:9])
            raise ValueError(f"this chat template has other ids as a whole than in parts, from {there!r} on")
        self.suffix([{"role": "tool", "content": "".join(self.control.values())}])  # they can be kept apart

    def _render(self, messages, reward_token=None, generate=True):
        messages = inject_reward_token(messages, reward_token) if reward_token else messages
        messages = tools_to_user(messages) if self.tools_as_user else messages
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **self.template)
        except Exception as error:  # jinja's own errors, and whatever a template calls
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"this chat template fails on messages of {roles}: {error!r}") from error

    def _after_answer(self, messages):
        return self._render(DUMMY + messages).partition(SAID)[2]

    def _encode(self, messages, opening=False, reward_token=None):
        """Ids of messages (JSON) in their frame. ValueError if their text adds a control token to it."""
        free = {"system": [HIGH, LOW], "assistant": self.unsaid.values()} if opening else {}  # to hold others
        said = [apart(m, free.get(m["role"], self.control.values())) for m in json.loads(messages)]
        if odd := [m["content"] for m in said if not isinstance(m["content"], str)]:
            raise TypeError(f"the content of a message must be a string, got {odd[0]!r}")
        marks = [f"aB{n}Ba" if m["content"].strip() else "" for n, m in enumerate(said)]
        other = [{**m, "content": m["content"] * (m["role"] in free) + mark} for m, mark in zip(said, marks)]
        render = partial(self._render, reward_token=reward_token) if opening else self._after_answer
        frame = render(other)
        if lost := [m["role"] for m, mark in zip(said, marks) if mark not in frame]:
            raise ValueError(f"this chat template drops messages of role {lost[0]}")
        ids, frame_ids = self._ids(render(said)), self.tokenizer(frame, add_special_tokens=False).input_ids
        found, expected = ([self.control[i] for i in part if i in self.control] for part in (ids, frame_ids))
        if found != expected or found.count(HIGH) + found.count(LOW) != bool(reward_token):
            raise ValueError(f"change these messages: they hold the control tokens {found}, not {expected}")
        return ids

    def _ids(self, text, **how):
        """Its ids, by the tokenizer itself. A warning names the words that the vocabulary lacks."""
        found = self.tokenizer(text, add_special_tokens=False, verbose=False, **how)[0]
        if lacks := [text[slice(*at)] for i, at in zip(found.ids, found.offsets) if i == self.unknown]:
            warnings.warn(f"the vocabulary lacks {lacks}: read as {self.tokenizer.unk_token}", stacklevel=2)
        return found.ids


def apart(message, tokens):
    """The same message, with a joint after the first character of each of these tokens that it spells."""
    text = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace").decode()  # no lone surrogates
    for token in [token for token in tokens if token in text]:
        for _ in token:  # as often as it may overlap itself
            text = text.replace(token, token[0] + JOINT + token[1:])
    return json.loads(text)


def tools_to_user(messages):
    """The same with tool results as user messages; consecutive user messages are merged."""
    merged = []
    for message in messages:
        message = {**message, "role": "user"} if message["role"] == "tool" else message
        if merged and message["role"] == merged[-1]["role"] == "user":
            message = {**message, "content": merged.pop()["content"] + "\n\n" + message["content"]}
        merged.append(message)
    return merged


# ===== D. The step, on one process or many ==================================================================
# Promise: what would train wrongly is refused before it costs anything; a non-finite gradient is dropped.

import torch.distributed as dist


def from_all(items):
    """The lists of all processes, joined in the order of their ranks; alone, the list itself."""
    if not dist.is_initialized():
        return list(items)
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, list(items))
    return [item for one in lists for item in one]


def total(x):
    """The sum of x over all processes."""
    return sum(from_all([x]))


def deal_groups(rollouts):
    """(the rollouts of all processes, those of the groups that this process learns from). They are dealt by
    length, so that processes wait little for each other."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    everyone = from_all(rollouts)
    groups = rows_by_group([t.group for t in everyone]).values()
    longest_first = sorted(groups, key=lambda rows: -sum(len(everyone[row].ids) for row in rows))
    return everyone, [everyone[row] for rows in longest_first[rank::size] for row in rows]


def largest_group(trajectories):
    """Rollouts in the largest group of any process."""
    groups = rows_by_group([t.group for t in trajectories]).values()
    return max(from_all([max(map(len, groups), default=0)]))


def optimizer_step(model, optimizer, max_grad_norm):
    """Clip the gradient to norm max_grad_norm (inf: no clipping), step, clear. Returns metrics.

    A gradient that is not finite is thrown away: grad_norm None, skipped 1, the weights as they were.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # full: over all shards
    finite = math.isfinite(norm)
    if finite:
        optimizer.step()
    model.zero_grad()
    torch.clear_autocast_cache()  # autocast around the whole loop would go on with the old weights, cast
    return {"grad_norm": norm if finite else None, "skipped": int(not finite)}


def temperature_of(policy):
    """What the policy samples at, and is scored at. ValueError if it cannot be scored at that."""
    temperature = getattr(policy, "temperature", 1.0)
    if not 0 < temperature < math.inf:
        raise ValueError(f"rollouts drawn at temperature {temperature} cannot be scored: take one above 0")
    return temperature


def check_step(model, optimizer, tokens_per_pass=24576, max_grad_norm=1.0):
    """ValueError for what cannot train, or not as it should."""
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise ValueError(f"give the model inside of {type(model).__name__} (model.module): for many "
                         "processes it is sharded by FSDP2, as in train_bfcl.py")
    if not (isinstance(tokens_per_pass, int) and tokens_per_pass >= 1):
        raise ValueError(f"tokens_per_pass must be a whole number from 1 on, got {tokens_per_pass}")
    if not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm must be positive (inf for no clipping), got {max_grad_norm}")
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if held.keys() != {id(p) for p in model.parameters() if p.requires_grad}:
        raise ValueError("the optimizer must hold the model's trainable parameters and no others: make it "
                         "after add_reward_tokens, adapters and sharding, from this model's parameters()")
    coarse = {p.dtype for p in held.values()} & {torch.bfloat16, torch.float16}
    if coarse and any("betas" in group for group in optimizer.param_groups):
        raise ValueError(f"Adam's small steps are lost in the rounding of {coarse.pop()} weights: train fp32 "
                         "master weights, or fp32 adapters (LoRA) on these")
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise ValueError("under autocast to float16 small gradients vanish: use bfloat16, or fp32")


def check_trajectories(model, trajectories, all_act=False):
    """ValueError for trajectories that the model cannot learn from. all_act: each must have an action."""
    silent = [row for row, t in enumerate(trajectories) if 1 not in t.mask] if all_act else []
    if silent or not total(len(trajectories)):
        raise ValueError(f"trajectories without an action token cannot be trained on: rows {silent} of "
                         f"{len(trajectories)}; drop them, or raise max_tokens if their prompt was too long")
    if any(t.reward_token for t in trajectories) and not getattr(model.config, "reward_token_ids", None):
        raise ValueError("the model does not know the reward tokens of these trajectories: call "
                         "add_reward_tokens(tokenizer, model)")


def check_update(model, ref_model, optimizer, G, beta=0.1, clip=0.2, ratio="token", updates=1,
                 tokens_per_pass=24576, max_grad_norm=1.0):
    """ValueError for settings of `rcgrpo_update` that cannot work. G: rollouts in the largest group."""
    check_step(model, optimizer, tokens_per_pass, max_grad_norm)
    if G < 2:
        raise ValueError("no group has two rollouts to compare: G must be at least 2, and the rollouts of a "
                         "task share a group id")
    if not (0 <= beta < math.inf and clip >= 0 and updates >= 1):
        raise ValueError(f"need beta and clip >= 0, updates >= 1, got {beta}, {clip}, {updates}")
    if ratio not in ("token", "trajectory"):
        raise ValueError(f'ratio must be "token" or "trajectory", got {ratio!r}')
    if beta and (ref_model is None or ref_model is model):
        raise ValueError("beta > 0 needs the frozen stage-1 model as ref_model; without one, set beta = 0")


# ===== E. The two new tokens ================================================================================
# Promise: no other token and no other row of the model changes, and both rows are fit to be told apart.

from transformers import AddedToken


def add_reward_tokens(tokenizer, model=None):
    """Teach tokenizer and model (if given) the two reward tokens. Idempotent: a second call changes nothing.

    Returns (id of HIGH, id of LOW). The embedding matrix never shrinks; it grows, to a multiple of 64 rows,
    when the new ids do not fit (Qwen2.5 has spare rows, Llama-3.1 none). Call it before sharding the model.
    """
    if isinstance(tokenizer, ChatFormat):
        tokenizer = tokenizer.tokenizer
    known = len(tokenizer)
    # special: user text that merely spells a reward token can be kept from becoming one (appendix C)
    added = [AddedToken(token, special=True, normalized=False) for token in (HIGH, LOW)]
    tokenizer.add_tokens(added, special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids([HIGH, LOW])
    if model is None:
        return tuple(ids)
    trained = getattr(model.config, "reward_token_ids", ids)
    if list(trained) != ids:
        raise ValueError(f"the model was trained with reward tokens {trained}, this tokenizer has {ids}: "
                         "load the tokenizer that was saved with the model")
    if hasattr(model.config, "reward_token_ids"):
        return tuple(ids)
    if hasattr(model, "peft_config"):
        raise ValueError("the model has an adapter already: tokens first, adapter second")
    rows_before = model.get_input_embeddings().weight.shape[0]
    if hasattr(model.get_input_embeddings().weight, "full_tensor"):
        raise RuntimeError("the model is sharded: call add_reward_tokens before fully_shard")
    if len(tokenizer) > rows_before:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    matrices = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    others = [row for row in range(min(known, rows_before)) if row not in ids]
    for weight in matrices.values():  # one matrix if tied, two if not
        weight.data[rows_before:] = 0  # padding; the library draws these rows, differently in every process
        _init_reward_rows(weight, ids, weight[others])
    model.config.reward_token_ids = ids  # saved with the model: the rows are trained from now on
    return tuple(ids)


@torch.no_grad()
def _init_reward_rows(weight, ids, known_rows):
    """Set the rows to mean +- d: d random, orthogonal to the mean, as long as it or as a usual deviation.

    The library draws all new rows next to the mean: two tokens that the model cannot tell apart. Ours are
    of the usual norm and at least 90 degrees apart. A fixed generator: every process draws the same rows.
    """
    rows = known_rows.float()
    if rows.any():
        rows = rows[rows.any(dim=1)]  # spare rows of zeros say nothing about the usual scale
    mean = rows.mean(0)
    deviation = torch.randn(len(mean), generator=torch.Generator().manual_seed(0)).to(mean.device)
    deviation -= (deviation @ mean) / mean.square().sum().clamp_min(1e-12) * mean
    length = torch.maximum((rows - mean).square().sum(1).mean().sqrt(), mean.norm())
    deviation *= length / deviation.norm()
    for token_id, sign in zip(ids, (1, -1)):
        weight[token_id] = (mean + sign * deviation).to(weight.dtype)

