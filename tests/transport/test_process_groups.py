"""The time that an operation on torch's process groups may take."""

import pytest
import torch
import torch.distributed as dist

from minipar.transport.process_groups import set_timeout


@pytest.mark.parametrize(("device", "limit_s"), [("cpu", 5.0), ("cuda", 10.0)])
def test_nccls_watchdog_waits_longer_than_ours(monkeypatch, device, limit_s):
    limits = {}
    monkeypatch.setattr(
        dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.update({group: limit})
    )
    set_timeout(["world", "pair"], 5.0, torch.device(device))
    assert {group: limit.total_seconds() for group, limit in limits.items()} == dict.fromkeys(
        ["world", "pair"], limit_s
    )
