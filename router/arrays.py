"""Names for the arrays that the router's parts hand one another; all int32, one-dimensional."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IdArray: TypeAlias = npt.NDArray[np.int32]
SlotArray: TypeAlias = npt.NDArray[np.int32]
RowArray: TypeAlias = npt.NDArray[np.int32]
