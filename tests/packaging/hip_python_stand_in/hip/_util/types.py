"""Arrays as hip-python has them."""


class DeviceArray:
    def __init__(self, pointer):
        self.__cuda_array_interface__ = {
            "shape": (1,),
            "typestr": "B",
            "data": (pointer, False),
            "strides": None,
            "offset": 0,
            "mask": None,
            "version": 3,
            "stream": None,
        }

    def configure(self, *, _force=False, **changes):
        unknown = set(changes) - {"shape", "typestr", "stream", "itemsize"}
        if unknown:
            raise KeyError(f"allowed keyword arguments are others than {unknown}")
        self.__cuda_array_interface__.update(changes)
        return self

    def __int__(self):
        return self.__cuda_array_interface__["data"][0]
