"""Generation against the model run anew for every token, and the choice of a token against numpy."""

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import CONFIGS, make

import jaxpp
from models.generate import BUCKET, Sampling, choose, generate

PROMPT = [3, 14, 15, 9, 2, 6, 5]
GREEDY = Sampling(temperature=0)


def anew(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits after the last token, without a cache."""
    microbatch = {"tokens": jnp.asarray([tokens])}
    stream = model.embed(microbatch, None)
    for block in model.blocks:
        stream = block(stream, microbatch, None)
    return np.asarray(model.head(stream, model.embed)[0, -1], np.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_the_likeliest_token_each_time(name: str) -> None:
    model, tokens = make(name), list(PROMPT)
    for token in generate(model, PROMPT, 6, jax.random.key(0), GREEDY):
        logits = anew(model, tokens)
        assert logits[token] >= logits.max() - 1e-4 * np.abs(logits).max()
        tokens.append(token)
    assert len(tokens) == len(PROMPT) + 6


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (4, 1), (2, 2), (3, 1)])
def test_from_parameters_on_any_number_of_stages(stages: int, chunks: int) -> None:
    """Also where a place is empty (4 layers on 3 stages)."""
    params = jaxpp.place(make("llama3"), jaxpp.make_mesh(pipe=stages), chunks)
    run = partial(generate, prompt=PROMPT, count=8, key=jax.random.key(5), sampling=Sampling(1.0))
    assert list(run(params, as_model=jaxpp.unstack)) == list(run(make("llama3")))


@pytest.mark.parametrize("length", [1, BUCKET - 1, BUCKET, BUCKET + 1])
def test_prompts_around_a_bucket(length: int) -> None:
    prompt = np.random.default_rng(0).integers(0, 61, length)
    model = make("qwen3")
    (token,) = generate(model, prompt, 1, jax.random.key(0), GREEDY)
    logits = anew(model, list(prompt))
    assert logits[token] >= logits.max() - 1e-4 * np.abs(logits).max()


def test_it_stops_at_the_end_token() -> None:
    model = make("llama3")
    free = list(generate(model, PROMPT, 5, jax.random.key(0), GREEDY))
    assert list(generate(model, PROMPT, 5, jax.random.key(0), GREEDY, end=free[2])) == free[: free.index(free[2])]


def test_the_key_decides() -> None:
    model = make("llama3")
    draw = lambda seed: list(generate(model, PROMPT, 8, jax.random.key(seed), Sampling(2.0)))
    assert draw(0) == draw(0) != draw(1)


def allowed(logits: np.ndarray, sampling: Sampling) -> tuple[list[int], np.ndarray]:
    """Tokens that may be drawn, and their chances, in numpy."""
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    chance = np.exp(logits[order] / sampling.temperature)
    chance /= chance.sum()
    kept = np.cumsum(chance) - chance < sampling.top_p
    return list(order[kept]), chance[kept] / chance[kept].sum()


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.5), Sampling(1.0, 3), Sampling(1.0, 0, 0.6), Sampling(2.0, 5, 0.7)]
)
def test_tokens_are_drawn_with_their_chances(sampling: Sampling) -> None:
    logits = np.random.default_rng(0).normal(size=8) * 1.5
    keys = jax.random.split(jax.random.key(1), 4000)
    drawn = Counter(np.asarray(jax.vmap(lambda key: choose(jnp.asarray(logits), key, sampling))(keys)).tolist())
    tokens, chances = allowed(logits, sampling)
    assert set(drawn) <= set(tokens)
    for token, chance in zip(tokens, chances, strict=True):
        assert drawn[int(token)] / 4000 == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 4000) ** 0.5)


def test_top_p_keeps_the_likeliest_however_small_it_is() -> None:
    assert int(choose(jnp.asarray([0.0, 5.0, 1.0]), jax.random.key(0), Sampling(1.0, 0, 1e-9))) == 1
