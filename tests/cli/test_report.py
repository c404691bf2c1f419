"""What the summary says about a trace, from spans with given times."""

import pytest

from minipar.cli.report import describe_trace
from minipar.support.trace import DATA, Span


def step(read_s, compute_s):
    return [Span("wait", DATA, 0.0, read_s), Span("compute", "F", read_s, read_s + compute_s)]


@pytest.mark.parametrize(
    ("traces", "findings"),
    [
        ({0: step(0.1, 9.9), 1: step(0.0, 9.5)}, []),
        ({0: step(0.1, 3.8), 1: step(6.2, 3.8)}, ["the run is input bound: rank 1 waited 62% of the traced time"]),
        ({0: step(0.0, 4.0), 1: step(0.0, 9.0), 2: step(0.0, 4.5)}, ["rank 1 computed 2.0 times as long"]),
        ({0: step(5.0, 4.0), 1: step(0.0, 9.0)}, ["input bound: rank 0", "rank 1 computed 2.2 times"]),
        ({0: [], 1: []}, []),
    ],
    ids=["well", "data", "straggler", "both", "nothing"],
)  # fmt: skip
def test_a_trace_s_summary_names_what_is_wrong_and_nothing_else(traces, findings):
    described = describe_trace(traces)
    assert len(described) == len(findings)
    assert all(finding in line for finding, line in zip(findings, described))
