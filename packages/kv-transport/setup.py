"""Compiles the kernels. Without a compiler the package is the same, and slower: `kv_transport.kernels` says which."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kv_transport._kernels",
            ["src/kv_transport/_kernels.c"],
            extra_compile_args=["-O3", "-fno-trapping-math", "-fno-math-errno"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
