"""Shared by many test files: the registry as parameters, seeded generators, closed forms, a browser.

The closed forms are written from the definitions, entry by entry, and differentiated by torch's autograd
or by explicit matrices; they share no code with the package.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import statistical
import torch
from torch import Tensor

import gapped

# Every registered estimator whose sample carries the gradient. A new one is tested by being registered.
KINDS: dict[str, Any] = dict(gapped.estimators("pathwise"))
MEMBERS = tuple(KINDS)
SOFT = tuple(name for name, kind in KINDS.items() if kind.has_surrogate)
# Those that draw one uniform per row and nothing else.
INVERSE_CDF = tuple(
    name
    for name, kind in KINDS.items()
    if kind.draw_category is gapped.Pathwise.draw_category and kind.draw_given is gapped.Pathwise.draw_given
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow_if` makes those variants of a test slow for whose arguments its function is true."""
    for item in items:
        marker = item.get_closest_marker("slow_if")
        if marker and marker.args[0](**item.callspec.params):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)


def function_of(kind: type) -> Callable[..., Tensor]:
    """The public function in the file of an estimator that takes the place of `F.gumbel_softmax`."""
    values = [getattr(gapped, name) for name in gapped.__all__]
    functions = [value for value in values if inspect.isfunction(value)]
    (function,) = (
        each
        for each in functions
        if each.__module__ == kind.__module__ and "hard" in inspect.signature(each).parameters
    )
    return function


FUNCTIONS = {name: function_of(kind) for name, kind in KINDS.items()}
# Other than 1, and legal for every member (ReinMax is meant for tau >= 1).
TAU = 2.0

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Absolute error allowed in a sum of a few numbers of size one.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}

every_member = pytest.mark.parametrize("name", MEMBERS)
every_soft_member = pytest.mark.parametrize("name", SOFT)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal logits or weights, the same on every call."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def pull(
    estimator: Any, logits: Tensor, weight: Tensor, *, seed: int = 0, **how: Any
) -> tuple[Tensor, Tensor]:
    """One sample, and the gradient that reaches the logits when `weight` is the gradient at the sample."""
    leaf = logits.detach().requires_grad_()
    sample = estimator.sample(leaf, generator=seeded(seed), **how)
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    return sample.detach(), gradient


def pulled(use: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """A value after an equal seed, and the gradients of a cost for all inputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    torch.manual_seed(0)
    value = use(*leaves)
    weight = normal(1, *value.shape, seed=3, dtype=value.dtype)[0]
    return (value.detach(), *torch.autograd.grad(value, leaves, weight, materialize_grads=True))


# The ways to use a sample of logits (*rows, K).
USES: dict[str, Callable[..., Tensor]] = {
    "sample": lambda estimator, logits, **how: (
        estimator.sample(logits, **how) * torch.arange(logits.shape[-1]).to(logits)
    ),
    "select": lambda estimator, logits, **how: estimator.choose(logits, **how).select(
        torch.arange(logits.shape[-1]).to(logits)
    ),
    "select by group": lambda estimator, logits, **how: (
        estimator.choose(logits, **how)
        .select(torch.arange(math.prod(logits.shape[-2:])).to(logits).view(*logits.shape[-2:], 1))
        .squeeze(-1)
    ),
    "gate": lambda estimator, logits, **how: estimator.choose(logits, **how).gate(),
}


def assert_one_hot(sample: Tensor, dim: int = -1) -> None:
    """Exactly one 1 in each row, exactly 0 elsewhere: no tolerance."""
    assert ((sample == 0) | (sample == 1)).all()
    assert ((sample == 1).sum(dim) == 1).all()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


def assert_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Two tuples of tensors agree bit for bit."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def assert_all_close(actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = 1e-12) -> None:
    """Two tuples of tensors agree up to rounding."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs, tolerance)


def jacobian_of_softmax(q: Tensor) -> Tensor:
    """J(q) = diag(q) - q q^T for each row of q."""
    return torch.diag_embed(q) - q.unsqueeze(-1) * q.unsqueeze(-2)


def through_softmax(h: Tensor, g: Tensor, tau: float = 1.0) -> Tensor:
    """J(h) g / tau: the gradient of softmax((theta + m) / tau), m fixed, with the matrix written out."""
    return (jacobian_of_softmax(h) @ g.unsqueeze(-1)).squeeze(-1) / tau


def lemma_1(p: Tensor) -> Tensor:
    """The expected gap with the published guard, as the formula stands; float64 and p well away from 0."""
    q = p.double() * (1 - 1e-5)
    return -torch.log(1 - q) / q


def gst_logits(theta: Tensor, index: int, gap: Any) -> Tensor:
    """t_i = max(theta), t_j = min(theta_j, max(theta) - gap), for one row."""
    top = theta.max()
    entries = [top if j == index else torch.minimum(theta[j], top - gap) for j in range(len(theta))]
    return torch.stack(entries)


def gst_surrogate(theta: Tensor, index: int, gap: Any, tau: float, detach: bool = True) -> Tensor:
    perturbed = gst_logits(theta, index, gap)
    if detach:
        perturbed = theta + (perturbed - theta).detach()
    return torch.softmax(perturbed / tau, -1)


def gradient_through(surrogate: Callable[[Tensor], Tensor], theta: Tensor, g: Tensor) -> Tensor:
    """(dh/dtheta)^T g with the Jacobian built row by row."""
    return torch.autograd.functional.jacobian(surrogate, theta).T @ g


def reinmax_gradient(theta: Tensor, index: int, g: Tensor, tau: float) -> Tensor:
    """2 J((softmax(theta/tau) + D)/2) g - J(p) g / 2."""
    hard = torch.eye(len(theta), dtype=theta.dtype)[index]
    mixed = (torch.softmax(theta / tau, -1) + hard) / 2
    return 2 * through_softmax(mixed, g) - through_softmax(torch.softmax(theta, -1), g) / 2


BROWSER_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session", autouse=True)
def _law_budget(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The declared rate of false failures holds for the whole run, however many processes share it."""
    base = tmp_path_factory.getbasetemp()
    statistical.LEDGER = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "law-assertions"


@pytest.fixture(autouse=True)
def _own_noise() -> Iterator[None]:
    """A test that draws from torch's default generator draws the same every time, and leaves no trace."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Relative paths lie in the test's folder, and the output is not a terminal's."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_data(sandbox: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The data sets of the machine are hidden; the cache is the test's own, in ``xdg``."""
    monkeypatch.setattr("gapped_lab.data.sources.SYSTEM", tmp_path / "system")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("GAPPED_DATA", raising=False)


@pytest.fixture(scope="session", autouse=True)
def _masks_of_the_interpreter() -> None:
    """Triton's interpreter makes integers of a condition on a scalar, and from 3.9 on takes no such mask."""
    if "triton.runtime.interpreter" in sys.modules:
        native = sys.modules["triton.runtime.interpreter"]._interpreter
        load, store = native.load, native.store
        native.load = lambda where, mask, *rest: load(where, mask.astype(bool), *rest)
        native.store = lambda where, value, mask: store(where, value, mask.astype(bool))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real browser without a window, one for all pages."""
    program, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver_program):
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_program))
    try:
        yield driver
    finally:
        driver.quit()
