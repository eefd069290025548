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
  1. rho is one ratio per token, and the loss a mean over all action tokens, as in verl, the authors' tool.
     GRPO itself divides each rollout by its own length, which makes a token of a long rollout count less.
     ratio="trajectory" is eq. 7 as printed, one product per rollout, which soon leaves the clip range.
  2. KL is estimated per token and averaged over tokens, under either ratio. The paper names no estimator.
  3. Reward tokens are drawn i.i.d. as in eq. 3; stratified=True puts equally many high ones into every group.
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
# third level is a third token wherever HIGH and LOW stand together.)

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
# All of it is (h_2, r). The mask is written when a token is sampled, never reconstructed from the text.


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
        if hasattr(group, "item"):  # tensors hash by identity: no two would share a group
            group = group.item()
        if isinstance(group, list):  # a tuple that went through JSON
            group = tuple(group)
        rows.setdefault(("alone", row) if group is None else group, []).append(row)
    return rows


def label_by_reward(trajectory, tokenizer, threshold=1.0):
    """Eq. 1 for a finished rollout (with this tokenizer's ids): HIGH if R >= threshold, else LOW.

    Returns a new one: the same actions and observations, behind the prompt that was played, with the token.
    """
    if 1 not in trajectory.mask or trajectory.opening is None:
        raise ValueError("to be labelled, a trajectory needs an action and its .opening, the messages played")
    r = HIGH if round(trajectory.reward, 9) >= threshold else LOW
    prompt = chat_format(tokenizer).prompt(trajectory.opening, r)
    start = trajectory.mask.index(1)
    mask = [0] * len(prompt) + trajectory.mask[start:]
    return replace(trajectory, ids=prompt + trajectory.ids[start:], mask=mask, reward_token=r)


# ===== 3. Stage 1, RCTP (eq. 2):   L = -E_{(tau, r) ~ D}  sum_t log pi(a_t | h_t, r) ========================
# RCTP: reward-conditioned trajectory policy. SFT: the same loss on experts, without a reward token.
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
# two tokens make the policy succeed at different rates, groups have variance. (For a 0/1 reward E[sigma_g^2]
# is (G-1)/G m(1-m), m = p mu_high + (1-p) mu_low: the tokens help by moving m away from 0 and 1.)


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
# Prop. 4.2, the collapse: if KL(pi* || pi_ref) <= eps_sft at each of the K turns of a deterministic expert
# pi*, all G rollouts are its own, so sigma_g and the policy gradient are 0, with P >= 1 - G K eps_sft.


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
# first update pi_theta is pi_old, so rho = 1, and with one update a batch (the paper) nothing clips. Its loss
# is then -mean[A], near 0 and of either sign; it is the gradient, -mean[A grad log pi], that trains.


def clipped_policy_loss(logp, old_logp, ref_logp, advantages, mask=None, clip=0.2, beta=0.1, ratio="token",
                        n_tokens=None, n_trajectories=None):
    """The RC-GRPO loss (eqs. 7-9) and what it saw.

    logp, old_logp, ref_logp (None if beta = 0) (N, T); mask (N, T), default: all True; advantages (N,).
    clip: c.  beta: weight of the KL.
    ratio: "token": one rho a token, mean over tokens; "trajectory": eq. 7's product, mean over trajectories.
    n_tokens, n_trajectories: counts of the whole batch if this is a part (default: of this part).
    Returns (loss, metrics). With the batch's counts, those of its parts add up to the batch's.

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
        d = bounded(ref_logp - logp)  # beyond +-20 without gradient
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

    tasks ... limits: as in `collect_groups`; tasks of this process, the metrics are of all.
    beta, update_settings: keywords of `rcgrpo_update`; the temperature is the policy's own.
    """
    temperature, started = getattr(policy, "temperature", 1.0), time.perf_counter()
    check_update(model, ref_model, optimizer, G, temperature, beta=beta, **update_settings)  # before it costs
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
    trajectories: whole groups, this process's part, just sampled by this model.  temperature: of sampling.
    clip, beta, ratio: as in `clipped_policy_loss`.  tokens_per_pass: as in `rctp_step`.
    """
    trajectories = list(trajectories)
    G = max(from_all(map(len, rows_by_group([t.group for t in trajectories]).values())), default=0)
    check_update(model, ref_model, optimizer, G, temperature, clip, beta, ratio, updates, tokens_per_pass,
                 max_grad_norm)
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
            seen.update(metrics, entropy=mean_entropy)  # adds, being a Counter
        stepped = optimizer_step(model, optimizer, max_grad_norm)
        skipped += stepped["skipped"]
    return {**{name: total(value) for name, value in seen.items()}, **stepped, "skipped": skipped}


def hindsight_step(model, optimizer, rollouts, tokenizer, tokens_per_pass=24576, max_grad_norm=1.0):
    """Not the paper's: after a step of stage 2, learn what its rollouts found. Returns metrics.

    What earned R = 1, under either token, is labelled high (eq. 1) and learned by eq. 2; "count": how many
    (0: no step). Why: where one mode always succeeds and the other never, sigma_g is largest, yet grad log pi
    of an action of probability 1 is 0, so neither can leave its habit. (The field's name is hindsight
    relabelling: Andrychowicz et al. 2017; of instructions to language models, Zhang et al. 2023.)
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
# Promise: log pi of every action token as one plain forward pass over its row gives it, without dropout. For
# the types of model in PACKED whole groups are computed in one pass, in bounded memory, laid out as
#
#   ids        [ shared prefix  | continuation 1 | continuation 2 | ... ]
#   positions    0 ... P-1        P P+1 ...        P P+1 ...
#   attention    causal           prefix + itself  prefix + itself
#
# so that a prompt is read once, up to the reward token where rollouts part, and every token sees what it
# would have seen alone. Models of other types are computed row by row. `pytest -k listed_type` compares a
# small model of each listed type with its plain pass: to have another packed, add its name and run that.

import inspect
import os
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from unittest.mock import patch

import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_layers import GradientCheckpointingLayer

PACKED = set("""apertus arcee cohere cohere2 deepseek_v3 ernie4_5 exaone4 gemma gemma3_text glm glm4
    glm4_moe gpt2 gpt_neox granite helium llama mistral mixtral olmo olmo2 olmo3 opt phi phi3 qwen2 qwen2_moe
    qwen3 qwen3_moe seed_oss smollm3 starcoder2""".split())
KERNELS = "sdpa", "flash_attention_2", "flash_attention_3"


def require(condition, otherwise):
    if not condition:
        raise ValueError(otherwise)


def action_logprobs(model, trajectories, temperature=1.0, entropy=False, rows_per_chunk=1024):
    """log pi of every token of the actions, given all before it, at the temperature it was sampled with.

    Returns logp (N, T): row j holds the log-probs of trajectory j's action tokens in order, then zeros.
    With entropy=True returns (logp, H), H (N, T) the entropy of the distribution at each, without gradient.
    rows_per_chunk: so many rows of logits are made at a time. The model is left in evaluation mode.
    """
    require(temperature > 0, f"log-probs need the temperature > 0 of the sampling, got {temperature}")
    require(not any(t.mask[0] for t in trajectories),
            "a trajectory begins with an action: nothing conditions its first token")
    check_rows(model, [t.ids for t in trajectories])
    rows = trajectories or [Trajectory([0], [0])]  # an empty pass is a pass
    with silent(model):
        if packs(model, max(len(t.ids) for t in rows)):
            head, states = model.get_output_embeddings(), packed_states(model, rows)  # (M, width)
        else:
            logits = [plain_logits(model, t.ids, predicting(t)) for t in rows]
            head, states = torch.nn.Identity(), torch.cat(logits)  # (M, V)
    targets = torch.tensor([token for t in rows for token in t.action_ids], device=states.device).long()
    read = partial(checkpoint, read_chunk, head, temperature, entropy, use_reentrant=False)
    parts = map(read, states.split(rows_per_chunk), targets.split(rows_per_chunk))
    mask = action_mask(trajectories, states.device)  # (N, T)
    zeros = torch.zeros(mask.shape, device=states.device)
    logp, h = (zeros.masked_scatter(mask, torch.cat(part)) for part in zip(*parts))
    return (logp, h) if entropy else logp


def action_mask(trajectories, device="cpu"):
    """(N, T) bool: True where row j of `action_logprobs` holds one of trajectory j's action tokens.

    >>> action_mask([Trajectory([5, 6, 7], [0, 1, 1]), Trajectory([5, 6], [0, 1])]).tolist()
    [[True, True], [True, False]]
    """
    counts = [sum(t.mask) for t in trajectories]
    columns = torch.arange(max(counts, default=0), device=device)
    return columns < torch.tensor(counts, device=device).long()[:, None]


def count_action_tokens(trajectories):
    return sum(sum(t.mask) for t in trajectories)


def predicting(trajectory):  # the places before its action tokens
    return [place for place, sampled in enumerate(trajectory.mask[1:]) if sampled]


def read_chunk(head, temperature, entropy, states, targets):
    """log pi and entropy (M,) of targets (M,) under softmax(head(states) (M, V) / temperature), in fp32."""
    logits = head(states).float() / temperature  # not kept, but made again in the backward pass
    log_z = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None])[:, 0] - log_z
    if not entropy:
        return logp, logp
    with torch.no_grad():
        return logp, torch.special.entr((logits - log_z[:, None]).exp()).sum(-1)  # -p log p


def bounded(log_ratio):
    """Keep exp() finite: e^20 is far outside any clip range. -inf minus -inf counts as no difference."""
    return log_ratio.nan_to_num(0.0).clamp(-20, 20)


def plain_logits(model, ids, places):
    """The definition: logits (n, V) at n places of one row, read from its beginning by the model as it is."""
    ids, places = (torch.tensor(x, device=model.device).long() for x in (ids, places))
    if "logits_to_keep" in inspect.signature(bare(model).forward).parameters:
        return model(ids[None], use_cache=False, logits_to_keep=places).logits[0]
    return model(ids[None], use_cache=False).logits[0, places]


def packed_states(model, trajectories):
    """One pass over many rows. Returns what the head makes logits of, at each action token (M, width)."""
    ids, positions, layout, places = pack(trajectories)
    ids, positions, places = (torch.tensor(x, device=model.device).long() for x in (ids, positions, places))
    attended, layers = [], bare(model).config.num_hidden_layers
    register_attention()
    with patch.object(model.get_output_embeddings(), "forward", lambda states: states):
        states = model(
            ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=places,
            attention_mask=torch.ones(1, 1, 1, 1, device=model.device),  # 4-d: the library builds none
            layout=partial(group_attention, layout, attended),  # a function: FSDP2 copies lists
            output_router_logits=False).logits[0]
    if len(attended) != layers:
        raise RuntimeError(f"{len(attended)} of {layers} layers attend as this type of model does: was their "
                           "attention replaced? Load the model with attn_implementation='eager'")
    return states


def pack(trajectories):
    """Lay trajectories out as drawn above, in segments, each a prefix or a continuation. Returns ids and
    positions (L,); layout: (tokens, number of its prefix) of each segment; places (M,) that predict the
    action tokens, in the rows' order."""
    ids, positions, layout, places = [], [], [], {}
    for rows in rows_by_group([t.group for t in trajectories]).values():
        start, number = len(ids), len(layout)
        prefix = len(os.path.commonprefix([trajectories[row].ids for row in rows]))
        ids += trajectories[rows[0]].ids[:prefix]
        positions += range(prefix)
        layout.append((prefix, number))
        for row in rows:
            t, shift = trajectories[row], len(ids) - prefix
            ids += t.ids[prefix:]
            positions += range(prefix, len(t.ids))
            layout.append((len(t.ids) - prefix, number))
            places[row] = [place + (start if place < prefix else shift) for place in predicting(t)]
    return ids, positions, layout, [place for row in sorted(places) for place in places[row]]


def group_attention(layout, attended, module, query, key, value, attention_mask, scaling=None, **kwargs):
    """query (1, heads, L, D), key and value (1, kv heads, L, D) -> (1, L, heads, D), None."""
    attended.append(module)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary makes them fp32
    key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    q, k, v = (x.split([tokens for tokens, _ in layout], 2) for x in (query, key, value))
    out = []
    for n, (tokens, prefix) in enumerate(layout):
        keys, values = k[n], v[n]
        if n != prefix:  # a continuation attends to the prefix and, causally, to itself
            keys, values = (torch.cat([x[prefix], x[n]], 2) for x in (k, v))
        if tokens:
            causal = causal_lower_right(tokens, keys.shape[2])  # flash attention: no mask in memory
            out.append(F.scaled_dot_product_attention(q[n], keys, values, causal, scale=scaling))
    return torch.cat(out, 2).transpose(1, 2), None


@cache  # once, at first use
def register_attention():
    """From now on the library calls `attention`, which is its own, `plain`, but in a pass with a layout."""
    def attention(plain, module, query, key, value, attention_mask, layout=None, **kwargs):
        return (layout or plain)(module, query, key, value, attention_mask, **kwargs)

    for name in KERNELS:
        AttentionInterface.register(name, partial(attention, AttentionInterface()[name]))


def bare(model):
    """The library's model in what PEFT or torch.compile has wrapped around it."""
    require(hasattr(model, "config"),
            f"{type(model).__name__} is no model of transformers: give the one in it (.module)")
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def packs(model, longest_row):
    """Whether groups of rows up to this length are packed. If not, a warning says so."""
    config = bare(model).config
    tested = config.model_type in PACKED and config._attn_implementation in KERNELS
    capped = any("softcap" in name and value for name, value in vars(config).items())
    packed = tested and not capped and longest_row <= (getattr(config, "sliding_window", None) or math.inf)
    if not packed:
        warnings.warn(f"rows are computed one by one, right but slower: {config.model_type} is not in PACKED "
                      "(add it if `pytest -k listed_type` then passes), or its attention not in KERNELS, or "
                      "it caps logits, or a row is longer than its window", stacklevel=1)
    return packed


def context_length(config):
    """Tokens that a row may have: the model's positions. "yarn" stretches them. Other ropes, and Llama-4's
    temperature, change a whole batch once its longest row passes a limit: what was sampled before could not
    be scored after it."""
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    if getattr(config, "attn_temperature_tuning", False):
        context = min(context, config.floor_scale - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [rope, *rope.values()]:  # for all layers, or for each type of layer
        trained = isinstance(one, dict) and one.get("original_max_position_embeddings")
        if trained and one.get("rope_type") in ("dynamic", "longrope"):
            context = min(context, trained)
        elif trained and one.get("rope_type") == "yarn":
            context = max(context, int(trained * (one.get("factor") or 1)))
    return context


def check_rows(model, rows):
    """ValueError for rows of ids that the model cannot read, or for a model that cannot be used."""
    config, longest_row = bare(model).config, max(map(len, rows), default=0)
    context, known = context_length(config), model.get_input_embeddings().weight.shape[0]
    largest = max((max(ids) for ids in rows if ids), default=0)
    require(longest_row <= context, f"a row of {longest_row} tokens, and the model reads {context} (its "
            "positions, or the length at which its rope changes): lower max_tokens")
    require(largest < known, f"token id {largest}, and the model has {known} embeddings: tokens were added "
            "to the tokenizer alone; call add_reward_tokens(tokenizer, model)")
    require(not getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False),
            "adapters with virtual tokens (prompt or prefix tuning) cannot be used: take LoRA")
    ahead = not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False)
    if config.model_type not in PACKED | BATCHED:  # nobody has tested it
        with torch.no_grad(), silent(model):
            one, other = (plain_logits(model, [1, 2, last], [0, 1]).float() for last in (3, 4))
        ahead = ahead or (one - other).abs().max() > 0.05 * one.std()
    require(not ahead, f"{config.model_type} is no causal language model: its logits look ahead")


def passes(model, trajectories, tokens_per_pass):
    """The rows of each forward pass (micro-batch): at most tokens_per_pass, a shared prefix counted once.

    A group that fits into a pass stays together, another is split. A longer row is a pass of its own, and so
    is every row of a model that is not packed. All processes make equally many, the last ones perhaps empty.
    """
    packed = packs(model, max(from_all([len(t.ids) for t in trajectories]), default=0))  # the same on all

    def fit(rows):
        return packed and len(pack([trajectories[row] for row in rows])[0]) <= tokens_per_pass

    cut = []
    for rows in rows_by_group([t.group for t in trajectories]).values():
        for part in [rows] if fit(rows) else [[row] for row in rows]:
            if not cut or not fit(cut[-1] + part):
                cut.append([])
            cut[-1] += part
    return cut + [[]] * (max(from_all([len(cut)])) - len(cut))


def reference_logprobs(model, ref_model, trajectories, temperature):
    """`action_logprobs` of the frozen model, without gradient."""
    adapter = not hasattr(ref_model, "config")  # it is a PEFT model's disable_adapter
    with torch.no_grad(), ref_model() if adapter else nullcontext():
        logp = action_logprobs(model if adapter else ref_model, trajectories, temperature)
    if hasattr(ref_model, "reshard"):  # sharded: no backward pass will free its gathered weights
        ref_model.reshard()
    return logp


@contextmanager
def silent(model):
    """Evaluation mode: no dropout, router noise, layer drop. Gradient checkpointing, which the library has in
    training mode only, is on within."""
    model.eval()
    with ExitStack() as restoring:
        for layer in model.modules() if torch.is_grad_enabled() else []:
            if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
                again = partial(layer._gradient_checkpointing_func, layer.forward, use_reentrant=False)
                restoring.enter_context(patch.object(layer, "forward", again))
        yield


# ===== B. Envs and policies =================================================================================
# Promise: whatever an env or a policy does wrong is an error that names it, and every env is closed. A model
# is sampled from exactly softmax(logits / temperature), and what was said is read once while its cache fits.

import copy
import operator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partialmethod

from transformers import DynamicCache


class RolloutError(RuntimeError, TypeError, ValueError):
    """What an env or a policy did wrong; it names the env's row, the turn and the method."""


def named(place, call, *arguments):
    """The call's answer. Whatever goes wrong is a RolloutError that begins with the place."""
    try:
        return call(*arguments)
    except Exception as error:
        raise RolloutError(f"{place}: {type(error).__name__}: {error}") from error


def checked_messages(answer):
    for message in answer if isinstance(answer, list) and answer else [None]:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"needs a non-empty list of {{'role': str, 'content': str}}, got {answer!r}")
    return copy.deepcopy(answer)  # the env may change its own


def checked_observation(answer):
    if answer is not None and "assistant" in [message["role"] for message in checked_messages(answer)]:
        raise TypeError("an env gives only what is new, and does not speak for the assistant")
    return answer


def checked_reward(answer):
    with suppress(Exception):  # a numeric string is no number
        if 0 <= (R := round(float(answer + 0), 9)) <= 1:  # six sixths are 1
            return abs(R)  # no -0
    raise ValueError(f"a reward is a finite number in [0, 1], not {answer!r}")


class CheckedEnv:
    """An env whose answers are checked. Whatever goes wrong is a RolloutError."""

    def __init__(self, env, row):
        self.env, self.row, self.turn = env, row, 0

    def _ask(self, method, checked, *arguments):
        self.turn += method == "step"
        place = f"env {self.row} ({type(self.env).__name__}), turn {self.turn}: env.{method}()"
        return named(place, lambda: checked(getattr(self.env, method)(*arguments)))

    reset = partialmethod(_ask, "reset", checked_messages)
    step = partialmethod(_ask, "step", checked_observation)
    reward = partialmethod(_ask, "reward", checked_reward)

    def close(self):
        if hasattr(self.env, "close"):
            self._ask("close", lambda answer: None)


@contextmanager
def open_envs(envs, policy, max_turns, max_tokens, threads):
    """The envs, checked, and a map over them. At the end every env is closed, and the policy forgets."""
    limits = max_turns, max_tokens, threads
    require(all(isinstance(limit, int) and limit >= 1 for limit in limits),
            f"max_turns, max_tokens and threads are whole numbers from 1 on, not {limits}")

    def forget(kind, error, trace):  # an error that is on its way goes before one of close()
        with suppress(Exception) if error else nullcontext():
            getattr(policy, "close", lambda: None)()

    with ExitStack() as closing:
        closing.push(forget)
        opened, envs = [], iter(envs)
        while (env := named(f"env {len(opened)}: not made", next, envs, None)) is not None:
            opened.append(CheckedEnv(env, len(opened)))
            closing.callback(opened[-1].close)
        require(len({id(checked.env) for checked in opened}) == len(opened),
                "one env object is given for several rollouts: make a fresh env for each")
        yield opened, closing.enter_context(ThreadPoolExecutor(threads)).map if threads > 1 else map


def one_per_env(envs, *given):
    """Reward tokens and group ids as lists, one for each env."""
    given = [[None] * len(envs) if values is None else list(values) for values in given]
    require(envs and {len(values) for values in given} == {len(envs)},
            "need as many reward tokens and groups as envs, at least one: "
            f"{len(envs)} envs, {' and '.join(str(len(values)) for values in given)}")
    return given


def ask_policy(policy, prompts, turn):
    """The policy's actions, as lists of int."""
    sampled = named(f"turn {turn}: the policy", policy, prompts)
    with suppress(TypeError):  # text in place of ids, or no lists at all
        actions = [[operator.index(token) for token in ids] for ids in sampled]
        if len(actions) == len(prompts) and all(actions):
            return actions
    raise RolloutError(f"turn {turn}: the policy must return one non-empty list of ids for each of its "
                       f"{len(prompts)} prompts, got {sampled!r}"[:400])


def warn_if_none_ended(trajectories, chat):
    """Where no action at all has an end, the policy leaves it out, or its limit is too low."""
    said = [token for t in trajectories for token in t.action_ids]
    if said and not chat.stop_ids.intersection(said):
        warnings.warn(f"no action ended with a stop id ({sorted(chat.stop_ids)}), so all rollouts are cut "
                      "off: a policy must return that id too; or raise max_new_tokens", stacklevel=3)


def scripted_policy(texts, tokenizer):
    """A policy for one conversation that says `texts` in order. A generator may look at its env first.

    ValueError if the conversation goes on when all is said, or is over, by its end or a limit, before.
    """
    texts, chat = iter(texts), chat_format(tokenizer)

    def policy(prompts):
        text = next(texts, None)
        require(text is not None, "the script is over but the conversation is not: let its last line end it")
        return [chat.action(text)]  # one: a script speaks in one conversation

    def close():
        require(next(texts, None) is None, "the conversation was over before the script: let the line that "
                "ends it be the last, and max_turns and max_tokens have room for all")

    policy.close = close
    return policy


def sample(model, prompts, temperature, max_new_tokens, stop_ids, generator=None):
    """Draw one action per prompt from exactly softmax(logits / temperature); greedy at temperature 0.

    prompts: N lists of ids.  stop_ids: an action ends with the first of these, kept, or after max_new_tokens.
    Returns N lists of ids. Nothing of the model's generation config counts.
    """
    return ModelPolicy(model, stop_ids, temperature, max_new_tokens, generator)(prompts)


def model_policy(model, tokenizer, temperature=1.0, max_new_tokens=512, generator=None, cache_tokens=2**17):
    """A policy that samples the model as `sample` does, and reads only what is new in a conversation.

    generator: of the draws, on the model's device.  cache_tokens: most tokens, padding included, whose keys
    and values are held at a time; a call that needs more samples in parts, and the next turn reads again.
    `rcgrpo_step` scores at its `temperature`. What it has read is forgotten when the weights change.
    """
    stop_ids = chat_format(tokenizer).stop_ids
    ends = getattr(bare(model).generation_config, "eos_token_id", None) or []
    if others := {*(ends if isinstance(ends, list) else [ends])} - stop_ids:
        warnings.warn(f"the model's generation_config also ends at ids {sorted(others)}, at which no action "
                      "ends here: if one should, make it the tokenizer's eos_token", stacklevel=2)
    return ModelPolicy(model, stop_ids, temperature, max_new_tokens, generator, cache_tokens)


# With states, convolutions, sinks, chunks: rows can share the library's own cache, but not go on from it.
BATCHED = set("""bamba gemma2 gpt_oss granitemoehybrid lfm2 lfm2_moe llama4_text olmo_hybrid phimoe
    qwen3_5_moe_text qwen3_5_text qwen3_next""".split())


class ModelPolicy:
    """What `model_policy` returns. A type in PACKED keeps keys and values for the next turn, one in BATCHED
    until its actions end; all others read a row again, from its beginning, for each token."""

    READ_AT_ONCE = 2**14  # tokens, padding included, of one forward pass

    def __init__(self, model, stop_ids, temperature, max_new_tokens, generator=None, cache_tokens=2**17):
        require(0 <= temperature < math.inf and max_new_tokens >= 1 and cache_tokens >= 1,
                "need 0 <= temperature < inf, max_new_tokens >= 1 and cache_tokens >= 1")
        self.model, self.stop_ids, self.generator = model, set(stop_ids), generator
        self.temperature, self.max_new_tokens, self.cache_tokens = temperature, max_new_tokens, cache_tokens
        config = bare(model).config
        self.max_tokens = context_length(config)  # `rollout` ends what is longer
        self.window = getattr(config, "sliding_window", None) or math.inf
        self.keeps, self.batches = config.model_type in PACKED, config.model_type in PACKED | BATCHED
        if not self.batches:
            packs(model, 0)  # warns that it is slow
        self.close()

    def close(self):
        """Forget what was read, and free its memory. The next call reads anew."""
        self.weights = None
        self._begin([])

    @torch.no_grad()
    def __call__(self, prompts):
        """N lists of ids -> N lists of sampled ids. The model is left in evaluation mode."""
        prompts = [list(prompt) for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]
        require(all(lengths) and max(lengths) < self.max_tokens,
                f"prompts must have from 1 to {self.max_tokens - 1} tokens, got {lengths}")
        check_rows(self.model, prompts)
        self.model.eval()
        fit = max(1, self.cache_tokens // (max(lengths) + self.max_new_tokens)) if self.batches else 1
        parts = [prompts[n : n + fit] for n in range(0, len(prompts), fit)]
        return [action for part in parts for action in self._sample(part)]

    def _sample(self, prompts):
        weights, held = weights_version(self.model), self.weights
        self.weights = None  # if anything fails before the end, it is not gone on with
        rows, longest = self._rows(prompts), max(map(len, prompts)) + self.max_new_tokens
        if held != weights or None in rows or longest > self.window:  # (a window counts gaps as well)
            self._begin(prompts)
            rows = self._rows(prompts)
        self._select(rows)
        new = [prompt[len(read) :] for prompt, read in zip(prompts, self.read)]
        room = [min(self.max_new_tokens, self.max_tokens - len(prompt)) for prompt in prompts]
        actions, talking = [[] for _ in prompts], set(range(len(prompts)))
        while talking:
            drawn = self._draw(self._feed(new))  # for all: a row does not depend on which others are over
            new = [[token] if row in talking else [] for row, token in enumerate(drawn)]
            for row in list(talking):
                actions[row] += new[row]
                if new[row][0] in self.stop_ids or len(actions[row]) == room[row]:
                    talking.remove(row)
        self.weights = weights if self.keeps else None
        return actions

    def _draw(self, logits):
        """N tokens from softmax(logits (N, V) / temperature)."""
        require(not logits.isnan().any(),
                "the model's logits are not numbers (nan): its weights have diverged")
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        probabilities = (logits / self.temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0].tolist()

    def _begin(self, prompts):
        """An empty row in place of the cache; where prompts are equal, all of them but for the last token."""
        self.read = [[]]
        self.real = torch.zeros(1, 0, dtype=torch.bool, device=self.model.device)  # slots that are no padding
        self.cache = DynamicCache(config=None if self.keeps else self.model.config)  # None: keep all slots
        different = dict.fromkeys(map(tuple, prompts))
        if self.keeps and len(different) < len(prompts):
            self._select([0] * len(different))
            self._feed([list(prompt[:-1]) for prompt in different])

    def _rows(self, prompts):
        """Of each prompt, the row that holds its longest beginning, not the whole; None if there is none."""
        fitting = ([row for row, read in enumerate(self.read) if read == prompt[: len(read)] != prompt]
                   for prompt in prompts)
        return [max(rows, key=lambda row: len(self.read[row]), default=None) for rows in fitting]

    def _select(self, rows):
        """Keep these rows of the cache, some perhaps twice, and of their slots the real ones, at the end."""
        real = self.real[rows]  # (N, slots)
        padding = real.shape[1] - int(real.sum(1).max())
        order = real.byte().argsort(dim=1, stable=True)[:, padding:]
        for layer in self.cache.layers:
            if self.keeps and layer.is_initialized:  # (N, heads, slots, D) -> (N, heads, n, D)
                layer.keys, layer.values = (
                    x[rows].gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
                    for x in (layer.keys, layer.values))
        self.real = real.gather(1, order)
        self.read = [self.read[row] for row in rows]

    def _feed(self, new):
        """Read the next ids of each row (none, for some). Returns the logits (N, V) that follow them."""
        self.read = [read + ids for read, ids in zip(self.read, new)]
        if not self.batches:
            return plain_logits(self.model, self.read[0], [-1]).float()
        width, past, device = max(map(len, new)), self.real.shape[1], self.real.device
        block = torch.tensor([[0] * (width - len(ids)) + ids for ids in new], device=device)
        real = torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in new], device=device)
        self.real = torch.cat([self.real, real], 1)
        positions = (self.real.cumsum(1) - 1).clamp_min(0)[:, past:]
        step = max(1, self.READ_AT_ONCE // len(new))
        for start in range(0, width, step):
            end = min(width, start + step)
            logits = self.model(
                block[:, start:end], attention_mask=self.real[:, : past + end].long(),
                position_ids=positions[:, start:end], cache=self.cache, use_cache=True, logits_to_keep=1,
                output_router_logits=False).logits
        return logits[:, -1].float()


def weights_version(model):
    """Changes when any weight or adapter does; what is written through .data shows in the sum alone."""
    adapters = [(list(m.active_adapters), m.disable_adapters) for m in model.modules()
                if isinstance(getattr(m, "active_adapters", None), list)]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]  # if sharded, ours
    return adapters, [(p.data_ptr(), p._version, p.sum(dtype=torch.float32).item()) for p in local]


# ===== C. Chat templates ====================================================================================
# Promise: a conversation appended piece by piece has the ids of the whole, rendered once; control tokens come
# from the frame, never from what a user or a tool says; all else is refused.

import json
import re

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
    inject_reward_token write them; in what a user or a tool says they get a joint. Where a template has no
    tool messages, an env answers as role "user". If its header opens a thought (<think>), a script closes it.
    """

    def __init__(self, tokenizer, **template):
        require(getattr(tokenizer, "chat_template", None) and getattr(tokenizer, "is_fast", False),
                "no chat template: set chat_template of a fast tokenizer (see AutoTokenizer)")
        self.tokenizer, self.template, self.unknown = tokenizer, template, tokenizer.unk_token_id
        added = [(i, t) for i, t in tokenizer.added_tokens_decoder.items() if i != self.unknown]
        self.special = {i: t.content for i, t in added if t.special}
        self.control = self.special | {i: t.content for i, t in added if t.content.startswith(("<", "["))}
        self.no_tools = None  # or why there can be no tool messages
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the vocabulary may lack the words of our examples
            self._read_frame()
            self._try_out("user")
            try:
                self._try_out("tool")
            except ValueError as problem:
                self.no_tools = problem
        self._encode = lru_cache(256)(self._encode)  # groups have few prompts, envs repeat themselves

    def prompt(self, messages, reward_token=None):
        """Ids of the opening messages, with `reward_token` if given, up to where the assistant speaks."""
        require(reward_token is None or reward_token in self.control.values(),
                f"no token {reward_token!r} yet: call add_reward_tokens(tokenizer, model)")
        return list(self._encode(json.dumps(messages), True, reward_token))

    def suffix(self, messages, after=None):
        """Ids that follow an action whose last id is `after`: `messages` in their frame, the next header."""
        ids = self._encode(json.dumps(messages))  # the turn's end comes first: most actions bring it along
        return ids[1:] if after in (None, ids[0]) else list(ids)

    def action(self, text):
        """Ids that a script "samples" to say `text`. Special tokens spelt in it stay ordinary text."""
        said = self._ids(text.encode("utf-8", "replace").decode(), split_special_tokens=True)
        require(self.unsaid.keys().isdisjoint(said),
                f"a script cannot say {text!r}: this tokenizer reads control tokens in it")
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
        ended_last = self._render(DUMMY, generate=False).partition(SAID)[2]
        self.end_of_turn, last_end = ([*self._ids(text), None][0] for text in (ended, ended_last))
        require(self.end_of_turn in self.control,
                f"a chat template must end a turn with an added token, not with {ended[:20]!r}")
        ends = self.control.keys() & {self.end_of_turn, last_end}
        self.stop_ids = (ends | {self.tokenizer.eos_token_id}) - {None}
        self.unsaid = self.special | {i: self.control[i] for i in ends}
        self.close_thought = "</think>\n\n" if header.rstrip().endswith("<think>") else ""

    def _try_out(self, role):
        """ValueError unless a conversation with such an answer has the same ids, whole or appended."""
        roles = ("user", "assistant", role, "assistant", "user")
        messages = [{"role": role, "content": f"say {n}"} for n, role in enumerate(roles)]
        whole, appended = self._render(messages), self._render(messages[:1])
        ids = self.prompt(messages[:1])
        for said, answer in (("say 1", messages[2:3]), ("say 3", messages[4:])):
            appended += self.close_thought + said + self._after_answer(answer)
            ids += self.action(said) + self.suffix(answer)
        thought = r"<think>\s*</think>\s*"  # templates drop it from earlier turns, ours stays
        same = re.sub(thought, "", appended) == re.sub(thought, "", whole)
        native = self.tokenizer(appended if same else whole, add_special_tokens=False).input_ids
        there = self.tokenizer.decode(native[len(os.path.commonprefix([ids, native])) :][:9])
        require(ids == native,
                f"this chat template has other ids as a whole than in parts, from {there!r} on")
        self.suffix([{"role": role, "content": "".join(self.control.values())}])  # all are kept apart

    def _render(self, messages, reward_token=None, generate=True):
        messages = inject_reward_token(messages, reward_token) if reward_token else messages
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **self.template)
        except Exception as error:  # jinja's own errors, and whatever a template calls
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"this chat template fails on messages of {roles}: {error!r}") from error

    def _after_answer(self, messages):
        return self._render(DUMMY + messages).partition(SAID)[2]

    def _encode(self, messages, opening=False, reward_token=None):
        """Ids of messages (JSON) in their frame. Their control tokens must be those that the frame has around
        other text. Exempt: an opening's system prompt, but for reward tokens, and tags in its examples."""
        free = {"system": [HIGH, LOW], "assistant": self.unsaid.values()} if opening else {}  # but for these
        said = [apart(m, free.get(m["role"], self.control.values())) for m in json.loads(messages)]
        require(all(isinstance(m["content"], str) for m in said),
                f"the content of a message must be a string, got {messages}")
        require(not self.no_tools or "tool" not in [m["role"] for m in said],
                f'to this model an env must answer as role "user", not "tool": {self.no_tools}')
        marks = [f"aB{n}Ba" if m["content"].strip() else "" for n, m in enumerate(said)]
        other = [{**m, "content": m["content"] * (m["role"] in free) + mark} for m, mark in zip(said, marks)]
        render = partial(self._render, reward_token=reward_token) if opening else self._after_answer
        frame = render(other)
        lost = [m["role"] for m, mark in zip(said, marks) if mark not in frame]
        require(not lost, f"this chat template drops messages of role {', '.join(lost)}")
        ids, frame_ids = self._ids(render(said)), self.tokenizer(frame, add_special_tokens=False).input_ids
        found, expected = ([self.control[i] for i in part if i in self.control] for part in (ids, frame_ids))
        require(found == expected and found.count(HIGH) + found.count(LOW) == bool(reward_token),
                f"change these messages: they hold the control tokens {found}, not {expected}")
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


def total(x):  # over all processes
    return sum(from_all([x]))


def deal_groups(rollouts):
    """(the rollouts of all processes, those that this one learns from): groups are dealt by their length."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    everyone = from_all(rollouts)
    groups = rows_by_group([t.group for t in everyone]).values()
    longest_first = sorted(groups, key=lambda rows: -sum(len(everyone[row].ids) for row in rows))
    return everyone, [everyone[row] for rows in longest_first[rank::size] for row in rows]


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


def check_step(model, optimizer, tokens_per_pass=24576, max_grad_norm=1.0):
    """ValueError for what cannot train, or not as it should."""
    bare(model)  # or an error: many processes share a model by FSDP2, not by a wrapper
    require(isinstance(tokens_per_pass, int) and tokens_per_pass >= 1,
            f"tokens_per_pass must be a whole number from 1 on, got {tokens_per_pass}")
    require(isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0,
            f"max_grad_norm must be positive (inf for no clipping), got {max_grad_norm}")
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    require(held == {p for p in model.parameters() if p.requires_grad},
            "the optimizer must hold the model's trainable parameters and no others: make it after "
            "add_reward_tokens, adapters and sharding, from this model's parameters()")
    coarse = {p.dtype for p in held} & {torch.bfloat16, torch.float16}
    require(not coarse or not any("betas" in group for group in optimizer.param_groups),
            "Adam's small steps are lost in 16-bit weights: train fp32 master weights or adapters (LoRA)")
    for device in ("cpu", "cuda"):
        half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        require(not half, "under autocast to float16 small gradients vanish: use bfloat16, or fp32")


def check_trajectories(model, trajectories, all_act=False):
    """ValueError for trajectories that the model cannot learn from. all_act: each must have an action."""
    silent = [row for row, t in enumerate(trajectories) if 1 not in t.mask] if all_act else []
    require(total(len(trajectories)) and not silent,
            f"trajectories without an action token cannot be trained on: rows {silent} of "
            f"{len(trajectories)}; drop them, or raise max_tokens if their prompt was too long")
    known = getattr(model.config, "reward_token_ids", None)
    require(known or not any(t.reward_token for t in trajectories), "the model does not know the reward "
            "tokens of these trajectories: call add_reward_tokens(tokenizer, model)")


def check_update(model, ref_model, optimizer, G, temperature, clip=0.2, beta=0.1, ratio="token", updates=1,
                 tokens_per_pass=24576, max_grad_norm=1.0):
    """ValueError for settings of `rcgrpo_update` that cannot work. G: rollouts in the largest group."""
    check_step(model, optimizer, tokens_per_pass, max_grad_norm)
    require(0 < temperature < math.inf,
            f"rollouts drawn at temperature {temperature} cannot be scored: take one above 0")
    require(G >= 2, "no group has two rollouts to compare: G must be at least 2, and the rollouts of a task "
            "share a group id")
    require(0 <= beta < math.inf and clip >= 0 and updates >= 1,
            f"need beta and clip >= 0, updates >= 1, got {beta}, {clip}, {updates}")
    require(ratio in ("token", "trajectory"), f'ratio must be "token" or "trajectory", got {ratio!r}')
    require(not beta or ref_model not in (None, model),
            "beta > 0 needs the frozen stage-1 model as ref_model; without one, set beta = 0")


# ===== E. The two new tokens ================================================================================
# Promise: no other token and no other row of the model changes, and both rows are fit to be told apart.

from transformers import AddedToken


def add_reward_tokens(tokenizer, model=None):
    """Teach tokenizer and model (if given) the two reward tokens. Idempotent: a second call changes nothing.

    Returns (id of HIGH, id of LOW). The embedding matrix never shrinks; it grows, to a multiple of 64 rows,
    when the new ids do not fit (Qwen2.5 has spare rows, Llama-3.1 none). Call it before sharding the model.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a ChatFormat may stand for it
    known = len(tokenizer)
    # special: user text that merely spells a reward token can be kept from becoming one (appendix C)
    added = [AddedToken(token, special=True, normalized=False) for token in (HIGH, LOW)]
    tokenizer.add_tokens(added, special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids([HIGH, LOW])
    trained = ids if model is None else getattr(model.config, "reward_token_ids", None)
    require(not trained or list(trained) == ids, f"the model was trained with reward tokens {trained}, this "
            f"tokenizer has {ids}: load the tokenizer that was saved with the model")
    if trained:
        return tuple(ids)
    embeddings = model.get_input_embeddings().weight
    require(not hasattr(model, "peft_config"), "the model has an adapter: tokens first, adapter second")
    require(not hasattr(embeddings, "full_tensor"), "the model is sharded: tokens first, fully_shard second")
    rows_before = len(embeddings)
    if len(tokenizer) > rows_before:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    matrices = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    for weight in matrices.values():  # one matrix if tied, two if not
        weight.data[rows_before:] = 0  # padding; the library draws these rows, differently in every process
        _init_reward_rows(weight, ids, weight[: min(known, rows_before)])
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

