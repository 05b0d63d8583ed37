from .hlo import Instruction as Instruction
from .memory import (
    MemoryTraffic as MemoryTraffic,
    Work as Work,
    memory_traffic as memory_traffic,
    program_work as program_work,
)
from .mesh import AXES as AXES, make_mesh as make_mesh, remesh as remesh
from .partition import Layout as Layout
from .rules import (
    PRESETS as PRESETS,
    Rules as Rules,
    by_rows as by_rows,
    change as change,
    make_rules as make_rules,
)
from .traffic import Traffic as Traffic, collectives as collectives
from .transfer import fetch as fetch, place as place, placed as placed
