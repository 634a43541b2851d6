"""Third-party additions: distributions that bring config groups and adapters for architectures of their own.

Beside the walk. A distribution declares an entry point in the group `eagle3.plugins` whose value is a package. What
lies in the package's `conf/` is appended to Hydra's search path (`model=theirs` then composes and tab-completes), and
the Adapter classes in its `adapters/` are listed by `eagle3 stage=adapters`. A broken plugin is named and left out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from types import ModuleType

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

GROUP = "eagle3.plugins"
OURS = "eagle3.conf"
log = logging.getLogger("eagle3")


@dataclass(frozen=True)
class Plugin:
    """A third-party package that could be imported, and the distribution that brought it."""

    package: str
    distribution: str
    version: str

    @property
    def label(self) -> str:
        """The distribution with its version, as messages name it."""
        return f"{self.distribution} {self.version}"


@cache
def installed() -> tuple[Plugin, ...]:
    """The plugins that can be imported, by distribution name; a broken one is named in a warning and left out."""
    found: dict[str, Plugin] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (_distribution(e)[0], e.value)):
        plugin = Plugin(entry.module, *_distribution(entry))
        try:
            importlib.import_module(entry.module)
        except Exception as error:
            log.warning(
                "plugin %s of %s is left out: importing %s failed with %s: %s",
                *(entry.name, plugin.label, entry.module, type(error).__name__, error),
            )
            continue
        if entry.module in found:
            log.warning(
                "plugin package %s is declared twice: by %s and by %s",
                *(entry.module, found[entry.module].label, plugin.label),
            )
        found.setdefault(entry.module, plugin)
    return tuple(found.values())


def adapter_packages() -> list[ModuleType]:
    """The `adapters` packages that plugins bring."""
    found: list[ModuleType] = []
    for plugin in installed():
        name = f"{plugin.package}.adapters"
        if importlib.util.find_spec(name) is None:
            continue
        try:
            found.append(importlib.import_module(name))
        except Exception as error:
            log.warning("adapters of %s are left out: %s: %s", plugin.label, type(error).__name__, error)
    return found


def _distribution(entry: importlib.metadata.EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("an unknown distribution", "")


def _options(package: str) -> set[str]:
    """The YAML files below a config package, as `group/option`."""

    def walk(folder: Traversable, prefix: str) -> Iterator[str]:
        for item in folder.iterdir():
            if item.is_dir():
                yield from walk(item, f"{prefix}{item.name}/")
            elif item.name.endswith(".yaml"):
                yield prefix + item.name.removesuffix(".yaml")

    return set(walk(importlib.resources.files(package), ""))


class PluginSearchPath(SearchPathPlugin):
    """Appends eagle3's own groups (for a primary config that lies elsewhere) and those of the plugins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once for each command."""
        if f"pkg://{OURS}" not in [element.path for element in search_path.get_path()]:
            search_path.append("eagle3", f"pkg://{OURS}")
        owners: dict[str, str] = {}
        for plugin in installed():
            conf = f"{plugin.package}.conf"
            if importlib.util.find_spec(conf) is None:
                continue
            owners = owners or dict.fromkeys(_options(OURS), "eagle3")
            for option in sorted(_options(conf)):
                if owners.setdefault(option, plugin.label) != plugin.label:
                    log.warning(
                        "%s brings %s.yaml, which %s has already: theirs is hidden; rename it",
                        plugin.label,
                        option,
                        owners[option],
                    )
            search_path.append(plugin.distribution, f"pkg://{conf}")


def register() -> None:
    """Makes Hydra ask `PluginSearchPath`; calling it again changes nothing."""
    plugins = Plugins.instance()
    if PluginSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(PluginSearchPath)
