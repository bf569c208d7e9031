"""Weights between a few hostile tokens, the same weights with hidden keys, and the values on a page."""

import re
from typing import Any

import numpy as np

from .conftest import TOKENS

LAYERS, HEADS, COUNT = 2, 3, len(TOKENS)


def random_pattern(*shape: int, causal: bool = True, seed: int = 0) -> np.ndarray:
    """Softmax of random scores, float32."""
    scores = 2 * np.random.default_rng(seed).normal(size=shape)
    if causal:
        scores = np.where(np.triu(np.ones(shape[-2:], dtype=bool), k=1), -np.inf, scores)
    exponential = np.exp(scores)
    return (exponential / exponential.sum(axis=-1, keepdims=True)).astype(np.float32)


def causal() -> np.ndarray:
    return random_pattern(LAYERS, HEADS, COUNT, COUNT)


def without(pattern: np.ndarray, hidden: list[int], rest: bool = False) -> np.ndarray:
    """Rows renormalised without some keys, by a loop; NaN if no weight is left."""
    left = np.zeros(pattern.shape)
    for *place, query in np.ndindex(pattern.shape[:-1]):
        row = pattern[(*place, query)].astype(np.float64)
        total = sum(row[key] for key in range(len(row)) if key not in hidden) + (1 - row.sum() if rest else 0)
        for key in range(len(row)):
            kept = 0 if key in hidden else row[key]
            left[(*place, query, key)] = kept / total if total > 0 else np.nan
    return left


def weights(page: Any) -> np.ndarray:
    return np.array(page.evaluate("document.getElementById('figure-0').control.weights()"), dtype=float)


def finding(page: Any) -> str:
    return str(page.inner_text(".attnmech-finding")).replace("\u2068", "").replace("\u2069", "")


def selector(page: Any, label: str) -> Any:
    return page.locator("label").filter(has_text=re.compile(f"^{label} ")).locator("select")


def choose(page: Any, label: str, option: str) -> None:
    selector(page, label).select_option(option)
