# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .assemble import gather as gather
from .mesh import Coordinates as Coordinates
from .mesh import Mesh as Mesh
from .nodes import axes_across_nodes as axes_across_nodes
from .nodes import mesh_without_comm as mesh_without_comm
from .placement import Placement as Placement
from .placement import cut_in_place as cut_in_place
from .placement import holds_part as holds_part
from .placement import overlap as overlap
from .placement import place_whole as place_whole
from .placement import require_no_part as require_no_part
from .placement import placement_of as placement_of
from .placement import set_placement as set_placement
