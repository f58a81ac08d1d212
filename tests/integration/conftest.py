"""A test that fails shows the last lines of its cluster's processes."""

from collections.abc import Generator

import pytest

from tests.integration.helpers_integration import Fabric


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, value in item.funcargs.items():
            if isinstance(value, Fabric):
                report.sections.append((f"processes of {name}", value.last_lines()))
    return report
