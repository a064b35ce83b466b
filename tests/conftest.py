"""Shared set-up of every Python test: how long the run may be, poison in what is allocated."""

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

_COMMON = dict(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# The same examples every time: a run that was green stays green until code changes.
settings.register_profile("short", max_examples=50, derandomize=True, database=None, **_COMMON)
settings.register_profile("long", max_examples=600, phases=tuple(Phase), **_COMMON)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="random tests draw many more examples")


def pytest_configure(config):
    settings.load_profile("long" if config.getoption("--long") else "short")


def _poisoned_empty(empty):
    def poisoned(*arguments, **keywords):
        array = empty(*arguments, **keywords)
        if array.dtype.kind in "iub":
            array.reshape(-1).view(np.uint8)[...] = 0xFF
        elif array.dtype.kind != "O":  # other libraries keep objects in arrays, not numbers
            array[...] = np.nan
        return array

    return poisoned


@pytest.fixture(scope="session", autouse=True)
def _poison_outputs_and_workspace():
    """onchip.ops makes results and workspace by numpy.empty: what a kernel fails to write shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", _poisoned_empty(np.empty))
        yield


def pytest_generate_tests(metafunc):
    """`backend` runs a test on every backend, `grad_backend` on those that have a backward,
    `merge_backend` on those that have merge, `decode_backend` on those that decode."""
    lists = {
        "backend": "BACKENDS",
        "grad_backend": "BACKWARD_BACKENDS",
        "merge_backend": "MERGE_BACKENDS",
        "decode_backend": "DECODE_BACKENDS",
    }
    for name, backends in lists.items():
        if name in metafunc.fixturenames:
            import harness

            metafunc.parametrize(name, getattr(harness, backends))


def pytest_runtest_setup(item):
    """What a test draws is for its backend."""
    harness = sys.modules.get("harness")
    if harness is not None:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        harness.current_backend = parameters.get("backend")


# ---- the command line


@pytest.fixture(params=["plain", "coloured"])
def parser(request, monkeypatch):
    """plain: as without the extra `cli`."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setenv("COLUMNS", "200")
    return request.param


@pytest.fixture
def run(parser, capsys):
    """Runs `onchip` with these words: exit status, stdout, stderr."""
    from onchip.cli import main

    def run(*words):
        status = main(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
