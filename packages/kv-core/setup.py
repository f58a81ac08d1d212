"""Compiles the hash chain. Without a compiler the package is the same, and slower: `kv_core.hash_chain` says which."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kv_core._hash_chain",
            ["src/kv_core/_hash_chain.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
