"""Names for the arrays that the router's parts hand one another; one-dimensional."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IdArray: TypeAlias = npt.NDArray[np.int32]
SlotArray: TypeAlias = npt.NDArray[np.int32]
RowArray: TypeAlias = npt.NDArray[np.int32]
FinishArray: TypeAlias = npt.NDArray[np.uint8]  # of ``FinishCode``
BoolArray: TypeAlias = npt.NDArray[np.bool_]
IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
