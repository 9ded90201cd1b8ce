"Conditions that all tests share, and the two models that many of them use."
import os
import shutil
import signal

import pytest

WORKER = 'PYTEST_XDIST_WORKER' in os.environ  # one of several processes that the tests are spread over
# Before torch is imported: two threads suit the smallest machine that the tests must run on, or two processes of one.
os.environ.setdefault('OMP_NUM_THREADS', str(1 if WORKER else min(2, os.cpu_count() or 1)))
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
os.environ.setdefault('MPLBACKEND', 'Agg')
# A hub that can't be reached should cost seconds, not minutes.
os.environ.setdefault('HF_HUB_DOWNLOAD_TIMEOUT', '10')
os.environ.setdefault('HF_HUB_ETAG_TIMEOUT', '5')
os.environ.setdefault('HF_HUB_DISABLE_TELEMETRY', '1')
os.environ.setdefault('HF_HUB_DISABLE_PROGRESS_BARS', '1')

CHROMIUM = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable', 'chrome')
MAC_CHROME = '/Applications/Google Chrome.app/Contents/MacOS/Google Chrome'


@pytest.fixture(scope='session')
def tiny():
    "The byte-level model made from scratch: (model, tokenizer), fp32. Shared by all tests: don't change it."
    import torch
    from pasta_lib.models import load
    return load('tiny', dtype=torch.float32)


@pytest.fixture(scope='session')
def smollm2():
    """SmolLM2-135M-Instruct: (model, tokenizer), fp32. Shared by all tests: don't change it. Skips where it can't be
    fetched, unless PASTA_REQUIRE_SMOLLM2 is set."""
    import torch
    from pasta_lib.core import PastaError
    from pasta_lib.models import load
    try: return load('smollm2', dtype=torch.float32)
    except (PastaError, OSError) as e:  # a mistake in the code is no reason to skip
        if os.environ.get('PASTA_REQUIRE_SMOLLM2'): raise
        pytest.skip(f'SmolLM2 can be neither found nor fetched: {e}')


@pytest.fixture(scope='session')
def chromium() -> str:
    "The path of a Chromium that can run headless; skips where there is none."
    found = os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if not found and os.path.exists(MAC_CHROME): found = MAC_CHROME
    if not found: pytest.skip('no Chromium on this machine: on Debian, `apt-get install chromium` brings it')
    return found


def pytest_runtest_setup(item):
    "A test marked `gpu` is skipped where there is none."
    if not item.get_closest_marker('gpu'): return
    import torch
    if not torch.cuda.is_available(): pytest.skip('no CUDA device on this machine')


# ---- coverage
# Measuring it makes all Python ten times slower before 3.12, that of other packages too. Where the tests are spread over processes
# (make test), the first second of each is measured, less of its other cases, and nothing that waits for the large model or a
# compiler: the report is a lower bound. A run in one process, of a file or two, measures all.

def measurement(config):
    "What measures coverage in this process, where it must be brief."
    plugin = config.pluginmanager.getplugin('_cov')
    return plugin.cov_controller and plugin.cov_controller.cov if WORKER and plugin else None


def pytest_sessionstart(session):
    "What most tests import is imported unmeasured."
    if not (coverage := measurement(session.config)): return
    coverage.stop()
    import matplotlib.pyplot, seaborn, torch, transformers
    from trl import GRPOTrainer
    coverage.start()


def pytest_collection_modifyitems(items):
    "How many seconds of each test are measured."
    seen = set()
    for item in items:
        name = item.nodeid.partition('[')[0]
        item.measured = .2 if name in seen else 1
        if item.get_closest_marker('smollm2') or item.get_closest_marker('slow'): item.measured = 0
        seen.add(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    "Measure a test for as long as it shall be measured."
    if not (coverage := measurement(item.config)): return (yield)
    signal.signal(signal.SIGVTALRM, lambda *_: coverage.stop())
    if item.measured: signal.setitimer(signal.ITIMER_VIRTUAL, item.measured)
    else: coverage.stop()
    try: return (yield)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        coverage.stop(), coverage.start()
