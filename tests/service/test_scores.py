"""The official client reads scores of prompts and samples; the forms of one score agree."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests import tiny
from tests.service.serving import QUIET, Server

pytestmark = pytest.mark.filterwarnings(*QUIET)

PROMPT = [5, 6, 7, 8, 9]
VOCABULARY = tiny.CONFIG.vocab_size


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.SamplingClient]:
    directory = tmp_path_factory.mktemp("scores")
    model = tiny.write_checkpoint(directory / "model")
    server = Server(model, directory / "run", "--precision", "fp32")
    with server.client() as service:
        yield service.create_sampling_client(base_model="tiny")
    server.stop()


def ask(sampler: tinker.SamplingClient, **asked: object) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=4, seed=3, stop=[], temperature=0.7)
    prompt = types.ModelInput.from_ints(PROMPT)
    return sampler.sample(
        prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True, **asked
    ).result()  # type: ignore[arg-type]


def tensor(ids: np.ndarray) -> types.TensorData:
    return types.TensorData.from_numpy(ids.astype(np.int64))


def named(response: types.SampleResponse) -> np.ndarray:
    assert response.target_prompt_logprobs is not None
    return response.target_prompt_logprobs.to_numpy()


def test_tokens_that_are_named_have_the_scores_of_the_prompt_and_of_the_most_probable(
    sampler: tinker.SamplingClient,
) -> None:
    found = ask(sampler, topk_prompt_logprobs=VOCABULARY)
    ids = found.topk_prompt_logprobs_np
    assert ids is not None
    assert found.topk_prompt_logprobs is not None
    assert found.topk_prompt_logprobs[0] is None  # nothing comes before the first token
    every = np.full((len(PROMPT), VOCABULARY), np.nan)
    np.put_along_axis(every, ids.token_ids, ids.logprobs, axis=1)
    np.testing.assert_allclose(np.exp(every[1:]).sum(axis=1), 1, rtol=1e-5)
    assert np.all(np.diff(ids.logprobs[1:], axis=1) <= 0)
    own = np.array(PROMPT[1:])[:, None]
    some = np.array([[30, -1, 2], [-1, -1, 8], [4, 4, 4], [0, VOCABULARY - 1, -1]])
    scored = ask(sampler, target_prompt_logprobs=tensor(np.concatenate([own, some], axis=1)))
    assert found.prompt_logprobs_np is not None
    np.testing.assert_allclose(named(scored)[:, 0], found.prompt_logprobs_np[1:], atol=1e-6)
    expected = np.where(some < 0, 0, np.take_along_axis(every[1:], np.maximum(some, 0), axis=1))
    np.testing.assert_allclose(named(scored)[:, 1:], expected, atol=1e-6)


def test_a_sparse_array_of_tokens_is_answered_in_its_layout(sampler: tinker.SamplingClient) -> None:
    ids = np.full((4, 9), -1)
    ids[0, :2], ids[2, 5], ids[3, 8] = (30, 2), 0, 9
    sparse = types.TensorData.from_torch_sparse(torch.tensor(ids), pad_value=-1)
    assert sparse.sparse_crow_indices is not None
    found = ask(sampler, target_prompt_logprobs=sparse).target_prompt_logprobs
    assert found is not None
    assert found.sparse_crow_indices == sparse.sparse_crow_indices
    assert found.sparse_col_indices == sparse.sparse_col_indices
    dense = named(ask(sampler, target_prompt_logprobs=tensor(ids)))
    np.testing.assert_allclose(found.data, dense[ids >= 0], atol=1e-6)


def test_alternatives_are_drawn_and_scored_by_the_model(sampler: tinker.SamplingClient) -> None:
    found = ask(sampler, prompt_alt_tokens_k=64).prompt_alt_tokens
    assert found is not None
    ids, logprobs = found.tokens.to_numpy(), found.logprobs.to_numpy()
    assert ids.shape == logprobs.shape == (len(PROMPT) - 1, 64)
    scored = named(ask(sampler, target_prompt_logprobs=tensor(ids)))
    np.testing.assert_allclose(scored, logprobs, atol=1e-6)
    assert all(len(set(row)) > 1 for row in ids.tolist())


def test_the_most_probable_tokens_of_samples_contain_what_was_drawn(
    sampler: tinker.SamplingClient,
) -> None:
    for one in ask(sampler, topk_sample_logprobs=VOCABULARY).sequences:
        top = one.topk_logprobs
        assert top is not None
        assert len(top) == len(one.tokens)
        prompt = types.ModelInput.from_ints([*PROMPT, *one.tokens])
        alone = sampler.compute_logprobs(prompt).result()[len(PROMPT) :]
        for pairs, token, expected in zip(top, one.tokens, alone, strict=True):
            assert pairs is not None
            assert dict(pairs)[token] == pytest.approx(expected, abs=1e-5)


def test_only_the_last_tokens_of_a_prompt_are_scored_if_so_asked(
    sampler: tinker.SamplingClient,
) -> None:
    whole = ask(sampler, topk_prompt_logprobs=3)
    last = ask(sampler, topk_prompt_logprobs=3, prompt_logprobs_last_n=2)
    for every, some in (
        (whole.prompt_logprobs, last.prompt_logprobs),
        (whole.topk_prompt_logprobs, last.topk_prompt_logprobs),
    ):
        assert every is not None
        assert some is not None
        assert some[:-2] == [None] * (len(PROMPT) - 2)
        assert some[-2:] == every[-2:]
    with pytest.raises(tinker.BadRequestError, match="prompt_logprobs_last_n = 5"):
        ask(sampler, prompt_logprobs_last_n=5)
