"""A plugin that runs notebooks as tests: `pytest -p tests.notebooks lessons`.

Starting a kernel, importing torch, and starting the fork server take about seven seconds. So the notebooks that a worker
runs share one kernel. Each begins with an empty namespace; after a failure the next one gets a new kernel.
"""

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CELL_S = 300  # until a cell counts as hanging

BEGIN = """%reset -f
%cd -q {folder}
import gc, warnings
gc.freeze()  # so that no later collection searches torch's modules: that takes a fifth of a second each time
warnings.resetwarnings()
del gc, warnings"""


def pytest_collect_file(file_path, parent):
    if file_path.suffix == ".ipynb":
        return NotebookFile.from_parent(parent, path=file_path)


def pytest_unconfigure():
    for kernel in list(_kernels):
        _end(kernel, now=False)


class NotebookFile(pytest.File):
    def collect(self):
        yield Notebook.from_parent(self, name=self.path.stem)


class Notebook(pytest.Item):
    def runtest(self):
        notebook = nbformat.read(self.path, as_version=4)
        begin = nbformat.v4.new_code_cell(BEGIN.format(folder=self.path.parent))
        notebook.cells.insert(0, begin)
        kernel = _kernel()
        try:
            NotebookClient(notebook, km=kernel, timeout=CELL_S).execute(cleanup_kc=False)
        except BaseException:
            _end(kernel)
            raise

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, (CellExecutionError, CellTimeoutError, DeadKernelError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)


_kernels = []


def _kernel():
    if not _kernels:
        _kernels.append(AsyncKernelManager(kernel_name="python3"))  # the client starts it
    return _kernels[0]


def _end(kernel, now=True):
    """End the kernel. Unless it is to end now, it can first remove its temporary folders."""
    _kernels.clear()
    if kernel.has_kernel:
        run_sync(kernel.shutdown_kernel)(now=now)
