from .grouped_mm import grouped_mm as grouped_mm
from .grouped_mm_wgrad import grouped_mm_wgrad as grouped_mm_wgrad
from .sort_by_group import GroupOrder as GroupOrder
from .sort_by_group import sort_by_group as sort_by_group
