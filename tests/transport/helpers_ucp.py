"""A stand-in for ucx-py (`ucp`), which cannot be installed beside a UCX of today: its surface, over ucxx."""

from types import ModuleType

import pytest

from kv_transport.backends import ucx as ucx_module
from kv_transport.backends.ucx_binding import UcxBinding, open_binding


class StandInContext:
    """ucx-py's `UCXContext` as far as it is used, over ucxx: `info` is a method there, the arguments are the same."""

    def __init__(self, config_dict: dict[str, str], feature_flags: tuple[object, ...]) -> None:
        import ucxx._lib.libucxx as real

        self.real = real.UCXContext(config_dict, feature_flags)
        self.handle = self.real.handle

    def info(self) -> str:
        return str(self.real.info)


class StandInWorker:
    """ucx-py's `UCXWorker`: made of a context alone."""

    def __init__(self, context: StandInContext) -> None:
        import ucxx._lib.libucxx as real

        self.real = real.UCXWorker(context.real, enable_delayed_submission=False, enable_python_future=False)
        self.handle = self.real.handle


def only_ucp(name: str) -> ModuleType:
    """An installation with ucx-py and without ucxx."""
    if name != "ucp._libs.ucx_api":
        raise ModuleNotFoundError(name)
    import ucxx._lib.libucxx as real

    module = ModuleType(name)
    vars(module).update(Feature=real.Feature, UCXContext=StandInContext, UCXWorker=StandInWorker)
    return module


def nothing_installed(name: str) -> ModuleType:
    raise ModuleNotFoundError(name)


def replace_opener(monkeypatch: pytest.MonkeyPatch, import_module: object) -> None:
    def opener(options: dict[str, str]) -> UcxBinding:
        return open_binding(options, import_module)  # type: ignore[arg-type]

    monkeypatch.setattr(ucx_module.UcxBackend.__init__, "__kwdefaults__", {"bindings": opener})
