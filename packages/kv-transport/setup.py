"""Compiles what moves bytes. Without a compiler the package is the same, and slower: `kernels.COMPILED` says which."""

from setuptools import Extension, setup


def extension(name: str) -> Extension:
    return Extension(
        f"kv_transport.{name}",
        [f"src/kv_transport/{name}.c"],
        depends=["src/kv_transport/_buffers.h"],
        extra_compile_args=["-O3", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off"],
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[extension("_kernels"), extension("_stream_io"), extension("_doorbell"), extension("_ucx_io")],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
