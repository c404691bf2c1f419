"""Resharding a checkpoint: a matrix that one mesh saved in parts is read in the different parts of another mesh.

    saved by rows    wanted by columns
    +-------+        +---+---+
    |   0   |        |   |   |
    +-------+        | 0 | 1 |       part 0 overlaps both files
    |   1   |        |   |   |
    +-------+        +---+---+

Checked: the right elements for any boxes; only files that overlap the wanted box are opened; a ValueError if an
element is in no file.
"""


def reshard(boxes, load, wanted):
    """Return the wanted box of the matrix.

    boxes     the saved parts, as ((row, row_end), (column, column_end))
    load      load(i) opens file i and returns the tensor of boxes[i]
    wanted    a box
    """
    raise NotImplementedError
