"""RC-GRPO in one file: Reward-Conditioned Group Relative Policy Optimization (arXiv 2602.03025).

An agent fine-tuned on expert demonstrations becomes so sure of itself that all G rollouts of a task earn the same
reward. Then sigma_g, the standard deviation of the rewards in the group, is 0, every advantage is 0, and GRPO has
nothing to learn from. RC-GRPO keeps the group diverse in two stages:

  stage 1, RCTP     fine-tune on good AND bad trajectories, each marked in its prompt with <|high_reward|> or
                    <|low_reward|>; the model learns to behave well or badly on request                      (eqs. 1-2)
  stage 2, RC-GRPO  every rollout of a group draws its own mark; the marks put variance back into the group, so the
                    group-normalised advantages mean something again; one clipped policy-gradient step with a KL to
                    the stage-1 model, then the next batch of tasks                                          (eqs. 3-9)

Afterwards the model is used under <|high_reward|>. The reward itself never looks at the mark.

Symbols: tau a trajectory, h_t its history, a_t its t-th action (one assistant turn), r_j the reward token that rollout j
acts under (its "mark", the "goal" of a rollout), D the data of stage 1, R the reward, A the advantage, mu_g and sigma_g
the mean and std of R in a group, pi_ref the frozen stage-1 model, p = P(high), N trajectories, T tokens.

Where this file departs from the paper, or fills in what it leaves open:
  1. rho is one ratio per token, averaged over tokens, as in the authors' framework; `ratio="trajectory"` is eq. 7 as
     printed (one product per trajectory, which leaves the clip range after a few hundred tokens).
  2. KL is the k3 estimator per token, averaged over tokens, under either ratio. The paper does not name one.
  3. Marks are drawn i.i.d. as in eq. 3; `stratified=True` draws exactly round(pG) high ones in every group.
  4. Trajectories are token in, token out: what the model sampled is never decoded and encoded again.
  5. All rollouts of a group are scored in one forward pass that computes their shared prompt once. The result is exact.
  6. Sums are divided by the counts of the whole batch, so micro-batches do not change the gradient; eq. 2 becomes a mean
     over tokens.
  7. eps of eq. 6 is 1e-6; a rollout that runs into a length limit has R = 0.

Sections, in the order a program needs them: 1 reward tokens (eq. 1), 2 trajectories, 3 rollouts (eqs. 4-5), 4 log-probs,
5 RCTP (eq. 2), 6 group sampling (eq. 3), 7 advantages (eq. 6), 8 the clipped policy gradient (eqs. 7-9), 9 what to watch
(Props. 4.2, 4.3), 10 the two stages. The second half of 2 and of 4 are plumbing: skip them on a first reading.
Run `python toy_env.py` to see it work on a laptop, `python train_bfcl.py` for the paper's benchmark on GPUs.
"""

import json
import math
import multiprocessing
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers import (
    AddedToken, AttentionInterface, AttentionMaskInterface, DynamicCache, Qwen2Config, Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# ======================================================================================================================
# 1. Reward tokens (eq. 1):   r = <|high_reward|> if R = 1,   <|low_reward|> if R = 0
#
# So the data of stage 1 is labelled. In stage 2 it is the other way round: r is drawn first (eq. 3), then R is earned.
# ======================================================================================================================

HIGH, LOW = "<|high_reward|>", "<|low_reward|>"


def add_reward_tokens(tokenizer, model=None):
    """Teach tokenizer and model (if given) the two reward tokens. Idempotent: a second call changes nothing.

    Returns (id of HIGH, id of LOW). The embedding matrix never shrinks; it grows, to a multiple of 64 rows, only when
    the new ids do not fit (Qwen2.5 has spare rows, Llama-3.1 has none). Call it before sharding the model.
    """
    known = len(tokenizer)
    # special: user text that merely spells a reward token can be kept from becoming one (section 2).
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in (HIGH, LOW)], special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids([HIGH, LOW])
    if model is None or getattr(model.config, "reward_token_ids", None) == ids:
        return tuple(ids)

    rows_before = model.get_input_embeddings().weight.shape[0]
    if hasattr(model.get_input_embeddings().weight, "full_tensor"):
        raise RuntimeError("the model is sharded already: call add_reward_tokens(tokenizer, model) before fully_shard")
    if len(tokenizer) > rows_before:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    matrices = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    for weight in matrices.values():  # one matrix if tied, two if not
        weight.data[rows_before:] = 0  # added rows are padding; the library draws them, differently on every rank
        _init_reward_rows(weight, ids, weight[: min(known, rows_before, *ids)])
    model.config.reward_token_ids = ids  # saved with the model: the rows are trained from now on
    return tuple(ids)


@torch.no_grad()
def _init_reward_rows(weight, ids, known_rows):
    """Set the rows to mean +- d: d random, orthogonal to the mean, as long as a usual deviation and at least as the mean.

    Library resizing draws all new rows next to the mean: two tokens that the model cannot tell apart. Ours are of about
    the usual norm and at least 90 degrees apart. The generator is fixed, so every process draws the same rows.
    """
    rows = known_rows.float()
    rows = rows[rows.any(dim=1)]  # spare rows of zeros say nothing about the usual scale
    mean = rows.mean(0)
    deviation = torch.randn(len(mean), generator=torch.Generator().manual_seed(0)).to(mean.device)
    deviation -= (deviation @ mean) / mean.square().sum().clamp_min(1e-12) * mean
    length = torch.maximum((rows - mean).square().sum(1).mean().sqrt(), mean.norm())
    deviation *= length / deviation.norm()
    for token_id, sign in zip(ids, (1, -1)):
        weight[token_id] = (mean + sign * deviation).to(weight.dtype)


def inject_reward_token(messages, token):
    """New messages with "\\n\\n[Reward Goal: <token>]" at the end of the first user message; `messages` stay as they were.

    >>> inject_reward_token([{"role": "user", "content": "Hi"}], HIGH)
    [{'role': 'user', 'content': 'Hi\\n\\n[Reward Goal: <|high_reward|>]'}]
    """
    messages = [dict(message) for message in messages]
    for message in messages:
        if message["role"] == "user":
            message["content"] += f"\n\n[Reward Goal: {token}]"
            return messages
    raise ValueError("there is no user message to put the reward goal into; env.reset() must return one")


# ======================================================================================================================
# 2. Trajectories, token in / token out
#
# A conversation is built by appending ids and nothing else:
#
#   ids    <|im_start|>user ... [Reward Goal: r]<|im_end|> <|im_start|>assistant | find cup <|im_end|> | \n <|im_start|>
#   mask   0 0 0 ...                                                             | 1    1   1          | 0  0 ...
#          prompt (h_1, r)                                                       | sampled (a_1)       | suffix (h_2)
#
# The mask is written where the token is sampled, never reconstructed: no search for role headers, no re-tokenising of
# model text (which would give other ids than the ones sampled).
# ======================================================================================================================


@dataclass
class Trajectory:
    """One rollout. `ids` and `mask` have the same length; mask 1 = sampled by the policy, 0 = forced."""

    ids: list[int]
    mask: list[int]
    reward_token: str | None = None  # the r_j it was drawn under; None: no mark at all (SFT, plain GRPO)
    group: object = None  # rollouts of one task share it; None: a group of its own
    reward: float = 0.0  # R in [0, 1]; 0 where truncated
    truncated: bool = False  # it ran into a token or turn limit

    @property
    def action_ids(self):
        return [token for token, sampled in zip(self.ids, self.mask) if sampled]


def rows_by_group(groups):
    """[7, 9, 7, None] -> {7: [0, 2], 9: [1], ("alone", 3): [3]}: the rows of each group, in order of appearance."""
    rows = {}
    for row, group in enumerate(groups):
        rows.setdefault(("alone", row) if group is None else group, []).append(row)
    return rows


class ChatFormat:
    """A tokenizer's chat template, cut into the pieces that a conversation is appended from.

    Control tokens (every added token that is not blank: <|im_end|>, <|high_reward|>, <tool_call>, ...) become ids only
    where the template, our system prompt or inject_reward_token put them. The same characters inside a user's or a
    tool's text are encoded as ordinary text.
    """

    ANSWER = "\ue001"  # stands for the assistant's text in a dummy chat

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: set tokenizer.chat_template, or use an instruct model")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("a fast tokenizer is needed: load it with AutoTokenizer.from_pretrained")
        self.tokenizer = tokenizer
        self.control = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.content.strip()}
        flags = {t.content: t for t in tokenizer.added_tokens_decoder.values()}
        longest_first = sorted(self.control, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(
            ("\\s*" if flags[t].lstrip else "") + f"({re.escape(t)})" + ("\\s*" if flags[t].rstrip else "")
            for t in longest_first
        ) or "(?!)")
        self.hidden_pattern = re.compile("|".join(map(re.escape, [*longest_first, "\ue000", self.ANSWER])))

        # The same tokenizer without control tokens: whatever it encodes is ordinary text.
        plain = json.loads(tokenizer.backend_tokenizer.to_str())
        plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] not in self.control]
        plain["post_processor"] = None
        if isinstance(vocabulary := plain["model"]["vocab"], dict):  # a word-level vocabulary may hold them as words
            for token in self.control.keys() - {plain["model"].get("unk_token")}:
                vocabulary.pop(token, None)
        self.plain = Tokenizer.from_str(json.dumps(plain))

        dummy = [{"role": "user", "content": "u"}, {"role": "assistant", "content": self.ANSWER}]
        self.end_of_turn = self._first_id_after_answer(self._render(dummy, generate=False))
        self.stop_ids = {self.end_of_turn, tokenizer.eos_token_id} - {None}
        native = tokenizer.apply_chat_template(dummy[:1], add_generation_prompt=True, return_dict=False)
        if self.prompt(dummy[:1]) != list(native):
            raise ValueError("this tokenizer encodes its chat template differently as a whole and in parts; "
                             "train with a model whose template is delimited by added tokens")

    def prompt(self, messages, reward_token=None):
        """Ids of the opening messages, marked with `reward_token` if given, up to where the assistant speaks."""
        if reward_token is not None and reward_token not in self.control:
            raise ValueError(f"{reward_token!r} is no token of this tokenizer: call add_reward_tokens(tokenizer, model)")
        messages, hidden = self._hide_control_tokens(messages)
        if reward_token is not None:
            messages = inject_reward_token(messages, reward_token)
        return self._encode(self._render(messages, generate=True), hidden)

    def suffix(self, messages):
        """Ids that follow the assistant's end token: the template's framing of `messages` and the next header."""
        dummy = [{"role": "user", "content": "u"}, {"role": "assistant", "content": self.ANSWER}]
        messages, hidden = self._hide_control_tokens(messages)
        rendered = self._render(dummy + messages, generate=True)
        return self._encode(rendered.partition(self.ANSWER)[2], hidden)[1:]

    def action(self, text):
        """Ids that a scripted policy "samples" to say `text`: special tokens spelt in it stay ordinary text."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return [*ids, self.end_of_turn]

    def text(self, action_ids):
        """What an env is given to read: the sampled ids as text, without the end token."""
        ids = action_ids[:-1] if action_ids and action_ids[-1] in self.stop_ids else action_ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _render(self, messages, generate):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)

    def _hide_control_tokens(self, messages):
        """Replace control tokens spelt in user and tool text by \\ue000<number>\\ue000, which survives any template.

        In trusted text (system prompt) only these stand-ins themselves are hidden, so that none is taken for ours.
        """
        hidden = []

        def hide(match):
            hidden.append(match[0])
            return f"\ue000{len(hidden) - 1}\ue000"

        out = []
        for message in messages:
            pattern = "[\ue000\ue001]" if message["role"] in ("system", "assistant") else self.hidden_pattern
            content = message["content"].encode("utf-8", "replace").decode()  # no lone surrogates: nothing encodes them
            out.append({**message, "content": re.sub(pattern, hide, content)})
        return out, hidden

    def _encode(self, rendered, hidden=()):
        ids, end = [], 0

        def ordinary(text):
            text = re.sub("\ue000(\\d+)\ue000", lambda match: hidden[int(match[1])], text)
            return self.plain.encode(text, add_special_tokens=False).ids if text else []

        for match in self.control_pattern.finditer(rendered):
            ids += ordinary(rendered[end : match.start()])
            ids.append(self.control[match[0].strip()])
            end = match.end()
        return ids + ordinary(rendered[end:])

    def _first_id_after_answer(self, rendered):
        tail = rendered.partition(self.ANSWER)[2]
        if not self.control_pattern.match(tail):
            raise ValueError(f"the chat template must close an assistant turn with an added token, not with {tail!r}")
        return self._encode(tail)[0]


@lru_cache(maxsize=8)
def _chat_format(tokenizer, vocabulary_size, template):
    return ChatFormat(tokenizer)


def chat_format(tokenizer):
    """The tokenizer's ChatFormat, built once (and again when tokens were added or the template changed)."""
    return _chat_format(tokenizer, len(tokenizer), str(getattr(tokenizer, "chat_template", None)))


# ======================================================================================================================
# 3. Rollouts (eq. 4):   a_{t,j} ~ pi(. | h_{t,j}, r_j)
#
# An env is any object with     reset() -> messages,  step(text) -> messages or None when over,  reward() -> R in [0, 1].
# Eq. 5, R = R_state R_action, is one such reward: BFCLEnv in train_bfcl.py.
# A policy is any callable      list of prompt ids -> list of sampled ids.
# A model, a scripted expert and a fake in a test therefore run through the same function, and demonstrations have
# exactly the layout of rollouts.
# ======================================================================================================================


def rollout(envs, goals, policy, tokenizer, groups=None, max_turns=20, max_tokens=32768, progress=None):
    """Play every env to its end, all of them turn by turn together.

    envs: N envs.  goals: N reward tokens, None for no mark.  groups: N group ids (default: None each).
    max_turns: assistant turns per rollout.  max_tokens: length limit of a trajectory.  progress: called with the number
    of conversations still open, once a turn.
    Returns N trajectories. One that hits a limit, or whose action does not end, is `truncated` with reward 0; a cut
    action is not executed.
    Raises TypeError or ValueError where an env or the policy breaks its contract.
    """
    envs, goals = list(envs), list(goals)
    groups = list(groups) if groups is not None else [None] * len(envs)
    if not envs or not len(envs) == len(goals) == len(groups):
        raise ValueError(f"need as many goals and groups as envs, at least one: {len(envs)} envs, {len(goals)} goals, "
                         f"{len(groups)} groups")
    chat = chat_format(tokenizer)
    trajectories = []
    for env, goal, group in zip(envs, goals, groups):
        prompt = chat.prompt(_checked_messages(env.reset(), "env.reset()"), goal)
        trajectories.append(Trajectory(prompt, [0] * len(prompt), goal, group))

    playing = list(zip(envs, trajectories))
    for _, trajectory in playing:
        trajectory.truncated = len(trajectory.ids) >= max_tokens  # a prompt that leaves no room to say anything
    playing = [pair for pair in playing if not pair[1].truncated]
    for _ in range(max_turns):
        if progress:
            progress(len(playing))
        if not playing:
            break
        sampled = policy([trajectory.ids for _, trajectory in playing])
        playing = [
            pair for pair, ids in zip(playing, _checked_samples(sampled, len(playing)))
            if _play_turn(*pair, ids, chat, max_tokens)
        ]
    for _, trajectory in playing:
        trajectory.truncated = True  # still talking at the turn limit

    for env, trajectory in zip(envs, trajectories):
        reward = 0.0 if trajectory.truncated else env.reward()
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"{type(env).__name__}.reward() returned {reward}: rewards must be finite numbers")
        trajectory.reward = float(reward)
    return trajectories


def _play_turn(env, trajectory, sampled, chat, max_tokens):
    """Append one action and the env's answer. True while the conversation goes on."""
    sampled = sampled[: max_tokens - len(trajectory.ids)]
    trajectory.ids = trajectory.ids + sampled
    trajectory.mask = trajectory.mask + [1] * len(sampled)
    if sampled[-1] not in chat.stop_ids:  # cut off: what it would have said, nobody knows
        trajectory.truncated = True
        return False
    answer = env.step(chat.text(sampled))
    if answer is None:
        return False
    suffix = chat.suffix(_checked_messages(answer, "env.step()"))
    if sampled[-1] != chat.end_of_turn:  # it ended with eos: the template's own end token follows, forced
        suffix = [chat.end_of_turn, *suffix]
    if len(trajectory.ids) + len(suffix) >= max_tokens:  # the answer leaves no room to go on
        trajectory.truncated = True
        return False
    trajectory.ids = trajectory.ids + suffix
    trajectory.mask = trajectory.mask + [0] * len(suffix)
    return True


def _checked_messages(messages, source):
    well_formed = isinstance(messages, list) and messages and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not well_formed:
        raise TypeError(f"{source} must return a non-empty list of {{'role': str, 'content': str}}, got {messages!r}")
    return messages


def _checked_samples(sampled, expected):
    sampled = [[int(token) for token in ids] for ids in sampled]
    if len(sampled) != expected or not all(sampled):
        raise ValueError(f"the policy must return one non-empty list of ids per prompt: {expected} prompts, "
                         f"lengths {[len(ids) for ids in sampled]}")
    return sampled


def scripted_policy(texts, tokenizer):
    """A policy for one conversation that says `texts` in order. A generator may look at its env before each line."""
    texts, chat = iter(texts), chat_format(tokenizer)

    def policy(prompts):
        if len(prompts) != 1:
            raise ValueError(f"a script speaks in one conversation, not in {len(prompts)}: call rollout with one env")
        if (text := next(texts, None)) is None:
            raise ValueError("the script is over but the conversation is not: let its last line end the episode")
        return [chat.action(text)]

    return policy


@torch.no_grad()
def sample(model, prompts, temperature, max_new_tokens, stop_ids, generator=None):
    """Draw one action per prompt from exactly softmax(logits / temperature); greedy at temperature 0.

    prompts: N lists of ids.  stop_ids: an action ends with the first of these (kept), or after max_new_tokens.
    Returns N lists of ids. A plain loop over a key-value cache: no top-k, no penalties, nothing that a generation
    config could slip in, because the log-probs of section 4 must be those of the distribution sampled here.
    """
    training, device = model.training, model.device
    model.eval()  # dropout off; gradient checkpointing would also switch the cache off
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)  # padded on the left: the last column is real
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long().to(device)  # (N, width)
    tokens, cache = tokens.to(device), DynamicCache(config=model.config)
    position_ids = (attention_mask.cumsum(1) - 1).clamp_min(0)
    sampled, open_rows = [[] for _ in prompts], set(range(len(prompts)))

    for _ in range(max_new_tokens):
        logits = model(tokens, attention_mask=attention_mask, position_ids=position_ids, cache=cache, use_cache=True,
                       logits_to_keep=1).logits[:, -1].float()  # (N, V)
        if temperature == 0:
            drawn = logits.argmax(-1)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        for row, token in enumerate(drawn.tolist()):
            if row in open_rows:
                sampled[row].append(token)
                if token in stop_ids:
                    open_rows.discard(row)
        if not open_rows:
            break
        tokens, position_ids = drawn[:, None], position_ids[:, -1:] + 1
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(prompts), 1)], 1)
    model.train(training)
    return sampled


# ======================================================================================================================
# 4. Log-probs of a whole group in one forward pass
#
# The G rollouts of a task share a long prompt (tool docs) and differ in short continuations. Laid out in one sequence
#
#   ids        [ shared prefix  | continuation 1 | continuation 2 | ... ]
#   positions    0 ... P-1        P P+1 ...        P P+1 ...
#   attention    causal           prefix + itself  prefix + itself
#
# the prefix is computed once, not G times. Every token sees what it would have seen alone, so values and gradients are
# those of separate passes. A list may hold several groups: they follow each other in the same way and never meet.
# ======================================================================================================================


def action_logprobs(model, trajectories, temperature=1.0, entropy=False, rows_per_chunk=1024):
    """log pi of every token of the actions, given all before it, at the temperature it was sampled with.

    Returns logp (N, T): row j holds the log-probs of trajectory j's n_j action tokens in order, then zeros; T = max n_j.
    With entropy=True returns (logp, H), H (N, T) being the entropy of the distribution at each action, without gradient.
    Raises ValueError on an empty list or a trajectory that begins with an action.
    """
    if not trajectories or not temperature > 0:
        raise ValueError(f"need at least one trajectory and a temperature > 0, got {len(trajectories)} and {temperature}")
    _use_group_attention(model)
    ids, positions, layout, readout, targets = _pack(trajectories)
    device = model.device
    logits = model(
        torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        attention_mask=torch.ones(1, 1, 1, 1, device=device),  # any 4-d mask: keeps the library from building its own
        layout=layout,
        use_cache=False,
        logits_to_keep=torch.tensor(readout or [0], device=device),  # logits only where an action token is predicted
    ).logits[0]  # (M, V), M = number of action tokens

    def read(logits, targets):  # fp32 for one chunk at a time; recomputed, not kept, for the backward pass
        logits = logits.float() / temperature
        log_z = logits.logsumexp(-1)
        logp = logits.gather(-1, targets[:, None])[:, 0] - log_z
        with torch.no_grad():
            h = log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1) if entropy else logp
        return logp, h

    targets = torch.tensor(targets or [0], device=device)
    chunks = [checkpoint(read, *chunk, use_reentrant=False)
              for chunk in zip(logits.split(rows_per_chunk), targets.split(rows_per_chunk))]
    mask = action_mask(trajectories, device)  # (N, T)
    logp, h = (torch.zeros(mask.shape, device=device).masked_scatter(mask, torch.cat(part)) for part in zip(*chunks))
    if not readout:
        logp = logp + 0.0 * logits.sum()  # no action at all: 0, but a sharded backward pass still runs on every rank
    return (logp, h) if entropy else logp


def action_mask(trajectories, device="cpu"):
    """(N, T) bool: True where row j of `action_logprobs` holds one of trajectory j's action tokens."""
    counts = torch.tensor([sum(t.mask) for t in trajectories], device=device)
    return torch.arange(int(counts.max()), device=device) < counts[:, None]


def _pack(trajectories):
    """Lay trajectories out as drawn above.

    Returns ids and positions (L,); layout: per group [prefix length, continuation lengths ...]; readout (M,): the place
    in the sequence that predicts each action token; targets (M,): that token. M runs over trajectories in their order.
    """
    ids, positions, layout, readout = [], [], [], {}
    for rows in rows_by_group([t.group for t in trajectories]).values():
        base = len(ids)
        # The marks differ, so the shared prefix usually ends just before r_j.
        prefix = os.path.commonprefix([trajectories[row].ids for row in rows])
        ids += prefix
        positions += range(len(prefix))
        layout.append([len(prefix)])
        for row in rows:
            trajectory, start = trajectories[row], len(ids)
            if trajectory.mask[0]:
                raise ValueError("a trajectory begins with an action: there is nothing to condition its first token on")
            ids += trajectory.ids[len(prefix) :]
            positions += range(len(prefix), len(trajectory.ids))
            layout[-1].append(len(trajectory.ids) - len(prefix))
            readout[row] = [
                base + t - 1 if t <= len(prefix) else start + t - 1 - len(prefix)
                for t, sampled in enumerate(trajectory.mask) if sampled
            ]
    targets = [token for trajectory in trajectories for token in trajectory.action_ids]
    return ids, positions, layout, sum((readout[row] for row in range(len(trajectories))), []), targets


def _group_attention(module, query, key, value, attention_mask, scaling=None, layout=None, **kwargs):
    """Attention over the layout of _pack; the library's own where no layout is given (sampling).

    query (1, heads, L, D), key and value (1, kv heads, L, D) -> (1, L, heads, D). Dropout is left out: the log-probs are
    to be those of the policy that sampled.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("sliding_window"):
        raise ValueError("packed log-probs need full attention in every layer; this model uses a sliding window")
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    continue_prefix = _SplitAttention.apply if query.device.type == "cpu" else _joint_attention
    out, start = [], 0
    for prefix_length, *lengths in layout:
        q, k, v = (x[:, :, start : start + prefix_length + sum(lengths)] for x in (query, key, value))
        (q0, q1), (k0, k1), (v0, v1) = (x.split([prefix_length, sum(lengths)], 2) for x in (q, k, v))
        if prefix_length:
            out.append(F.scaled_dot_product_attention(q0, k0, v0, is_causal=True, scale=scaling))
        if sum(lengths):
            out.append(continue_prefix(q1, k0, v0, k1, v1, lengths, scaling))
        start += prefix_length + sum(lengths)
    return torch.cat(out, 2).transpose(1, 2), None


def _joint_attention(q, prefix_k, prefix_v, k, v, lengths, scale):
    """Every continuation attends to the prefix and, causally, to itself: one call each. (1, heads, sum(lengths), D)"""
    out = []
    for q1, k1, v1 in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2)):
        if n := q1.shape[2]:
            sees = causal_lower_right(n, prefix_k.shape[2] + n)  # flash attention: no mask in memory
            k1, v1 = torch.cat([prefix_k, k1], 2), torch.cat([prefix_v, v1], 2)
            out.append(F.scaled_dot_product_attention(q1, k1, v1, attn_mask=sees, scale=scale))
    return torch.cat(out, 2)


class _SplitAttention(torch.autograd.Function):
    """The same on a CPU, in half the time: all continuations attend to the prefix in one call without a mask, then each
    to itself, and the two parts o, with log-normalisers l, are merged:

        o = o_prefix e^(l_prefix - l) + o_own e^(l_own - l),   e^l = e^l_prefix + e^l_own

    For the backward pass, flash attention recomputes each part's weights from l; given the merged o and l, its gradients
    are those of the joint softmax.
    """

    forward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    @staticmethod
    def forward(ctx, q, prefix_k, prefix_v, k, v, lengths, scale):
        lengths = [n for n in lengths if n]
        flash = _SplitAttention.forward_part
        own = [flash(*part, is_causal=True, scale=scale) for part in zip(*(x.split(lengths, 2) for x in (q, k, v)))]
        o, l = (torch.cat(part, 2) for part in zip(*own))  # (1, heads, N, D), (1, heads, N)
        if prefix_k.shape[2]:
            o_prefix, l_prefix = flash(q, prefix_k, prefix_v, scale=scale)
            l_own, l = l, torch.logaddexp(l_prefix, l)
            o = o_prefix * (l_prefix - l).exp()[..., None].to(o.dtype) + o * (l_own - l).exp()[..., None].to(o.dtype)
        ctx.save_for_backward(q, prefix_k, prefix_v, k, v, o, l)
        ctx.lengths, ctx.scale = lengths, scale
        return o

    @staticmethod
    def backward(ctx, grad):
        q, prefix_k, prefix_v, k, v, o, l = ctx.saved_tensors
        flash = _SplitAttention.backward_part
        own = [flash(*part, 0.0, True, scale=ctx.scale)
               for part in zip(*(x.split(ctx.lengths, 2) for x in (grad, q, k, v, o, l)))]
        dq, dk, dv = (torch.cat(part, 2) for part in zip(*own))
        if not prefix_k.shape[2]:
            return dq, torch.zeros_like(prefix_k), torch.zeros_like(prefix_v), dk, dv, None, None
        dq_prefix, *prefix = flash(grad, q, prefix_k, prefix_v, o, l, 0.0, False, scale=ctx.scale)
        return dq + dq_prefix, *prefix, dk, dv, None, None


AttentionInterface.register("rcgrpo", _group_attention)
AttentionMaskInterface.register("rcgrpo", sdpa_mask)


def _use_group_attention(model):
    # Set once and for good: gradient checkpointing runs the layers again long after action_logprobs has returned.
    if model.config._attn_implementation != "rcgrpo":
        model.set_attn_implementation("rcgrpo")


# ======================================================================================================================
# 5. Stage 1, RCTP (eq. 2):   L = -E_{(tau, r) ~ D}  sum_t log pi(a_t | h_t, r)
#
# Divided by the number of action tokens in the batch: eq. 2 up to its scale. SFT is the same loss on expert trajectories
# without a mark.
# ======================================================================================================================


def rctp_loss(logp, mask=None, n_tokens=None):
    """Mean negative log-likelihood of the action tokens; observations, prompts and padding have no term.

    logp, mask (N, T), all True if not given.  n_tokens: action tokens of the whole batch when this is a part of it
    (default: of this part). Raises ValueError when there is nothing to train on.
    """
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    n_tokens = int(mask.sum()) if n_tokens is None else n_tokens
    if n_tokens == 0:
        raise ValueError("no action token in the batch: drop trajectories whose prompt fills the whole context")
    return -(logp * mask).sum() / n_tokens


# ======================================================================================================================
# 6. Group sampling (eq. 3):   r_j ~ P_sample i.i.d.,   P(high) = p
# ======================================================================================================================


def sample_reward_tokens(G, p, generator=None, stratified=False):
    """G reward tokens for one group. i.i.d. as in the paper: at G = 5, p = .5, 6 % of groups are all of one mark.

    stratified=True: exactly round(pG) high ones in random order. Raises ValueError unless G >= 1 and 0 <= p <= 1.
    """
    if G < 1 or not 0 <= p <= 1:
        raise ValueError(f"need G >= 1 and 0 <= p <= 1, got G = {G}, p = {p}")
    if stratified:
        high = torch.randperm(G, generator=generator) < math.floor(p * G + 0.5)
    else:
        high = torch.rand(G, generator=generator) < p
    return [HIGH if is_high else LOW for is_high in high.tolist()]


# ======================================================================================================================
# 7. Advantages (eq. 6):   A_j = (R_j - mu_g) / (sigma_g + eps),   sigma_g^2 = 1/G sum_j (R_j - mu_g)^2
# ======================================================================================================================


def group_advantages(rewards, groups, eps=1e-6):
    """Group-normalised advantages, (N,) float32.

    rewards: N finite numbers.  groups: N group ids in any order; groups may differ in size. The mark is no part of the
    id: high and low rollouts of a task are compared with each other, which is the point of the method.
    A group whose rewards are all equal, one of size 1 included, has advantage exactly 0.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if len(rewards) != len(groups):
        raise ValueError(f"need one group id per reward: {len(rewards)} rewards, {len(groups)} ids")
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    advantages = torch.zeros_like(rewards)
    for rows in rows_by_group(groups).values():
        R = rewards[rows]
        if R.max() > R.min():
            mu, sigma = R.mean(), R.std(correction=0)  # population std: 1/G, not 1/(G-1)
            advantages[rows] = (R - mu) / (sigma + eps)
    return advantages.float()


# ======================================================================================================================
# 8. Clipped policy gradient with KL (eqs. 7-9)
#
#   rho = pi_theta(a | h, r) / pi_old(a | h, r)                                                                   (eq. 7)
#   L   = -mean[ min(rho A, clip(rho, 1 - c, 1 + c) A) ]                          c = 0.2, the paper's eps        (eq. 8)
#         + beta mean[ KL(pi_theta || pi_ref) ]                                                                   (eq. 9)
#
# All three policies are asked under the same r_j. On the first pass after sampling pi_theta IS pi_old: rho = 1 and nothing
# clips (with one update a batch, as in the paper and in our scripts, nothing ever does). L is then about 0 per trajectory,
# since advantages sum to 0 in a group; per token a remainder stays, since long rollouts weigh more. Its gradient,
# -mean[ A grad log pi ], is not 0.
# ======================================================================================================================


def clipped_policy_loss(logp, old_logp, ref_logp, advantages, mask=None, clip=0.2, beta=0.1, ratio="token",
                        n_tokens=None, n_trajectories=None):
    """The RC-GRPO loss and what it saw.

    logp, old_logp, ref_logp, mask (N, T), all True if not given; advantages (N,). ref_logp may be None when beta = 0.
    ratio: "token": one rho per token, mean over tokens; "trajectory": rho_j = prod_t, mean over trajectories (eq. 7).
    n_tokens, n_trajectories: counts of the whole batch when this is a part of it (default: of this part).
    Returns (loss, metrics); losses and metrics of the parts of a batch add up to those of the batch.
    """
    if ratio not in ("token", "trajectory"):
        raise ValueError(f'ratio must be "token" or "trajectory", got {ratio!r}')
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    n_tokens = max(1, int(mask.sum()) if n_tokens is None else n_tokens)
    n_trajectories = len(logp) if n_trajectories is None else n_trajectories
    A = advantages.to(logp.device)[:, None]  # (N, 1)

    log_rho = _bounded(logp - old_logp) * mask  # (N, T)
    if ratio == "trajectory":
        log_rho = _bounded(log_rho.sum(1, keepdim=True))  # (N, 1)
        weight = 1 / n_trajectories
    else:
        weight = mask.to(logp.dtype) / n_tokens  # (N, T)
    rho = log_rho.exp()
    surrogate = torch.minimum(rho * A, rho.clamp(1 - clip, 1 + clip) * A)
    loss = -(surrogate * weight).sum()

    kl = torch.zeros((), device=logp.device)
    if beta:
        # k3: with d = log pi_ref - log pi_theta, e^d - d - 1 >= 0, and its mean under pi_theta is KL(pi_theta || pi_ref).
        d = _bounded(ref_logp - logp)
        kl = ((d.exp() - d - 1) * mask).sum() / n_tokens
        loss = loss + beta * kl

    with torch.no_grad():
        clipped = ((rho > 1 + clip) & (A > 0)) | ((rho < 1 - clip) & (A < 0))
        metrics = {"loss": loss.item(), "kl": kl.item(), "clip_fraction": (clipped * weight).sum().item()}
    return loss, metrics


def _bounded(log_ratio):
    """Keep exp() finite: e^20 is far outside any clip range. -inf minus -inf counts as no difference."""
    return log_ratio.nan_to_num(0.0, posinf=20.0, neginf=-20.0).clamp(-20, 20)


# ======================================================================================================================
# 9. What to watch
#
# Prop. 4.2, the collapse: if KL(pi* || pi_ref) <= eps_sft at every one of T steps, all G rollouts are identical, and so
# sigma_g = 0, with probability >= 1 - G T eps_sft.
# Prop. 4.3, the floor: E[sigma_g^2] >= kappa (mu_high - mu_low)^2 with kappa = (G-1)/G p(1-p).
# For a 0/1 reward E[sigma_g^2] = (G-1)/G m(1-m) exactly, m = p mu_high + (1-p) mu_low: the marks help by moving m off 0
# and 1. Over a batch of different tasks the floor holds for the mean gap, and the exact value, at the mean m, becomes a
# ceiling (m(1-m) is concave). Both are statements about expectations: in a single batch of few tasks the gap is noisy.
# ======================================================================================================================


def group_metrics(trajectories, p=None):
    """Reward statistics of one batch of groups. None stands for "there was no such rollout".

    reward, reward_high, reward_low: mean R, of all, and by mark.  reward_high_minus_low: mu_high - mu_low.
    sigma: mean sigma_g.  zero_std: share of groups with sigma_g = 0.  sigma2: mean sigma_g^2, beside sigma2_floor
    (p = share of high marks, measured if not given) and sigma2_ceiling (for i.i.d. marks).  advantage_std: spread of A.
    truncated: share of rollouts.  tokens: action tokens sampled.
    """
    R = [t.reward for t in trajectories]
    by_mark = {mark: [t.reward for t in trajectories if t.reward_token == mark] for mark in (HIGH, LOW)}
    groups = [t.group for t in trajectories]
    by_group = [[R[row] for row in rows] for rows in rows_by_group(groups).values()]
    sigmas = [torch.tensor(rewards, dtype=torch.float64).std(correction=0).item() if len(set(rewards)) > 1 else 0.0
              for rewards in by_group]
    mean = lambda values: sum(values) / len(values) if values else None

    mu_high, mu_low, m, G = mean(by_mark[HIGH]), mean(by_mark[LOW]), mean(R), len(R) / len(sigmas)
    gap = mu_high - mu_low if by_mark[HIGH] and by_mark[LOW] else None
    p = len(by_mark[HIGH]) / len(R) if p is None else p
    kappa = (G - 1) / G * p * (1 - p)
    return {
        "reward": m, "reward_high": mu_high, "reward_low": mu_low, "reward_high_minus_low": gap,
        "sigma": mean(sigmas), "zero_std": mean([s == 0 for s in sigmas]),
        "sigma2": mean([s * s for s in sigmas]), "sigma2_floor": 0.0 if gap is None else kappa * gap**2,
        "sigma2_ceiling": (G - 1) / G * m * (1 - m),
        "advantage_std": group_advantages(R, groups).std(correction=0).item(),
        "truncated": mean([t.truncated for t in trajectories]), "tokens": sum(sum(t.mask) for t in trajectories),
    }


# ======================================================================================================================
# 10. The two stages
#
# One process sees all there is. With many, `gather` turns a list of this process into the concatenation of everybody's,
# so that counts and metrics are global; gradients are then SUMMED over processes, every term having its global divisor.
# ======================================================================================================================


def rctp_step(model, optimizer, trajectories, rows_per_pass=16, max_grad_norm=1.0, gather=list):
    """One optimizer step of stage 1 on a batch of marked trajectories (of SFT: unmarked expert ones). Returns metrics."""
    silent = [row for row, t in enumerate(trajectories) if not any(t.mask)]
    if silent or not trajectories:
        raise ValueError(f"trajectories without an action token cannot be trained on: rows {silent} of "
                         f"{len(trajectories)}; drop them, or raise max_tokens if their prompt was too long")
    n_tokens, loss_sum = sum(gather([sum(sum(t.mask) for t in trajectories)])), 0.0
    model.train()
    for part in _parts(trajectories, rows_per_pass):
        loss = rctp_loss(action_logprobs(model, part), action_mask(part, model.device), n_tokens)
        loss.backward()
        loss_sum += loss.item()
    return {"loss": sum(gather([loss_sum])), "tokens": n_tokens, **optimizer_step(model, optimizer, max_grad_norm)}


def collect_groups(tasks, make_env, policy, tokenizer, G=5, p=0.5, stratified=False, generator=None, **limits):
    """Roll out G conversations per task, each under its own mark (eqs. 3-4).

    make_env(task) -> a fresh env.  p: P(high); 1.0 is "always high", None "no mark", as in plain GRPO.  limits: passed
    on to `rollout`.  Returns len(tasks) * G trajectories whose `group` is the index in `tasks`.
    """
    marks = [[None] * G if p is None else sample_reward_tokens(G, p, generator, stratified) for _ in tasks]
    envs = [make_env(task) for task in tasks for _ in range(G)]
    groups = [index for index in range(len(tasks)) for _ in range(G)]
    return rollout(envs, sum(marks, []), policy, tokenizer, groups, **limits)


def rcgrpo_update(model, ref_model, optimizer, trajectories, temperature=1.0, clip=0.2, beta=0.1, ratio="token",
                  updates=1, groups_per_pass=1, max_grad_norm=1.0, gather=list):
    """`updates` clipped optimizer steps on one batch of groups (the paper: one). Returns the last step's metrics.

    ref_model: the frozen stage-1 model, None if beta = 0.  groups_per_pass: whole groups scored in one forward pass.
    """
    if beta and ref_model is None:
        raise ValueError("beta > 0 needs the frozen stage-1 model as ref_model; without one, set beta = 0")
    advantages = group_advantages([t.reward for t in trajectories], [t.group for t in trajectories])
    n_tokens, n_trajectories = sum(gather([sum(sum(t.mask) for t in trajectories)])), sum(gather([len(trajectories)]))
    groups = list(rows_by_group([t.group for t in trajectories]).values())
    model.train()
    old, ref = {}, {}
    for update in range(updates):
        seen = Counter()
        for number, together in enumerate(_parts(groups, groups_per_pass)):
            rows = sum(together, [])
            part = [trajectories[row] for row in rows]
            mask = action_mask(part, model.device)
            logp, entropy = action_logprobs(model, part, temperature, entropy=True)
            if update == 0:
                old[number] = logp.detach()  # no update since sampling: pi_old is pi_theta
                with torch.no_grad():
                    ref[number] = action_logprobs(ref_model, part, temperature) if beta else None
            loss, metrics = clipped_policy_loss(logp, old[number], ref[number], advantages[rows], mask, clip, beta, ratio,
                                                n_tokens, n_trajectories)
            loss.backward()
            seen.update(metrics, entropy=(entropy * mask).sum().item() / max(1, n_tokens))
        stepped = optimizer_step(model, optimizer, max_grad_norm)
    return {**{name: sum(gather([value])) for name, value in seen.items()}, **stepped}


def rcgrpo_step(model, ref_model, optimizer, tasks, make_env, policy, tokenizer, G=5, p=0.5, stratified=False,
                generator=None, limits={}, gather=list, **update_settings):
    """One step of stage 2: marks, rollouts, advantages, update. Returns (metrics, trajectories of this process).

    limits: keywords of `rollout`, e.g. {"max_turns": 8}.  update_settings: keywords of `rcgrpo_update`, among them the
    temperature, which must be the policy's. The metrics are those of sections 8 and 9, and seconds of both halves.
    """
    started = time.perf_counter()
    trajectories = collect_groups(tasks, make_env, policy, tokenizer, G, p, stratified, generator, **limits)
    sampled = time.perf_counter()
    updated = rcgrpo_update(model, ref_model, optimizer, trajectories, gather=gather, **update_settings)
    everyone = [replace(t, group=(process, t.group))
                for process, part in enumerate(gather([trajectories])) for t in part]
    seconds = {"rollout_seconds": sampled - started, "update_seconds": time.perf_counter() - sampled}
    return {**group_metrics(everyone, p), **updated, **seconds}, trajectories


def optimizer_step(model, optimizer, max_grad_norm):
    """Clip the gradient to norm max_grad_norm > 0 (inf: no clipping), step, clear.

    A non-finite gradient is thrown away: skipped = 1, and the weights stay as they were.
    """
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive (inf for no clipping), got {max_grad_norm}")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # full: over all shards
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": norm, "skipped": int(not math.isfinite(norm))}


def _parts(items, size):
    return [items[start : start + size] for start in range(0, len(items), size)]


# ======================================================================================================================
# Benchmark of section 4: `python rcgrpo.py`
# ======================================================================================================================


def _scoring(mode, prefix, G, length):
    """A function that runs forward and backward of one group on a small Qwen2, and the model's number of weights.

    mode: "packed", one pass; "rows", one pass for each rollout; "batch", one pass for all of them that shares nothing.
    """
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192))
    draw = lambda n: torch.randint(2048, (n,)).tolist()
    prompt = draw(prefix)
    group = [Trajectory(prompt + draw(length), [0] * prefix + [1] * length, group=None if mode == "batch" else 0)
             for _ in range(G)]

    def run():
        for part in _parts(group, 1 if mode == "rows" else G):
            action_logprobs(model, part).sum().backward()

    return run, sum(p.numel() for p in model.parameters())


def _peak_memory(mode, *shape):
    """MiB by which the memory of this process peaks above what it holds before (Linux)."""
    run, _ = _scoring(mode, *shape)
    resident = lambda name: int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def _seconds(run, repeats=3):
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def benchmark(shapes=((1024, 4, 64), (1024, 16, 64), (1024, 8, 128), (3600, 5, 400))):
    """Print time and memory of one group, for each (tokens of the shared prompt, G, tokens of each action)."""
    a = torch.randn(2048, 2048)
    speed = 2 * 2048**3 / _seconds(lambda: a @ a)
    print(f"CPU with {torch.get_num_threads()} threads, matrix products at {speed / 1e9:.0f} GFLOP/s. Forward + backward of "
          "one group, Qwen2 of 6 layers x 256.\nprefix  G  tokens    packed      rows  speed-up  actions/s  of matmul speed"
          "    MiB packed  MiB one batch")
    for shape in shapes:
        prefix, G, length = shape
        run, n_weights = _scoring("packed", *shape)
        packed, rows = _seconds(run), _seconds(_scoring("rows", *shape)[0])
        # 6 per weight and token; attention: 12 per layer, width, and pair of tokens that see each other (half if causal)
        pairs = prefix**2 / 2 + G * length * (prefix + length / 2)
        flops = 6 * n_weights * (prefix + G * length) + 12 * 6 * 256 * pairs
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
            memory = [fresh.apply(_peak_memory, (mode, *shape)) for mode in ("packed", "batch")]
        print(f"{prefix:6} {G:2} {length:7}  {packed:6.2f} s  {rows:6.2f} s  {rows / packed:7.1f}x  "
              f"{G * length / packed:9.0f}  {flops / packed / speed:15.0%}  {memory[0]:12.0f}  {memory[1]:13.0f}", flush=True)


if __name__ == "__main__":
    benchmark()
