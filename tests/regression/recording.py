"""What a run leaves behind, and the comparison of two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class Forward:
    """One forward pass of the model, over the rows of real tokens, without padding."""

    rows: list[tuple[int, int, int]]
    """Request, position and token of each row of `logits`."""
    tokens: list[tuple[int, int, int]]
    """The same of every token that went in."""
    logits: Tensor
    """`(rows, vocabulary)`, in the model's dtype."""


@dataclass
class Recording:
    """All that has to be the same in two trees."""

    prompts: list[list[int]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    steps: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    """How often what was to happen happened."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Blocks in all, for active and for paused requests."""
    free_blocks: list[int] = field(default_factory=list)
    """After each step."""
    block_bytes: int = 0
    storage: dict[str, Any] = field(default_factory=dict)
    """Bytes, shape, strides and dtype of the cache."""
    cache: list[dict[tuple[int, int], str]] = field(default_factory=list)
    """At each forward, by request and layer: a hash of the bits of its valid keys and values."""
    contents: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """If wanted, by request and layer: those keys and values, as the last forward left them."""

    @property
    def texts(self) -> list[list[int]]:
        """Each request's prompt and the tokens generated for it."""
        return [prompt + self.tokens[number] for number, prompt in enumerate(self.prompts)]

    def rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Request, position and logits of each row but those after a draft that was rejected."""
        texts = self.texts
        for forward in self.forwards:
            wrong_from: dict[int, int] = {}
            for request, position, token in forward.tokens:
                text = texts[request]
                if position >= len(text) or text[position] != token:
                    wrong_from[request] = min(position, wrong_from.get(request, position))
            for row, (request, position, _) in enumerate(forward.rows):
                if position < wrong_from.get(request, len(texts[request])):
                    yield request, position, forward.logits[row]


@dataclass
class Outcome:
    """What came of a scenario: a recording, a reason why it cannot run here, or an error."""

    recording: Recording | None = None
    skipped: str = ''
    error: str = ''
    dense: dict[str, float] = field(default_factory=dict)
    """Comparison with forwards without a cache: rows compared, and the largest differences."""
    seconds: float = 0

    def save(self, path: Path) -> None:
        """Write to a file; it has a name only once it is whole."""
        partial = path.with_suffix('.partial')
        torch.save(self, partial)
        partial.rename(path)

    @staticmethod
    def load(path: Path) -> Outcome:
        """Read what `save` wrote."""
        outcome: Outcome = torch.load(path, weights_only=False)
        return outcome


class Run:
    """The outcomes that the runner left of one tree, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outcomes: dict[str, list[Outcome]] = {}

    def __call__(self, name: str) -> list[Outcome]:
        """The outcomes of all ranks of the scenario, or of `FAULT.SCENARIO`.

        Raises:
            FileNotFoundError: the runner left none.
        """
        if name not in self._outcomes:
            files = sorted(self._folder.glob(f'{name}.rank*.pt'))
            if not files:
                raise FileNotFoundError(f'{self._folder} has no outcome of {name}')
            self._outcomes[name] = [Outcome.load(file) for file in files]
        return self._outcomes[name]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree to the bit, NaN and signed zeros included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def differences(
    reference: Recording, candidate: Recording, ignore: tuple[str, ...] = ()
) -> Iterator[str]:
    """A line for each field in which two recordings are not the same."""
    for name in (item.name for item in fields(Recording)):
        # Of the contents there are hashes.
        if name in ignore or name == 'contents':
            continue
        old, new = getattr(reference, name), getattr(candidate, name)
        if name == 'forwards':
            yield from _forward_differences(old, new)
        elif repr(old) != repr(new):
            yield f'{name}: {_first_difference(old, new)}'


def _forward_differences(old: list[Forward], new: list[Forward]) -> Iterator[str]:
    if len(old) != len(new):
        yield f'forwards: {len(old)} before, {len(new)} after'
    for number, (before, after) in enumerate(zip(old, new, strict=False)):
        if before.tokens != after.tokens or before.rows != after.rows:
            yield f'forward {number}: other tokens went in'
            return
        if not same_bits(before.logits, after.logits):
            wrong = (before.logits != after.logits).any(-1).nonzero().flatten().tolist()
            worst = (before.logits - after.logits).abs().max().item()
            rows = [before.rows[row][:2] for row in wrong]
            yield f'forward {number}: logits of (request, position) {rows} differ by up to {worst}'
            return


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            if repr(old.get(key)) != repr(new.get(key)):
                return f'{key}: {_first_difference(old.get(key), new.get(key))}'
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            if repr(before) != repr(after):
                return f'[{index}] {_first_difference(before, after)}'
    return f'{old} before, {new} after'


@dataclass(frozen=True)
class Tolerances:
    """How far one kernel's numbers may be from another's."""

    logits: float
    log_probs: float
    cache: float


def agreement(reference: Recording, candidate: Recording) -> list[int]:
    """Of each request the tokens, its prompt included, up to the first that differs."""
    return [
        next((place for place, pair in enumerate(zip(*texts)) if pair[0] != pair[1]), len(texts[0]))
        for texts in zip(reference.texts, candidate.texts, strict=True)
    ]


def deviations(reference: Recording, candidate: Recording, tolerances: Tolerances) -> Iterator[str]:
    """A line for each way in which one recording is not as near to another as it should be.

    A request is compared up to the first token that differs, and the logits that this token was
    chosen by, too. So where these agree, the two tokens were nearly equal to either engine, and
    which of them comes first is up to rounding.
    """
    if reference.prompts != candidate.prompts or sorted(reference.tokens) != sorted(
        candidate.tokens
    ):
        yield f'requests: {sorted(candidate.tokens)}'
        return
    same = agreement(reference, candidate)
    old, new = (
        {(request, position): logits for request, position, logits in recording.rows()}
        for recording in (reference, candidate)
    )
    for request, (length, prompt) in enumerate(zip(same, reference.prompts, strict=True)):
        for position in range(len(prompt) - 1, length - 1):
            if (request, position) not in old or (request, position) not in new:
                yield f'logits: there are none of request {request} at {position}'
    shared = [key for key in old.keys() & new.keys() if key[1] < same[key[0]]]
    contents = reference.contents, candidate.contents
    # Where a request's last token lies in the cache, there may be a draft that was rejected.
    written = [
        min(length, len(text) - 1) for length, text in zip(same, reference.texts, strict=True)
    ]
    pairs: dict[str, list[tuple[Any, Tensor, Tensor]]] = {
        'logits': [(key, old[key], new[key]) for key in sorted(shared)],
        'log_probs': [
            (
                request,
                torch.tensor(reference.log_probs[request][: length - 1]),
                torch.tensor(candidate.log_probs[request][: length - 1]),
            )
            for request, length in enumerate(same)
        ],
        'cache': [
            (key, *[torch.stack(found[key])[:, : written[key[0]]] for found in contents])
            for key in sorted(reference.contents)
        ],
    }
    for what, compared in pairs.items():
        worst = {key: largest_difference(before, after) for key, before, after in compared}
        if wrong := {
            key: far for key, far in worst.items() if not far <= getattr(tolerances, what)
        }:
            yield f'{what}: {len(wrong)} of {len(worst)} differ by more, as {list(wrong.items())[:3]}'
    drafts = [recording.counters['drafts_accepted'] for recording in (reference, candidate)]
    if same == [len(text) for text in reference.texts] and drafts[0] == drafts[1]:
        ignore = {item.name for item in fields(Recording)} - {
            'steps',
            'blocks',
            'free_blocks',
            'block_bytes',
        }
        yield from differences(reference, candidate, tuple(ignore))


def largest_difference(before: Tensor, after: Tensor) -> float:
    """Between elements of two tensors; infinite where they differ in shape, NaN where one is NaN."""
    if before.shape != after.shape:
        return math.inf
    return float((before.float() - after.float()).abs().max()) if before.numel() else 0
