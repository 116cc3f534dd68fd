"""The public error classes: re-exports only (see `_errors.py` for what each means)."""

from ._errors import AbiSkew as AbiSkew
from ._errors import Ambiguous as Ambiguous
from ._errors import BackendError as BackendError
from ._errors import BrokenMetadata as BrokenMetadata
from ._errors import DeviceError as DeviceError
from ._errors import DriverTooOld as DriverTooOld
from ._errors import DTypeError as DTypeError
from ._errors import FlavourMismatch as FlavourMismatch
from ._errors import GroupSizesError as GroupSizesError
from ._errors import LibraryMissing as LibraryMissing
from ._errors import MultigemmError as MultigemmError
from ._errors import NativeError as NativeError
from ._errors import NoKernelForArch as NoKernelForArch
from ._errors import NotInstalled as NotInstalled
from ._errors import OptionError as OptionError
from ._errors import ShapeError as ShapeError
from ._errors import SymbolMissing as SymbolMissing
from ._errors import VersionSkew as VersionSkew
