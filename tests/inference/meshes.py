"""Models cut over a mesh of ranks, and texts read in pieces."""

from minipar.expert import expert_parallel
from minipar.inference.blocks import Rows, blocks_for
from minipar.mesh import Mesh
from minipar.pipeline import partition
from minipar.tensor_parallel import tensor_parallel
from tests.inference.texts import PROMPTS


def cut(world, model, sizes, **how):
    """On a rank: the mesh, and its stage of the model, cut over tp and ep."""
    mesh = Mesh(world, **sizes)
    stage = tensor_parallel(partition(model, mesh.sizes["pp"])[mesh.coordinates.pp], mesh.comm("tp"), **how)
    return mesh, stage if mesh.sizes["ep"] == 1 else expert_parallel(stage, mesh.comm("ep"))


def read_in_pieces(paged, passes):
    """On a rank: read the next tokens of PROMPTS, so many of each; yield the rows of each pass, and this rank's logits."""
    tables, read = [[] for _ in PROMPTS], [0] * len(PROMPTS)
    for counts in passes:
        rows = []
        for i, count in enumerate(counts):
            tokens = PROMPTS[i][read[i] : read[i] + count]
            read[i] += count
            missing = blocks_for(read[i], paged.pool.block_size) - len(tables[i])
            tables[i] += [paged.pool.allocate() for _ in range(missing)]
            if count:
                rows.append(Rows(tokens, read[i] - count, tables[i], num_chosen=count))
        yield rows, paged(rows)
