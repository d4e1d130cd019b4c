"""The library is not an extension module. It is built with the limited API, so that one wheel fits all Pythons."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "reshard_kernels._loops",
            [f"reshard_kernels/{name}.c" for name in ("fold", "hash", "run")],
            depends=["reshard_kernels/hash.h", "reshard_kernels/xxhash.h"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
