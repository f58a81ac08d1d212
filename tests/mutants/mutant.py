"""What a mutant is, and how it gets into a process without touching a file."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from textwrap import dedent, indent
from types import ModuleType
from typing import Final

_DEPTH_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Mutant:
    """One deliberate fault.

    Args:
        name: of the fault, as a user would call it.
        module: which module has it.
        old: whole lines of that module, at whatever depth, there exactly once.
        new: the lines that stand there instead.
        tests: pytest arguments of the tests that must see it; quick ones.
    """

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]


class StaleMutantError(Exception):
    """The code has changed under a mutant: it must be written anew."""


def source_of(mutant: Mutant) -> str:
    """The module's text as it lies on disk."""
    spec = importlib.util.find_spec(mutant.module)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise StaleMutantError(f"{mutant.name}: there is no module {mutant.module}")
    source = spec.loader.get_source(mutant.module)
    assert source is not None
    return source


def patched(mutant: Mutant, source: str) -> str:
    """The text with the fault.

    Raises:
        StaleMutantError: what the mutant replaces is not there exactly once.
    """
    places: list[tuple[str, str]] = []
    for depth in range(_DEPTH_MAX):
        old = _lines(mutant.old, depth)
        places += [(old, _lines(mutant.new, depth))] * f"\n{source}".count(f"\n{old}")
    if len(places) != 1 or mutant.old == mutant.new:
        raise StaleMutantError(f"{mutant.name}: what it replaces is {len(places)} times in {mutant.module}")
    old, new = places[0]
    return f"\n{source}".replace(f"\n{old}", f"\n{new}").removeprefix("\n")


def _lines(text: str, depth: int) -> str:
    """The lines of a mutant as they stand at that depth."""
    text = dedent(text).strip("\n")
    return indent(text, "    " * depth) + "\n" if text else ""


class _MutatedLoader(SourceFileLoader):
    """Loads the patched text; keeps no bytecode and takes none."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str):  # type: ignore[no-untyped-def]  # a code object, as typeshed has it
        source = patched(self._mutant, self.get_data(self.path).decode())
        return compile(source, self.path, "exec", dont_inherit=True)


class MutatingFinder(MetaPathFinder):
    """Goes before all other finders and takes over one module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.loaded = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        self.loaded = True
        loader = _MutatedLoader(fullname, spec.origin, self._mutant)
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)

    def install(self) -> None:
        """From now on; the module must not be there yet."""
        assert self._mutant.module not in sys.modules, "the module was imported before it could be patched"
        sys.meta_path.insert(0, self)
