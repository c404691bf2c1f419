"""A Comm for values that the host needs: without gloo in the process group, the Comm of the GPUs itself."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

from minipar.comm import host


def test_a_group_of_nccl_alone_has_no_other_comm_for_the_host():
    comm = SimpleNamespace(device=torch.device("cuda"), _transport=SimpleNamespace(group=None))
    with patch.object(host, "has_backend", lambda group, backend: False):
        assert host.on_host(comm) is comm
