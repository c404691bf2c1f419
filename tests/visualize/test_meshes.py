"""The picture of the README: each run's marks are its own losses, and the lower lines how far it is from one process."""

import pytest

from minipar.visualize import meshes
from minipar.visualize.meshes import LEAST, config_of, losses_of, losses_of_one_process, meshes_figure


def test_a_run_has_marks_at_its_own_steps_and_a_line_of_differences():
    reference = [3.0, 2.0, 1.0, 0.5]
    above, below = meshes_figure(reference, {"a": reference, "b": [3.0, 2.0, 1.5, 0.5]}).axes
    one_process, a, b = above.lines
    assert list(one_process.get_ydata()) == reference
    assert (list(a.get_xdata()), list(a.get_ydata())) == ([0, 2], [3.0, 1.0])
    assert (list(b.get_xdata()), list(b.get_ydata())) == ([1, 3], [2.0, 0.5])
    assert [list(line.get_ydata()) for line in below.lines] == [[LEAST] * 4, [LEAST, LEAST, 0.5, LEAST]]


def test_every_pictured_mesh_is_legal_and_exact_ones_have_marks():
    for mesh in (meshes.MESHES | meshes.LOSSY).values():
        assert config_of(mesh, steps=2).world_size in (4, 8)
    assert len(meshes.MESHES) <= len(meshes.MARKERS)
    assert len(meshes.MESHES | meshes.LOSSY) <= len(meshes.COLOURS)


@pytest.mark.thorough
def test_a_mesh_has_the_losses_of_one_process():
    assert losses_of(dict(dp=2, tp=2), 2) == pytest.approx(losses_of_one_process(2), rel=1e-12)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no meshes to draw"):
        meshes_figure([1.0], {})
    with pytest.raises(ValueError, match="steps=0"):
        meshes.main(steps=0)
    with pytest.raises(ValueError, match="its name says no format"):
        meshes.main(out=tmp_path / "meshes.txt")
