"""What must be set before any test imports the package, and the order of the tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import beside, garbage, imports
from tests.support.interpreter import quicken
from tests.support.process_state import changes, process_state, put_threads_back

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

garbage.pause()
# Triton reads it when a kernel is declared: without a GPU, kernels run in its interpreter. Asking
# torch would cost every run of a test that needs none the import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests and the servers that they start share the cores: threads that wait by spinning would take
# most of them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NumPy's own do just that, and are started when it is imported: products in Triton's
# interpreter took a quarter more of the processors' time, for no result that came much sooner.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests talk plain HTTP to this machine: where all authorities' certificates are in one file, httpx
# reads it for each client that it makes, for 40 ms of a processor. Those of a folder are looked up.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = "/etc/ssl/certs"
# A shell's background jobs ignore Ctrl-C, and so would all servers that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput") and config.args_source is config.ArgsSource.TESTPATHS:
        worker, workers = config.workerinput["workerid"], config.workerinput["workercount"]
        imports.import_all(config.rootpath, int(worker.removeprefix("gw")), workers)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with the files that take long, so that none is left alone at the end.

    What is computed beside them is asked for last.
    """
    if hasattr(config, "workerinput"):
        marks = ("slow", "e2e")
        long = {item.path for item in items if any(map(item.get_closest_marker, marks))}
        items.sort(key=lambda item: (item.nodeid.startswith(beside.READER), item.path not in long))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: WorkerController, ids: list[str]) -> None:
    """Begin in the process that outlives all workers, and knows of the tests by them alone."""
    config = node.config
    if any(name.startswith(beside.READER) for name in ids):
        shared = config._tmp_path_factory.getbasetemp()
        kept = getattr(config, "cache", None)
        beside.start(config.rootpath, shared, kept.mkdir("triton") if kept else shared / "triton")


def pytest_runtest_logstart(nodeid: str) -> None:
    if nodeid.startswith(beside.READER):
        beside.hurry()


def pytest_unconfigure() -> None:
    beside.end()


def pytest_collection_finish(session: pytest.Session) -> None:
    garbage.set_aside()
    # Beside other workers, threads of small products only wait for one another.
    if hasattr(session.config, "workerinput") and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.runtime.interpreter" in sys.modules:
        quicken()
    if "structlog" in sys.modules:
        _log_plainly()


def _log_plainly() -> None:
    """Log as servers do: rich draws all variables beside a traceback, for 16 ms each time."""
    structlog = sys.modules["structlog"]
    *before, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*before, renderer])


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was():
    before = process_state()
    yield
    put_threads_back(before)
    found = changes(before, process_state())
    assert not found, f"the test leaves behind, for all tests after it: {'; '.join(found)}"


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory, pytestconfig) -> Path:
    """The embedded model, converted by this code and not by what the user ran before.

    Once for all workers: who comes while one of them converts it waits, as servers do.
    """
    from tailrace.models import gguf  # noqa: PLC0415 - few tests want it

    own = tmp_path_factory.getbasetemp()
    run = own.parent if hasattr(pytestconfig, "workerinput") else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILRACE_CACHE_DIR", str(run / "converted"))
        return gguf.resolve("smollm2")
