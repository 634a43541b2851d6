"""What users may exchange in a training, each by a node of the config that names its class (around step 6 of the walk).

A class of another kind is refused before any work; what a function makes shows only when it is called.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eagle3.config import build, locate
from eagle3.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class Part(Generic[T]):
    """One of them: `where` its node lies in the config, the `kind` of object that it makes, that kind in words, what
    to do when it makes another, the class that is meant when the node is empty, and whether the node says `all` that
    its class is to be given."""

    where: str
    kind: type[T]
    expected: str
    hint: str
    default: str | None = None
    all: bool = False

    def check(self, node: Any) -> Any:
        """The class or function that a node names, not called. RequestError when it names nothing or a class of another
        kind."""
        node = self._named(node)
        found = locate(node, self.where)
        if isinstance(found, type) and not issubclass(found, self.kind):
            raise self._refusal(node["_target_"])
        if not self.all:
            return found
        given = {key: value for key, value in node.items() if not (key.startswith("_") and key.endswith("_"))}
        try:
            inspect.signature(found).bind(*node.get("_args_", ()), **given)
        except TypeError as error:
            raise RequestError(
                f"{self.where}: {node['_target_']} is not given what it needs ({error}), found {sorted(given)}; add it "
                f"with +{self.where}.NAME=VALUE"
            ) from error
        except ValueError:  # a callable written in C tells no signature
            pass
        return found

    def build(self, node: Any, **kwargs: Any) -> T:
        """The object that the node describes. RequestError when it cannot be built or is of another kind."""
        node = self._named(node)
        made = build(node, self.where, **kwargs)
        if not isinstance(made, self.kind):
            raise self._refusal(f"{node['_target_']}, which made a {type(made).__name__}")
        return made

    def _named(self, node: Any) -> dict[str, Any]:
        if node == {} and self.default is not None:
            return {"_target_": self.default}
        if not isinstance(node, dict) or "_target_" not in node:
            raise self._refusal(node)
        return node

    def _refusal(self, found: Any) -> RequestError:
        return RequestError(f"{self.where}: found {found}, expected {self.expected}; {self.hint}")
