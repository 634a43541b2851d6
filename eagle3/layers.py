"""Layer ids and selections: the one place where they are converted.

Layer id k is the residual stream that ENTERS decoder layer k (0-based): 0 is the embedding output, n the output of the
last layer before the final norm. This is vLLM's and EAGLE's meaning. SpecForge, TorchSpec and most trainers number the
OUTPUT of layer i instead, which is id i + 1 here.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.errors import RequestError

CONVENTION = (
    "id k = residual stream entering decoder layer k (0-based); n = after the last layer, before the final norm"
)


def eagle_ids(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's default selection (2, n//2, n-3), which vLLM and SGLang also assume when no ids are given."""
    return (2, num_layers // 2, num_layers - 3)


def fraction_ids(fractions: Sequence[float], num_layers: int) -> tuple[int, ...]:
    """Rounds fractions of the depth to ids, half up, so that one preset fits a model of any depth."""
    return tuple(int(fraction * num_layers + 0.5) for fraction in fractions)


def override(ids: Sequence[int]) -> str:
    """The selection as one types it into a shell."""
    return f"'layers.ids=[{','.join(map(str, ids))}]'"


def check_ids(ids: Sequence[int], num_layers: int, where: str = "layers.ids") -> tuple[int, ...]:
    """Returns the ids as non-negative, sorted, distinct numbers of at most `num_layers`.

    -j on input means n - j. Raises RequestError when ids collapse, repeat, are unsorted or out of range.
    """
    if not ids:
        raise RequestError(
            f"{where}: found no layer, expected at least one; try layers=eagle or {override((2, 15, 27))}"
        )
    resolved = tuple(num_layers + i if i < 0 else i for i in ids)
    shown = list(ids)
    for given, i in zip(ids, resolved, strict=True):
        if not 0 <= i <= num_layers:
            raise RequestError(
                f"{where}: found {given} in {shown}, expected ids of 0 to {num_layers} (the model has {num_layers} "
                f"decoder layers; -j means {num_layers}-j); try layers=eagle"
            )
    if len(set(resolved)) != len(resolved):
        raise RequestError(
            f"{where}: {shown} selects {list(resolved)}, which repeats a layer of this {num_layers}-layer model; "
            f"expected distinct ids; set them yourself, for example {override((1, 2, max(num_layers - 1, 3)))}"
        )
    if list(resolved) != sorted(resolved):
        raise RequestError(
            f"{where}: {shown} selects {list(resolved)}, expected ascending ids (the drafter's fc reads them in this "
            f"order); try {override(sorted(resolved))}"
        )
    return resolved


def select(
    num_layers: int, ids: Sequence[int] | None = None, fractions: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Turns a config's selection into checked ids: explicit ids win, then fractions, else EAGLE's default."""
    if ids is not None:
        return check_ids(ids, num_layers)
    where = f"layers.fractions={list(fractions)}" if fractions is not None else "layers=eagle"
    chosen = fraction_ids(fractions, num_layers) if fractions is not None else eagle_ids(num_layers)
    return check_ids(chosen, num_layers, where)


def output_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Our ids in the "output of layer i" convention (SpecForge, TorchSpec; SGLang's nested list for Llama targets)."""
    if min(ids) < 1:
        raise RequestError(f"layers.ids: id 0 in {list(ids)} is the embedding and is the output of no decoder layer")
    return tuple(i - 1 for i in ids)


def from_output_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Reads ids of the "output of layer i" convention into ours."""
    return tuple(i + 1 for i in ids)
