from part_head import *  # noqa: F403

# ============================================================================================================
# The method: sections 1-4 and 6-9 of rcgrpo.py. What is expected is written straight down: plain forward
# passes of the library, python floats, gradients derived by hand, SGD and AdamW in a few lines.
# ============================================================================================================

import doctest
import functools
import importlib.util
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from types import SimpleNamespace


def trajectory(prompt, *turns, group=None, **fields):
    """trajectory([1, 2], ([3, 4], [5]), ([6], [])): prompt 1 2, action 3 4, observation 5, action 6."""
    ids, mask = list(prompt), [0] * len(prompt)
    for action, observation in turns:
        ids += [*action, *observation]
        mask += [1] * len(action) + [0] * len(observation)
    return Trajectory(ids, mask, group=group, **fields)


def random_turns(rng, n, longest=6):
    def part():
        return rng.integers(1, 50, rng.integers(1, longest)).tolist()

    return [(part(), part()) for _ in range(n)]


@functools.cache
def ready_tokenizer():
    tokenizer = byte_level_tokenizer()
    add_reward_tokens(tokenizer)
    return tokenizer


def test_the_examples_in_the_docstrings_are_true():
    result = doctest.testmod(rcgrpo)
    assert result.failed == 0 and result.attempted >= 6


# ===== 1. Reward tokens =====


def test_the_reward_token_goes_to_the_end_of_the_first_user_message():
    texts = ("system", "s"), ("user", "a"), ("assistant", "x"), ("user", "b")
    messages = [{"role": role, "content": text} for role, text in texts]
    said = [m["content"] for m in inject_reward_token(messages, LOW)]
    assert said == ["s", "a\n\n[Reward Goal: <|low_reward|>]", "x", "b"]
    assert messages[1]["content"] == "a"


@pytest.mark.parametrize("R, threshold, token", [(1.0, 1.0, HIGH), (0.99, 1.0, LOW), (0.5, 0.5, HIGH)])
def test_a_logged_rollout_is_labelled_by_its_reward(R, threshold, token):
    tokenizer, turns = ready_tokenizer(), [([5, 6], [7]), ([8], [])]
    logged = trajectory([9, 9, 9], *turns, group="g", reward=R)
    labelled = rcgrpo.label_by_reward(logged, [{"role": "user", "content": "the cat"}], tokenizer, threshold)
    conditioned = [{"role": "user", "content": f"the cat\n\n[Reward Goal: {token}]"}]
    text = tokenizer.apply_chat_template(conditioned, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    assert labelled == trajectory(prompt, *turns, group="g", reward=R, reward_token=token)
    assert logged == trajectory([9, 9, 9], *turns, group="g", reward=R)


# ===== 2. Trajectories =====


@pytest.mark.parametrize("ids", [
    [7, 9, 7, 9, 9], ["a", "b", "a", "b", "b"], [(0, 1), (1, 1), (0, 1), (1, 1), (1, 1)],
    torch.tensor([0, 1, 0, 1, 1]), np.array([0, 1, 0, 1, 1]), np.array(["a", "b", "a", "b", "b"]),
    list(torch.tensor([0, 1, 0, 1, 1])), list(np.array([0.5, 1, 0.5, 1, 1])),
], ids=lambda ids: f"{type(ids).__name__} of {type(ids[0]).__name__}")
def test_rows_that_share_an_id_are_a_group_whatever_the_id_is(ids):
    assert list(rcgrpo.rows_by_group(ids).values()) == [[0, 2], [1, 3, 4]]
    expected = [1, -(2**0.5), -1, 0.5**0.5, 0.5**0.5]
    assert group_advantages([1, 0, 0, 1, 1], ids).tolist() == pytest.approx(expected, rel=1e-5)


def test_actions_are_what_the_mask_says_and_a_row_without_a_group_is_alone():
    assert trajectory([1, 2], ([3, 4], [5]), ([6], [])).action_ids == [3, 4, 6]
    assert list(rcgrpo.rows_by_group([None, 1, None, 1]).values()) == [[0], [1, 3], [2]]


# ===== 3. Stage 1 =====


def rl_batch():
    """Two groups of four with rewards, ragged and mixed, of a vocabulary of 50."""
    rng, batch = np.random.default_rng(0), []
    for group in range(2):
        prompt = rng.integers(1, 50, 12).tolist()
        for reward in (1.0, 0.0, 0.0, 1.0):
            turns = random_turns(rng, int(rng.integers(1, 4)))
            batch.append(trajectory(prompt, *turns, group=group, reward=reward))
    return [batch[i] for i in rng.permutation(len(batch))]


def plain_scores(model, trajectories, temperature=1.0):
    """One plain forward pass a trajectory: log-probs (N, T) and entropies (N, T) of the action tokens."""
    logps, entropies = [], []
    for t in trajectories:
        logits = model(torch.tensor([t.ids]), use_cache=False).logits[0, :-1].float()
        every, sampled = (logits / temperature).log_softmax(-1), torch.tensor(t.mask[1:], dtype=torch.bool)
        logps.append(every[torch.arange(len(t.ids) - 1), torch.tensor(t.ids[1:])][sampled])
        entropies.append(-(every.exp() * every).sum(-1)[sampled].detach())
    return [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (logps, entropies)]


class SGD:
    """Written by hand; `of` gives torch's."""

    def __init__(self, lr=0.5):
        self.lr = lr

    def of(self, model):
        return torch.optim.SGD(model.parameters(), self.lr)

    def step(self, parameters, gradients):
        for p, g in zip(parameters, gradients):
            p.data -= self.lr * g


class AdamW:
    B1, B2, EPS, DECAY, LR = 0.8, 0.9, 1e-3, 0.1, 0.02

    def __init__(self):
        self.t, self.m, self.v = 0, Counter(), Counter()

    def of(self, model):
        return torch.optim.AdamW(model.parameters(), self.LR, (self.B1, self.B2), self.EPS, self.DECAY)

    def step(self, parameters, gradients):
        self.t += 1
        for i, (p, g) in enumerate(zip(parameters, gradients)):
            self.m[i] = self.B1 * self.m[i] + (1 - self.B1) * g
            self.v[i] = self.B2 * self.v[i] + (1 - self.B2) * g * g
            m, v = self.m[i] / (1 - self.B1**self.t), self.v[i] / (1 - self.B2**self.t)
            p.data -= self.LR * (m / (v.sqrt() + self.EPS) + self.DECAY * p.data)


def straight_step(model, optimizer, objective, max_grad_norm):
    """Clip and step, written out. Returns the norm of the gradient before."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(objective, parameters)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    optimizer.step(parameters, [g * min(1, max_grad_norm / norm) for g in gradients])
    return norm


def straight_rctp(model, batch, optimizer, max_grad_norm=1.0):
    """`rctp_step` on a copy of the model. Returns the copy and the metrics."""
    model, n_tokens = copy.deepcopy(model).eval(), sum(sum(t.mask) for t in batch)
    loss = -plain_scores(model, batch)[0].sum() / n_tokens
    norm = straight_step(model, optimizer, loss, max_grad_norm)
    return model, {"loss": loss.item(), "tokens": n_tokens, "grad_norm": norm, "skipped": 0}


def assert_moved_alike(start, ours, expected):
    before, ours, expected = start.state_dict(), ours.state_dict(), expected.state_dict()
    moved = max((expected[name] - before[name]).abs().max() for name in before)
    assert moved > 0.001
    assert max((ours[name] - expected[name]).abs().max() for name in before) < 0.001 * moved


def assert_close(metrics, expected):
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=2e-5)


def policy_model(vocabulary=50, seed=0):
    return tiny_model(vocabulary, "llama", seed, num_hidden_layers=1)


@pytest.mark.parametrize("limit, max_grad_norm, by", [
    (10**6, 0.5, SGD), (30, math.inf, SGD), (1, 0.5, AdamW)], ids=["one pass", "passes of 30", "row by row"])
def test_a_step_of_stage_1_is_the_one_written_straight_down(limit, max_grad_norm, by):
    model = policy_model().train()
    start = copy.deepcopy(model)
    expected, metrics = straight_rctp(model, rl_batch(), by(), max_grad_norm)
    assert rcgrpo.packs(model, 100)
    fed = count_fed(model)
    ours = rctp_step(model, by().of(model), rl_batch(), limit, max_grad_norm)
    assert ours.keys() == metrics.keys() and len(fed) == {10**6: 1, 30: 7, 1: 8}[limit]
    assert_close(ours, metrics)
    assert_moved_alike(start, model, expected)
    assert rctp_loss(torch.tensor([[-1.0, -3.0]])) == 2  # without a mask all count


# ===== 4. Group sampling =====


def test_reward_tokens_are_independent_draws_with_probability_p():
    generator = torch.Generator().manual_seed(0)
    one_kind = np.mean([len(set(sample_reward_tokens(5, 0.5, generator))) == 1 for _ in range(5000)])
    assert one_kind == pytest.approx(2 * 0.5**5, abs=0.01)  # a fixed half/half split would never show it
    for p in (0.0, 0.3, 1.0):
        share = np.mean([token == HIGH for token in sample_reward_tokens(20000, p, generator)])
        assert share == pytest.approx(p, abs=0.015 if 0 < p < 1 else 0)


def test_stratified_reward_tokens_are_exactly_round_pG_in_random_order():
    generator = torch.Generator().manual_seed(0)
    for G, p, high in ((5, 0.5, 3), (8, 0.5, 4), (8, 0.25, 2), (4, 0.0, 0), (4, 1.0, 4), (1, 0.4, 0)):
        draws = [sample_reward_tokens(G, p, generator, stratified=True) for _ in range(50)]
        assert {draw.count(HIGH) for draw in draws} == {high}
        assert len({tuple(draw) for draw in draws}) > 1 or high in (0, G)


# ===== 6. Advantages =====


@pytest.mark.parametrize("rewards, expected", [
    ([1.0], [0]), ([1, 1, 1, 1], [0] * 4), ([0.1] * 3, [0] * 3), ([1, 0], [1, -1]),
    ([1, 0, 0, 0], [3**0.5, -1 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5]),  # by the population's std
])
def test_advantages_of_one_group(rewards, expected):
    advantages = group_advantages(rewards, [0] * len(rewards))
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=0)  # without variance: exactly 0


def advantages_by_numpy(trajectories, eps=1e-6):
    R, groups = (np.array([getattr(t, name) for t in trajectories]) for name in ("reward", "group"))
    A = np.zeros(len(R))
    for group in set(groups.tolist()):
        from_mean = R[groups == group] - R[groups == group].mean()
        A[groups == group] = from_mean / (np.sqrt(np.mean(from_mean**2)) + eps)
    return A


def test_groups_may_be_interleaved_and_of_any_size_and_are_normalised_alone():
    rng = np.random.default_rng(0)
    groups = rng.permutation([0] * 5 + [1] * 3 + [2] * 1 + [7] * 4).tolist()
    rewards = rng.random(len(groups)).round(1).tolist()
    rows = [Trajectory([], [], group=group, reward=reward) for group, reward in zip(groups, rewards)]
    for eps in (1e-6, 0.1):
        expected = advantages_by_numpy(rows, eps)
        assert group_advantages(rewards, groups, eps).numpy() == pytest.approx(expected, abs=1e-5)


# ===== 7. The clipped policy gradient with KL =====


def brute_force_loss(logp, old, ref, A, mask, clip, beta, ratio):
    """Eqs. 7-9 with floats and ifs: metrics, and the gradient with respect to logp, derived by hand."""
    (N, T), logp, old = mask.shape, logp.tolist(), old.tolist()
    tokens, loss, kl, clip_fraction = int(mask.sum()), 0.0, 0.0, 0.0
    gradient = torch.zeros(N, T)
    for j in range(N):
        steps = [t for t in range(T) if mask[j, t]]
        for unit in [[t] for t in steps] if ratio == "token" else [steps]:
            rho = math.exp(sum(logp[j][t] - old[j][t] for t in unit))
            weight = 1 / tokens if ratio == "token" else 1 / N
            clipped = (A[j] > 0 and rho > 1 + clip) or (A[j] < 0 and rho < 1 - clip)
            bound = 1 + clip if A[j] > 0 else 1 - clip
            clip_fraction += weight * clipped
            loss -= weight * A[j] * (bound if clipped else rho)
            for t in unit:
                gradient[j, t] -= 0 if clipped else weight * A[j] * rho
        for t in steps if beta else ():
            d = float(ref[j, t]) - logp[j][t]
            kl += (math.exp(d) - d - 1) / tokens
            gradient[j, t] -= beta * d / tokens  # of d^2/2
    return {"loss": loss + beta * kl, "kl": kl, "clip_fraction": clip_fraction}, gradient


@pytest.mark.parametrize("ratio", ["token", "trajectory"])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_against_brute_force_whole_and_in_parts(ratio, seed):
    g = torch.Generator().manual_seed(seed)
    logp, old, ref = (-torch.rand(4, 6, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(6) < torch.tensor([6, 1, 4, 3])[:, None]
    A = torch.randn(4, generator=g, dtype=torch.float64)
    expected, gradient = brute_force_loss(logp, old, ref, A.tolist(), mask, 0.3, 0.4, ratio)
    logp.requires_grad_()
    loss, metrics = clipped_policy_loss(logp, old, ref, A, mask, 0.3, 0.4, ratio)
    assert metrics == pytest.approx(expected, abs=1e-9) and loss.item() == metrics["loss"]
    assert torch.allclose(torch.autograd.grad(loss, logp)[0], gradient.double(), atol=1e-6)
    parts = Counter()
    for rows in (slice(0, 1), slice(1, 4)):
        of_part = [x[rows] for x in (logp, old, ref, A, mask)]
        parts.update(clipped_policy_loss(*of_part, 0.3, 0.4, ratio, n_tokens=14, n_trajectories=4)[1])
    assert parts == pytest.approx(expected)


def test_the_kl_term_has_the_value_and_the_gradient_of_kl_from_theta_to_ref_by_enumeration():
    theta, q = torch.tensor([0.7, -0.3, 0.1], requires_grad=True), torch.tensor([0.2, 0.3, 0.5])
    p = theta.softmax(-1)
    exact, reverse = (p * (p / q).log()).sum(), (q * (q / p).log()).sum()
    value = gradient = 0
    for token in range(3):
        logp, ref = p.log()[token].reshape(1, 1), q.log()[token].reshape(1, 1)
        loss, metrics = clipped_policy_loss(logp, logp.detach(), ref, torch.zeros(1), beta=1.0)
        assert metrics["kl"] > 0  # k3, whichever token it is
        value += p[token].item() * metrics["kl"]
        gradient += p[token].item() * torch.autograd.grad(loss, theta, retain_graph=True)[0]
    assert value == pytest.approx(exact.item(), abs=1e-6)
    assert torch.allclose(gradient, torch.autograd.grad(exact, theta, retain_graph=True)[0], atol=1e-6)
    assert (gradient - torch.autograd.grad(reverse, theta)[0]).abs().max() > 0.01


@pytest.mark.parametrize("ratio", ["token", "trajectory"])
def test_the_loss_is_finite_for_any_input_and_0_without_actions(ratio):
    inf, A = math.inf, torch.tensor([1.0, -1.0])
    logp = torch.tensor([[-1.0, -inf, -1000.0, -inf]] * 2, requires_grad=True)
    other = torch.tensor([[-inf, -1.0, -1.0, -inf]] * 2)
    for mask in (None, torch.zeros(2, 4, dtype=torch.bool)):
        loss, metrics = clipped_policy_loss(logp, other, other, A, mask, ratio=ratio)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert gradient.isfinite().all() and all(math.isfinite(value) for value in metrics.values())
    assert metrics == {"loss": 0, "kl": 0, "clip_fraction": 0} and not gradient.any()


# ===== 8. Stage 2, one step =====


def straight_update(model, ref, batch, optimizer, temperature=1.0, clip=0.2, beta=0.1, ratio="token",
                    updates=1, max_grad_norm=1.0):
    """`rcgrpo_update` on a copy of the model. Returns the copy, and the metrics of the last update."""
    model, A, mask = copy.deepcopy(model).eval(), advantages_by_numpy(batch), action_mask(batch)
    with torch.no_grad():
        old = plain_scores(model, batch, temperature)[0]
        ref = plain_scores(ref, batch, temperature)[0] if beta else None
    for _ in range(updates):
        logp, entropy = plain_scores(model, batch, temperature)
        metrics, gradient = brute_force_loss(logp, old, ref, A, mask, clip, beta, ratio)
        norm = straight_step(model, optimizer, (logp * gradient).sum(), max_grad_norm)
        metrics.update(entropy=(entropy.sum() / mask.sum()).item(), grad_norm=norm, skipped=0)
    return model, metrics


UPDATES = {
    "the defaults": {},
    "one product of ratios a trajectory": dict(ratio="trajectory", beta=0.5, updates=2),
    "groups split": dict(updates=2, beta=0.5, tokens_per_pass=25),
    "no KL": dict(updates=2, beta=0.0, clip=0.05),
    "row by row": dict(updates=3, ratio="trajectory", tokens_per_pass=1, max_grad_norm=0.3, temperature=0.7),
    "AdamW": dict(updates=2, by=AdamW, clip=0.4, max_grad_norm=math.inf, tokens_per_pass=50, temperature=1.3),
}


@pytest.mark.parametrize("settings", UPDATES.values(), ids=UPDATES)
def test_an_update_is_the_one_written_straight_down(settings):
    settings = {"tokens_per_pass": 10**6, **settings}
    by, model, ref = settings.pop("by", SGD), policy_model().train(), policy_model(seed=1).train()
    start, ref_start = copy.deepcopy(model), copy.deepcopy(ref.state_dict())
    written = {name: value for name, value in settings.items() if name != "tokens_per_pass"}
    expected, metrics = straight_update(model, ref, rl_batch(), by(), **written)
    given_ref = ref if settings.get("beta", 0.1) else None
    ours = rcgrpo_update(model, given_ref, by().of(model), rl_batch(), **settings)
    assert ours.keys() == metrics.keys()
    assert_close(ours, metrics)
    assert_moved_alike(start, model, expected)
    assert metrics["clip_fraction"] > 0 or not settings.get("updates")  # else nothing was tested
    assert all(torch.equal(value, ref_start[name]) for name, value in ref.state_dict().items())
    assert all(p.grad is None for p in [*ref.parameters(), *model.parameters()])


def test_groups_without_variance_and_rows_without_actions_change_nothing():
    model, silent = policy_model(), [Trajectory([1, 2, 3][:n], [0] * n, group=5) for n in (2, 3)]
    equal = [replace(t, reward=float(t.group)) for t in rl_batch()]
    for nothing in (equal, silent):
        metrics = rcgrpo_update(model, None, SGD().of(model), nothing, beta=0)
        assert metrics["loss"] == pytest.approx(0) and metrics["grad_norm"] == metrics["skipped"] == 0
    start = copy.deepcopy(model)
    expected, metrics = straight_update(model, start, rl_batch(), SGD())
    assert_close(rcgrpo_update(model, start, SGD().of(model), [*rl_batch(), *silent]), metrics)
    assert_moved_alike(start, model, expected)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_gradient_that_is_not_finite_is_thrown_away_for_good_and_counted(bad):
    model, backward_passes = policy_model(), itertools.count()
    start = copy.deepcopy(model)
    expected, _ = straight_update(model, start, rl_batch(), SGD(), updates=2)
    model.model.norm.weight.register_hook(lambda g: g * (math.nan if next(backward_passes) == bad else 1))
    metrics = rcgrpo_update(model, start, SGD().of(model), rl_batch(), updates=3)
    assert metrics["skipped"] == 1 and math.isnan(metrics["grad_norm"]) == (bad == 2)
    assert_moved_alike(start, model, expected)  # two of three updates count


class Parity(Echo):
    """An env that answers once. R is 1 if the codes of the characters that it heard add up to an even one."""

    def __init__(self, task):
        super().__init__(["ok"], task)

    def reward(self):
        return float(sum(map(ord, "".join(self.heard))) % 2 == 0)


class Chatter:
    """A policy that says three random letters and claims a temperature."""

    def __init__(self, tokenizer, temperature=1.0, seed=0):
        self.end, self.temperature = tokenizer.convert_tokens_to_ids("<|im_end|>"), temperature
        self.rng = np.random.default_rng(seed)

    def say(self, prompts):
        return [[*self.rng.integers(1, 50, 3).tolist(), self.end] for _ in prompts]

    __call__ = say


class Together:
    """Processes as threads of this one: they meet in every collective, or the test fails."""

    def __init__(self, models):
        self.barrier, self.values = threading.Barrier(len(models), timeout=20), [None] * len(models)
        for process, model in enumerate(models):
            assert rcgrpo.packs(model, 1)  # trials count calls: not at the same time
            for name, parameter in model.named_parameters():
                parameter.register_hook(lambda g, process=process, name=name: self.sum(process, name, g))

    def exchange(self, process, value):
        self.values[process] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def sum(self, process, name, gradient):
        """As sharded models do: gradients are summed over processes when they are made."""
        everyones = self.exchange(process, (name, gradient))
        assert {other for other, _ in everyones} == {name}
        return sum(g for _, g in everyones)

    def run(self, work):
        def with_gather(process):
            return work(process, lambda values: [v for part in self.exchange(process, values) for v in part])

        with ThreadPoolExecutor() as threads:
            return list(threads.map(with_gather, range(len(self.values))))


@pytest.mark.parametrize("ratio, shares", [
    ("token", [slice(0, None, 2), slice(1, None, 2)]), ("trajectory", [slice(None), slice(0, 0)]),
], ids=["groups dealt", "an empty share"])
def test_two_processes_make_the_step_of_one(shares, ratio):
    tokenizer, start, ref = ready_tokenizer(), policy_model(384), policy_model(384, seed=1)
    models, refs, given = [copy.deepcopy(start) for _ in shares], [copy.deepcopy(ref) for _ in shares], []
    assert all(rcgrpo.packs(ref, 1) for ref in refs)
    settings = dict(updates=2, beta=0.5, ratio=ratio)

    def work(process, gather):
        def mine(groups):
            given.append(groups)
            return groups[shares[process]]

        tasks = ["the cat", "the other cat sat on the mat"][: 2 - process]  # both call their first group 0
        model, policy = models[process], Chatter(tokenizer, seed=process)
        return rcgrpo_step(
            model, refs[process], SGD().of(model), tasks, Parity, policy, tokenizer, G=4, tokens_per_pass=150,
            generator=torch.Generator().manual_seed(process), gather=gather, mine=mine, **settings)

    (first, of_first), (second, of_second) = Together(models).run(work)
    assert [t.group for t in of_first + of_second] == [0] * 4 + [1] * 4 + [0] * 4
    everyone = of_first + [replace(t, group=2) for t in of_second]
    expected, metrics = straight_update(start, ref, everyone, SGD(), **settings)
    assert metrics["clip_fraction"] > 0
    metrics.update(group_metrics(everyone, 0.5))
    for ours, model in ((first, models[0]), (second, models[1])):
        assert ours.keys() == metrics.keys() | {"rollout_seconds", "update_seconds"}
        assert_close(ours, metrics)
        assert_moved_alike(start, model, expected)
    lengths = [sum(len(everyone[row].ids) for row in rows) for rows in given[0]]
    assert given[0] == given[1] and lengths == sorted(lengths, reverse=True) != sorted(lengths)


def test_two_processes_make_the_step_of_one_in_stage_1():
    start, batch = policy_model(), rl_batch()
    models, shares = [copy.deepcopy(start) for _ in range(2)], [batch[:6], batch[6:]]

    def work(process, gather):
        model = models[process]
        return rctp_step(model, SGD().of(model), shares[process], 30, gather=gather)

    results = Together(models).run(work)
    expected, metrics = straight_rctp(start, batch, SGD())
    for ours, model in zip(results, models):
        assert_close(ours, metrics)
        assert_moved_alike(start, model, expected)


def recorded_step(monkeypatch, **settings):
    """What one step hands to its parts."""
    tokenizer, model, ref = ready_tokenizer(), policy_model(384), policy_model(384, seed=1)
    seen = {"scored at": set(), "loss": set(), "clipped to": [], "rows a pass": []}

    def record(owner, name, note):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: note(*given) or original(*given, **named))

    def note_scoring(scored_model, part, temperature):
        seen["scored at"].add(temperature)
        seen["rows a pass"] += [len(part)] * (scored_model is model)

    record(rcgrpo, "action_logprobs", note_scoring)
    record(rcgrpo, "clipped_policy_loss", lambda *given: seen["loss"].add(given[5:8]))
    record(torch.nn.utils, "clip_grad_norm_", lambda parameters, norm: seen["clipped to"].append(norm))
    policy = Chatter(tokenizer, settings.pop("policy_temperature", 1.0))
    policy = policy.say if settings.pop("plain", "temperature" in settings) else policy
    given = {"generator": torch.Generator().manual_seed(0), "limits": {"max_turns": 4}, **settings}
    optimizer, tasks = SGD().of(model), ["the cat"]
    metrics, rollouts = rcgrpo_step(model, ref, optimizer, tasks, Parity, policy, tokenizer, **given)
    monkeypatch.undo()
    return {**seen, "truncated": metrics["truncated"], "reward tokens": [t.reward_token for t in rollouts]}


def drawn(G=5, p=0.5, seed=0, stratified=False):
    return sample_reward_tokens(G, p, torch.Generator().manual_seed(seed), stratified)


USUAL = {"scored at": {1.0}, "loss": {(0.2, 0.1, "token")}, "clipped to": [1.0], "rows a pass": [5],
         "truncated": 0, "reward tokens": drawn()}


@pytest.mark.parametrize("setting, value, changes", [
    ("plain", True, {}),  # a policy that claims no temperature
    ("temperature", 0.6, {"scored at": {0.6}}),  # the same
    ("policy_temperature", 0.7, {"scored at": {0.7}}),
    ("clip", 0.3, {"loss": {(0.3, 0.1, "token")}}),
    ("beta", 0.7, {"loss": {(0.2, 0.7, "token")}}),
    ("ratio", "trajectory", {"loss": {(0.2, 0.1, "trajectory")}}),
    ("updates", 3, {"clipped to": [1.0] * 3, "rows a pass": [5] * 3}),
    ("tokens_per_pass", 1, {"rows a pass": [1] * 5}),
    ("max_grad_norm", 0.3, {"clipped to": [0.3]}),
    ("G", 3, {"rows a pass": [3], "reward tokens": drawn(3)}),
    ("p", 0.0, {"reward tokens": [LOW] * 5}),
    ("p", 1.0, {"reward tokens": [HIGH] * 5}),
    ("p", None, {"reward tokens": [None] * 5}),  # plain GRPO
    ("stratified", True, {"reward tokens": drawn(stratified=True)}),
    ("generator", torch.Generator().manual_seed(1), {"reward tokens": drawn(seed=1)}),
    ("limits", {"max_turns": 1}, {"truncated": 1}),
])
def test_a_setting_changes_what_it_names_and_nothing_else(setting, value, changes, monkeypatch):
    assert recorded_step(monkeypatch, **{setting: value}) == {**USUAL, **changes}


# ===== 9. What to watch, and the two propositions =====


def scored(rewards, tokens=None, group=0, **fields):
    tokens = tokens or [None] * len(rewards)
    return [trajectory([1], ([2, 3], []), group=group, reward=float(R), reward_token=token, **fields)
            for R, token in zip(rewards, tokens)]


def test_metrics_by_hand():
    batch = scored([1, 1, 0, 0], [HIGH, HIGH, LOW, LOW]) + scored([1] * 4, [HIGH, LOW, LOW, LOW], group=1)
    expected = {
        "reward": 0.75, "reward_high": 1, "reward_low": 0.6, "reward_high_minus_low": 0.4, "tokens": 16,
        "sigma": 0.25, "zero_std": 0.5, "sigma2": 0.125, "truncated": 0, "advantage_std": 0.5**0.5,
        "sigma2_floor": 3 / 4 * 0.25 * 0.4**2, "sigma2_ceiling": 3 / 4 * 0.75 * 0.25,
    }
    assert group_metrics(batch, p=0.5) == pytest.approx(expected, abs=1e-5)
    expected["sigma2_floor"] = 3 / 4 * 3 / 8 * 5 / 8 * 0.4**2  # p as measured
    assert group_metrics(batch) == pytest.approx(expected, abs=1e-5)
    plain = group_metrics(scored([0.1] * 3) + scored([0], truncated=True, group=1))
    assert plain["zero_std"] == 1 and plain["truncated"] == 0.25  # no rounding error counts as variance
    assert plain["reward_high"] is plain["reward_low"] is plain["reward_high_minus_low"] is None
    assert plain["sigma2_floor"] == 0
    json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize("means, p, G, stratified", [  # of R under HIGH and LOW, for each kind of task
    ([(0.9, 0.1)], 0.5, 5, False), ([(1.0, 0.8)], 0.25, 8, False), ([(0.3, 0.3)], 0.5, 4, False),
    ([(0.95, 0.1), (0.2, 0.05)], 0.5, 5, False), ([(1.0, 0.0)], 0.5, 6, True),
])
def test_proposition_4_3_floor_and_ceiling_of_the_variance(means, p, G, stratified):
    rng, generator, batch = np.random.default_rng(0), torch.Generator().manual_seed(0), []
    for group in range(800):
        tokens = sample_reward_tokens(G, p, generator, stratified)
        mean = dict(zip((HIGH, LOW), means[group % len(means)]))
        batch += scored([rng.random() < mean[token] for token in tokens], tokens, group)
    metrics = group_metrics(batch, p=p)
    high, low = np.mean(means, axis=0)
    m, kappa = p * high + (1 - p) * low, (G - 1) / G * p * (1 - p)
    assert metrics["sigma2_floor"] == pytest.approx(kappa * (high - low) ** 2, abs=0.015)
    assert metrics["sigma2_ceiling"] == pytest.approx((G - 1) / G * m * (1 - m), abs=0.015)
    if stratified:  # between-mode variance without the factor (G-1)/G
        assert metrics["sigma2"] == pytest.approx(p * (1 - p)) and metrics["zero_std"] == 0
    elif len(means) > 1:  # different tasks: both are bounds
        assert metrics["sigma2_floor"] + 0.02 < metrics["sigma2"] < metrics["sigma2_ceiling"] - 0.01
    else:
        assert metrics["sigma2"] == pytest.approx((G - 1) / G * m * (1 - m), abs=0.015)


def test_proposition_4_2_a_peaked_policy_gives_identical_rollouts():
    T, G, p_optimal = 4, 5, 0.998
    eps_sft = -math.log(p_optimal)  # KL(point mass || pi) at each step
    optimal = (np.random.default_rng(0).random((4000, G, T)) < p_optimal).all(2)
    assert optimal.mean() >= math.exp(-T * eps_sft) - 0.002
    bound = 1 - G * T * eps_sft
    assert 0 < bound < 1 and optimal.all(1).mean() >= bound - 0.002  # it is empty once G T eps_sft >= 1
    collapsed = [group_advantages(row, [0] * G).any() for row in optimal[:200] if row.all()]
    assert not any(collapsed) and 0 < len(collapsed) < 200


# ============================================================================================================
# Appendix A. Log-probs: of any causal language model, what one plain pass a row gives
# ============================================================================================================

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.25, init_std=0.25,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_dropout=0.0, tie_word_embeddings=False,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_heads=8,
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8, state_size=8, n_groups=1,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    chunk_size=8, decoder_layers=2, encoder_layers=1, d_model=32, ffn_dim=48, decoder_ffn_dim=48,
)


def layers(*types, **more):
    return dict(layer_types=list(types), num_hidden_layers=len(types), **more)


def tiny(kind, **overrides):
    """A random model of a type of the library. An override of None drops a setting."""
    torch.manual_seed(0)
    settings = {name: value for name, value in {**SMALL, **overrides}.items() if value is not None}
    config = AutoConfig.for_model(kind, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0, original_max_position_embeddings=16)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
NOISY = {
    "seed_oss": dict(attention_dropout=0.3, residual_dropout=0.3), "phi": dict(resid_pdrop=0.3),
    "gpt2": dict(resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.3), "mixtral": dict(router_jitter_noise=0.3),
    "opt": dict(dropout=0.3, attention_dropout=0.3),
}
# What people train is packed, without a warning: a fault of ours would else hide behind the slow path.
PACKED = [
    *((kind, {}) for kind in "qwen2 qwen3 llama mistral gemma smollm3 qwen2_moe qwen3_moe olmo2 starcoder2 "
                             "glm4_moe ernie4_5 hunyuan_v1_dense gpt_neox".split()),
    *((kind, layers(SLIDING, FULL)) for kind in "gemma3_text olmo3 cohere2 exaone4 ministral".split()),
    ("deepseek_v3", dict(num_key_value_heads=4)), ("llama4_text", layers("chunked_attention", FULL)),
    ("granite", dict(logits_scaling=8.0)), ("cohere", dict(logit_scale=0.1)),
    ("phi3", dict(sliding_window=262144)),
    ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=64)),
    ("llama", dict(rope_parameters=YARN, max_position_embeddings=64)), *NOISY.items(),
]
# The rest may be computed row by row: states, convolutions, sinks, soft-caps, biases, windows of 8 that bite.
OTHERS = [
    *((kind, {}) for kind in "bloom stablelm nanochat bart doge mamba2".split()),
    ("falcon", dict(head_dim=None)), ("qwen3_5_text", layers(LINEAR, FULL)), ("lfm2", layers("conv", FULL)),
    ("gpt_oss", layers(FULL, FULL)),
    ("granitemoehybrid", dict(layer_types=["mamba", "attention"])), ("gemma2", layers(SLIDING, FULL)),
    ("gemma3_text", layers(FULL, final_logit_softcapping=2.0)), ("mistral", dict(sliding_window=8)),
    ("qwen2", dict(use_sliding_window=True, max_window_layers=1, sliding_window=8)),
    *((kind, layers(SLIDING, FULL, sliding_window=8)) for kind in ("gemma3_text", "gemma2", "gpt_oss")),
    ("llama4_text", layers("chunked_attention", FULL, attention_chunk_size=8)),
    ("modernbert-decoder", dict(local_attention=8)),
]
PROMPT = [3, 9, 14, 22, 31, 40, 5, 8]
ROWS = [
    trajectory(PROMPT, ([6, 7, 8], [9, 1]), ([11], []), group=0), trajectory([*PROMPT, 12], ([13, 14], [])),
    trajectory(PROMPT, ([33, 5, 44, 21, 9], []), group=0), trajectory([7, 7, 9], ([20, 21], [2]), ([30], [])),
]


def with_gradients(model, logp):
    """The log-probs, and the gradients of a random sum of them."""
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (logp * weights).sum().backward()
    return logp.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, expected):
    assert ours[0].shape == expected[0].shape and (ours[0] - expected[0]).abs().max() < 2e-5
    assert ours[1].keys() == expected[1].keys() and any(g.abs().max() > 0 for g in ours[1].values())
    for name, gradient in expected[1].items():
        assert (ours[1][name] - gradient).abs().max() <= 2e-5 * max(1.0, gradient.abs().max()), name


def greedy(model, prompt, n):
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind, overrides", [*PACKED, *OTHERS])
def test_any_architecture_is_scored_and_sampled_as_its_plain_forward_pass(kind, overrides):
    model = tiny(kind, **overrides)
    attention, expected = model.config._attn_implementation, plain_scores(model, ROWS)[0]
    expected = with_gradients(model, expected)
    prompts = [[3, 9, 14, 22], [7, 8], [5] * 11, [7, 8]]
    model.train()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        policy = rcgrpo.ModelPolicy(model, set(), 0, 2)
        said = policy(prompts)
        assert_same(with_gradients(model, action_logprobs(model, ROWS)), expected)
        longer = [prompt + ids + [50] for prompt, ids in zip(prompts[1:], said[1:])]
        said += policy(longer)
    model.eval()
    with torch.no_grad():
        assert said == [greedy(model, prompt, 2) for prompt in [*prompts, *longer]]
        assert torch.allclose(plain_scores(model, ROWS)[0], expected[0], atol=1e-5)  # the model is as before
    assert model.config._attn_implementation == attention
    if (kind, overrides) in PACKED:
        assert rcgrpo.packs(model, 15) and not any("one by one" in str(w.message) for w in warned)


def groups_of_every_kind():
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 50, 20).tolist()
    kinds = {
        "ragged": [trajectory(prompt, *random_turns(rng, n), group="r") for n in (1, 4, 2, 7)],
        "conditioned": [trajectory([*prompt, r, 7], *random_turns(rng, 2), group="c") for r in (48, 49, 48)],
        "nothing shared": [trajectory([n] * n, *random_turns(rng, 2), group="n") for n in (3, 30)],
        "twins": [trajectory(prompt, ([1, 2, 3], [4]), ([5], []), group="t") for _ in range(3)],
        "nested": [trajectory(prompt, *[([1, 2], [3])] * n, group="x") for n in (1, 2, 3)],
        "loose": [trajectory(prompt, *random_turns(rng, 2)) for _ in range(2)],
    }
    return {**kinds, "mixed": [t for several in itertools.zip_longest(*kinds.values()) for t in several if t]}


@pytest.mark.parametrize("shape", groups_of_every_kind())
def test_one_pass_over_groups_equals_one_pass_a_row(shape):
    trajectories, model = groups_of_every_kind()[shape], tiny_model(50)
    model.set_attn_implementation("eager")
    logp, expected_entropy = plain_scores(model, trajectories, temperature=0.8)
    expected = with_gradients(model, logp)
    model.set_attn_implementation("sdpa")
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        logp, entropy = action_logprobs(model, trajectories, 0.8, entropy=True, rows_per_chunk=5)
        assert_same(with_gradients(model, logp), expected)
        assert torch.allclose(entropy, expected_entropy, atol=1e-4) and not entropy.requires_grad


def count_fed(model):
    """The tokens of each forward pass from now on."""
    fed = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0].numel()))
    return fed


def test_a_shared_prefix_is_read_once_and_logits_are_made_chunk_by_chunk_where_actions_are_predicted():
    trajectories, model, rows = groups_of_every_kind()["conditioned"], tiny_model(50), []
    assert rcgrpo.packs(model, 100)
    fed, head = count_fed(model), model.get_output_embeddings()
    head.register_forward_hook(lambda head, args, out: rows.append(len(out)) if out.shape[-1] == 50 else None)
    logp = action_logprobs(model, trajectories, rows_per_chunk=4)
    actions = sum(sum(t.mask) for t in trajectories)
    assert fed == [20 + sum(len(t.ids) - 20 for t in trajectories)]
    assert sum(rows) == actions and max(rows) == 4
    logp.sum().backward()  # nothing was kept: each chunk is made again
    assert sum(rows) == 2 * actions and max(rows) == 4


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", NOISY)
def test_scoring_has_no_noise_and_gradient_checkpointing_recomputes_the_layers(kind, checkpointing):
    model, calls = tiny(kind, **NOISY[kind]), []
    reference = copy.deepcopy(model).train()
    expected = with_gradients(model, plain_scores(model, rl_batch())[0])
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    assert rcgrpo.packs(model, 100)
    for name, module in model.named_modules():
        if name.endswith((".self_attn", ".attn")):
            module.register_forward_pre_hook(lambda module, args: calls.append(module))
    model.train()
    assert_same(with_gradients(model, action_logprobs(model, rl_batch())), expected)
    assert [calls.count(layer) for layer in set(calls)] == [1 + checkpointing] * 2
    assert rcgrpo_update(model.train(), reference, SGD().of(model), rl_batch(), beta=1.0)["kl"] == 0


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_fp32_weights_work_under_bf16_autocast(checkpointing):
    model = tiny_model(50, initializer_range=0.05)
    expected, gradients = with_gradients(model, plain_scores(model, rl_batch())[0])
    if checkpointing:
        model.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16):
        ours, ours_gradients = with_gradients(model, action_logprobs(model.train(), rl_batch()))
        assert rcgrpo.packs(model, 100)
    assert ours.dtype == torch.float32 and 0 < (ours - expected).abs().max() < 0.05
    for name, gradient in gradients.items():
        assert (ours_gradients[name] - gradient).norm() < 0.05 * gradient.norm() + 0.02, name


@pytest.mark.parametrize("kind", ["qwen2", "bloom"])  # packed, and not
def test_an_empty_pass_has_no_rows_and_gives_every_weight_a_gradient_of_0(kind):
    model = tiny(kind)
    logp, entropy = action_logprobs(model, [], entropy=True)
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("limit", [1, 30, 60, 100, 10**6])
def test_a_pass_has_at_most_so_many_tokens_and_groups_that_fit_stay_together(limit):
    model, batch = policy_model(), groups_of_every_kind()["mixed"] + rl_batch()
    parts, fed = rcgrpo.passes(model, batch, limit), count_fed(model)
    for rows in parts:
        action_logprobs(model, [batch[row] for row in rows])
    assert sorted(row for rows in parts for row in rows) == list(range(len(batch)))
    assert all(tokens <= limit or len(rows) == 1 for tokens, rows in zip(fed, parts))
    assert "r" in {batch[row].group for row in parts[0]}  # the longest: memory runs out at once or never
    assert len(parts) <= 2 * sum(fed) / limit + 1
    for rows in rcgrpo.rows_by_group([t.group for t in batch]).values():
        fed.clear()
        action_logprobs(model, [batch[row] for row in rows])
        assert fed[0] > limit or sum(not set(rows).isdisjoint(part) for part in parts) == 1


def test_all_processes_make_as_many_passes_and_a_model_that_is_not_packed_one_a_row():
    model, batch = tiny("mistral", sliding_window=40), rl_batch()[:3]
    parts = rcgrpo.passes(model, batch, 1, lambda values: [*values, 5])
    assert sorted(parts[:3]) == [[0], [1], [2]] and parts[3:] == [[], []]
    assert rcgrpo.passes(model, [], 1, lambda values: [*values, 2]) == [[], []]
    assert [len(rows) for rows in rcgrpo.passes(model, batch, 10**6)] == [3]
    elsewhere = rcgrpo.passes(model, batch, 10**6, lambda values: [max(values[0], 41)])  # beyond the window
    assert [len(rows) for rows in elsewhere[:3]] == [1] * 3


# ============================================================================================================
# Appendix D. The optimizer step.   Appendix E. The two new tokens
# ============================================================================================================


@pytest.mark.parametrize("lr, warm_up, by, dtype, refused", [
    (1e-6, None, "AdamW", torch.bfloat16, True), (1e-6, 0.0, "AdamW", torch.bfloat16, True),
    (1e-2, None, "AdamW", torch.bfloat16, False), (1e-2, 1e-9, "AdamW", torch.bfloat16, False),
    (1e-6, None, "SGD", torch.bfloat16, False), (1e-6, None, "AdamW", torch.float32, False),
    (0.0, None, "AdamW", torch.bfloat16, False),
])
def test_weights_too_coarse_for_adams_step_are_refused(lr, warm_up, by, dtype, refused):
    optimizer = getattr(torch.optim, by)(policy_model().to(dtype).parameters(), lr)
    if warm_up is not None:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up)
    with pytest.raises(ValueError, match=f"at lr {lr}.*fp32 master weights") if refused else nullcontext():
        rcgrpo.check_precision(optimizer)


def test_the_reward_tokens_are_new_and_special_and_survive_save_and_reload(tmp_path):
    tokenizer = byte_level_tokenizer()
    special, size = set(tokenizer.all_special_tokens), len(tokenizer)
    ids = add_reward_tokens(tokenizer)
    assert ids == (size, size + 1) == add_reward_tokens(tokenizer) and len(tokenizer) == size + 2
    assert special <= set(tokenizer.all_special_tokens)
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert tuple(one.convert_tokens_to_ids([HIGH, LOW])) == ids
        assert all(one.added_tokens_decoder[token].special for token in ids)
        for text in (f"{HIGH}\nHello", f"a {LOW} b", f"\n{HIGH}{LOW}\n\n"):
            assert one.decode(one(text, add_special_tokens=False).input_ids) == text


def matrices(model):
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("spare", [0, 2, 70])
def test_no_other_row_changes_the_matrix_grows_if_it_must_and_trained_rows_stay(tied, spare, tmp_path):
    tokenizer = byte_level_tokenizer()
    size = len(tokenizer)
    model = tiny_model(size + spare, tie_word_embeddings=tied)
    for weight in matrices(model):
        weight.data[size:] = 0
    before = [weight.detach().clone() for weight in matrices(model)]
    ids = list(add_reward_tokens(tokenizer, model))
    expected_rows = size + spare if spare else 64 * math.ceil((size + 2) / 64)
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert (matrices(one)[0] is matrices(one)[1]) == tied and one.config.vocab_size == expected_rows
        for old, new in zip(before, matrices(one)):
            assert len(new) == expected_rows and torch.equal(old[:size], new[:size])
            assert new[ids].isfinite().all() and new[ids].any(1).all() and not new[size + 2 :].any()
        for new in matrices(one):
            new.data[ids] = 0.5  # "training"
        assert list(add_reward_tokens(tokenizer, one)) == ids
        assert all((weight[ids] == 0.5).all() for weight in matrices(one))
    fresh = tiny_model(expected_rows, seed=1)  # a known tokenizer does not mean a known model
    drawn = matrices(fresh)[1].detach()[ids].clone()
    add_reward_tokens(tokenizer, fresh)
    assert not torch.equal(drawn, matrices(fresh)[1][ids])


@pytest.mark.parametrize("first", [True, False], ids=["ids 0 and 1", "the last ids"])
@pytest.mark.parametrize("common", [0.0, 30.0])  # 30: rows point nearly the same way, as in real output heads
def test_the_two_rows_are_of_usual_length_far_apart_and_the_same_on_every_process(common, first):
    seen = []
    for process in range(2):
        words = Tokenizer(models.WordLevel({HIGH: 0, LOW: 1, "a": 2, "b": 3}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words) if first else byte_level_tokenizer()
        model, size = tiny_model(len(tokenizer)), len(tokenizer)
        for weight in matrices(model):
            weight.data += common
        torch.manual_seed(process)
        ids = list(add_reward_tokens(tokenizer, model))
        assert ids == ([0, 1] if first else [size, size + 1])
        for weight in matrices(model):
            rows, usual = weight[ids], weight[2:size].norm(dim=1).mean()
            assert torch.cosine_similarity(rows[0], rows[1], dim=0) < 0.1
            assert (rows.norm(dim=1) > 0.3 * usual).all() and (rows.norm(dim=1) < 3 * usual).all()
            seen.append(weight.detach().clone())
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])  # padding rows included


# ===== What is refused, and in which words =====


def stage_1(batch=None, **settings):
    model = policy_model()
    rctp_step(model, SGD().of(model), rl_batch() if batch is None else batch, **settings)


def stage_2(sampled_at=1.0, **settings):
    """Refused before anything is rolled out."""
    model = policy_model()
    given = {"ref_model": model, "optimizer": SGD().of(model), **settings}
    rcgrpo_step(model, tasks=["a"], make_env=lambda task: pytest.fail("rolled out"), tokenizer=None,
                policy=SimpleNamespace(temperature=sampled_at), **given)


def score(n=2, mask=(0, 1), last=1, model=None, temperature=1.0):
    ids = [1] * (n - 1) + [last]
    action_logprobs(model or tiny_model(50), [Trajectory(ids, list(mask) * (n // 2))], temperature)


def coarse():
    return torch.optim.AdamW(policy_model().bfloat16().parameters(), 1e-6)


SILENT, ZERO = Trajectory([1, 2], [0, 0]), torch.zeros(1, 1)
SHORT_ROPE = dict(rope_parameters=LONGROPE, original_max_position_embeddings=16)
REFUSED = [
    (lambda: inject_reward_token([{"role": "system", "content": "s"}], HIGH), "no user message .* env.reset"),
    (lambda: rcgrpo.label_by_reward(SILENT, [], None), "without an action .* drop it"),
    (lambda: rctp_loss(ZERO, ZERO.bool()), "no action token in the batch: drop"),
    (lambda: stage_1([]), r"without an action token .* rows \[\] of 0"),
    (lambda: stage_1([*rl_batch(), SILENT]), r"without an action token .* rows \[8\] of 9; drop"),
    (lambda: stage_1(tokens_per_pass=0), "tokens_per_pass must be 1 or more"),
    (lambda: stage_1(max_grad_norm=0), "max_grad_norm must be positive"),
    (lambda: stage_1(max_grad_norm=math.nan), "max_grad_norm must be positive"),
    (lambda: rctp_step(None, coarse(), rl_batch()), "fp32 master weights"),
    (lambda: sample_reward_tokens(0, 0.5), "G >= 1 and 0 <= p <= 1, got G = 0"),
    (lambda: sample_reward_tokens(4, -0.1), "0 <= p <= 1, got G = 4, p = -0.1"),
    (lambda: sample_reward_tokens(4, 1.1), "0 <= p <= 1, got G = 4, p = 1.1"),
    (lambda: sample_reward_tokens(4, math.nan), "0 <= p <= 1, got G = 4, p = nan"),
    (lambda: group_advantages([1, math.nan], [0, 0]), "finite and in"),
    (lambda: group_advantages([1, -0.1], [0, 0]), "finite and in"),
    (lambda: group_advantages([1.1, 0], [0, 0]), "finite and in"),
    (lambda: group_advantages([1], [0, 0]), "one group id per reward: 1 rewards, 2 ids"),
    (lambda: clipped_policy_loss(ZERO, ZERO, None, ZERO[0], beta=0, ratio="turn"), '"trajectory", got .turn'),
    (lambda: stage_2(ref_model=None), "beta > 0 needs the frozen stage-1 model"),
    (lambda: stage_2(ref_model=None, beta=0.3), "beta > 0 needs the frozen stage-1 model"),
    (lambda: stage_2(temperature=1.0, sampled_at=0.7), "drawn at temperature 0.7 cannot be scored at 1.0"),
    (lambda: stage_2(sampled_at=0.0), "temperature is above 0"),
    (lambda: stage_2(optimizer=coarse()), "fp32 master weights"),
    (lambda: rcgrpo_update(None, None, None, []), "beta > 0 needs the frozen stage-1 model"),
    (lambda: rcgrpo_update(None, None, coarse(), [], beta=0), "fp32 master weights"),
    (lambda: score(temperature=0), "temperature > 0"),
    (lambda: score(temperature=math.nan), "temperature > 0"),
    (lambda: score(mask=(1, 1)), "begins with an action"),
    (lambda: score(last=50), "token id 50, and the model has 50 embeddings.* add_reward_tokens"),
    (lambda: score(514), "a row of 514 tokens, and the model reads 512"),
    (lambda: score(18, model=tiny("llama", rope_parameters=DYNAMIC)), "the model reads 16 .*rope changes"),
    (lambda: score(18, model=tiny("phi3", **SHORT_ROPE)), "the model reads 16 .*rope changes"),
    (lambda: score(model=tiny("roberta", is_decoder=False)), "no causal language model: its logits"),
]


@pytest.mark.parametrize("call, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_would_go_wrong_is_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)


# ============================================================================================================
# The fast way is fast: `python test_rcgrpo.py` prints it
# ============================================================================================================


def small_qwen(vocabulary, layers):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192))


def random_ids(n):
    return torch.randint(2048, (n,)).tolist()


def scoring(way, prefix, G, length, vocabulary=2048, layers=6):
    """A function that runs forward and backward of one group: its prompt, and G actions of that length."""
    model, prompt = small_qwen(vocabulary, layers), random_ids(prefix)
    group = [trajectory(prompt, (random_ids(length), []), group=0) for _ in range(G)]
    ids = torch.tensor([t.ids for t in group])
    action_logprobs(model, group[:1])  # the trial

    def packed():
        action_logprobs(model, group).sum().backward()

    def rows():
        for t in group:
            action_logprobs(model, [t]).sum().backward()

    def batch():
        logits = model(ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
        logits.log_softmax(-1).gather(-1, ids[:, -length:, None]).sum().backward()

    def trl():
        from trl import GRPOTrainer
        from trl.trainer.utils import add_fused_lm_head

        if "log_probs" not in vars(model):
            add_fused_lm_head(model, outputs=("log_probs", "entropy"))
            model.log_probs = True
        trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
        score = GRPOTrainer._get_per_token_logps_and_entropies
        score(trainer, model, ids, torch.ones_like(ids), length)[0].sum().backward()

    return {"packed": packed, "rows": rows, "batch": batch, "trl": trl}[way]


def seconds(run):
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def best_seconds(runs, repeats):
    """The best time of each, measured in turn."""
    return np.min([[seconds(run) for run in runs] for _ in range(repeats)], axis=0)


def peak_memory(way, shape):
    """MiB by which the memory of this process peaks above what it held before (Linux)."""
    def resident(name):
        return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    run = scoring(way, *shape)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def test_a_packed_group_is_faster_than_its_rows():
    packed, rows = best_seconds([scoring(way, 512, 8, 32, layers=2) for way in ("packed", "rows")], repeats=3)
    assert rows / packed > 2.5  # usually about 4.5; the tokens alone give 5.7


def rollout_seconds(keeps, prompt=3800, G=5, turns=4, action=24, answer=150):
    """Seconds, tokens fed and trajectories of a group like BFCL's: what is known is kept, or read again."""
    model, first = small_qwen(2048, 6), random_ids(prompt)
    prompts = [[*first, 7 + row % 2, 9] for row in range(G)]  # two reward tokens
    answers = [random_ids(answer) for _ in range(turns)]
    fed, generator = count_fed(model), torch.Generator().manual_seed(0)
    policy, started = rcgrpo.ModelPolicy(model, set(), 1.0, action, generator), time.perf_counter()
    for observation in answers:
        said = policy(prompts) if keeps else sample(model, prompts, 1.0, action, set(), generator)
        prompts = [ids + new + observation for ids, new in zip(prompts, said)]
    return time.perf_counter() - started, sum(fed), prompts


def print_scoring(shapes, ways, vocabulary=2048):
    print(f"\nvocabulary {vocabulary:,}\nprefix   G  tokens", *(f"{way:>9}" for way in ways), " last/first")
    for shape in shapes:
        times = best_seconds([scoring(way, *shape, vocabulary) for way in ways], repeats=2)
        columns = [f"{t:7.2f} s" for t in times] + [f"{times[-1] / times[0]:8.1f}x"]
        print("{:6} {:3} {:7}".format(*shape), *columns, flush=True)


def benchmark():
    print(f"Forward + backward of one group, {torch.get_num_threads()} threads, Qwen2 of 6 layers x 256.")
    shapes = (1024, 4, 64), (1024, 16, 64), (1024, 8, 128), (3600, 5, 400)
    print_scoring(shapes, ["packed", "batch", "rows"])
    for shape in shapes:
        with get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
            memory = [fresh.apply(peak_memory, (way, shape)) for way in ("packed", "batch")]
        print(f"{shape}: {memory[0]:.0f} MiB packed, {memory[1]:.0f} MiB as one padded batch", flush=True)
    if importlib.util.find_spec("trl"):  # its _get_per_token_logps_and_entropies, on the same rows
        print_scoring(shapes[2:], ["packed", "rows", "trl"], vocabulary=32000)
    (kept, few, said), (again, many, said_again) = rollout_seconds(True), rollout_seconds(False)
    print(f"\nRollouts of a group like BFCL's (prompt 3,800, G 5, 4 turns): {few} tokens fed in {kept:.1f} s "
          f"with kept keys and values,\n{many} in {again:.1f} s without, {again / kept:.1f}x; "
          f"{'equal' if said == said_again else 'UNEQUAL'} draws")


if __name__ == "__main__":
    benchmark()
