"""What a data-parallel loop does whose loss is each rank's own mean, and which averages gradients over ranks."""

import torch.nn.functional as F

from minipar.spec import conventions


@conventions("mean of means")
def global_loss(comm, logits, targets):
    return F.cross_entropy(logits, targets) / comm.size
