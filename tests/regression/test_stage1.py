"""Stage 1 changes no number: the engine before it and after it, on the same scenarios.

Each tree runs in processes of its own (`runner.py`); here their recordings are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from recording import Outcome, Recording, Run, differences
from scenarios import FAULTS, HND, SCENARIOS, Scenario

Runs = tuple[Run, Run]

STAGE = 1
RUNNERS = ['--set', 'all'], ['--set', 'all', '--set', 'hnd', '--set', 'faults']

# Largest differences from forwards without a cache, whose matrix products have other shapes. Logits
# are of the order of ten; a wrong key or value moves them by as much.
TOLERANCES = {'float32': 2e-3, 'bfloat16': 0.8}


def on_devices(
    cases: Iterable[tuple[Scenario, *tuple[str, ...]]], *names: str
) -> pytest.MarkDecorator:
    """Parametrizes over cases, each a scenario and values of `names`, and the devices at hand."""
    params = []
    for scenario, *values in cases:
        cpu = [pytest.mark.skip(reason=scenario.gpu_only)] if scenario.gpu_only else []
        for device, marks in (('cpu', cpu), ('cuda', [pytest.mark.gpu])):
            if device == 'cpu' or torch.cuda.is_available():
                ids = '-'.join([device, scenario.name, *values])
                params.append(pytest.param(device, scenario, *values, marks=marks, id=ids))
    return pytest.mark.parametrize(('runs', 'scenario', *names), params, indirect=['runs'])


def recordings(outcomes: list[Outcome]) -> list[Recording]:
    for outcome in outcomes:
        if outcome.skipped:
            pytest.skip(outcome.skipped)
        assert not outcome.error, outcome.error
    return [outcome.recording for outcome in outcomes if outcome.recording]


def all_differences(
    before: list[Recording], after: list[Recording], ignore: tuple[str, ...] = ()
) -> list[str]:
    assert len(before) == len(after)
    return [
        f'rank {rank}: {line}'
        for rank, pair in enumerate(zip(before, after, strict=True))
        for line in differences(*pair, ignore)
    ]


@on_devices((scenario,) for scenario in SCENARIOS.values())
def test_before_and_after_are_the_same(runs: Runs, scenario: Scenario) -> None:
    before, after = (recordings(run(scenario.name)) for run in runs)
    assert all_differences(before, after) == []


@on_devices((scenario,) for scenario in SCENARIOS.values())
def test_the_reference_does_what_the_scenario_is_for(runs: Runs, scenario: Scenario) -> None:
    for recording in recordings(runs[0](scenario.name)):
        missing = [what for what in scenario.expects if not recording.counters.get(what)]
        assert missing == [], recording.counters
        assert sorted(recording.tokens) == list(range(len(scenario.lengths)))
        assert {len(tokens) for tokens in recording.tokens.values()} == {scenario.new_tokens}
        states = [state for forward in recording.cache for state in forward.values()]
        assert states and not [state for state in states if 'not numbers' in state]


@on_devices((scenario,) for scenario in SCENARIOS.values())
def test_the_reference_agrees_with_forwards_without_a_cache(runs: Runs, scenario: Scenario) -> None:
    outcomes = runs[0](scenario.name)
    recordings(outcomes)
    tolerance = TOLERANCES[scenario.model.get('dtype', 'float32')]
    for outcome in outcomes:
        rows, *worst = (outcome.dense[what] for what in ('rows', 'logits', 'tokens', 'log_probs'))
        assert rows >= scenario.new_tokens * len(scenario.lengths)
        assert all(value <= tolerance for value in worst), outcome.dense


@on_devices((SCENARIOS[name],) for name in HND)
def test_heads_first_gives_the_same_as_tokens_first(runs: Runs, scenario: Scenario) -> None:
    tokens_first = recordings(runs[1](scenario.name))
    heads_first = recordings(runs[1](HND[scenario.name].name))
    assert all_differences(tokens_first, heads_first, ignore=('storage',)) == []
    for nhd, hnd in zip(tokens_first, heads_first, strict=True):
        assert hnd.storage['bytes'] == nhd.storage['bytes']
        *outer, tokens, heads, dim = nhd.storage['shape']
        assert hnd.storage['shape'] == (*outer, heads, tokens, dim)


@on_devices(
    ((SCENARIOS[name], fault) for fault, names in FAULTS.items() for name in names), 'fault'
)
def test_a_deliberate_fault_is_caught(runs: Runs, scenario: Scenario, fault: str) -> None:
    before, after = runs
    faulty = after(f'{fault}.{scenario.name}')
    assert all(outcome.error for outcome in faulty) or all_differences(
        recordings(before(scenario.name)), recordings(faulty)
    )
