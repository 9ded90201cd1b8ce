"Conditions that all tests share, and the two models that many of them use."
import os
import shutil

import pytest

# Before torch is imported: two threads suit the smallest machine that the tests must run on, or two processes of one.
# (A process of several inherits what the first one set, so it has to be told.)
if 'PYTEST_XDIST_WORKER' in os.environ: os.environ['OMP_NUM_THREADS'] = '1'
else: os.environ.setdefault('OMP_NUM_THREADS', str(min(2, os.cpu_count() or 1)))
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
