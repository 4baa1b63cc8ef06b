"""On a GPU, too, a lossless preset gives the very tokens of the unmodified model, whatever the cache does.

float32 against transformers on the same GPU, with TF32 off; bfloat16 against itself at other budgets, to the last bit
of the logits, since no kernel's result may depend on which slot an expert lies in or on what runs beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from cache_rigs import bytes_held
from policy_presets import POLICIES
from serving import greedy, logits, policy, prepared, reference_greedy, serving_locally

from tiermoe.actors.budget import Budget
from tiermoe.actors.settings import EngineSettings, KvSettings, NdpSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir, load_hardware, load_policy
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.cluster.local import LocalWorker

PROMPTS, PROMPT_TOKENS, TOKENS = 6, 40, 32
Check = Callable[[list[list[int]]], None]
# what needs calibration beyond the store's own files (gates, predictors, replicas) is tried on the CPU, in tests/e2e
NEEDS_MORE = {"pre-gated", "promoe", "static-ndp", "ktransformers"}
LOSSLESS = sorted(name for name in POLICIES if load_policy(name).lossless and name not in NEEDS_MORE)
# computed on the NDP worker's cores in float32, whose sums are other ones than the GPU's: the same tokens almost always
OFF_THE_GPU = {name for name in LOSSLESS if load_policy(name).uses_ndp}
ON_THE_GPU = [name for name in LOSSLESS if name not in OFF_THE_GPU]


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """No TF32: both sides compute in float32."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, target: torch.device) -> ExpertStore:
    """`target` first, which skips where there is no GPU: making a store takes seconds."""
    return prepared(default_model_dir(), tmp_path_factory.mktemp("default") / "store")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return heldout_prompts(default_model_dir(), PROMPTS, PROMPT_TOKENS)


@pytest.fixture(scope="module")
def unmodified(target: torch.device) -> Any:
    """transformers' model as it is, in float32 on the same device."""
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32).to(target).eval()


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]], unmodified: Any) -> list[list[int]]:
    return reference_greedy(unmodified, prompts, TOKENS)


@pytest.fixture
def check(prompts: list[tuple[int, ...]], expected: list[list[int]], unmodified: Any) -> Check:
    """Fails where tokens differ, and says how near the unmodified model was to a tie there."""

    def compare(found: list[list[int]]) -> None:
        for prompt, tokens, ours in zip(prompts, expected, found, strict=False):
            if ours == tokens:
                continue
            pairs = enumerate(itertools.zip_longest(tokens, ours))
            same = next(i for i, (theirs, mine) in pairs if theirs != mine)
            context = torch.tensor([[*prompt, *tokens[:same]]], device=unmodified.device)
            with torch.no_grad():
                best = unmodified(context).logits[0, -1].float().topk(2)[0].tolist()
            pytest.fail(
                f"token {same} is {ours[same : same + 1]}, not {tokens[same : same + 1]}; the unmodified model's two "
                f"best logits there are {best[0]:.6f} and {best[1]:.6f}, {best[0] - best[1]:.2e} apart"
            )

    return compare


def _settings(preset: str, budget: float, target: torch.device, **more: Any) -> EngineSettings:
    more.setdefault("dtype", "float32")
    more.setdefault("kv", KvSettings(page_size=32, num_blocks=64))
    more.setdefault("ndp", NdpSettings(hardware=asdict(load_hardware("cpu-ndp"))))
    return EngineSettings(
        policy=load_policy(preset), budget=Budget(share=budget), device=target.type, integrity_checks=True, **more
    )


def _check_budget(worker: LocalWorker) -> None:
    stats = worker.stats()
    assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
    assert bytes_held(worker.engine.cache) <= stats.expert_budget_bytes


@pytest.mark.parametrize("preset", ON_THE_GPU)
def test_lossless_presets_give_the_unmodified_models_tokens(
    preset: str, store: ExpertStore, prompts: list[Any], check: Check, target: torch.device
) -> None:
    budget = 1.0 if load_policy(preset).preload == "all" else 0.2
    with serving_locally(store, _settings(preset, budget, target)) as worker:
        check(greedy(worker, prompts, TOKENS))  # in flight together
        check(greedy(worker, prompts[:2], TOKENS))  # again, on what the first left in the cache
        _check_budget(worker)


@pytest.mark.parametrize("batching", ["continuous", "serial"])
@pytest.mark.parametrize("budget", [0.6, 0.05])
def test_same_tokens_at_other_budgets_and_both_ways_of_batching(
    budget: float, batching: str, store: ExpertStore, prompts: list[Any], check: Check, target: torch.device
) -> None:
    kv = KvSettings(page_size=32, num_blocks=64, batching=batching)
    with serving_locally(store, _settings("next-gate", budget, target, kv=kv)) as worker:
        check(greedy(worker, prompts, TOKENS))
        assert worker.stats().total().misses > 0
        _check_budget(worker)


@pytest.mark.parametrize("preset", sorted(OFF_THE_GPU))
def test_experts_on_the_cores_give_nearly_all_of_the_tokens(
    preset: str, store: ExpertStore, prompts: list[Any], expected: list[list[int]], target: torch.device
) -> None:
    """Full-precision experts near data: other sums, so a near tie may fall otherwise; nothing is recomputed here."""
    with serving_locally(store, _settings(preset, 0.25, target)) as worker:
        found = [greedy(worker, [prompt], TOKENS)[0] for prompt in prompts]
        same = sum(a == b for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=False))
        assert same >= 0.9 * sum(map(len, expected))
        assert worker.stats().total().ndp_recomputed == 0


def test_bfloat16_logits_are_the_same_bits_at_every_budget(
    store: ExpertStore, prompts: list[Any], target: torch.device
) -> None:
    found = []
    for budget in (1.0, 0.3, 0.05):
        config = _settings("on-demand", budget, target, dtype="bfloat16", compile="off")  # else a measurement chooses
        config = config.model_copy(update={"policy": policy("none")})
        with serving_locally(store, config) as worker:
            found.append([logits(worker, prompt, "sdpa").float().cpu() for prompt in prompts[:3]])
    for other in found[1:]:
        for whole, small in zip(found[0], other, strict=True):
            assert torch.equal(whole, small)


@pytest.mark.parametrize(
    ("preset", "budgets"),
    [
        ("next-gate", (1.0, 0.3, 0.05, 0.05)),
        ("auto", (1.0, 0.3, 0.05, 0.05)),
        pytest.param("auto", (0.25,) * 10, marks=pytest.mark.slow),
    ],
    ids=["next-gate", "auto", "auto in ten runs"],
)
def test_bfloat16_tokens_are_the_same_at_every_budget(
    preset: str, budgets: tuple[float, ...], store: ExpertStore, prompts: list[Any], target: torch.device
) -> None:
    """`auto` without an NDP worker, as a GPU has it by default: which miss went near data was the clock's choice."""
    results = []
    for budget in budgets:
        with serving_locally(store, _settings(preset, budget, target, dtype="bfloat16"), ndp_workers=0) as worker:
            results.append([greedy(worker, [prompt], TOKENS)[0] for prompt in prompts])  # no batch to vary
    assert results == results[:1] * len(results)
